import contextlib
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.runs.serving import service_thread
from tests.studio.fake_service import FakePlay, FakeService, FakeStream
from websockets.sync.server import serve

from palaestra.errors import PalaestraError, ServiceUnreachable, UnknownRun
from palaestra.files.home import Home
from palaestra.runs.client.client import TrainerService
from palaestra.runs.phase import Phase
from palaestra.runs.play.protocol import Pause
from palaestra.runs.play.state import PlayEnded, StepReport, pack_report
from palaestra.runs.record import RunEvent
from palaestra.runs.series import MetricPoint
from palaestra.runs.spec import RunSpec
from palaestra.studio import feed as feed_module
from palaestra.studio.feed import PlayFrame, ServiceFeed, Stream, Subscribers

LONG_S = 20.0
"""Longest time that a test waits for something that must happen."""


class Window:
    """The thread of the window: it drains the feed, and remembers what it was told."""

    def __init__(self, service, **options):
        self.woken = threading.Event()
        self.told = []
        self.threads = set()
        self.feed = ServiceFeed(
            service,
            Subscribers(**{name: self._note(name) for name in Subscribers.__dataclass_fields__}),
            wake=self.woken.set,
            **options,
        )

    def _note(self, name):
        def note(*values):
            self.threads.add(threading.get_ident())
            self.told.append((name, *values))

        return note

    def of(self, name):
        return [values for kind, *values in self.told if kind == name]

    def drain_until(self, is_done, timeout_s=LONG_S):
        deadline = time.monotonic() + timeout_s
        while not is_done():
            assert time.monotonic() < deadline, f"it did not happen; told so far: {self.told[-5:]}"
            self.woken.clear()
            self.feed.drain()
            if not is_done():
                self.woken.wait(0.01)

    def request(self, work, key=""):
        """Ask, and note the answer."""
        self.feed.request(work, self._note("done"), self._note("failed_request"), key=key)


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def open_window(monkeypatch):
    """Opens windows that wait little; closes them, and fails a test after which a thread of a feed lives."""
    monkeypatch.setattr(feed_module, "_RETRY_S", 0.02)
    monkeypatch.setattr(feed_module, "_HEALTH_EVERY_S", 0.02)
    windows = []

    def open_window(service, **options):
        windows.append(Window(service, **options))
        return windows[-1]

    yield open_window
    late = [name for window in windows for name in window.feed.close(LONG_S)]
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("studio-")]
    assert not late + left, f"left running: {late + left}"


@pytest.fixture
def window(service, open_window):
    return open_window(service)


@contextlib.contextmanager
def _blocked_requests(window, count):
    """Requests that wait until the block ends, so that all threads are busy."""
    release, begun = threading.Event(), threading.Semaphore(0)

    def wait(_):
        begun.release()
        release.wait(LONG_S)

    for _ in range(count):
        window.feed.request(wait, lambda _: None, lambda _: None)
    for _ in range(count):
        assert begun.acquire(timeout=LONG_S)
    try:
        yield
    finally:
        release.set()


# ---------------------------------------------------------------------- requests


def test_a_request_runs_in_another_thread_and_is_answered_in_the_one_that_drains(window, service):
    begun_in = []
    has_run = threading.Event()

    def work(given):
        begun_in.append((given, threading.get_ident()))
        has_run.set()
        return "answer"

    window.request(work)
    assert has_run.wait(LONG_S)
    assert window.of("done") == []
    window.drain_until(lambda: window.of("done"))

    assert window.of("done") == [["answer"]]
    assert window.threads == {threading.get_ident()}
    (given, thread), *_ = begun_in
    assert given is service
    assert thread != threading.get_ident()


def test_an_error_of_the_service_is_answered_as_a_failure(window):
    error = ServiceUnreachable("no answer")

    def work(_):
        raise error

    window.request(work)
    window.drain_until(lambda: window.of("failed_request"))

    assert window.of("failed_request") == [[error]]


