"""Where events go: the `Sink` seam, the fan-out that feeds several, and the sink that only remembers.

A sink that was asked for must start: its constructor raises `ConfigError`. After that it is an observer, and
a broken observer never stops training: `Telemetry` warns once, drops it and goes on with the others. This is
the only file in `telemetry` that catches everything, and the trainer drives it from one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from palaestra.telemetry.event import Event

__all__ = ["BatchSink", "MemorySink", "Sink", "Telemetry"]

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes every kind of event. `telemetry.conformance.check_sink` proves an implementation right."""

    def emit(self, event: Event) -> None:
        """Take one event, quickly; a kind of no interest is ignored."""

    def flush(self) -> None:
        """Hand on whatever is held back."""

    def close(self) -> None:
        """Flush and release everything. Harmless when repeated."""


@runtime_checkable
class BatchSink(Sink, Protocol):
    """A sink that takes many events at the price of one."""

    def emit_many(self, events: Iterable[Event]) -> None:
        """Take the events in their order."""


class MemorySink:
    """Keeps every event in a list: the sink for tests and notebooks."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def emit(self, event: Event) -> None:
        """Remember the event."""
        self.events.append(event)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Remember that nothing more was promised."""
        self.closed = True


class Telemetry:
    """Gives every event to every sink that still works."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks that still work."""
        return tuple(self._sinks)

    def emit(self, event: Event) -> None:
        """Give one event to all."""
        for sink in tuple(self._sinks):
            try:
                sink.emit(event)
            except Exception as error:  # noqa: BLE001  an observer, whatever ails it, never stops training
                self._drop(sink, "emit", error)

    def emit_many(self, events: Iterable[Event]) -> None:
        """Give the events to all, in one go where a sink can take it."""
        batch = list(events)
        if not batch:
            return
        for sink in tuple(self._sinks):
            try:
                if isinstance(sink, BatchSink):
                    sink.emit_many(batch)
                else:
                    for event in batch:
                        sink.emit(event)
            except Exception as error:  # noqa: BLE001  an observer, whatever ails it, never stops training
                self._drop(sink, "emit", error)

    def flush(self) -> None:
        """Have every sink hand on what it holds back."""
        for sink in tuple(self._sinks):
            try:
                sink.flush()
            except Exception as error:  # noqa: BLE001  an observer, whatever ails it, never stops training
                self._drop(sink, "flush", error)

    def close(self) -> None:
        """Close every sink, also when one of them fails. Harmless when repeated."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  an observer, whatever ails it, never stops training
                _warn(sink, "close", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drop(self, sink: Sink, doing: str, error: Exception) -> None:
        self._sinks.remove(sink)
        _warn(sink, doing, error)
        try:
            sink.close()
        except Exception as again:  # noqa: BLE001  it was reported already; closing only frees what it still held
            _log.debug("closing the dropped %s failed too: %s", type(sink).__name__, again)


def _warn(sink: Sink, doing: str, error: Exception) -> None:
    _log.warning(
        "%s failed in %s and gets no more events: %s: %s. Training goes on without it; "
        "fix the cause (disk space, connection, permissions) and resume the run to have it back.",
        type(sink).__name__,
        doing,
        type(error).__name__,
        error,
    )
