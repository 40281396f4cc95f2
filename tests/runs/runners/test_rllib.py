"""The runner of RLlib in `examples/rllib_runner`: what it refuses, and a real training where RLlib is installed.

RLlib has an environment of its own: set PALAESTRA_RLLIB_PYTHON to an interpreter with `ray[rllib]`.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runs.supervisors import run_supervisor, wait_for_end

from palaestra.runs.phase import Phase
from palaestra.runs.runner import Machine
from palaestra.runs.runners.conformance import check_runner
from palaestra.runs.spec import RunSpec

PACKAGE = Path(__file__).parents[3] / "examples" / "rllib_runner" / "palaestra_rllib"
PYTHON = os.environ.get("PALAESTRA_RLLIB_PYTHON") or sys.executable
MACHINE = Machine(environment=dict(os.environ), free_disk_bytes=1 << 40)


def _load_runner():
    spec = importlib.util.spec_from_file_location("palaestra_rllib.runner", PACKAGE / "runner.py")
    # pydantic finds the types of annotations in the module by its name.
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RllibRunner


RllibRunner = _load_runner()


needs_rllib = pytest.mark.skipif(
    "PALAESTRA_RLLIB_PYTHON" not in os.environ, reason="set PALAESTRA_RLLIB_PYTHON to a Python with ray[rllib]"
)


def _spec(**fields):
    config = {"total_timesteps": 600, "num_envs": 2, "training": {"train_batch_size_per_learner": 300, "num_epochs": 2}}
    return RunSpec(**{"runner": "rllib", "env_id": "CartPole-v1", "python": PYTHON, "config": config, **fields})


@pytest.mark.parametrize(
    ("fields", "check", "words"),
    [
        ({"config": {"steps": 5}}, "flag", "steps"),
        ({"config": {"num_envs": 0}}, "flag", "num_envs"),
        ({"script": "ppoo"}, "flag", "no such algorithm"),
        ({"env_id": None}, "env", "no environment is given"),
        ({"python": "/no/such/python"}, "flag", "/no/such/python"),
    ],
)
def test_what_would_fail_later_is_refused_before_the_launch(fields, check, words):
    (finding,) = RllibRunner().preflight(_spec(**fields), MACHINE)
    assert (finding.check, finding.level) == (check, "refused")
    assert words in finding.text


def test_an_interpreter_without_rllib_is_refused_with_the_command_that_installs_it(tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    findings = RllibRunner().preflight(_spec(python=str(bare / "bin" / "python")), MACHINE)
    refused = {finding.check: finding.remedy for finding in findings if finding.level == "refused"}
    assert refused["dependency:ray"].endswith("-m pip install 'ray[rllib]'")


@needs_rllib
def test_it_keeps_the_rules_of_runners(tmp_path):
    check_runner(RllibRunner, _spec(), tmp_path, timeout_s=140)


@needs_rllib
def test_a_training_has_steps_episodes_losses_and_a_checkpoint(home):
    async def body():
        async with run_supervisor(home, runners={"rllib": RllibRunner()}) as supervisor:
            return await wait_for_end(supervisor, (await supervisor.submit(_spec(seed=1))).run_id)

    record = asyncio.run(body())
    assert record.phase is Phase.SUCCEEDED, record.reason
    assert (record.agent_id, record.total_steps) == ("rllib/ppo", 600)
    assert record.env_step >= 600
    assert record.episodes > 5
    assert 8 <= record.episode_return <= 500  # an episode of CartPole lasts at least eight steps
    assert (home.run(record.run_id).attempt(1).path / "checkpoints" / f"step_{record.env_step}").is_dir()
