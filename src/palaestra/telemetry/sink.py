"""The `Sink` protocol, `Telemetry` (which sends events to several sinks), and two small sinks.

A configured sink must start: its constructor raises `ConfigError`. After that, a failing sink never stops training:
`Telemetry` warns once, drops it and continues with the others. All calls come from one thread.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Protocol, Self, TextIO, runtime_checkable

from palaestra.telemetry.event import Event, LogLine

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives every kind of event. `telemetry.conformance.check_sink` tests an implementation."""

    def emit(self, event: Event) -> None:
        """Handle one event, quickly. Kinds that the sink does not use are ignored."""

    def flush(self) -> None:
        """Write out everything that is buffered."""

    def close(self) -> None:
        """Flush and release all resources. May be called more than once."""


@runtime_checkable
class BatchSink(Sink, Protocol):
    """A sink that handles many events faster than one by one."""

    def emit_many(self, events: Iterable[Event]) -> None:
        """Handle the events in their order."""


class MemorySink:
    """Stores every event in a list, for tests and notebooks."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def emit(self, event: Event) -> None:
        """Append the event."""
        self.events.append(event)

    def flush(self) -> None:
        """Do nothing: events are not buffered."""

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True


class WarningSink:
    """Prints warnings and errors to stderr, for runs without a progress display."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def emit(self, event: Event) -> None:
        """Print a `LogLine` of level warning or above."""
        if isinstance(event, LogLine) and event.level in ("warning", "error", "critical"):
            print(f"{event.level}: {event.text}", file=self._stream or sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: lines are not buffered."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class Telemetry:
    """Sends every event to every working sink."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks that have not failed."""
        return tuple(self._sinks)

    def emit(self, event: Event) -> None:
        """Send one event to all sinks."""
        self._call_each("emit", lambda sink: sink.emit(event))

    def emit_many(self, events: Iterable[Event]) -> None:
        """Send several events to all sinks, as one batch to sinks that support it."""
        batch = list(events)

        def emit_batch(sink: Sink) -> None:
            if isinstance(sink, BatchSink):
                sink.emit_many(batch)
            else:
                for event in batch:
                    sink.emit(event)

        if batch:
            self._call_each("emit", emit_batch)

    def flush(self) -> None:
        """Flush every sink."""
        self._call_each("flush", lambda sink: sink.flush())

    def close(self) -> None:
        """Close every sink, even if one of them fails. May be called more than once."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  a failing sink never stops training
                _warn(sink, "close", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _call_each(self, action: str, call: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001  a failing sink never stops training
                self._drop(sink, action, error)

    def _drop(self, sink: Sink, action: str, error: Exception) -> None:
        self._sinks.remove(sink)
        _warn(sink, action, error)
        try:
            sink.close()
        except Exception as close_error:  # noqa: BLE001  the failure was reported already
            _log.debug("closing the dropped %s failed too: %s", type(sink).__name__, close_error)


def _warn(sink: Sink, action: str, error: Exception) -> None:
    _log.warning(
        "%s failed in %s and gets no more events: %s: %s. Training continues without it; "
        "fix the cause (disk space, connection, permissions) and resume the run to have it back.",
        type(sink).__name__,
        action,
        type(error).__name__,
        error,
    )