def test_an_unexpected_exception_is_a_failure_and_ends_no_thread(window):
    def work(_):
        raise KeyError("run_id")

    for _ in range(50):
        window.request(work)
    window.request(lambda _: "still here")
    window.drain_until(lambda: window.feed.is_idle)

    (first,), *others = window.of("failed_request")
    assert (type(first), str(first)) == (PalaestraError, "the service's answer cannot be used (KeyError: 'run_id')")
    assert len(others) == 49
    assert window.of("done") == [["still here"]]


def test_of_two_requests_with_one_key_only_the_newer_is_answered_even_if_the_older_fails_later(window):
    release = threading.Event()

    def old(_):
        release.wait(LONG_S)
        raise ServiceUnreachable("too late")

    window.request(old, key="runs")
    window.request(lambda _: "new", key="runs")
    window.request(lambda _: "other", key="other")
    window.drain_until(lambda: len(window.of("done")) == 2)
    release.set()
    window.drain_until(lambda: window.feed.is_idle)

    assert sorted(window.of("done")) == [["new"], ["other"]]
    assert window.of("failed_request") == []


def test_an_older_request_that_has_not_begun_is_not_made(window):
    made = []
    with _blocked_requests(window, 16):
        for number in range(100):
            window.request(lambda _, number=number: made.append(number), key="run x")
    window.drain_until(lambda: window.feed.is_idle)

    assert made == [99]
    assert len(window.of("done")) == 1


def test_requests_that_wait_long_do_not_hold_up_the_others(window):
    with _blocked_requests(window, 15):
        window.request(lambda _: "quick")
        window.drain_until(lambda: window.of("done"))


def test_threads_are_started_as_they_are_needed_and_used_again(window):
    for number in range(20):
        window.request(lambda _: None)
        window.drain_until(lambda number=number: len(window.of("done")) > number)

    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("studio-request")}
    assert len(names) <= 2


def test_requests_without_a_key_are_all_answered(window):
    for number in range(30):
        window.request(lambda _, number=number: number)
    assert not window.feed.is_idle
    window.drain_until(lambda: window.feed.is_idle)

    assert sorted(window.of("done")) == [[number] for number in range(30)]


# ---------------------------------------------------------------------- draining


def test_draining_ten_thousand_callbacks_takes_bounded_time_each_and_loses_none(window):
    received = []

    def receive(number):
        end = time.perf_counter() + 0.0001
        while time.perf_counter() < end:
            pass
        received.append(number)

    with _blocked_requests(window, 15):
        for number in range(10_000):
            window.feed.request(lambda _, number=number: number, receive, lambda _: None)
        deadline = time.monotonic() + LONG_S
        while len(window.feed._calls) < 10_000 and time.monotonic() < deadline:
            window.woken.wait(0.01)
        durations = []
        is_left = True
        while is_left:
            start = time.thread_time()
            is_left = window.feed.drain()
            durations.append(time.thread_time() - start)

    assert received == list(range(10_000))  # one thread was free, so the order is that of the requests
    assert len(durations) > 50  # a second of work in steps of 8 ms
    assert sorted(durations)[len(durations) // 2] < 0.02


def test_a_single_callback_that_takes_long_does_not_starve_the_queue(window, monkeypatch):
    monkeypatch.setattr(feed_module, "_BUDGET_S", 0.0)
    for number in range(3):
        window.request(lambda _, number=number: number)
    window.drain_until(lambda: window.feed.is_idle)

    assert len(window.of("done")) == 3


def test_a_subscriber_that_fails_does_not_stop_the_others(window, service):
    def broken(_):
        raise ValueError("broken view")

    window.feed.request(lambda _: 1, broken, lambda _: None)
    window.request(lambda _: 2)
    window.drain_until(lambda: window.feed.is_idle)

    assert window.of("failed") == [["ValueError: broken view"]]
    assert window.of("done") == [[2]]


def test_a_failure_that_cannot_be_shown_stops_nothing_either(service, open_window):
    def broken(*_):
        raise ValueError("broken")

    window = open_window(service)
    window.feed._subscribers = Subscribers(**{name: broken for name in Subscribers.__dataclass_fields__})
    window.feed.request(lambda _: 1, broken, lambda _: None)
    window.request(lambda _: 2)
    window.drain_until(lambda: window.feed.is_idle)

    assert window.of("done") == [[2]]


# ---------------------------------------------------------------------- the connection


def test_the_window_learns_once_that_the_service_answers_and_once_that_it_does_not(window, service):
    window.feed.connect()
    window.drain_until(lambda: window.of("connected"))
    service.health.put(ServiceUnreachable("killed"))
    window.drain_until(lambda: window.of("disconnected"))
    service.health.put(None)
    window.drain_until(lambda: len(window.of("connected")) == 2)

    assert [kind for kind, *_ in window.told] == ["connected", "disconnected", "connected"]
    assert window.of("disconnected") == [["killed"]]


def test_a_service_that_is_busy_for_a_moment_is_not_reported_as_lost(window, service):
    service.health.put(None)
    service.health.put(ServiceUnreachable("timed out"))
    service.health.put(None)
    service.health.put(ServiceUnreachable("killed"))
    window.feed.connect()
    window.drain_until(lambda: window.of("disconnected"))

    assert window.told == [("connected",), ("disconnected", "killed")]


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError("not HTTP"), "ValueError: not HTTP"), (PalaestraError(""), "")]
)
def test_garbage_or_an_error_without_a_text_is_no_connection(window, service, error, reason):
    service.health.put(error)
    window.feed.connect()
    window.drain_until(lambda: window.told)

    assert window.told == [("disconnected", reason)]


