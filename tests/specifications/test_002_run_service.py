"""Specification 002, "Agent RL Integration": the calls it names. It has diagrams and plans, and no code to run."""

import pytest

from palaestra.files.home import Home
from palaestra.runs import Phase, TrainerOrchestrator, TrainerService
from palaestra.runs.config import SupervisorConfig
from palaestra.runs.runners.echo import EchoRunner
from palaestra.telemetry import TrainingStep

pytestmark = pytest.mark.timeout(120)


def test_the_orchestrator_registers_launches_streams_and_stops(tmp_path):
    with TrainerOrchestrator(Home(tmp_path), SupervisorConfig(min_free_disk_mb=0)) as orchestrator:
        orchestrator.register_runner("mine", EchoRunner)
        assert "mine" in orchestrator.registered_runners()
        run_id = orchestrator.launch("echo", {"steps": 3})
        updates = [r.event.update for r in orchestrator.stream(run_id) if isinstance(r.event, TrainingStep)]
        assert updates == [1, 2, 3]
        assert orchestrator.run(run_id).phase is Phase.SUCCEEDED


@pytest.mark.parametrize(
    "name", ["start_run", "stop_run", "stream_log", "recent_metrics", "export_to_tensorboard", "prepare_training"]
)
def test_the_trainer_service_has_the_calls_it_names(name):
    assert callable(getattr(TrainerService, name))
