"""Our own trainer as the run service starts it."""

import json
import os
import signal
import time

import pytest
from tests.runs.runners.conftest import run, start

from palaestra.runs.runner import JournalFile
from palaestra.runs.runners.palaestra import PalaestraRunner, training_document
from palaestra.runs.spec import RunSpec
from palaestra.telemetry import EpisodeSummary, JournalReader
from palaestra.telemetry.event import PhaseChanged

CONFIG = {
    "env": {"id": "CartPole-v1", "num_envs": 2},
    "algorithm": {"n_epochs": 1, "batch_size": 32},
    "trainer": {"total_timesteps": 2048, "rollout_length": 64},
}


@pytest.fixture(scope="module")
def runner():
    """One for all, because it remembers what it checked."""
    return PalaestraRunner()


def _events(place):
    with JournalReader(place.attempt_dir / "metrics.jsonl") as reader:
        return [record.event for record in reader.read()]


def test_general_wishes_go_where_the_trainer_reads_them():
    spec = RunSpec(config=CONFIG, env_id="Acrobot-v1", seed=5, track="offline", script="ppo")

    document = training_document(spec)

    assert document["env"] == {"id": "Acrobot-v1", "num_envs": 2}
    assert document["trainer"]["seed"] == 5
    assert document["telemetry"] == {"wandb": "offline", "progress": False}
    assert document["algorithm"]["name"] == "ppo"
    assert spec.config == CONFIG


def test_it_trains_in_the_prepared_attempt(runner, place, machine, tmp_path):
    spec = RunSpec(config=CONFIG, seed=3, invoked_from=tmp_path)
    assert {finding.level for finding in runner.preflight(spec, machine)} == {"ok"}

    plan = runner.plan(spec, place, machine)
    code, output = run(plan)

    events = _events(place)
    assert (code, plan.sources) == (0, (JournalFile(),)), output
    assert (plan.env_id, plan.algorithm, plan.total_steps) == ("CartPole-v1", "ppo", 2048)
    assert plan.resolved["trainer"]["seed"] == 3
    assert plan.env_signature["action_space"]["n"] == 2
    assert events[-1] == PhaseChanged("succeeded", "done")
    assert any(isinstance(event, EpisodeSummary) for event in events)
    assert json.loads((place.run_dir / "resolved.json").read_text()) == plan.resolved
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_asked_to_stop_it_saves_and_the_next_attempt_goes_on(runner, place, machine, tmp_path):
    long = {**CONFIG, "trainer": {"total_timesteps": 50_000_000, "rollout_length": 64}}
    plan = runner.plan(RunSpec(config=long, invoked_from=tmp_path), place, machine)
    with start(plan) as process:
        deadline = time.monotonic() + 60
        while not _events(place):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 130
    assert _events(place)[-1].phase == "stopped"


@pytest.mark.parametrize(
    ("config", "check", "words", "remedy"),
    [
        ({"env": {"id": "CartPole-v7"}}, "env", "CartPole-v7", "CartPole-v1"),
        ({**CONFIG, "trainer": {"rollout_lenght": 3}}, "flag", "unknown key", "rollout_length"),
        ({**CONFIG, "trainer": 3}, "flag", "trainer", ""),
        ({}, "flag", "env", "CartPole-v1"),
    ],
)
def test_what_the_trainer_would_refuse_is_refused_before(runner, machine, config, check, words, remedy):
    (finding,) = runner.preflight(RunSpec(config=config), machine)

    assert (finding.level, finding.check) == ("refused", check)
    assert words in finding.text
    assert remedy in finding.remedy


def test_an_interpreter_without_palaestra_or_a_missing_one_is_refused(runner, machine):
    missing, *_ = runner.preflight(RunSpec(config=CONFIG, python="/nowhere/python"), machine)
    strange, *_ = runner.preflight(RunSpec(config=CONFIG, python="/bin/true"), machine)

    assert (missing.check, missing.level, strange.check, strange.level) == ("python", "refused", "python", "refused")


def test_a_warm_start_names_the_checkpoint_and_a_resume_the_run(runner, place, machine, tmp_path):
    from dataclasses import replace

    checkpoint = tmp_path / "update_00000001"
    spec = RunSpec(config=CONFIG, warm_start="update_00000001", invoked_from=tmp_path)
    (refused,) = runner.preflight(spec, machine)
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")

    begun = runner.plan(spec, place, machine)
    resumed = runner.plan(spec, replace(place, attempt=2, resume_from=str(checkpoint)), machine)

    assert refused.check == "warm_start"
    assert begun.argv[-2:] == ("--warm-start", str(checkpoint))
    assert resumed.argv[-2:] == ("--resume", str(place.run_dir))


def test_the_schema_is_the_one_of_the_configuration(runner):
    schema = runner.config_schema(RunSpec())

    assert {"env", "algorithm", "trainer", "telemetry"} <= schema["properties"].keys()
