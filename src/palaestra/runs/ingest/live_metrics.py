"""New points of many runs for live charts: put together between two batches, and bounded for a slow client.

The pump publishes records; each subscription collects the points of its runs until they are taken. Points that wait
for a client that does not read are thinned: the first, lowest, highest and last of neighbouring points stay, so that a
spike remains visible and memory stays bounded. The stored series have every point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.ingest.feed import update_series
from palaestra.runs.series.files import POINT, points_to_buckets, read_last_commit, representative_points
from palaestra.runs.series.writer import MAX_METRICS, read_metrics
from palaestra.runs.state.unsupervised import read_unsupervised
from palaestra.telemetry.event import Record
from palaestra.telemetry.journal import JournalReader

Curve: TypeAlias = list[tuple[int, float, float]]
"""Step, value and time of points, in order."""

_MAX_WAITING = 65_536
"""Points of all runs that may wait for one client before they are thinned."""
_POINTS_PER_BIN = 4
_READ_LIMIT = 10_000


class MetricBatch(NamedTuple):
    """What is new about a run."""

    run_id: str
    points: Mapping[str, Curve]
    needs_history: bool
    """The client has to load the stored series: at the beginning, and when a resumed attempt replaces points."""
    has_ended: bool
    """The run has ended since the last batch."""


def group_by_metric(records: Sequence[Record]) -> dict[str, Curve]:
    """The points of records by the names of their stored series."""
    curves: dict[str, Curve] = {}
    for record in records:
        measured = read_metrics(record.event)
        if measured is None:
            continue
        step, metrics = measured
        for name, value in metrics.items():
            curve = curves.get(name)
            if curve is None:
                curve = curves[name] = []
            curve.append((step, value, record.time))
    return curves


class MetricSubscription:
    """Collects the new points of some runs for one client. Thread-safe; `wake` is called by the publishing thread."""

    def __init__(self, attempts: Mapping[str, int], wake: Callable[[], None], max_waiting: int = _MAX_WAITING) -> None:
        self._attempts = dict(attempts)
        self._wake = wake
        self._lock = threading.Lock()
        self._points: dict[str, dict[str, Curve]] = {}
        self._without_history = set(attempts)
        self._ended: dict[str, bool] = {}
        self._new_ends: set[str] = set()
        self._waiting = 0
        self._max_waiting = self._thin_at = max_waiting

    def is_about(self, run_id: str) -> bool:
        """Whether the client has asked for this run."""
        return run_id in self._attempts

    @property
    def waiting(self) -> int:
        """Number of points that wait for the client."""
        return self._waiting

    def add(self, run_id: str, attempt: int, curves: Mapping[str, Curve]) -> None:
        """Add new points of a run."""
        known = self._attempts.get(run_id)
        if known is None or not curves:
            return
        with self._lock:
            if attempt > known > 0:
                # The attempt repeats steps after its checkpoint; the stored series hide the earlier ones.
                self._without_history.add(run_id)
            self._attempts[run_id] = max(attempt, known)
            waiting = self._points.setdefault(run_id, {})
            for name, curve in curves.items():
                if name in waiting or len(waiting) < MAX_METRICS:
                    waiting.setdefault(name, []).extend(curve)
                    self._waiting += len(curve)
            if self._waiting > self._thin_at:
                self._thin()
        self._wake()

    def set_ended(self, run_id: str, has_ended: bool) -> None:
        """Note whether a run has ended; may be repeated."""
        if run_id not in self._attempts:
            return
        with self._lock:
            is_new = has_ended and not self._ended.get(run_id)
            if is_new:
                self._new_ends.add(run_id)
            self._ended[run_id] = has_ended
        if is_new:
            self._wake()

    def take(self) -> list[MetricBatch]:
        """Remove and return what is new, one batch for each run that has something new."""
        with self._lock:
            points, self._points = self._points, {}
            histories, self._without_history = self._without_history, set()
            ends, self._new_ends = self._new_ends, set()
            self._waiting, self._thin_at = 0, self._max_waiting
        return [
            MetricBatch(run_id, points.get(run_id, {}), run_id in histories, run_id in ends)
            for run_id in self._attempts
            if run_id in points or run_id in histories or run_id in ends
        ]

    def _thin(self) -> None:
        """Halve the points that wait. With very many metrics, every curve keeps at least one bin."""
        curves = [curve for waiting in self._points.values() for curve in waiting.values()]
        share = max(_POINTS_PER_BIN, self._max_waiting // 2 // len(curves))
        for curve in curves:
            if len(curve) > share:
                curve[:] = thin(curve, share)
        self._waiting = sum(map(len, curves))
        self._thin_at = max(self._max_waiting, 2 * self._waiting)


def thin(curve: Curve, points: int) -> Curve:
    """At most `points` points of a curve (at least 4): the first, lowest, highest and last of equal stretches."""
    bins = max(1, points // _POINTS_PER_BIN)
    starts = np.unique(np.arange(bins) * len(curve) // bins)
    steps, values, times = representative_points(points_to_buckets(np.array(curve, POINT)), starts)
    return list(zip(steps.tolist(), values.tolist(), times.tolist(), strict=True))


class LiveMetrics:
    """Passes the points of records on to the subscriptions. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: list[MetricSubscription] = []

    def subscribe(self, attempts: Mapping[str, int], wake: Callable[[], None]) -> MetricSubscription:
        """Collect the points of these runs from now on; `attempts` are their current attempts."""
        subscription = MetricSubscription(attempts, wake)
        with self._lock:
            self._subscriptions = [*self._subscriptions, subscription]
        return subscription

    def unsubscribe(self, subscription: MetricSubscription) -> None:
        """Stop collecting. May be repeated."""
        with self._lock:
            self._subscriptions = [other for other in self._subscriptions if other is not subscription]

    def publish(self, run_id: str, attempt: int, records: Sequence[Record]) -> None:
        """Add the points of new records to every subscription of their run."""
        interested = [one for one in self._subscriptions if one.is_about(run_id)]
        if not interested:
            return
        curves = group_by_metric(records)
        for subscription in interested:
            subscription.add(run_id, attempt, curves)

    def set_ended(self, run_id: str, has_ended: bool) -> None:
        """Tell every subscription of a run whether it has ended."""
        for subscription in self._subscriptions:
            subscription.set_ended(run_id, has_ended)


