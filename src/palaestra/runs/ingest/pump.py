"""One thread that takes the telemetry of all live attempts from files to series and followers.

Every attempt gets its turn every 50 ms, and no more than 4,000 records in it, so one that floods delays the others
by a fraction of a second. An attempt whose disk is full, or whose files cannot be read, is tried again every second
from its last commit; its sources are files, so nothing is lost meanwhile. The supervisor drives it.
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
from palaestra.runs.series.commits import SeriesBusy
from palaestra.runs.state.progress import AttemptProgress
from palaestra.telemetry.event import Record

__all__ = ["Publish", "Pump"]

_log = logging.getLogger(__name__)

Publish = Callable[[str, int, list[Record]], None]
"""Given a run's id, the number of the attempt and new records. Called by the pump's thread, or by whoever calls
`finish`; must not wait. After a restart of the service, records since the last commit come a second time, under the
same numbers."""

_MOST_PER_TURN = 4_000
"""Fits into a ring, so that whoever follows closely never has to read the file."""
_TRY_AGAIN_S = 1.0
_BUSY_S = 0.05


class _Watched:
    """One attempt that is followed."""

    def __init__(self, run_id: str, attempt: Attempt, sources: tuple[Source, ...], thin_every: int) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self.lock = threading.Lock()
        self.progress = AttemptProgress(attempt=attempt.number)
        self.published = 0
        self.try_again_at = 0.0
        self._sources = sources
        self._thin_every = thin_every
        self._feed: Feed | None = None

    def turn(self, publish: Publish, *, last: bool = False) -> bool:
        """Read on and hand on; whether there may be more at once."""
        if self._feed is None:
            self._feed = Feed(self.attempt, self._sources, self._thin_every)
        feed = self._feed
        records = feed.finish(_MOST_PER_TURN) if last else feed.turn(_MOST_PER_TURN)
        self.progress = feed.progress()
        if feed.began_again:
            self.published, feed.began_again = 0, False
        new = [record for record in records if record.seq > self.published]
        if new:
            self.published = new[-1].seq
            publish(self.run_id, self.attempt.number, new)
        return feed.more

    def give_up(self, error: Exception, now: float) -> None:
        """Remember why, and begin again from the last commit later."""
        if isinstance(error, SeriesBusy):
            # A reader brings them up to the journal, which takes a moment and is nothing to tell anybody.
            self.try_again_at = now + _BUSY_S
            return
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = f"{type(error).__name__}: {error}"
        if self.progress.problem != problem:
            _log.warning(
                "the telemetry of %s cannot be taken in at the moment: %s. It is tried again every second and nothing "
                "is lost; %s.",
                self.run_id,
                problem,
                "free space on the disk" if full else "see what ails its directory",
            )
        self.progress = replace(self.progress, problem=problem, disk_full=full)
        self.try_again_at = now + _TRY_AGAIN_S
        self.close()

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None


class Pump:
    """Follows any number of attempts until each is finished."""

    def __init__(self, publish: Publish, poll_every_s: float = 0.05) -> None:
        self._publish = publish
        self._poll_every_s = poll_every_s
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="palaestra-pump", daemon=True)
        self._thread.start()

    def watch(self, run_id: str, attempt: Attempt, sources: tuple[Source, ...], thin: int = 1) -> None:
        """Follow an attempt, from wherever its files say that an earlier pump came. One attempt per run at a time."""
        with self._lock:
            if run_id in self._watched:
                raise ValueError(f"{run_id} is being followed already; finish its attempt first")
            self._watched[run_id] = _Watched(run_id, attempt, sources, thin)
        self._wake.set()

    def finish(self, run_id: str, timeout_s: float = 60.0) -> AttemptProgress:
        """Take in everything that an ended attempt has left, to the last byte, and follow it no longer.

        Blocks. A disk that stays full is waited for until `timeout_s` is over; then `problem` says so, and watching
        the attempt again later completes it.
        """
        with self._lock:
            watched = self._watched.pop(run_id, None)
        if watched is None:
            raise ValueError(f"{run_id} is not being followed")
        deadline = time.monotonic() + timeout_s
        with watched.lock:
            while True:
                try:
                    while watched.turn(self._publish, last=True):
                        pass
                    break
                except Exception as error:  # noqa: BLE001  an end must be recorded whatever ails its telemetry
                    watched.give_up(error, time.monotonic())
                    pause_s = watched.try_again_at - time.monotonic()
                    if time.monotonic() > deadline or self._closing.wait(max(0.0, min(pause_s, timeout_s))):
                        watched.progress = replace(watched.progress, problem=watched.progress.problem or f"{error}")
                        break
            watched.close()
        return watched.progress

    def progress(self, run_id: str) -> AttemptProgress | None:
        """How far an attempt has come; None when it is not followed."""
        with self._lock:
            watched = self._watched.get(run_id)
        return None if watched is None else watched.progress

    def close(self) -> None:
        """Follow nothing any more. What was not committed is read again by the next pump."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        with self._lock:
            watched, self._watched = list(self._watched.values()), {}
        for one in watched:
            with one.lock:
                one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            with self._lock:
                watched = list(self._watched.values())
            more = [one for one in watched if self._turn(one, began)]
            if not more:
                self._wake.wait(max(0.0, began + self._poll_every_s - time.monotonic()))
                self._wake.clear()

    def _turn(self, watched: _Watched, now: float) -> bool:
        if watched.try_again_at > now or not watched.lock.acquire(blocking=False):
            return False
        try:
            with self._lock:
                # Somebody may have finished it since the round began.
                if self._watched.get(watched.run_id) is not watched:
                    return False
            return watched.turn(self._publish)
        except Exception as error:  # noqa: BLE001  what ails one run must not stop the telemetry of the others
            watched.give_up(error, time.monotonic())
            return False
        finally:
            watched.lock.release()
