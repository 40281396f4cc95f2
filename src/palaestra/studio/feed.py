"""The feed: the one module of the studio that crosses threads.

Requests run in a few worker threads, streams in one thread each. What arrives waits in queues until the thread of the
window calls `drain`, which spends a bounded time, so that no amount of data blocks the window. Metrics are put together
per curve, and of the pictures of a play only the newest is kept. `wake` is called, from any thread, when something has
arrived that should be drawn at once. All threads are daemons: a service that does not answer keeps no process alive.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from palaestra.errors import PalaestraError, ServiceUnreachable, UnknownRun
from palaestra.runs.client.client import TrainerService
from palaestra.runs.client.play import PlayConnection
from palaestra.runs.play.protocol import Control
from palaestra.runs.play.state import PlayEnded, PlayNotice, Report, StepReport
from palaestra.runs.record import RunEvent
from palaestra.runs.series import MetricPoint

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_REQUESTS = 16
"""Requests at the same time. Some wait long, such as the stop of a run, and must not hold up the others."""
_BUDGET_S = 0.008
"""Longest time that one `drain` spends on callbacks."""
_RETRY_S = 0.5
_REPORTED_FAILURES = 2
"""Failures in succession after which a play counts as out of reach. A service that is gone is noticed before."""
_HEALTH_EVERY_S = 0.75
_HEALTH_TIMEOUTS_S = (1.0, 2.0)
"""A busy service gets a second chance; one that is gone refuses both at once."""
_LAST_REQUESTS_S = 1.0
"""Time of the requests in flight when the feed is closed. The service performs what it has received in any case."""
_ABORT_EVERY_S = 0.1
_MAX_LOG_CHARACTERS = 1 << 18
"""Output that waits for the window; of more, only the newest is kept."""
_MAX_METRIC_RUNS = 64
"""Runs of which one stream of the service sends the metrics."""
Curves: TypeAlias = dict[str, list[MetricPoint]]


class PlayFrame(NamedTuple):
    """A step of a play with its picture, decoded."""

    play_id: str
    report: StepReport
    picture: Any


@dataclass(frozen=True, kw_only=True)
class Subscribers:
    """What the feed calls in the thread of the window."""

    connected: Callable[[], None]
    disconnected: Callable[[str], None]
    run_event: Callable[[str, RunEvent], None]
    points: Callable[[str, Mapping[str, Sequence[MetricPoint]]], None]
    """New points of a run. Without points: load its stored curves, which have everything up to now."""
    log: Callable[[str, str], None]
    play: Callable[[str, Report], None]
    failed: Callable[[str], None]
    """A subscriber failed."""


class Stream:
    """A thread that reads a stream, and starts again when it breaks."""

    def __init__(self, name: str, read: Callable[[Stream], None]) -> None:
        self.name = name
        self.stopped = threading.Event()
        self.failures = 0
        """Attempts in succession that failed."""
        self._close: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._threads = [_start_thread(f"studio-{name}", partial(self._run, read))]

    def close_with(self, close: Callable[[], None]) -> None:
        """Register what ends a blocking read from another thread."""
        with self._lock:
            self._close = close
            is_stopped = self.stopped.is_set()
        if is_stopped:
            close()

    def cancel(self) -> None:
        """Let the thread end, without waiting for it."""
        with self._lock:
            self.stopped.set()
            close = self._close
        if close is not None:
            # To close a WebSocket takes a round trip, and ten seconds if the service hangs.
            self._threads.append(_start_thread(f"studio-close-{self.name}", partial(self._end, close)))

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended."""
        return not _join_threads(self._threads, timeout_s)

    def _run(self, read: Callable[[Stream], None]) -> None:
        while not self.stopped.is_set():
            try:
                read(self)
                self.failures = 0
            except PalaestraError as error:
                self.failures += 1
                _log.info("%s: %s", self.name, error)
            except Exception:  # noqa: BLE001 - what a service sends must not end the stream for good
                self.failures += 1
                _log.exception("%s: the stream sent something unexpected", self.name)
            self.stopped.wait(_RETRY_S)

    def _end(self, close: Callable[[], None]) -> None:
        try:
            close()
        except Exception:  # noqa: BLE001 - the stream ends in any case
            _log.exception("%s: the stream was not closed", self.name)


