"""Checkpoints of other trainers act in plays: from the run that saved them to the steps of an episode."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import stable_baselines3 as sb3
from tests.runs.runners.test_cleanrl import CHECKOUT

from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.home import Home
from palaestra.runs.checkpoints.catalogue import list_checkpoints
from palaestra.runs.checkpoints.import_checkpoint import Provenance, import_checkpoint
from palaestra.runs.phase import Phase
from palaestra.runs.play.plays import Plays
from palaestra.runs.play.policy_planner import PolicyPlanner
from palaestra.runs.play.protocol import LoadPolicy, unpack
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import PlayState, StepReport, read_report
from palaestra.runs.runner import PolicyPlan, RunnerCapabilities
from palaestra.runs.runners.cleanrl import CleanrlRunner
from palaestra.runs.runners.sb3 import Sb3Runner
from palaestra.runs.supervisor.orchestrator import TrainerOrchestrator

CARTPOLE = PlaySpec(env_id="CartPole-v1", mode="agent", speed=100.0, recording=False)


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path.resolve() / "var" / "training")


def _planner(home, *runners):
    by_name = {runner.name: runner for runner in runners or (Sb3Runner(), CleanrlRunner())}

    async def get_runner(name):
        return by_name[name]

    return PolicyPlanner(home, get_runner)


def _play_episode(home, checkpoint, spec=CARTPOLE):
    """The agent's steps of one episode, and the status of its policy."""

    async def body():
        plays = Plays(home, _planner(home).plan, idle_timeout_s=60)
        try:
            record = await plays.start(spec.model_copy(update={"checkpoint": checkpoint}))
            steps, status = [], None
            with plays.get(record.play_id).subscribe() as messages:
                while not (steps and steps[-1].is_last):
                    report = read_report(unpack(await asyncio.wait_for(messages.next(), 120)))
                    if isinstance(report, PlayState):
                        assert report.loading is None or report.loading.state == "loading", report.loading
                        status = report.policy or status
                    elif isinstance(report, StepReport) and report.step:
                        steps.append(report)
            return steps, status
        finally:
            await plays.close()

    return asyncio.run(body())


def test_a_checkpoint_of_a_stable_baselines3_run_plays_an_episode(home):
    config = {"total_timesteps": 64, "algorithm": {"n_steps": 32, "batch_size": 32}}
    with TrainerOrchestrator(home.base) as orchestrator:
        run_id = orchestrator.launch("sb3", config, script="ppo", env_id="CartPole-v1", seed=1, python=sys.executable)
        list(orchestrator.stream(run_id))
        assert orchestrator.run(run_id).phase is Phase.SUCCEEDED
    (checkpoint,) = list_checkpoints(home, run_id=run_id)

    steps, status = _play_episode(home, checkpoint.checkpoint_id)

    assert {step.actor for step in steps} == {"agent"}
    assert steps[-1].episode_return == len(steps) > 5
    assert all(sum(step.outputs["probabilities"]) == pytest.approx(1) for step in steps)
    assert (status.name, status.agent_id, status.notes) == ("ppo, 64 steps", "sb3/ppo", ())
    best = [max((0, 1), key=step.outputs["probabilities"].__getitem__) for step in steps]
    assert [step.action for step in steps] == best


def test_a_checkpoint_of_a_cleanrl_run_plays_an_episode_without_another_consent(home):
    config = {"checkout": str(CHECKOUT), "save_model": True, "total_timesteps": 30}
    with TrainerOrchestrator(home.base) as orchestrator:
        run_id = orchestrator.launch("cleanrl", config, script="q_learning", consent=True, python=sys.executable)
        list(orchestrator.stream(run_id))
        assert orchestrator.run(run_id).phase is Phase.SUCCEEDED
    (checkpoint,) = list_checkpoints(home, run_id=run_id)

    steps, status = _play_episode(home, checkpoint.checkpoint_id)

    assert [step.action for step in steps] == [
        step.outputs["q_values"].index(max(step.outputs["q_values"])) for step in steps
    ]
    assert (status.state, status.agent_id) == ("ready", "cleanrl/q_learning")


def _import_zip(home, tmp_path, **kwargs):
    sb3.PPO("MlpPolicy", "CartPole-v1", device="cpu", seed=1).save(tmp_path / "a.zip")
    return import_checkpoint(home, tmp_path / "a.zip", Provenance(env_id="CartPole-v1", **kwargs))


