"""Writes metrics as TensorBoard event files: one scalar per metric and update, over environment steps.

Needs only the `tensorboard` package (no torch, no TensorFlow), which is imported when a sink is opened.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from palaestra.errors import ConfigError
from palaestra.telemetry.scalar_sink import ScalarSink

_FLUSH_EVERY_S = 10


def require_tensorboard() -> None:
    """Raise `ConfigError` if the package is not installed."""
    _import("tensorboard.summary.writer.event_file_writer")


class TensorBoardSink(ScalarSink):
    """Writes scalars into a directory that `tensorboard --logdir` shows."""

    def __init__(
        self, directory: str | Path, clock: Callable[[], float] = time.time, *, single_episodes: bool = False
    ) -> None:
        super().__init__(single_episodes=single_episodes)
        file_writer = _import("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._proto = _import("tensorboard.compat.proto.event_pb2")
        self._summary = _import("tensorboard.compat.proto.summary_pb2").Summary
        try:
            self._writer = file_writer(str(directory), flush_secs=_FLUSH_EVERY_S)
        except OSError as error:
            remedy = "Choose a directory that can be written"
            raise ConfigError("telemetry.tensorboard", str(directory), f"cannot be written: {error}", remedy) from error
        self._clock = clock
        self.points = 0
        """Number of values written."""

    def flush(self) -> None:
        """Write all buffered values to the file."""
        if not self._closed:
            self._writer.flush()

    def _finish(self) -> None:
        self._writer.close()

    def _write(self, env_step: int, metrics: Mapping[str, float]) -> None:
        self.points += len(metrics)
        values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._proto.Event(wall_time=self._clock(), step=env_step, summary=summary))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            "telemetry.tensorboard",
            True,
            f"needs the tensorboard package ({error})",
            "Run pip install 'palaestra[tensorboard]', or set telemetry.tensorboard to false",
        ) from error