class JournalTail:
    """Reads the new records of a run that was started with `palaestra train`, which no pump ingests."""

    def __init__(self, run: RunDirectory, subscription: MetricSubscription) -> None:
        self._run, self._subscription = run, subscription
        self._lock = threading.Lock()
        self._reader: JournalReader | None = None
        self._attempt = 0
        self._is_closed = False

    def poll(self) -> None:
        """Add what was written since the last call; everything before the first call is in the stored series."""
        with self._lock:
            attempts = self._run.attempts()
            if self._is_closed or not attempts:
                return
            newest = attempts[-1]
            if self._reader is None or newest.number != self._attempt:
                self._reader, self._attempt = self._open_journal(newest), newest.number
            # Looked at before the records, so that everything written until the end is read.
            record = read_unsupervised(self._run)
            while records := self._reader.read(_READ_LIMIT):
                self._subscription.add(self._run.run_id, newest.number, group_by_metric(records))
            self._subscription.set_ended(self._run.run_id, record is None or record.phase.has_ended)

    def close(self) -> None:
        """Close the journal; waits for a `poll` in another thread."""
        with self._lock:
            self._is_closed = True
            if self._reader is not None:
                self._reader.close()

    def _open_journal(self, attempt: Attempt) -> JournalReader:
        if self._reader is not None:
            self._reader.close()
            return JournalReader(attempt.journal)
        update_series(attempt)
        commit = read_last_commit(attempt.series / "commits.log")
        return JournalReader(attempt.journal, None if commit is None else commit.cursor)
