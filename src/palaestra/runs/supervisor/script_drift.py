"""Whether a script is still the one that an earlier run of the same agent ran."""

from __future__ import annotations

from palaestra.files.home import Home
from palaestra.runs.runner import LaunchPlan
from palaestra.runs.state.attempt_plan import AttemptPlan
from palaestra.runs.store.registry import Registry

__all__ = ["plan_drift", "script_drift"]

_LOOKED_AT = 100
"""So many of the runner's newest runs are looked through."""


def script_drift(home: Home, registry: Registry, agent_id: str, run_id: str, sha256: str) -> str:
    """What is to be said of it; empty when it is the same or nobody ran it before."""
    if not sha256:
        return ""
    for other in registry.runs(runner=agent_id.partition("/")[0], limit=_LOOKED_AT):
        if other.run_id == run_id or other.agent_id != agent_id:
            continue
        attempts = home.run(other.run_id).attempts()
        earlier = AttemptPlan.read(attempts[-1]) if attempts else None
        if earlier is not None and earlier.script_sha256:
            return "" if earlier.script_sha256 == sha256 else f"its script is not the one that {other.run_id} ran"
    return ""


def plan_drift(home: Home, registry: Registry, runner: str, plan: LaunchPlan) -> str:
    """The same of a command that was not launched yet."""
    agent_id = f"{runner}/{plan.algorithm}" if plan.algorithm else runner
    return script_drift(home, registry, agent_id, plan.paths.run_id, plan.script_sha256)
