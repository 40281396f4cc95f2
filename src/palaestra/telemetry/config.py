"""The `telemetry` section of a configuration, and `open_telemetry`, which opens the sinks of a run.

The journal is always among them, because it is the record of the run. A missing package or missing credentials are
refused before the first file is created; if one sink cannot start, those already open are closed again.
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
from palaestra.telemetry.progress import ProgressSink
from palaestra.telemetry.sink import Sink, Telemetry, WarningSink
from palaestra.telemetry.tensorboard import TensorBoardSink, require_tensorboard
from palaestra.telemetry.wandb import WandbSink, require_wandb


class TelemetryConfig(Section):
    """Outputs of a run besides its journal."""

    progress: bool = True
    """Show progress on stderr: a live display on a terminal, a plain line every ten seconds elsewhere."""

    tensorboard: bool = False
    """Also write TensorBoard event files beside the journal; needs the extra `palaestra[tensorboard]`."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to W&B; `offline` stores the run on disk until `wandb sync`. Needs `palaestra[wandb]`."""

    wandb_project: str = Field(default="palaestra", min_length=1)
    """The W&B project in which the run appears."""


def check_telemetry(config: TelemetryConfig) -> None:
    """Raise `ConfigError` for a sink that cannot start, without starting or writing anything."""
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
    line: TextIO | None = None,
) -> Telemetry:
    """Open the journal and every configured sink, or none of them.

    `resolved` is the resolved configuration, shown by W&B. TensorBoard files are written next to the journal, so that
    each attempt has its own. `stream` replaces stderr for the progress display, which counts `total_env_steps` in
    `unit`. `line`: show progress on this stream instead, as one line that is rewritten.
    """
    check_telemetry(config)
    with ExitStack() as cleanup:
        sinks: list[Sink] = []
        notice = ""

        def add(sink: Sink) -> None:
            cleanup.callback(sink.close)
            sinks.append(sink)

        journal = Journal(journal_path)
        add(journal)
        if config.tensorboard:
            add(TensorBoardSink(Path(journal_path).parent / "tensorboard"))
        if config.wandb != "off":
            wandb = WandbSink(config.wandb_project, run_id, config.wandb, run_dir, resolved)
            add(wandb)
            notice = wandb.notice
        if config.progress:
            add(ProgressSink(total_env_steps, run_id, stream=line or stream, unit=unit, rewrite=line is not None))
        else:
            add(WarningSink(stream))
        cleanup.pop_all()
    telemetry = Telemetry(sinks)
    if notice:
        # The output of W&B is silenced; the run service reads the URL in the journal.
        telemetry.emit(LogLine("info", notice))
    return telemetry