# ---------------------------------------------------------------------- streams


def _event(number):
    return RunEvent(seq=number, time=0.0, attempt=1, kind="note", phase=Phase.RUNNING)


def test_a_stream_starts_again_after_every_kind_of_failure(window, service):
    broken, odd, ended, good = FakeStream(), FakeStream(), FakeStream(), FakeStream()
    broken.push(("a", _event(1)))
    broken.fail()
    odd.push(("a", _event(2)))
    odd.fail(KeyError("phase"))
    ended.end()
    good.push(("a", _event(3)))
    service.prepare("watch_runs", broken, ServiceUnreachable("not yet"), odd, ended, good)

    window.feed.connect()
    window.drain_until(lambda: len(window.of("run_event")) == 3)

    assert [event.seq for _, event in window.of("run_event")] == [1, 2, 3]
    assert broken.is_closed.is_set()
    assert odd.is_closed.is_set()


def test_fifty_thousand_points_from_another_thread_arrive_complete_and_in_order(window, service):
    stream = service.prepare("watch_metrics", FakeStream())
    window.feed.watch_metrics(["a", "b"])

    def push():
        for step in range(0, 25_000, 10):
            points = [MetricPoint(number, float(number), 0.0) for number in range(step, step + 10)]
            stream.push(("a", {"loss": points}), ("b", {"loss": points[:5], "entropy": points[5:]}))

    pushing = threading.Thread(target=push)
    pushing.start()
    window.drain_until(lambda: sum(len(p) for _, c in window.of("points") for p in c.values()) == 50_000, LONG_S)
    pushing.join()
    received = {}
    for run_id, curves in window.of("points"):
        for name, points in curves.items():
            received.setdefault((run_id, name), []).extend(point.step for point in points)

    assert received["a", "loss"] == list(range(25_000))
    assert received["b", "loss"] == [step for step in range(25_000) if step % 10 < 5]
    assert received["b", "entropy"] == [step for step in range(25_000) if step % 10 >= 5]


def test_the_window_is_told_to_load_stored_curves_before_it_gets_the_points_after_them(window, service):
    stream = service.prepare("watch_metrics", FakeStream())
    points = {"loss": [MetricPoint(1, 1.0, 1.0)]}
    stream.push(("a", {}), ("a", points), ("b", {}), ("a", {}))
    window.feed.watch_metrics(["b", "a"])
    window.drain_until(lambda: ["b", {}] in window.of("points"))
    window.drain_until(lambda: ["a", points] in window.of("points"))

    calls = window.of("points")
    assert calls.index(["a", {}]) < calls.index(["a", points])
    assert service.opened["watch_metrics"] == [(("a", "b"), stream)]