class RequestThreads:
    """Threads that perform requests in the order in which they were made; started as they are needed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Perform a job in one of the threads."""
        self._jobs.put(job)
        if not self._num_idle.acquire(blocking=False) and len(self._threads) < self._limit:
            self._threads.append(_start_thread(f"studio-request-{len(self._threads)}", self._run))

    def close(self, timeout_s: float) -> list[str]:
        """Let the threads end after the jobs that wait; returns the names of those that did not end in time."""
        for _ in self._threads:
            self._jobs.put(None)
        return _join_threads(self._threads, timeout_s)

    def discard_jobs(self) -> None:
        """Forget the jobs that no thread has begun, so that the threads end."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, timeout_s: float) -> list[str]:
        """Wait for the threads; returns the names of those that did not end in time."""
        return _join_threads(self._threads, timeout_s)

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> Callable[[], None] | None:
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            self._num_idle.release()
            return self._jobs.get()


class ServiceFeed:
    """Requests and streams of one service. Every method is called by the thread of the window."""

    def __init__(
        self,
        service: TrainerService,
        subscribers: Subscribers,
        *,
        wake: Callable[[], None] = lambda: None,
        decode: Callable[[bytes], Any] = lambda data: data,
    ) -> None:
        self.service, self._subscribers, self._wake, self._decode = service, subscribers, wake, decode
        self._threads = RequestThreads(_MAX_REQUESTS)
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        """Guards what the threads of the streams leave for the window."""
        self._points: dict[str, Curves] = {}
        self._stale_curves: dict[str, None] = {}
        self._log_text: dict[str, str] = {}
        self._frame: PlayFrame | None = None
        self._numbers: dict[str, int] = {}
        self._streams: dict[str, tuple[object, Stream]] = {}
        self._ending: list[Stream] = []
        self._play: PlayConnection | None = None
        self._is_closed = False
        self._pending = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting for its answer and nothing waits to be drained."""
        return self._pending == 0 and not self._calls

    # ------------------------------------------------------------------ requests

    def request(
        self,
        work: Callable[[TrainerService], _T],
        done: Callable[[_T], None],
        failed: Callable[[PalaestraError], None],
        *,
        key: str = "",
    ) -> None:
        """Call `work` in another thread, and `done` or `failed` with the result in this one.

        Of requests with the same key only the newest is answered: what an older one returns is out of date. An older
        one that has not begun is not made.
        """
        if self._is_closed:
            return
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        self._pending += 1

        def is_newest() -> bool:
            return not key or self._numbers[key] == number

        def answer(call: Callable[[Any], None], result: object) -> None:
            self._pending -= 1
            if is_newest():
                call(result)

        def run() -> None:
            try:
                if not is_newest():
                    raise PalaestraError("a newer request has replaced this one")
                result = work(self.service)
            except PalaestraError as error:
                self._post(partial(answer, failed, error))
            except Exception as error:  # noqa: BLE001 - a service may answer anything
                _log.exception("a request failed")
                text = f"the service's answer cannot be used ({type(error).__name__}: {error})"
                self._post(partial(answer, failed, PalaestraError(text)))
            else:
                self._post(partial(answer, done, result))

        self._threads.submit(run)

    # ------------------------------------------------------------------ streams

    def connect(self) -> None:
        """Watch whether the service answers, and the events of all runs."""
        self._watch("health", True, self._read_health)
        self._watch("runs", True, self._read_run_events)

    def watch_metrics(self, run_ids: Sequence[str]) -> None:
        """Receive the new points of these runs (of at most 64), and of no others."""
        chosen = tuple(sorted(run_ids[:_MAX_METRIC_RUNS]))
        self._watch("metrics", chosen, partial(self._read_metrics, chosen))

    def watch_log(self, run_id: str, offset: int = 0) -> None:
        """Receive the output of a run from an offset on; an empty id: of none."""
        self._watch("log", run_id, partial(self._read_log, run_id, offset))

    def watch_play(self, play_id: str) -> None:
        """Receive the messages of a play; an empty id: of none."""
        self._watch("play", play_id, partial(self._read_play, play_id))

    def send(self, control: Control) -> bool:
        """Send a control to the play; whether the connection is open."""
        connection = self._play
        if connection is None:
            return False
        try:
            connection.send(control)
        except ServiceUnreachable:
            return False
        return True

    def take_frame(self) -> PlayFrame | None:
        """The newest picture of the play since the last call."""
        with self._lock:
            frame, self._frame = self._frame, None
        return frame

    def drain(self) -> bool:
        """Call the subscribers with what has arrived, for a bounded time; whether something is left."""
        if self._is_closed:
            return False
        deadline = time.monotonic() + _BUDGET_S
        with self._lock:
            stale_curves, self._stale_curves = self._stale_curves, {}
            points, self._points = self._points, {}
            log_text, self._log_text = self._log_text, {}
        for run_id in stale_curves:
            self._call(partial(self._subscribers.points, run_id, {}))
        for run_id, curves in points.items():
            self._call(partial(self._subscribers.points, run_id, curves))
        for run_id, text in log_text.items():
            self._call(partial(self._subscribers.log, run_id, text))
        while self._calls:
            self._call(self._calls.popleft())
            if time.monotonic() >= deadline:
                break
        return bool(self._calls)

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """End all threads; returns the names of those that did not end in time. Nothing is called any more."""
        self._is_closed = True
        patience_s = min(timeout_s / 2, _LAST_REQUESTS_S)
        deadline = time.monotonic() + patience_s
        for name in list(self._streams):
            self._cancel(name)
        late = self._threads.close(patience_s)
        if late:
            self._threads.discard_jobs()
        late += self._join_streams(max(0.0, deadline - time.monotonic()))
        while late and time.monotonic() < deadline + patience_s:
            # Again and again: a thread may send its request just after an abort.
            self.service.abort()
            late = self._threads.join(_ABORT_EVERY_S) + self._join_streams(_ABORT_EVERY_S)
        return late

    def _join_streams(self, timeout_s: float) -> list[str]:
        """Wait for the streams; returns the names of those that did not end in time."""
        deadline = time.monotonic() + timeout_s
        return [stream.name for stream in self._ending if not stream.join(max(0.0, deadline - time.monotonic()))]

    def _watch(self, name: str, subject: object, read: Callable[[Stream], None]) -> None:
        """Read a stream, instead of the one of this name about another subject; none for an empty subject."""
        current = self._streams.get(name)
        if current is not None and current[0] == subject:
            return
        self._cancel(name)
        if subject and not self._is_closed:
            self._streams[name] = (subject, Stream(name, read))

    def _cancel(self, name: str) -> None:
        current = self._streams.pop(name, None)
        if current is not None:
            current[1].cancel()
            self._ending = [*(stream for stream in self._ending if not stream.join(0.0)), current[1]]
            with self._lock:
                if name == "log":
                    self._log_text.clear()
                elif name == "play":
                    self._frame = None

    def _post(self, call: Callable[[], None]) -> None:
        if not self._is_closed:
            self._calls.append(call)
            self._wake()

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - one broken subscriber must not stop the others
            _log.exception("a subscriber failed")
            try:
                self._subscribers.failed(f"{type(error).__name__}: {error}")
            except Exception:  # noqa: BLE001 - nor must the one that reports it
                _log.exception("the failure of a subscriber cannot be shown")

    # ------------------------------------------------------------------ the threads of the streams

    def _read_health(self, stream: Stream) -> None:
        was_connected: bool | None = None
        while not stream.stopped.is_set():
            reason = self._find_failure()
            is_connected = reason is None
            if is_connected is not was_connected:
                was_connected = is_connected
                subscribers = self._subscribers
                self._post(subscribers.connected if reason is None else partial(subscribers.disconnected, reason))
            stream.stopped.wait(_HEALTH_EVERY_S)

    def _find_failure(self) -> str | None:
        """Why the service does not answer; None if it does."""
        reason = ""
        for timeout_s in _HEALTH_TIMEOUTS_S:
            try:
                self.service.check_health(timeout_s)
            except PalaestraError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 - what answers may be no run service at all
                reason = f"{type(error).__name__}: {error}"
            else:
                return None
        return reason

    def _read_run_events(self, stream: Stream) -> None:
        with self.service.watch_runs() as events:
            stream.close_with(events.close)
            for run_id, event in events:
                self._post(partial(self._subscribers.run_event, run_id, event))

    def _read_metrics(self, run_ids: Sequence[str], stream: Stream) -> None:
        with self.service.watch_metrics(run_ids) as batches:
            stream.close_with(batches.close)
            for run_id, curves in batches:
                with self._lock:
                    if not curves:
                        self._stale_curves[run_id] = None
                        continue
                    waiting = self._points.setdefault(run_id, {})
                    for name, points in curves.items():
                        waiting.setdefault(name, []).extend(points)

    def _read_log(self, run_id: str, offset: int, stream: Stream) -> None:
        with self.service.watch_log(run_id, offset=offset) as chunks:
            stream.close_with(chunks.close)
            while not stream.stopped.is_set():
                try:
                    for text in chunks:
                        with self._lock:
                            if not stream.stopped.is_set():
                                whole = self._log_text.get(run_id, "") + text
                                self._log_text[run_id] = whole[-_MAX_LOG_CHARACTERS:]
                except UnknownRun:
                    pass  # it was deleted
                except ServiceUnreachable as error:
                    _log.info("%s: %s", stream.name, error)
                    stream.stopped.wait(_RETRY_S)
                    continue  # the same stream goes on after the last line; a new one would repeat the others
                # The run has ended, and with it its output.
                stream.stopped.wait()

    def _read_play(self, play_id: str, stream: Stream) -> None:
        try:
            connection = self._open_play(play_id, stream)
            with connection:
                self._read_reports(play_id, stream, connection)
        except UnknownRun:  # raised by the first read
            reason = "the run service no longer knows it, as after a restart"
            ended = PlayEnded(reason=reason, failed=True, remedy="Start the play again")
            self._post(partial(self._subscribers.play, play_id, ended))
            stream.stopped.wait()

    def _open_play(self, play_id: str, stream: Stream) -> PlayConnection:
        try:
            return self.service.open_play(play_id)
        except ServiceUnreachable as error:
            if stream.failures >= _REPORTED_FAILURES:
                notice = PlayNotice(level="warning", text="The play cannot be reached.", remedy=str(error))
                self._post(partial(self._subscribers.play, play_id, notice))
            raise

    def _read_reports(self, play_id: str, stream: Stream, connection: PlayConnection) -> None:
        stream.close_with(connection.close)
        with self._lock:
            if not stream.stopped.is_set():
                self._play = connection
        try:
            for report, picture in connection:
                self._receive(play_id, stream, report, picture)
                if isinstance(report, PlayEnded):
                    stream.stopped.wait()
        finally:
            with self._lock:
                # The connection of the next play may be open already.
                if self._play is connection:
                    self._play = None

    def _receive(self, play_id: str, stream: Stream, report: Report, picture: bytes) -> None:
        image = None
        if picture and isinstance(report, StepReport):
            try:
                image = self._decode(picture)
            except Exception:  # noqa: BLE001 - a step without its picture is better than none
                _log.exception("a picture of the play cannot be read")
        with self._lock:
            if stream.stopped.is_set():
                return
            if image is not None and isinstance(report, StepReport):
                self._frame = PlayFrame(play_id, report, image)
        self._post(partial(self._subscribers.play, play_id, report))


def _start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _join_threads(threads: Sequence[threading.Thread], timeout_s: float) -> list[str]:
    """Wait for threads; the names of those that have not ended in time."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
