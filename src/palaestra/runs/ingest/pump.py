"""One thread that ingests the telemetry of all live attempts.

Each attempt is polled every 50 ms for at most 4,000 records, so a flood from one delays the others by a fraction of a
second. An attempt whose disk is full or whose files cannot be read is retried every second from its last commit; its
sources are files, so nothing is lost.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.feed import Feed
from palaestra.runs.runner import Source
from palaestra.runs.series.files import SeriesBusy
from palaestra.runs.state.progress import AttemptProgress
from palaestra.telemetry.event import Record

_log = logging.getLogger(__name__)

Publish = Callable[[str, int, list[Record]], None]
"""Called with a run id, an attempt number and new records, by the pump's thread or the caller of `finish`. Must not
block. After a restart of the service, records since the last commit are published again with the same numbers."""

_BATCH = 4_000
"""Fits into a ring, so that a follower that keeps up never has to read the file."""
_RETRY_AFTER_S = 1.0
_RETRY_BUSY_AFTER_S = 0.05


class _WatchedAttempt:
    """One attempt that is being ingested."""

    def __init__(self, run_id: str, attempt: Attempt, sources: tuple[Source, ...], thin_every: int) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self.lock = threading.Lock()
        self.progress = AttemptProgress(attempt=attempt.number)
        self.published = 0
        self.retry_at = 0.0
        self._sources = sources
        self._thin_every = thin_every
        self._feed: Feed | None = None

    def advance(self, publish: Publish, *, final: bool = False) -> bool:
        """Ingest and publish one batch; return whether there may be more."""
        if self._feed is None:
            self._feed = Feed(self.attempt, self._sources, self._thin_every)
        feed = self._feed
        records = feed.finish(_BATCH) if final else feed.advance(_BATCH)
        self.progress = feed.progress()
        if feed.restarted:
            self.published, feed.restarted = 0, False
        new = [record for record in records if record.seq > self.published]
        if new:
            self.published = new[-1].seq
            publish(self.run_id, self.attempt.number, new)
        return feed.has_more

    def flush(self) -> None:
        """Write what was ingested to the stored series."""
        if self._feed is not None:
            self._feed.flush()

    def handle_error(self, error: Exception, now: float) -> None:
        """Record the problem and schedule a retry from the last commit."""
        if isinstance(error, SeriesBusy):
            # A reader is updating the series, which takes a moment.
            self.retry_at = now + _RETRY_BUSY_AFTER_S
            return
        disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = f"{type(error).__name__}: {error}"
        if self.progress.problem != problem:
            _log.warning(
                "telemetry of %s cannot be ingested: %s. Retrying every second; nothing is lost. %s.",
                self.run_id,
                problem,
                "Free disk space" if disk_full else "Check the files in its directory",
            )
        self.progress = replace(self.progress, problem=problem, disk_full=disk_full)
        self.retry_at = now + _RETRY_AFTER_S
        self.close()

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None


class Pump:
    """Ingests any number of attempts until each is finished."""

    def __init__(self, publish: Publish, poll_every_s: float = 0.05) -> None:
        self._publish = publish
        self._poll_every_s = poll_every_s
        self._attempts: dict[str, _WatchedAttempt] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="palaestra-pump", daemon=True)
        self._thread.start()

    def watch(self, run_id: str, attempt: Attempt, sources: tuple[Source, ...], thin: int = 1) -> None:
        """Ingest an attempt, continuing where an earlier pump stopped. One attempt per run at a time."""
        with self._lock:
            if run_id in self._attempts:
                raise ValueError(f"{run_id} is already being watched; finish its attempt first")
            self._attempts[run_id] = _WatchedAttempt(run_id, attempt, sources, thin)
        self._wake.set()

    def finish(self, run_id: str, timeout_s: float = 60.0) -> AttemptProgress:
        """Ingest everything that an ended attempt wrote, then stop watching it. Blocks.

        Errors such as a full disk are retried until `timeout_s` is over; then `problem` is set, and watching the
        attempt again later completes it.
        """
        with self._lock:
            watched = self._attempts.pop(run_id, None)
        if watched is None:
            raise ValueError(f"{run_id} is not being watched")
        deadline = time.monotonic() + timeout_s
        with watched.lock:
            while True:
                try:
                    while watched.advance(self._publish, final=True):
                        pass
                    break
                except Exception as error:  # noqa: BLE001 - the end of a run must be recorded even if its telemetry fails
                    watched.handle_error(error, time.monotonic())
                    pause_s = watched.retry_at - time.monotonic()
                    if time.monotonic() > deadline or self._closing.wait(max(0.0, min(pause_s, timeout_s))):
                        watched.progress = replace(watched.progress, problem=watched.progress.problem or f"{error}")
                        break
            watched.close()
        return watched.progress

    def flush(self, run_id: str) -> None:
        """Write everything that was published about a run to its stored series; does nothing if it is not watched."""
        with self._lock:
            watched = self._attempts.get(run_id)
        if watched is None:
            return
        with watched.lock:
            try:
                watched.flush()
            except Exception as error:  # noqa: BLE001 - as in the thread: retried later, and nothing is lost
                watched.handle_error(error, time.monotonic())

    def progress(self, run_id: str) -> AttemptProgress | None:
        """Return the progress of a watched attempt; None when the run is not watched."""
        with self._lock:
            watched = self._attempts.get(run_id)
        return None if watched is None else watched.progress

    def close(self) -> None:
        """Stop the thread. Records that were not committed are read again by the next pump."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        with self._lock:
            watched, self._attempts = list(self._attempts.values()), {}
        for attempt in watched:
            with attempt.lock:
                attempt.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            started = time.monotonic()
            with self._lock:
                watched = list(self._attempts.values())
            has_more = [self._advance(attempt, started) for attempt in watched]
            if not any(has_more):
                self._wake.wait(max(0.0, started + self._poll_every_s - time.monotonic()))
                self._wake.clear()

    def _advance(self, watched: _WatchedAttempt, now: float) -> bool:
        if watched.retry_at > now or not watched.lock.acquire(blocking=False):
            return False
        try:
            with self._lock:
                # `finish` may have removed it since the round began.
                if self._attempts.get(watched.run_id) is not watched:
                    return False
            return watched.advance(self._publish)
        except Exception as error:  # noqa: BLE001 - the problem of one run must not stop ingestion of the others
            watched.handle_error(error, time.monotonic())
            return False
        finally:
            watched.lock.release()
