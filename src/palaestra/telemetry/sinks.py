"""Which observers a run has: the configuration section and the one function that opens them.

The journal is always among them, because it is the record of the run; the others are asked for. Everything
that can be refused without side effects (a missing package, missing credentials) is refused before the first
file is created, and when one observer cannot start, those already open are closed again. The wiring of a
training run drives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import Field

from palaestra.config import Section
from palaestra.telemetry.event import LogLine
from palaestra.telemetry.journal import Journal
from palaestra.telemetry.notice import NoticeSink
from palaestra.telemetry.progress import ProgressSink
from palaestra.telemetry.sink import Sink, Telemetry
from palaestra.telemetry.tensorboard import TensorBoardSink, require_tensorboard
from palaestra.telemetry.wandb import WandbSink, require_wandb

__all__ = ["TelemetryConfig", "check_telemetry", "open_telemetry"]


class TelemetryConfig(Section):
    """Who watches the run besides the journal."""

    progress: bool = True
    """Show progress on stderr: a live display on a terminal, a plain line every ten seconds elsewhere."""

    tensorboard: bool = False
    """Also write TensorBoard event files beside the journal; needs the extra `palaestra[tensorboard]`."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to W&B; `offline` keeps the run on disk until `wandb sync`. Needs `palaestra[wandb]`."""

    wandb_project: str = Field(default="palaestra", min_length=1)
    """The W&B project in which the run appears."""


def check_telemetry(config: TelemetryConfig) -> None:
    """Refuse what cannot start, without starting or writing anything."""
    if config.tensorboard:
        require_tensorboard()
    if config.wandb != "off":
        require_wandb(config.wandb)


def open_telemetry(
    config: TelemetryConfig,
    run_dir: Path,
    run_id: str,
    total_env_steps: int,
    resolved: Mapping[str, Any],
    journal_path: Path,
    *,
    stream: TextIO | None = None,
    unit: Literal["steps", "updates"] = "steps",
) -> Telemetry:
    """Open the journal and every sink that was asked for, or none of them.

    `resolved` is the resolved configuration, for W&B to show. TensorBoard files go beside the journal, so
    that each attempt has its own; `stream` replaces stderr for the progress display, which counts `total_env_steps` in
    `unit`.
    """
    check_telemetry(config)
    with ExitStack() as undo:
        sinks: list[Sink] = []

        def opened(sink: Sink) -> None:
            undo.callback(sink.close)
            sinks.append(sink)

        journal = Journal(journal_path)
        opened(journal)
        if config.tensorboard:
            opened(TensorBoardSink(Path(journal_path).parent / "tensorboard"))
        if config.wandb != "off":
            wandb = WandbSink(config.wandb_project, run_id, config.wandb, run_dir, resolved)
            opened(wandb)
            if wandb.url:
                # In the journal, because W&B itself is kept quiet; the run service reads it there.
                journal.emit(LogLine("info", f"View run at {wandb.url}"))
        if config.progress:
            opened(ProgressSink(total_env_steps, run_id, stream=stream, unit=unit))
        else:
            opened(NoticeSink(stream))
        undo.pop_all()
    return Telemetry(sinks)
