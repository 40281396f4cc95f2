"""Alarms: conditions that an operator should look at while a run continues.

An alarm never changes the phase. It is raised once, stays while its cause lasts, and is cleared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from palaestra.runs.record import LASTING_ALARMS, Alarm
from palaestra.runs.state.progress import AttemptProgress, NonFiniteMetric
from palaestra.strict_json import json_number

TRACEBACK_AFTER_S = 10.0
DISAGREE_AFTER_S = 10.0
MAX_EPISODE_DIFFERENCE = 2


@dataclass(frozen=True)
class AlarmLimits:
    """Thresholds of the alarms."""

    stall_after_s: float = 600.0
    no_episode_steps: int = 50_000
    """Steps without a finished episode; 0: no alarm."""


class AlarmMonitor:
    """Decides which alarms of one attempt are active. Times are monotonic seconds."""

    def __init__(self, limits: AlarmLimits, now: float, *, drift: str = "") -> None:
        self._limits = limits
        self._drift = drift
        self._progress = AttemptProgress(attempt=0)
        self._steps = 0
        self._watchdog_gone = False
        self._unreachable = ""
        self._last_activity = now
        self._traceback_at: float | None = None
        self._disagree_since: float | None = None

    def update(
        self,
        progress: AttemptProgress,
        steps: int,
        now: float,
        *,
        watchdog_gone: bool = False,
        unreachable: str = "",
        is_visible: bool = True,
    ) -> None:
        """Process the progress of the attempt, which has taken this many steps so far.

        `unreachable` says why its machine does not answer; while it does not, the attempt is not visible.
        """
        before, self._progress = self._progress, progress
        self._steps, self._watchdog_gone, self._unreachable = steps, watchdog_gone, unreachable
        # A run that cannot be seen is not stalled.
        if not is_visible or _activity(progress) != _activity(before):
            self._last_activity = now
        if progress.tracebacks > before.tracebacks:
            self._traceback_at = now
        if progress.episode_lines - progress.episodes <= MAX_EPISODE_DIFFERENCE:
            self._disagree_since = None
        elif self._disagree_since is None:
            self._disagree_since = now

    def alarms(self, now: float, wall_time: float) -> tuple[Alarm, ...]:
        """The active alarms, each raised at `wall_time`."""
        progress, silent_s = self._progress, now - self._last_activity
        texts = _metric_alarms(progress, progress.non_finite)
        if silent_s >= self._limits.stall_after_s:
            texts["stalled"] = f"no output and no event for {int(silent_s)} s"
        if missing := describe_missing_episodes(self._steps, progress.episodes, self._limits):
            texts["no_episodes"] = f"{missing}: the environment may never end an episode, or episodes are not reported"
        if self._traceback_at is not None and now - self._traceback_at >= TRACEBACK_AFTER_S:
            texts["traceback"] = "its output holds a Python traceback and the run continues; look at its log"
        if progress.disk_full:
            texts["disk"] = "the disk is full: telemetry waits in the trainer's own files until there is space"
        elif progress.problem:
            texts["unreadable_events"] = f"its telemetry cannot be read: {progress.problem}"
        if self._disagree_since is not None and now - self._disagree_since >= DISAGREE_AFTER_S:
            text = f"it printed {progress.episode_lines} episodes and its event files hold {progress.episodes}"
            texts.setdefault("unreadable_events", text)
        if self._watchdog_gone:
            texts["watchdog_gone"] = "its watchdog was killed: the outcome will be inferred from the journal"
        if self._unreachable:
            texts["unreachable"] = self._unreachable
        if self._drift:
            texts["drift"] = self._drift
        return _to_alarms(texts, wall_time)


def lasting_alarms(progress: AttemptProgress, wall_time: float) -> tuple[Alarm, ...]:
    """The alarms about metrics that stay when a run has ended; a metric that has become finite again raises none."""
    current = tuple(metric for metric in progress.non_finite if not metric.finite_since)
    return _to_alarms(_metric_alarms(progress, current), wall_time)


def merge_alarms(before: Iterable[Alarm], now: Iterable[Alarm]) -> tuple[Alarm, ...]:
    """The current alarms, each with the time it was first raised.

    Texts with counts are updated; the text of a stall, which changes every second, is not.
    """
    known = {alarm.code: alarm for alarm in before}
    merged = []
    for alarm in now:
        earlier = known.get(alarm.code, alarm)
        merged.append(replace(alarm, since=earlier.since) if alarm.code in LASTING_ALARMS else earlier)
    return tuple(merged)


def describe_missing_episodes(steps: int, episodes: int, limits: AlarmLimits) -> str:
    """`60,000 steps and no finished episode` if an episode should have ended by now; else empty."""
    if not limits.no_episode_steps or steps < limits.no_episode_steps or episodes:
        return ""
    return f"{steps:,} steps and no finished episode"


def describe_non_finite(metrics: Sequence[NonFiniteMetric], *, seen_from_the_start: bool = True) -> str:
    """Which metrics are not finite; the step is the first such step only if all values were seen."""
    first = metrics[0]
    is_now = first.finite_since == 0
    when = "since" if is_now and seen_from_the_start else "at"
    text = f"{first.name} {'is' if is_now else 'was'} {json_number(first.value)} {when} step {first.step:,}"
    others = [one.name for one in metrics[1:]]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        text += f"; also {', '.join(others[:3])}{more}"
    return text


def _activity(progress: AttemptProgress) -> tuple[int, int]:
    return progress.output_bytes + progress.source_bytes, progress.seq


def _metric_alarms(progress: AttemptProgress, non_finite: Sequence[NonFiniteMetric]) -> dict[str, str]:
    texts: dict[str, str] = {}
    if non_finite:
        texts["non_finite"] = describe_non_finite(non_finite)
    if progress.dropped:
        lines, were = ("line or record", "was") if progress.dropped == 1 else ("lines or records", "were")
        text = f"{progress.dropped:,} {lines} of its telemetry could not be read and {were} dropped"
        texts["dropped_events"] = f"{text}; the first: {progress.first_dropped}" if progress.first_dropped else text
    if progress.points_left_out:
        text = f"{progress.points_left_out:,} values have no curve (too many metrics, or steps beyond 64 bits)"
        texts["left_out_metrics"] = f"{text}; the journal has them"
    return texts


def _to_alarms(texts: dict[str, str], wall_time: float) -> tuple[Alarm, ...]:
    return tuple(Alarm(code, text, wall_time) for code, text in texts.items())
