import logging

import pytest

from palaestra.telemetry.conformance import check_sink
from palaestra.telemetry.event import Frame
from palaestra.telemetry.sink import MemorySink, Telemetry

ONE, TWO = Frame(1, "1.png"), Frame(2, "2.png")


class Breaking(MemorySink):
    """Works until the named method is called."""

    def __init__(self, *methods):
        super().__init__()
        self.methods = methods

    def _break(self, method):
        if method in self.methods:
            raise OSError("disk full")

    def emit(self, event):
        self._break("emit")
        super().emit(event)

    def flush(self):
        self._break("flush")

    def close(self):
        super().close()
        self._break("close")


class Batching(MemorySink):
    def __init__(self):
        super().__init__()
        self.batches = []

    def emit_many(self, events):
        self.batches.append(list(events))


def test_every_sink_gets_every_event_in_order():
    first, second = MemorySink(), MemorySink()
    with Telemetry([first, second]) as telemetry:
        telemetry.emit(ONE)
        telemetry.emit_many(iter([TWO, ONE]))
        telemetry.flush()

    assert first.events == second.events == [ONE, TWO, ONE]
    assert first.closed
    assert second.closed


def test_a_batch_goes_in_one_piece_to_a_sink_that_takes_batches():
    sink = Batching()
    telemetry = Telemetry([sink])

    telemetry.emit_many([ONE, TWO])
    telemetry.emit_many([])

    assert sink.batches == [[ONE, TWO]]


@pytest.mark.parametrize("method", ["emit", "flush"])
def test_a_broken_sink_is_warned_about_once_and_dropped_while_the_others_go_on(method, caplog):
    broken, sound = Breaking(method, "close"), MemorySink()
    telemetry = Telemetry([broken, sound])

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            telemetry.emit(ONE)
            telemetry.flush()

    assert len(caplog.messages) == 1
    assert f"Breaking failed in {method}" in caplog.text
    assert "OSError: disk full" in caplog.text
    assert "Training continues" in caplog.text
    assert telemetry.sinks == (sound,)
    assert sound.events == [ONE, ONE, ONE]
    assert broken.closed


def test_a_sink_that_breaks_on_a_batch_is_dropped_too(caplog):
    broken, sound = Breaking("emit"), MemorySink()
    telemetry = Telemetry([broken, sound])

    telemetry.emit_many([ONE, TWO])

    assert "Breaking failed in emit" in caplog.text
    assert sound.events == [ONE, TWO]


def test_closing_closes_all_even_when_one_fails_and_can_be_repeated(caplog):
    broken, sound = Breaking("close"), MemorySink()
    telemetry = Telemetry([broken, sound])

    telemetry.close()
    telemetry.close()

    assert sound.closed
    assert len(caplog.messages) == 1
    assert "Breaking failed in close" in caplog.text


def test_an_interrupt_is_not_a_broken_sink():
    class Interrupted(MemorySink):
        def emit(self, event):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Telemetry([Interrupted()]).emit(ONE)


def test_the_remembering_sink_keeps_the_rules():
    check_sink(MemorySink)
    check_sink(Batching)


@pytest.mark.parametrize(
    ("methods", "rule"),
    [
        (("emit",), "accepts every kind of event.*OSError: disk full"),
        (("flush",), "flushed before anything was emitted"),
        (("close",), "can be closed"),
    ],
)
def test_the_conformance_kit_names_the_broken_rule(methods, rule):
    with pytest.raises(AssertionError, match=rule):
        check_sink(lambda: Breaking(*methods))


def test_the_kit_refuses_a_sink_that_trips_over_an_event_after_close():
    class Tripping(MemorySink):
        def emit(self, event):
            if self.closed:
                raise AttributeError("'NoneType' object has no attribute 'write'")

    with pytest.raises(AssertionError, match="event after close is ignored, or refused"):
        check_sink(Tripping)


def test_the_kit_allows_a_sink_that_refuses_events_after_close():
    class Refusing(MemorySink):
        def emit(self, event):
            if self.closed:
                raise RuntimeError("closed")

    check_sink(Refusing)


def test_the_kit_refuses_answers_where_none_was_asked_for():
    class Chatty(MemorySink):
        def emit(self, event):
            return "done"

    with pytest.raises(AssertionError, match="returns nothing; it returned 'done'"):
        check_sink(Chatty)