def _plan(home, planner, checkpoint, consent="", spec=CARTPOLE):
    return asyncio.run(planner.plan(LoadPolicy(checkpoint, True, consent), spec))


class Prepared:
    """A runner with a plan that the test gives it, and what it was asked for."""

    name = "sb3"
    capabilities = RunnerCapabilities(title="Prepared", offline_inference=True)

    def __init__(self, plan):
        self.plan, self.requests = plan, []

    def plan_policy(self, request, machine):
        self.requests.append(request)
        return self.plan


PLAN = PolicyPlan(argv=("act",))


def test_foreign_code_waits_for_the_consent_to_exactly_that_command(home, tmp_path):
    record = _import_zip(home, tmp_path)
    runner = Prepared(replace(PLAN, foreign_code="a class of yours"))
    planner = _planner(home, runner)

    asked = _plan(home, planner, record.checkpoint_id)
    wrong = _plan(home, planner, record.checkpoint_id, consent="0" * 64)
    agreed = _plan(home, planner, record.checkpoint_id, consent=asked.status.digest)

    assert (asked.status.state, wrong.status.state, agreed.status.state) == (
        "needs_consent",
        "needs_consent",
        "loading",
    )
    assert asked.status.text.endswith("code that is not part of palaestra: a class of yours")
    assert (asked.command, agreed.command["argv"]) == (None, ["act"])
    runner.plan = replace(runner.plan, argv=("act", "differently"))
    assert _plan(home, planner, record.checkpoint_id, consent=asked.status.digest).status.state == "needs_consent"


def test_foreign_code_that_only_helps_is_offered_and_not_demanded(home, tmp_path):
    record = _import_zip(home, tmp_path)
    extended = PolicyPlan(argv=("act", "--statistics"), foreign_code="a pickle")
    planner = _planner(home, Prepared(replace(PLAN, alternative=extended)))

    first = _plan(home, planner, record.checkpoint_id)
    second = _plan(home, planner, record.checkpoint_id, consent=first.status.digest)

    assert (first.status.state, first.command["argv"]) == ("loading", ["act"])
    assert first.status.notes == ("It acts as in training if you agree to execute a pickle.",)
    assert (second.status.state, second.command["argv"]) == ("loading", ["act", "--statistics"])
    assert second.status.notes == ()


def test_the_runner_gets_the_environment_of_the_play_and_the_result_of_the_scan(home, tmp_path):
    runner = Prepared(PLAN)
    record = _import_zip(home, tmp_path, agent_id="mine")
    spec = CARTPOLE.model_copy(update={"parameters": {"sutton_barto_reward": True}})

    _plan(home, _planner(home, runner), record.checkpoint_id, spec=spec)

    (request,) = runner.requests
    assert (request.env_id, request.parameters) == ("CartPole-v1", {"sutton_barto_reward": True})
    assert (request.unsafe, request.spec, request.command) == ("", None, {})


def test_a_damaged_or_unknown_checkpoint_and_one_of_another_environment_are_refused(home, tmp_path):
    record = _import_zip(home, tmp_path)
    planner = _planner(home)
    elsewhere = PlaySpec(env_id="Pendulum-v1", mode="agent")

    with pytest.raises(CheckpointError, match=r"it was trained in CartPole-v1, this is Pendulum-v1"):
        _plan(home, planner, record.checkpoint_id, spec=elsewhere)
    with pytest.raises(ConfigError, match="no such checkpoint"):
        _plan(home, planner, "ffff")
    with pytest.raises(CheckpointError, match="Import it first"):
        _plan(home, planner, str(tmp_path / "a.zip"))
    os.truncate(record.path, Path(record.path).stat().st_size - 1)
    with pytest.raises(CheckpointError, match="it was changed or damaged"):
        _plan(home, planner, record.checkpoint_id)


def test_a_checkpoint_whose_run_has_a_damaged_spec_is_refused_with_the_reason(home, tmp_path):
    record = replace(_import_zip(home, tmp_path), run_id="run-1", attempt=1)
    home.run("run-1").spec.parent.mkdir(parents=True)
    home.run("run-1").spec.write_text('{"agent": 5}')

    with pytest.raises(CheckpointError, match="the spec of its run run-1 is damaged"):
        _planner(home)._policy_request(record, True, CARTPOLE)
