"""Executable rules of `Sink`: call `check_sink(lambda: MySink(...))` in your tests.

A broken rule raises an `AssertionError` with the rule. What the sink writes is not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from palaestra.telemetry.event import (
    Belief,
    CheckpointSaved,
    EpisodeSummary,
    Event,
    Frame,
    LogLine,
    PhaseChanged,
    TrainingStep,
)
from palaestra.telemetry.sink import BatchSink, Sink

_EVENTS: tuple[Event, ...] = (
    PhaseChanged("running", "first update"),
    EpisodeSummary(env_step=200, episode=1, env_index=0, episode_return=21.0, length=21),
    EpisodeSummary(env_step=256, episode=2, env_index=3, episode_return=math.nan, length=1),
    TrainingStep(update=1, env_step=256, metrics={"policy_loss": -0.25, "steps_per_second": 1024.0}),
    TrainingStep(update=2, env_step=512, metrics={"policy_loss": math.nan, "value_loss": math.inf}),
    TrainingStep(update=3, env_step=768, metrics={}),
    TrainingStep(update=4, env_step=1024, metrics={"an undeclared metric": -math.inf}),
    CheckpointSaved(update=4, env_step=1024, path="checkpoints/4", sha256="0" * 64, best=True, metric=21.0),
    CheckpointSaved(update=4, env_step=1024, path="checkpoints/4", sha256="0" * 64),
    LogLine("warning", "a line\nwith a break, [brackets], Greek παλαίστρα and \x1b[31mcolour"),
    Belief("agent@localhost", {"at": ["door", 2], "open": None}),
    Frame(env_step=1024, path="videos/1024.png"),
)


def check_sink(make_sink: Callable[[], Sink]) -> None:
    """Raise `AssertionError` with the first broken rule. Makes several sinks, one after another."""
    _check_every_kind(make_sink())
    _check_batches(make_sink())
    _check_repeated_flush(make_sink())
    _check_closing(make_sink())
    _check_unused(make_sink())


def _check_every_kind(sink: Sink) -> None:
    for event in _EVENTS:
        _require_success(lambda event=event: sink.emit(event), f"a sink accepts every kind of event, also {event}")  # type: ignore[misc]
    _require_success(sink.close, "a sink that took every kind of event can be closed")


def _check_batches(sink: Sink) -> None:
    if isinstance(sink, BatchSink):
        _require_success(lambda: sink.emit_many(_EVENTS), "emit_many accepts every kind of event")
        _require_success(lambda: sink.emit_many(()), "emit_many accepts no events at all")
        _require_success(lambda: sink.emit_many(iter(_EVENTS)), "emit_many accepts any iterable, read once")
    sink.close()


def _check_repeated_flush(sink: Sink) -> None:
    _require_success(sink.flush, "a sink can be flushed before anything was emitted")
    sink.emit(_EVENTS[0])
    _require_success(sink.flush, "a sink can be flushed after an event")
    _require_success(sink.flush, "a sink can be flushed twice")
    _require_success(lambda: sink.emit(_EVENTS[1]), "a sink accepts events after a flush")
    sink.close()


def _check_closing(sink: Sink) -> None:
    sink.emit(_EVENTS[0])
    _require_success(sink.close, "a sink can be closed after an event")
    _require_success(sink.close, "a sink can be closed twice")
    try:
        sink.emit(_EVENTS[1])
    except (ValueError, RuntimeError):
        return
    except Exception as error:
        rule = "an event after close is ignored, or refused with ValueError or RuntimeError"
        raise AssertionError(f"{rule}; it raised {type(error).__name__}: {error}") from error


def _check_unused(sink: Sink) -> None:
    _require_success(sink.close, "a sink that never got an event can be closed")


def _require_success(action: Callable[[], None], rule: str) -> None:
    try:
        result: object = action()  # type: ignore[func-returns-value]
    except Exception as error:
        raise AssertionError(f"{rule}; it raised {type(error).__name__}: {error}") from error
    assert result is None, f"{rule}, and returns nothing; it returned {result!r}"
