"""What the registry and the run directories say about runs: plain frozen rows, cheap to import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.phase import Phase

__all__ = ["LASTING_ALARMS", "Alarm", "CheckpointRecord", "RunEvent", "RunRecord"]


@dataclass(frozen=True)
class RunEvent:
    """One line of life.jsonl: something happened to a run."""

    seq: int
    time: float
    attempt: int
    happening: str
    """A `PhaseEvent`, or `alarm`, `alarm_over`, `adopted`, `note`, which change no phase."""
    phase: Phase
    """After it."""
    reason: str = ""
    code: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Alarm:
    """Something a person should look at while the run goes on."""

    code: str
    """`stalled`, `no_episodes`, `traceback`, `disk`, `unreadable_events`, `warden_gone`, `drift`; and about its numbers
    `non_finite`, `dropped_events`, `left_out_metrics`, which stay when the run has ended."""
    text: str
    since: float


LASTING_ALARMS = frozenset({"non_finite", "dropped_events", "left_out_metrics"})
"""Alarms about what a run measured. They stay on its row when it has ended: its numbers do, too."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run as the registry knows it."""

    run_id: str
    runner: str
    agent_id: str
    """Runner and algorithm: `palaestra/ppo`, `cleanrl/dqn`."""
    env_id: str
    phase: Phase
    reason: str = ""
    code: str = ""
    attempt: int = 0
    supervised: bool = True
    """False for a run that somebody started with `palaestra train` alone: it is shown and never stopped by us."""
    priority: int = 0
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    warden: ProcessIdentity | None = None
    """The watchdog process beside the trainer."""
    trainer: ProcessIdentity | None = None
    env_step: int = 0
    total_steps: int | None = None
    episodes: int = 0
    episode_return: float | None = None
    """Mean of the last 100 episodes."""
    seed: int | None = None
    tags: tuple[str, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    archived: bool = False
    tracking_url: str = ""
    bytes_on_disk: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """One checkpoint, of a run or imported; keyed (agent_id, env_id, run_id) like its run."""

    checkpoint_id: str
    """First 16 hex digits of its SHA-256."""
    run_id: str
    """Empty for one that was imported."""
    agent_id: str
    env_id: str
    attempt: int
    env_step: int | None
    """Environment steps it learned from; None when unknown."""
    path: str
    """Absolute; `uri()` is `file://` and this."""
    sha256: str
    size_bytes: int
    format: str
    """`palaestra`, `safetensors`, `torch_zip`, `sb3_zip`."""
    created: float
    best: bool = False
    metric: float | None = None
    step_source: str = ""
    """How the step is known, see `checkpoints.steps`; empty on rows of earlier versions."""
    profile: str = "local"
    """Where it is stored: `local` in its run, `managed` copied by an import."""
    env_signature: dict[str, Any] = field(default_factory=dict)
    metrics_digest: dict[str, float] = field(default_factory=dict)
    verified: float | None = None
    """When its bytes last matched the hash; None never, negative when they did not."""

    @property
    def shown_step(self) -> str:
        """`12,000`, `11,992+` for a lower bound, or `unknown`."""
        if self.env_step is None:
            return "unknown"
        return f"{self.env_step:,}{'+' if self.step_source == 'log' else ''}"
