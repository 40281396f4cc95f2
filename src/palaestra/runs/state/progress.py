"""How far a run has come, as one frozen row that any thread may read."""

from __future__ import annotations

from dataclasses import dataclass

from palaestra.runs.state.non_finite import NonFinite

__all__ = ["Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What ingestion knows of one attempt. Everything counts from the attempt's beginning, restarts included."""

    attempt: int
    seq: int = 0
    """Number of the last record of its journal; 0 before the first."""
    env_step: int = 0
    """The greatest step that any record named."""
    update: int = 0
    episodes: int = 0
    episode_return: float | None = None
    """Mean of the last 100 episodes."""
    said: str = ""
    """The last phase the trainer itself announced, such as `succeeded`."""
    said_reason: str = ""
    tracking_url: str = ""
    """Where an experiment tracker shows the run, once its output has said so."""
    output_bytes: int = 0
    """Size of stdout.log."""
    source_bytes: int = 0
    """Bytes of journals, output and event files that were read as telemetry. Together with `output_bytes` it stands
    still only when the trainer is silent."""
    tracebacks: int = 0
    """Python tracebacks in the output."""
    corrupt: int = 0
    """Damaged lines and damaged stretches of event files; all were stepped over."""
    unread_lines: int = 0
    """Lines of output that its grammar does not understand."""
    episode_lines: int = 0
    """Episodes announced on stdout, for trainers whose numbers come from event files: the two should agree."""
    points_left_out: int = 0
    """Points that were not kept: more than 2,000 metrics, or steps beyond 64 bits."""
    dropped: int = 0
    """Lines and records that were meant as telemetry and could not be read: damaged, bad JSON, unknown kinds."""
    first_dropped: str = ""
    """Where the first of them is, and what is wrong with it."""
    non_finite: tuple[NonFinite, ...] = ()
    """Metrics that are NaN or infinite, or were so a few values ago."""
    disk_full: bool = False
    problem: str = ""
    """Why ingestion stands still at the moment; it is tried again every second and loses nothing."""