def test_one_stream_is_never_asked_for_more_runs_than_the_service_allows(window, service):
    window.feed.watch_metrics([f"run-{number:03}" for number in range(100)])
    window.drain_until(lambda: service.opened.get("watch_metrics"))

    ((runs, _),) = service.opened["watch_metrics"]
    assert runs == tuple(f"run-{number:03}" for number in range(64))


def test_the_same_subject_keeps_its_stream_and_another_one_ends_it(window, service):
    window.feed.watch_metrics(["a", "b"])
    window.drain_until(lambda: service.opened.get("watch_metrics"))
    (_, first), *_ = service.opened["watch_metrics"]
    window.feed.watch_metrics(["b", "a"])
    assert not first.is_closed.is_set()
    window.feed.watch_metrics(["b"])
    window.drain_until(lambda: len(service.opened["watch_metrics"]) == 2)
    assert first.is_closed.wait(LONG_S)

    window.feed.watch_metrics([])

    assert service.opened["watch_metrics"][1][1].is_closed.wait(LONG_S)
    assert len(service.opened["watch_metrics"]) == 2


# ---------------------------------------------------------------------- output


def test_output_arrives_in_order_and_goes_on_where_a_lost_connection_stopped(window, service):
    stream = service.prepare("watch_log", FakeStream())
    stream.push("one\n", "two\n")
    stream.fail()
    stream.push("three\n")
    window.feed.watch_log("a", -1000)
    window.drain_until(lambda: "".join(text for _, text in window.of("log")).endswith("three\n"))

    assert "".join(text for _, text in window.of("log")) == "one\ntwo\nthree\n"
    assert service.opened["watch_log"] == [(("a", -1000), stream)]


@pytest.mark.parametrize("end", [FakeStream.end, lambda stream: stream.fail(UnknownRun("run", "a", "no such run"))])
def test_the_output_of_a_run_that_has_ended_or_is_gone_is_not_asked_for_again(window, service, end):
    stream = service.prepare("watch_log", FakeStream())
    stream.push("text")
    end(stream)
    window.feed.watch_log("a")
    window.drain_until(lambda: window.of("log"))
    window.feed.watch_log("a")
    window.feed.watch_log("b")
    window.drain_until(lambda: len(service.opened["watch_log"]) == 2)

    assert [subject for subject, _ in service.opened["watch_log"]] == [("a", 0), ("b", 0)]


def test_output_that_waits_when_another_run_is_chosen_is_dropped(window, service):
    stream = service.prepare("watch_log", FakeStream())
    stream.push("old")
    window.feed.watch_log("a")
    deadline = time.monotonic() + LONG_S
    while not window.feed._log_text and time.monotonic() < deadline:
        window.woken.wait(0.001)
    window.feed.watch_log("b")
    window.feed.watch_log("a")
    window.drain_until(lambda: len(service.opened["watch_log"]) == 3)
    service.opened["watch_log"][-1][1].push("new")
    window.drain_until(lambda: window.of("log"))

    assert window.of("log") == [["a", "new"]]


def test_output_that_arrives_after_another_run_was_chosen_is_dropped(window, service):
    class LateStream(FakeStream):
        def __init__(self):
            super().__init__()
            self.has_ended = threading.Event()

        def __iter__(self):
            yield from super().__iter__()
            yield "late"
            self.has_ended.set()

    late = service.prepare("watch_log", LateStream())
    window.feed.watch_log("a")
    assert late.is_read.wait(LONG_S)
    window.feed.watch_log("b")
    assert late.has_ended.wait(LONG_S)
    window.drain_until(lambda: service.opened["watch_log"][-1][0] == ("b", 0))
    service.opened["watch_log"][-1][1].push("text")
    window.drain_until(lambda: window.of("log"))

    assert window.of("log") == [["b", "text"]]


