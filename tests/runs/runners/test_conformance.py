"""Our runners pass the conformance test, and it names the rule that a runner breaks."""

import os
import sys
from pathlib import Path

import pytest
from tests.runs.runners.test_cleanrl import CHECKOUT, PYTHON, needs_tyro
from tests.runs.runners.test_sb3 import PYTHON as SB3_PYTHON

from palaestra.runs.phase import Phase
from palaestra.runs.runner import Finding
from palaestra.runs.runners.cleanrl import CleanrlRunner
from palaestra.runs.runners.conformance import check_runner
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.runners.palaestra import PalaestraRunner
from palaestra.runs.runners.sb3 import Sb3Runner
from palaestra.runs.runners.template import ScriptRunner
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.orchestrator import TrainerOrchestrator
from palaestra.telemetry import EpisodeSummary, TrainingStep

OWN = str(Path(__file__).with_name("own_script.py"))
ECHO = RunSpec(runner="echo", config={"steps": 20})


def test_echo_keeps_the_rules(tmp_path):
    check_runner(EchoRunner, ECHO, tmp_path)


@pytest.mark.slow
def test_ours_keeps_the_rules(tmp_path):
    config = {
        "env": {"id": "CartPole-v1", "num_envs": 2},
        "algorithm": {"n_epochs": 1, "batch_size": 32},
        "trainer": {"total_timesteps": 512, "rollout_length": 64},
    }
    kept = PalaestraRunner()  # remembers what it checked, or this would take half a minute
    check_runner(lambda: kept, RunSpec(config=config), tmp_path)


@needs_tyro
def test_cleanrl_keeps_the_rules(tmp_path):
    config = {"checkout": str(CHECKOUT), "total_timesteps": 200}
    check_runner(CleanrlRunner, RunSpec(runner="cleanrl", script="shaped", config=config, python=PYTHON), tmp_path)


def test_sb3_keeps_the_rules(tmp_path):
    config = {"algorithm": {"n_steps": 128}, "total_timesteps": 256}
    spec = RunSpec(runner="sb3", script="ppo", env_id="CartPole-v1", config=config, python=SB3_PYTHON)
    check_runner(Sb3Runner, spec, tmp_path)


def test_the_template_keeps_the_rules(tmp_path):
    check_runner(ScriptRunner, RunSpec(runner="script", script=OWN, config={"steps": 30}), tmp_path)


def test_the_template_is_short_and_runs_under_supervision(tmp_path):
    assert len(Path(sys.modules[ScriptRunner.__module__].__file__).read_text().splitlines()) < 100
    with TrainerOrchestrator(tmp_path) as orchestrator:
        orchestrator.register_runner("script", ScriptRunner)

        run_id = orchestrator.launch("script", {"steps": 30, "learning_rate": 0.5}, consent=True, script=OWN)
        events = [record.event for record in orchestrator.stream(run_id)]
        record = orchestrator.run(run_id)

    assert (record.phase, record.agent_id) == (Phase.SUCCEEDED, "script/own_script")
    assert [e.metrics for e in events if isinstance(e, TrainingStep)] == [
        {"loss": 0.5},
        {"loss": 0.25},
        {"loss": 0.125},
    ]
    assert [e.episode_return for e in events if isinstance(e, EpisodeSummary)] == [10.0, 20.0, 30.0]


class _Forgetful(EchoRunner):
    def preflight(self, spec, machine):
        return [Finding("python", "ok", "surely")]


class _Random(EchoRunner):
    def plan(self, spec, paths, machine):
        return super().plan(spec.model_copy(update={"config": {"steps": ord(os.urandom(1))}}), paths, machine)


class _Writing(EchoRunner):
    def plan(self, spec, paths, machine):
        paths.attempt_dir.mkdir(parents=True, exist_ok=True)
        return super().plan(spec, paths, machine)


class _Failing(EchoRunner):
    def plan(self, spec, paths, machine):
        return super().plan(spec.model_copy(update={"config": {"then": "exit:3"}}), paths, machine)


class _Silent(EchoRunner):
    def plan(self, spec, paths, machine):
        from dataclasses import replace

        from palaestra.runs.runner import StdoutLines

        return replace(super().plan(spec, paths, machine), sources=(StdoutLines("none"),), argv=("/bin/true",))


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (_Forgetful, "an unknown key is refused"),
        (_Random, "two instances plan the same command"),
        (_Writing, "preflight and plan write nothing"),
        (_Failing, "the given spec succeeds"),
        (_Silent, "the run reports at least one event"),
    ],
)
def test_a_runner_that_breaks_a_rule_is_told_which(tmp_path, broken, rule):
    with pytest.raises(AssertionError, match=rule):
        check_runner(broken, ECHO, tmp_path)
