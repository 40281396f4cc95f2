"""Numbers of a whole run: those of its attempts, one after the other.

An attempt that resumed from a checkpoint repeats steps which the one before it had already taken. What counts is what
came later: every attempt hides, metric by metric, the earlier points from its own first step on.
"""

from __future__ import annotations

from palaestra.files.run_directory import RunDirectory
from palaestra.runs.series.metric_point import MetricPoint
from palaestra.runs.series.reader import MetricInfo, SeriesReader

__all__ = ["RunSeries"]

_FEWEST = 4


class RunSeries:
    """Reads the series of all attempts of a run."""

    def __init__(self, run: RunDirectory) -> None:
        self._readers = [SeriesReader(attempt.series) for attempt in run.attempts()]

    def names(self) -> dict[str, MetricInfo]:
        """Every metric of any attempt, with the points of all of them, hidden ones included."""
        found: dict[str, MetricInfo] = {}
        for reader in self._readers:
            for name, info in reader.names().items():
                before = found[name].points if name in found else 0
                found[name] = MetricInfo(before + info.points, info.source)
        return found

    def recent(self, name: str, count: int) -> list[MetricPoint]:
        """The last points of a metric, oldest first."""
        found: list[MetricPoint] = []
        for reader, hidden_from in reversed(self._visible(name)):
            found = reader.recent(name, count - len(found), hidden_from) + found
        return found

    def decimated(
        self, name: str, points: int = 2000, first: int | None = None, last: int | None = None
    ) -> list[MetricPoint]:
        """At most `points` points (and four of every attempt) between two steps; see `SeriesReader.decimated`."""
        parts = []
        for reader, hidden_from in self._visible(name):
            ends = [end for end in (last, None if hidden_from is None else hidden_from - 1) if end is not None]
            stop = min(ends, default=None)
            parts.append((reader, stop, reader.count(name, first, stop)))
        total = sum(count for _, _, count in parts)
        # Four of everybody come first, so that the sum of the shares stays below what was asked for.
        spare = max(0, points - _FEWEST * len(parts))
        return [
            point
            for reader, stop, count in parts
            if count
            for point in reader.decimated(
                name, points if total <= points else _FEWEST + spare * count // total, first, stop
            )
        ]

    def _visible(self, name: str) -> list[tuple[SeriesReader, int | None]]:
        """Every attempt that has the metric, and the step from which on a later one hides it."""
        hidden_from: int | None = None
        found: list[tuple[SeriesReader, int | None]] = []
        for reader in reversed(self._readers):
            begins = reader.first_step(name)
            if begins is not None:
                found.append((reader, hidden_from))
                hidden_from = begins if hidden_from is None else min(begins, hidden_from)
        found.reverse()
        return found