def test_a_flood_of_output_keeps_the_newest(window, service, monkeypatch):
    monkeypatch.setattr(feed_module, "_MAX_LOG_CHARACTERS", 1000)
    stream = service.prepare("watch_log", FakeStream())
    stream.push(*["x" * 100] * 50, "the end")
    stream.end()
    window.feed.watch_log("a")
    deadline = time.monotonic() + LONG_S
    while "the end" not in window.feed._log_text.get("a", "") and time.monotonic() < deadline:
        window.woken.wait(0.001)
    window.feed.drain()

    ((_, text),) = window.of("log")
    assert len(text) == 1000
    assert text.endswith("xthe end")


# ---------------------------------------------------------------------- plays


def _step(number):
    return StepReport(episode=1, step=number)


def test_every_step_is_reported_and_only_the_newest_picture_is_kept(window, service):
    play = service.prepare("open_play", FakePlay())
    play.push(*[(_step(number), b"picture %d" % number) for number in range(100)], (_step(100), b""))
    window.feed.watch_play("p")
    window.drain_until(lambda: len(window.of("play")) == 101)

    assert [report.step for _, report in window.of("play")] == list(range(101))
    assert window.feed.take_frame() == PlayFrame("p", _step(99), b"picture 99")
    assert window.feed.take_frame() is None


def test_pictures_are_decoded_in_the_thread_of_the_stream(service, open_window):
    threads = []

    def decode(data):
        threads.append(threading.current_thread().name)
        return data.decode()

    window = open_window(service, decode=decode)
    service.prepare("open_play", FakePlay()).push((_step(1), b"picture"))
    window.feed.watch_play("p")
    window.drain_until(lambda: window.of("play"))

    assert (window.feed.take_frame().picture, threads) == ("picture", ["studio-play"])
    assert window.feed.close() == []


def test_a_picture_that_cannot_be_read_loses_no_step(service, open_window):
    def decode(data):
        raise ValueError("not a picture")

    window = open_window(service, decode=decode)
    service.prepare("open_play", FakePlay()).push((_step(1), b"garbage"), (_step(2), b""))
    window.feed.watch_play("p")
    window.drain_until(lambda: len(window.of("play")) == 2)

    assert window.feed.take_frame() is None
    assert len(service.opened["open_play"]) == 1
    assert window.feed.close() == []


def test_the_newest_frame_is_never_lost_to_a_window_that_takes_the_one_before(window, service):
    play = service.prepare("open_play", FakePlay())
    window.feed.watch_play("p")
    taken = []
    for last in range(1000, 20_001, 1000):
        pushing = threading.Thread(
            target=lambda last=last: play.push(*[(_step(number), b"x") for number in range(last - 1000, last)])
        )
        pushing.start()
        while not taken or taken[-1] != last - 1:
            frame = window.feed.take_frame()
            if frame is not None:
                taken.append(frame.report.step)
        pushing.join()

    assert taken == sorted(taken)


def test_controls_are_sent_while_the_play_is_connected(window, service):
    assert not window.feed.send(Pause(True))
    play = service.prepare("open_play", FakePlay())
    window.feed.watch_play("p")
    window.drain_until(lambda: window.feed.send(Pause(True)))
    assert play.sent == [Pause(True)]
    play.close()

    window.drain_until(lambda: service.opened["open_play"][-1][1] is not play)


def test_a_control_that_cannot_be_sent_is_reported_to_the_caller(window, service):
    class DeafPlay(FakePlay):
        def send(self, control):
            raise ServiceUnreachable("closed")

    service.prepare("open_play", DeafPlay())
    window.feed.watch_play("p")
    window.drain_until(lambda: window.feed._play is not None)

    assert not window.feed.send(Pause(True))


