"""The run service: launch, watch, stop, recover and compare runs of any trainer. Never imports torch.

`TrainerService` speaks to the run service, which starts by itself; `TrainerOrchestrator` does without one. A
trainer of your own is a `Runner` (docs/runners.md). Names are loaded when asked for: `palaestra runs list` must not
pay for a web server.
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
