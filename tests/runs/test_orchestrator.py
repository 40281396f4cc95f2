"""Runs from within one process."""

import pytest

from palaestra.errors import ConfigError, ConsentRequired, LaunchRefused, StateDirectoryLocked, UnknownRun
from palaestra.runs import Phase, TrainerOrchestrator
from palaestra.runs.config import SupervisorConfig
from palaestra.runs.runner import RunnerCapabilities
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.store.lock import ServiceLock
from palaestra.runs.store.registry import open_registry_read_only
from palaestra.telemetry import TrainingStep

CONFIG = SupervisorConfig(min_free_disk_mb=0)


class Mine(EchoRunner):
    """A runner that somebody brought along."""

    name = "mine"
    capabilities = RunnerCapabilities(title="Mine", runs_foreign_code=True)


def _updates(records):
    return [record.event.update for record in records if isinstance(record.event, TrainingStep)]


def test_launch_and_stream_to_the_end(home):
    with TrainerOrchestrator(home, CONFIG) as orchestrator:
        run_id = orchestrator.launch("echo", {"steps": 25}, name="mine")
        assert _updates(orchestrator.stream(run_id)) == list(range(1, 26))
        assert orchestrator.run(run_id).phase is Phase.SUCCEEDED


def test_stop_ends_a_run_and_its_stream(home):
    with TrainerOrchestrator(home, CONFIG) as orchestrator:
        run_id = orchestrator.launch("echo", {"steps": 3, "then": "hang"})
        stream = orchestrator.stream(run_id)
        next(stream)
        assert orchestrator.stop(run_id, grace_s=5).phase is Phase.STOPPED
        assert _updates(stream) == [1, 2, 3]


def test_a_runner_of_ones_own_is_registered_and_asked_consent_for(home):
    with TrainerOrchestrator(home, CONFIG) as orchestrator:
        with pytest.raises(LaunchRefused, match="no such runner"):
            orchestrator.launch("mine", {})
        orchestrator.register_runner("mine", Mine)
        assert {"mine", "echo", "palaestra"} <= set(orchestrator.registered_runners())
        with pytest.raises(ConsentRequired):
            orchestrator.launch("mine", {"steps": 1})
        run_id = orchestrator.launch("mine", {"steps": 1}, consent=True)
        assert _updates(orchestrator.stream(run_id)) == [1]


def test_runs_outlive_it_and_are_found_again(home):
    with TrainerOrchestrator(home, CONFIG) as orchestrator:
        run_id = orchestrator.launch("echo", {"steps": 3, "until": str(home.path / "go")})
        next(iter(orchestrator.stream(run_id)))
    with TrainerOrchestrator(home, CONFIG) as orchestrator:
        assert orchestrator.run(run_id).phase.has_process
        (home.path / "go").touch()
        assert _updates(orchestrator.stream(run_id)) == [1, 2, 3]


def test_it_holds_the_state_directory(home):
    with TrainerOrchestrator(home.base, CONFIG):
        with pytest.raises(StateDirectoryLocked), ServiceLock(home):
            pass
        with pytest.raises(StateDirectoryLocked), TrainerOrchestrator(home):
            pass
    with ServiceLock(home):
        pass


def test_mistakes_are_told_apart(home):
    orchestrator = TrainerOrchestrator(home, CONFIG)
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        orchestrator.launch("echo", {})
    with orchestrator:
        with pytest.raises(UnknownRun):
            list(orchestrator.stream("no-such-run"))
        with pytest.raises(ConfigError, match=r"spec\.priorty = 3: unknown key\. Did you mean 'priority'"):
            orchestrator.launch("echo", {}, priorty=3)


def test_a_run_is_resumed_from_its_last_checkpoint(home):
    with TrainerOrchestrator(home, CONFIG) as orchestrator:
        run_id = orchestrator.launch("echo", {"steps": 30, "checkpoint_every": 10, "then": "exit:1"})
        assert _updates(orchestrator.stream(run_id)) == list(range(1, 31))
        assert orchestrator.run(run_id).phase is Phase.FAILED
        orchestrator.resume(run_id)
        list(orchestrator.stream(run_id))
        assert orchestrator.run(run_id).attempt == 2
    registry = open_registry_read_only(home)
    assert {checkpoint.env_step for checkpoint in registry.checkpoints(run_id=run_id)} >= {100, 200, 300}
    registry.close()