def test_the_end_of_an_old_connection_does_not_disconnect_the_new_play(window, service):
    class SlowPlay(FakePlay):
        """Its end is noticed late, as over a slow network."""

        def __init__(self):
            super().__init__()
            self.may_end = threading.Event()
            self.has_ended = threading.Event()

        def __iter__(self):
            yield from super().__iter__()
            self.may_end.wait(LONG_S)
            yield _step(99), b"late picture"

        def __exit__(self, *_):
            self.has_ended.set()

    old = service.prepare("open_play", SlowPlay())
    window.feed.watch_play("old")
    window.drain_until(lambda: window.feed.send(Pause(True)))
    new = service.prepare("open_play", FakePlay())
    window.feed.watch_play("new")
    window.drain_until(lambda: window.feed._play is new)
    new.push((_step(1), b"first picture"))
    window.drain_until(lambda: window.of("play"))
    old.may_end.set()
    assert old.has_ended.wait(LONG_S)

    assert window.feed.send(Pause(False))
    assert new.sent == [Pause(False)]
    assert window.feed.take_frame() == PlayFrame("new", _step(1), b"first picture")
    assert window.of("play") == [["new", _step(1)]]


def test_a_play_that_is_left_while_it_is_opened_receives_no_controls(window, service):
    has_begun, may_open = threading.Event(), threading.Event()
    play = FakePlay()

    def open_slowly(play_id):
        has_begun.set()
        may_open.wait(LONG_S)
        return play

    service.open_play = open_slowly
    window.feed.watch_play("p")
    assert has_begun.wait(LONG_S)
    window.feed.watch_play("")
    may_open.set()

    assert play.is_closed.wait(LONG_S)
    assert not window.feed.send(Pause(True))
    assert play.sent == []


def test_a_picture_of_the_play_before_is_not_shown_in_the_next(window, service):
    service.prepare("open_play", FakePlay()).push((_step(1), b"old"))
    window.feed.watch_play("old")
    window.drain_until(lambda: window.of("play"))
    window.feed.watch_play("new")

    assert window.feed.take_frame() is None


def test_a_play_that_has_ended_is_not_connected_again(window, service):
    ended = PlayEnded(reason="the worker was killed", failed=True)
    play = service.prepare("open_play", FakePlay())
    play.push((ended, b""))
    play.end()
    window.feed.watch_play("p")
    window.drain_until(lambda: window.of("play"))
    window.feed.watch_play("")

    assert play.is_closed.wait(LONG_S)
    assert window.of("play") == [["p", ended]]
    assert len(service.opened["open_play"]) == 1


def test_a_play_whose_first_message_is_that_it_is_unknown_has_ended_and_says_so(window, service):
    play = service.prepare("open_play", FakePlay())
    play.fail(UnknownRun("play", "p", "no such play"))

    window.feed.watch_play("p")

    window.drain_until(lambda: window.of("play"))
    ((_, report),) = window.of("play")
    assert (type(report), report.failed) == (PlayEnded, True)
    assert len(service.opened["open_play"]) == 1


def test_a_play_that_cannot_be_opened_three_times_is_a_notice(window, service):
    service.prepare("open_play", *(ServiceUnreachable("nothing there") for _ in range(3)))

    window.feed.watch_play("p")

    window.drain_until(lambda: window.of("play"))
    ((_, report),) = window.of("play")
    assert (report.text, report.remedy) == ("The play cannot be reached.", "nothing there")


def test_a_play_that_the_service_no_longer_knows_has_ended_and_says_so(window, service):
    broken = FakePlay()
    broken.fail()
    service.prepare("open_play", broken, UnknownRun("play", "p", "no such play"))
    window.feed.watch_play("p")
    window.drain_until(lambda: window.of("play"))

    ((play_id, report),) = window.of("play")
    assert (play_id, report.failed, report.remedy) == ("p", True, "Start the play again")
    assert report.reason == "the run service no longer knows it, as after a restart"


def test_a_restarted_service_says_that_it_does_not_know_the_play(tmp_path, open_window):
    home = Home(tmp_path / "var" / "training")
    with service_thread(home):
        window = open_window(TrainerService(home))
        window.feed.watch_play("play-cartpole-v1-before-the-restart")
        window.drain_until(lambda: window.of("play"))

        ((_, report),) = window.of("play")
        assert (report.failed, report.remedy) == (True, "Start the play again")
        assert window.feed.close() == []


# ---------------------------------------------------------------------- closing


