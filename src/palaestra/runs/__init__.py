"""The run service: launches, monitors, stops, recovers and compares runs of any trainer. Never imports torch.

`TrainerService` is a client of the run service and starts it automatically; `TrainerOrchestrator` works without one.
Your own trainer is a `Runner` (docs/runners.md). Names are imported lazily, so that `palaestra runs list` does not
import a web server.
"""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.runs.client.client import TrainerService
    from palaestra.runs.phase import Phase
    from palaestra.runs.record import RunRecord
    from palaestra.runs.runner import Finding, LaunchPlan, Runner, RunnerCapabilities
    from palaestra.runs.spec import RunSpec
    from palaestra.runs.supervisor.orchestrator import TrainerOrchestrator

__all__ = [
    "Finding",
    "LaunchPlan",
    "Phase",
    "RunRecord",
    "RunSpec",
    "Runner",
    "RunnerCapabilities",
    "TrainerOrchestrator",
    "TrainerService",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Finding": "runner",
        "LaunchPlan": "runner",
        "Phase": "phase",
        "RunRecord": "record",
        "RunSpec": "spec",
        "Runner": "runner",
        "RunnerCapabilities": "runner",
        "TrainerOrchestrator": "supervisor.orchestrator",
        "TrainerService": "client.client",
    },
)
