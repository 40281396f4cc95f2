"""The runner of Stable-Baselines3."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import stable_baselines3
import torch
from tests.runs.runners.conftest import run, start

from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.runs.checkpoints.import_checkpoint import import_checkpoint
from palaestra.runs.ingest.translator import Translator
from palaestra.runs.runners.sb3 import Sb3Runner
from palaestra.runs.spec import RunSpec
from palaestra.telemetry import CheckpointSaved, EpisodeSummary, JournalReader, TrainingStep
from palaestra.telemetry.event import PhaseChanged

PYTHON = os.environ.get("PALAESTRA_SB3_PYTHON") or sys.executable
SHORT = {"total_timesteps": 1024, "algorithm": {"n_steps": 256}, "checkpoint_every": 500}


def _spec(**options):
    return RunSpec(**{"runner": "sb3", "script": "ppo", "env_id": "CartPole-v1", "python": PYTHON, **options})


def _events(plan):
    attempt = Attempt(plan.paths.attempt_dir)
    translator = Translator(attempt, plan.sources, 1)
    while translator.pump(10_000, final=True):
        pass
    translator.close()
    with JournalReader(attempt.journal) as reader:
        return [record.event for record in reader.read()]


def test_it_trains_reports_under_our_names_and_saves(paths, machine):
    spec = _spec(config=SHORT, seed=3)
    assert "refused" not in {finding.level for finding in Sb3Runner().preflight(spec, machine)}
    plan = Sb3Runner().plan(spec, paths, machine)

    code, output = run(plan)

    events = _events(plan)
    steps = [event for event in events if isinstance(event, TrainingStep)]
    assert code == 0, output
    assert [event.env_step for event in steps] == [256, 512, 768, 1024]
    assert {"policy_loss", "value_loss", "explained_variance", "episode_return"} <= steps[-1].metrics.keys()
    assert sum(isinstance(event, EpisodeSummary) for event in events) > 10
    assert [event.env_step for event in events if isinstance(event, CheckpointSaved)] == [500, 1000, 1024]
    assert events[-1] == PhaseChanged("succeeded", "done")
    assert plan.env_signature["max_episode_steps"] == 500


def test_asked_to_stop_it_saves_and_the_next_attempt_counts_on(paths, machine):
    plan = Sb3Runner().plan(_spec(config={**SHORT, "total_timesteps": 10_000_000}), paths, machine)
    with start(plan) as process:
        deadline = time.monotonic() + 120
        while not list(paths.attempt_dir.glob("checkpoints/step_*.zip")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    last = [event for event in _events(plan) if isinstance(event, CheckpointSaved)][-1]
    second = paths.run_dir / "attempt_2"
    again = replace(paths, attempt=2, attempt_dir=second, work_dir=second / "work", resume_from=last.path)
    longer = {**SHORT, "total_timesteps": last.env_step + 512}

    resumed = Sb3Runner().plan(_spec(config=longer), again, machine)
    code, output = run(resumed)

    events = _events(resumed)
    assert code == 0, output
    assert events[0] == PhaseChanged("running", "resumed")
    assert min(event.env_step for event in events if isinstance(event, TrainingStep)) > last.env_step


def test_a_warm_start_reads_weights_only_also_those_of_an_imported_zip(paths, machine, tmp_path):
    model = stable_baselines3.PPO("MlpPolicy", "CartPole-v1", device="cpu", seed=5)
    model.save(tmp_path / "best.zip")
    imported = import_checkpoint(Home(tmp_path / "imported" / "var" / "training"), tmp_path / "best.zip")
    # Without updates the weights stay those that it began with.
    config = {"total_timesteps": 8, "algorithm": {"n_steps": 8, "batch_size": 8, "learning_rate": 0.0}}

    plan = Sb3Runner().plan(_spec(config=config, warm_start=imported.path), paths, machine)
    code, output = run(plan)

    assert (code, plan.argv[-2:]) == (0, ("--load", imported.path)), output
    trained = stable_baselines3.PPO.load(paths.attempt_dir / "checkpoints" / "step_8.zip", device="cpu")
    for name, weight in model.policy.state_dict().items():
        assert torch.equal(trained.policy.state_dict()[name], weight), name


@pytest.mark.parametrize(
    ("options", "check", "remedy"),
    [
        ({"config": {"algorithm": {"learning_rat": 1}}}, "flag", "Did you mean 'learning_rate'?"),
        ({"config": {"algorithm": {"n_steps": "many"}}}, "flag", "2048"),
        ({"config": {"algorithm": {"tensorboard_log": "/x"}}}, "flag", ""),
        ({"env_id": "CartPole-v7"}, "env", "CartPole-v1"),
    ],
)
def test_what_the_library_would_refuse_is_refused_before(machine, options, check, remedy):
    (refused,) = [f for f in Sb3Runner().preflight(_spec(**options), machine) if f.level == "refused"]

    assert refused.check == check
    assert remedy in refused.remedy


@pytest.mark.parametrize(
    ("options", "check", "remedy"),
    [
        ({"script": "pppo"}, "script", "Did you mean 'ppo'?"),
        ({"script": None}, "script", "--script"),
        ({"env_id": None}, "env", "--env"),
        ({"env_id": "--config"}, "env", "--env"),
        ({"config": {"num_env": 3}}, "flag", "num_envs"),
        ({"warm_start": "nothing.zip"}, "warm_start", "step_N.zip"),
        ({"python": "/nowhere"}, "python", "virtualenv"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused_without_an_interpreter(machine, options, check, remedy):
    (refused,) = Sb3Runner().preflight(_spec(**{"python": sys.executable, **options}), machine)

    assert (refused.level, refused.check) == ("refused", check)
    assert remedy in refused.remedy


def test_a_missing_library_names_the_interpreter_to_install_it_into(machine, bare_python):
    findings = Sb3Runner().preflight(_spec(python=bare_python, video=True), machine)

    missing = {f.check: f.remedy for f in findings if f.level == "refused"}
    assert missing["dependency:stable-baselines3"] == f"{bare_python} -m pip install 'stable-baselines3'"
    assert "dependency:moviepy" in missing


def test_every_value_is_one_word(paths, machine):
    spec = _spec(python=sys.executable, config={"env_kwargs": {"x": "--seed 3; $(id)"}}, seed=7)

    argv = Sb3Runner().plan(spec, paths, machine).argv

    assert json.loads(argv[argv.index("--config") + 1])["env_kwargs"] == {"x": "--seed 3; $(id)"}
    assert argv[argv.index("--seed") + 1] == "7"


def test_a_gpu_for_a_torch_that_sees_none_is_refused(machine):
    blind = replace(machine, environment={**machine.environment, "CUDA_VISIBLE_DEVICES": ""}, gpus=("0",))

    (refused,) = [finding for finding in Sb3Runner().preflight(_spec(gpus=1), blind) if finding.level == "refused"]

    assert refused.check == "gpu"