def test_closing_ends_streams_that_are_blocked_in_a_read_and_nothing_is_called_after_it(service, open_window):
    window = open_window(service)
    window.feed.connect()
    window.feed.watch_metrics(["a"])
    window.feed.watch_log("a")
    window.feed.watch_play("p")
    window.drain_until(lambda: len(service.opened) == 4)
    for opened in service.opened.values():
        assert opened[0][1].is_read.wait(LONG_S)
    start = time.monotonic()

    assert window.feed.close() == []

    assert time.monotonic() - start < 1.0
    count = len(window.told)
    window.request(lambda _: 1)
    window.feed.watch_play("q")
    assert not window.feed.drain()
    assert len(window.told) == count
    assert len(service.opened["open_play"]) == 1


def test_a_request_that_was_made_is_still_performed_when_the_feed_is_closed(service, open_window):
    window = open_window(service)
    performed = []
    for number in range(40):
        window.request(lambda _, number=number: performed.append(number))

    assert window.feed.close() == []
    assert sorted(performed) == list(range(40))
    assert window.of("done") == []


def test_a_request_without_an_answer_is_named_and_does_not_hold_up_the_end(service, open_window):
    window = open_window(service)
    release = threading.Event()
    window.request(lambda _: release.wait(LONG_S))
    start = time.monotonic()

    assert window.feed.close() == ["studio-request-0"]

    assert time.monotonic() - start < 3.0
    release.set()
    assert window.feed.close() == []


def test_requests_that_wait_behind_hanging_ones_are_given_up_when_the_feed_is_closed(service, open_window):
    window = open_window(service)
    aborted, begun = threading.Event(), []
    service.abort = aborted.set

    def hang(_, number):
        begun.append(number)
        if not aborted.wait(LONG_S):
            raise AssertionError("it was not aborted")
        aborted.clear()

    for number in range(40):
        window.request(partial(hang, number=number))
    window.drain_until(lambda: len(begun) == 16)

    assert window.feed.close() == []
    assert sorted(begun) == list(range(16))


