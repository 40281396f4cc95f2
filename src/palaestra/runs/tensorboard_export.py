"""Where the event files of a run are written when somebody wants to see it in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from palaestra.errors import ConfigError
from palaestra.runs.reader import RunReader

if TYPE_CHECKING:
    from palaestra.runs.ingest.export import ExportReport

__all__ = ["export_run"]


def export_run(reading: RunReader, name: str, into: str | Path | None = None) -> ExportReport:
    """Write a run's curves into a directory; its own `tensorboard` when none is given."""
    from palaestra.runs.ingest.export import export_tensorboard

    paths = reading.paths(name)
    target = paths.tensorboard if into is None else Path(into)
    if not target.is_absolute():
        raise ConfigError("into", str(target), "is not an absolute path", "Name the directory from the root on")
    try:
        return export_tensorboard(paths, target)
    except OSError as error:
        remedy = "Name a directory that can be written"
        raise ConfigError("into", str(target), f"cannot be written ({error.strerror})", remedy) from None
