"""Our runners pass the conformance test, and it names the rule that a runner breaks."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runs.runners.example_runner import ExampleRunner
from tests.runs.runners.test_cleanrl import CHECKOUT, PYTHON, needs_tyro
from tests.runs.runners.test_sb3 import PYTHON as SB3_PYTHON

from palaestra.runs.catalogue import ScriptInfo
from palaestra.runs.phase import Phase
from palaestra.runs.runner import Finding, PolicyPlan, RunnerCapabilities
from palaestra.runs.runners.cleanrl import CleanrlRunner
from palaestra.runs.runners.conformance import check_runner
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.runners.palaestra import PalaestraRunner
from palaestra.runs.runners.sb3 import Sb3Runner
from palaestra.runs.runners.template import MyTrainerRunner
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
    config = {"checkout": str(CHECKOUT), "total_timesteps": 200, "save_model": True}
    check_runner(CleanrlRunner, RunSpec(runner="cleanrl", script="q_learning", config=config, python=PYTHON), tmp_path)


def test_sb3_keeps_the_rules(tmp_path):
    config = {"algorithm": {"n_steps": 128}, "total_timesteps": 256}
    spec = RunSpec(runner="sb3", script="ppo", env_id="CartPole-v1", config=config, python=SB3_PYTHON)
    check_runner(Sb3Runner, spec, tmp_path)


def test_the_template_keeps_the_rules(tmp_path):
    check_runner(MyTrainerRunner, RunSpec(runner="my-trainer", script=OWN, config={"steps": 30}), tmp_path)


def test_a_runner_of_another_package_with_a_catalogue_and_policies_keeps_the_rules(tmp_path):
    check_runner(ExampleRunner, RunSpec(runner="example", script="second", config={"steps": 30}), tmp_path)


def test_the_template_is_short_and_runs_under_supervision(tmp_path):
    assert len(Path(sys.modules[MyTrainerRunner.__module__].__file__).read_text().splitlines()) < 100
    with TrainerOrchestrator(tmp_path) as orchestrator:
        orchestrator.register_runner("my-trainer", MyTrainerRunner)

        run_id = orchestrator.launch("my-trainer", {"steps": 30, "learning_rate": 0.5}, consent=True, script=OWN)
        events = [record.event for record in orchestrator.stream(run_id)]
        record = orchestrator.run(run_id)

    assert (record.phase, record.agent_id) == (Phase.SUCCEEDED, "my-trainer/own_script")
    assert [e.metrics for e in events if isinstance(e, TrainingStep)] == [
        {"loss": 0.5},
        {"loss": 0.25},
        {"loss": 0.125},
    ]
    assert [e.episode_return for e in events if isinstance(e, EpisodeSummary)] == [10.0, 20.0, 30.0]


EXAMPLE = RunSpec(runner="example", script="second", config={"steps": 30})


class _Boasting(EchoRunner):
    capabilities = RunnerCapabilities(title="It claims too much", offline_inference=True)


class _Forgetting(ExampleRunner):
    def plan(self, spec, paths, machine):
        return MyTrainerRunner().plan(spec.model_copy(update={"script": OWN}), paths, machine)


class _Speechless(ExampleRunner):
    def plan_policy(self, request, machine):
        return PolicyPlan(argv=("/bin/true",))


class _Asking(ExampleRunner):
    def plan_policy(self, request, machine):
        return replace(super().plan_policy(request, machine), foreign_code="something")


class _Failed(ExampleRunner):
    def plan_policy(self, request, machine):
        message = {"type": "failed", "text": "no"}
        code = f"import struct,sys; sys.stdout.buffer.write(struct.pack('<II', {len(json.dumps(message))}, 0))"
        return PolicyPlan(argv=(sys.executable, "-c", f"{code}; sys.stdout.write({json.dumps(message)!r})"))


class _Unlisted(ExampleRunner):
    def scripts(self, spec, machine):
        return [ScriptInfo(name="first", title="Another")]


class _Unready(ExampleRunner):
    def readiness(self, spec, machine):
        return [Finding("licence", "refused", "expired", "Renew it")]


@pytest.mark.parametrize(
    ("broken", "spec", "rule"),
    [
        (_Boasting, ECHO, "a runner with offline_inference has plan_policy"),
        (_Forgetting, EXAMPLE, "the given spec saves a checkpoint"),
        (_Speechless, EXAMPLE, "a policy process sends a message when it is loaded"),
        (_Asking, EXAMPLE, "a checkpoint of a run that the user agreed to needs no further consent"),
        (_Failed, EXAMPLE, "a policy of the run is ready"),
        (_Unlisted, EXAMPLE, "the script of the given spec is in the list of scripts"),
        (_Unready, EXAMPLE, "a runner that can run the given spec is ready: expired"),
    ],
)
def test_a_runner_whose_policies_or_catalogue_break_a_rule_is_told_which(tmp_path, broken, spec, rule):
    with pytest.raises(AssertionError, match=rule):
        check_runner(broken, spec, tmp_path)


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