def test_a_process_ends_although_a_request_is_not_answered():
    script = """
import threading
from palaestra.studio.feed import ServiceFeed, Subscribers
note = lambda *_: None
service = type("Silent", (), {"abort": note})()
feed = ServiceFeed(service, Subscribers(**{name: note for name in Subscribers.__dataclass_fields__}))
feed.request(lambda _: threading.Event().wait(), note, note)
print(feed.close(0.1))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert (result.returncode, result.stdout) == (0, "['studio-request-0']\n")


def test_a_stream_whose_end_takes_long_does_not_block_the_window(window, service):
    class HangingPlay(FakePlay):
        def __init__(self):
            super().__init__()
            self.may_close = threading.Event()

        def close(self):
            self.may_close.wait(LONG_S)
            super().close()

    play = service.prepare("open_play", HangingPlay())
    window.feed.watch_play("p")
    assert play.is_read.wait(LONG_S)
    start = time.monotonic()
    window.feed.watch_play("")
    duration = time.monotonic() - start
    assert window.feed.close(0.1) == ["play"]
    play.may_close.set()

    assert duration < 0.5
    assert window.feed.close() == []


def test_a_stream_that_cannot_be_closed_ends_all_the_same(window, service):
    class OddStream(FakeStream):
        def close(self):
            super().close()
            raise OSError("already closed")

    stream = service.prepare("watch_runs", OddStream())
    window.feed.connect()
    assert stream.is_read.wait(LONG_S)


def test_a_stream_that_is_cancelled_while_it_opens_is_closed_as_soon_as_it_has_opened():
    has_begun, may_open, closed = threading.Event(), threading.Event(), threading.Event()

    def read(stream):
        has_begun.set()
        may_open.wait(LONG_S)
        stream.close_with(closed.set)

    stream = Stream("test", read)
    assert has_begun.wait(LONG_S)
    stream.cancel()
    assert not stream.join(0.0)
    may_open.set()

    assert closed.wait(LONG_S)
    assert stream.join(LONG_S)


# ---------------------------------------------------------------------- over real connections


class _Events(BaseHTTPRequestHandler):
    """Answers every stream with one event, and then nothing."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        if self.path == "/health":
            self.send_header("Content-Length", "16")
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')
            return
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        data = {
            "/runs/a/log/stream": '{"text": "hello"}',
            "/stream": '{"run_id": "a", "seq": 1, "time": 0.0, "attempt": 1, "kind": "note", "phase": "running"}',
        }[self.path.partition("?")[0]]
        event = f"id: 5\ndata: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.flush()
        self.server.is_over.wait(LONG_S)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def silent_server():
    """An HTTP server whose streams send one event and then stay silent."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Events)
    server.is_over = threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.is_over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_streams_over_sockets_end_within_a_second_while_they_wait_for_the_next_event(
    silent_server, tmp_path, open_window
):
    window = open_window(TrainerService(tmp_path, silent_server))
    window.feed.connect()
    window.feed.watch_log("a")
    window.drain_until(lambda: {kind for kind, *_ in window.told} >= {"connected", "run_event", "log"})
    assert window.of("log") == [["a", "hello"]]
    start = time.monotonic()

    assert window.feed.close() == []

    assert time.monotonic() - start < 1.0


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_a_play_over_a_websocket_is_received_controlled_and_ended_within_a_second(tmp_path, open_window):
    controls = []

    def handle(connection):
        connection.send(pack_report(_step(7), b"picture"))
        with contextlib.suppress(Exception):
            while True:
                controls.append(connection.recv())

    with serve(handle, "127.0.0.1", 0) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        window = open_window(TrainerService(tmp_path, f"http://127.0.0.1:{server.socket.getsockname()[1]}"))
        window.feed.watch_play("p")
        window.drain_until(lambda: window.of("play"))
        assert window.feed.take_frame() == PlayFrame("p", _step(7), b"picture")
        assert window.feed.send(Pause(True))
        window.drain_until(lambda: controls)
        start = time.monotonic()

        assert window.feed.close() == []

        duration = time.monotonic() - start
        server.shutdown()
        serving.join()
    assert duration < 1.0


def _seconds(act):
    start = time.monotonic()
    act()
    return time.monotonic() - start


def test_a_service_that_accepts_and_never_answers_does_not_block_the_window(tmp_path, open_window):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        window = open_window(TrainerService(tmp_path, f"http://127.0.0.1:{deaf.getsockname()[1]}"))
        durations = [
            _seconds(act)
            for act in (
                window.feed.connect,
                lambda: window.feed.watch_play("p"),
                lambda: window.request(lambda service: service.run("a")),
                lambda: window.feed.send(Pause(True)),
            )
        ]
        window.drain_until(lambda: window.of("disconnected"))
        durations += [_seconds(window.feed.drain), _seconds(lambda: window.feed.watch_play(""))]
        late = window.feed.close(0.2)

    assert max(durations) < 1.0
    assert late  # the threads wait for the socket, which is closed now


def test_a_real_service_is_followed_through_a_run_and_missed_when_it_ends(tmp_path, monkeypatch, open_window):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    home = Home.default()
    with service_thread(home) as url:
        window = open_window(TrainerService(home, url, home.token.read_text().strip()))
        window.feed.connect()
        window.drain_until(lambda: window.of("connected"))
        window.request(lambda service: service.submit(RunSpec(runner="echo", config={"steps": 5})))
        window.drain_until(lambda: window.of("done"))
        ((record,),) = window.of("done")
        window.feed.watch_log(record.run_id)
        window.feed.watch_metrics([record.run_id])
        window.drain_until(lambda: [record.run_id, {}] in window.of("points"))
        window.drain_until(lambda: any(event.phase.has_ended for _, event in window.of("run_event")), 60.0)
        window.drain_until(lambda: window.of("log"))
        phases = [event.phase for run_id, event in window.of("run_event") if run_id == record.run_id]
        assert (phases[-1], window.threads) == (Phase.SUCCEEDED, {threading.get_ident()})
    ended_at = time.monotonic()
    window.drain_until(lambda: [kind for kind, *_ in window.told if "connected" in kind][-1] == "disconnected")

    assert time.monotonic() - ended_at < 5.0  # a second on a machine with nothing else to do
