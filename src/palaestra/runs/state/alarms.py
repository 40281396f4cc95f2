"""What a person should look at while a run goes on: decided from counters and a clock that nobody sets. Pure.

An alarm never changes the phase. It comes once, stays while its cause does, and goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from palaestra.runs.record import LASTING_ALARMS, Alarm
from palaestra.runs.state.non_finite import NonFinite
from palaestra.strict_json import json_number

__all__ = [
    "Limits",
    "Signs",
    "Watch",
    "alarms",
    "lasting_alarms",
    "no_episodes",
    "non_finite_text",
    "noticed",
    "still_the_same",
]

TRACEBACK_AFTER_S = 10.0
DISAGREE_AFTER_S = 10.0
EPISODES_APART = 2


@dataclass(frozen=True)
class Limits:
    """When to speak."""

    stall_after_s: float = 600.0
    no_episode_steps: int = 50_000
    """Steps without a finished episode; 0 never asks."""


@dataclass(frozen=True)
class Signs:
    """What can be seen of a run at one moment. Counters only grow."""

    bytes_seen: int = 0
    events: int = 0
    env_step: int = 0
    episodes: int = 0
    episode_lines: int = 0
    tracebacks: int = 0
    dropped: int = 0
    first_dropped: str = ""
    points_left_out: int = 0
    non_finite: tuple[NonFinite, ...] = ()
    disk_full: bool = False
    problem: str = ""
    warden_gone: bool = False
    drift: str = ""


@dataclass(frozen=True)
class Watch:
    """The memory of one run's watcher; times are monotonic seconds."""

    signs: Signs
    last_sign: float
    """When a byte or an event last came."""
    traceback_at: float | None = None
    disagree_since: float | None = None

    @classmethod
    def begin(cls, now: float) -> Watch:
        """Of a run that is looked at from now on."""
        return cls(Signs(), now)


def noticed(watch: Watch, signs: Signs, now: float) -> Watch:
    """The watch after another look."""
    before = watch.signs
    moved = (signs.bytes_seen, signs.events) != (before.bytes_seen, before.events)
    apart = signs.episode_lines - signs.episodes > EPISODES_APART
    return replace(
        watch,
        signs=signs,
        last_sign=now if moved else watch.last_sign,
        traceback_at=now if signs.tracebacks > before.tracebacks else watch.traceback_at,
        disagree_since=None if not apart else now if watch.disagree_since is None else watch.disagree_since,
    )


def alarms(watch: Watch, now: float, wall: float, limits: Limits) -> tuple[Alarm, ...]:
    """Everything that is wrong now. `wall` is the time that people read."""
    signs = watch.signs
    silent = now - watch.last_sign
    found = _about_numbers(signs)
    if silent >= limits.stall_after_s:
        found.append(("stalled", f"no output and no event for {int(silent)} s"))
    endless = no_episodes(signs.env_step, signs.episodes, limits)
    if endless:
        found.append(("no_episodes", f"{endless}: the environment may never end, or nobody counts"))
    if watch.traceback_at is not None and now - watch.traceback_at >= TRACEBACK_AFTER_S:
        found.append(("traceback", "its output holds a Python traceback, and it goes on; look at its log"))
    if signs.disk_full:
        found.append(("disk", "the disk is full: telemetry waits in the trainer's own files until there is space"))
    elif signs.problem:
        found.append(("unreadable_events", f"its telemetry cannot be taken in: {signs.problem}"))
    if watch.disagree_since is not None and now - watch.disagree_since >= DISAGREE_AFTER_S:
        text = f"it printed {signs.episode_lines} episodes and its event files hold {signs.episodes}"
        found.append(("unreadable_events", text))
    if signs.warden_gone:
        found.append(("warden_gone", "its warden was killed: how it ends will be guessed from its journal"))
    if signs.drift:
        found.append(("drift", signs.drift))
    return tuple(Alarm(code, text, wall) for code, text in dict(reversed(found)).items())[::-1]


def lasting_alarms(signs: Signs, wall: float) -> tuple[Alarm, ...]:
    """What stays wrong with the numbers of a run that has ended. A metric that is finite again is not."""
    now = tuple(one for one in signs.non_finite if not one.finite_since)
    return tuple(Alarm(code, text, wall) for code, text in _about_numbers(replace(signs, non_finite=now)))


def _about_numbers(signs: Signs) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if signs.non_finite:
        found.append(("non_finite", non_finite_text(signs.non_finite)))
    if signs.dropped:
        lines, were = ("line or record", "was") if signs.dropped == 1 else ("lines or records", "were")
        text = f"{signs.dropped:,} {lines} of its telemetry could not be read and {were} dropped"
        found.append(("dropped_events", f"{text}; the first: {signs.first_dropped}" if signs.first_dropped else text))
    if signs.points_left_out:
        text = f"{signs.points_left_out:,} values have no curve (too many metrics, or steps beyond 64 bits)"
        found.append(("left_out_metrics", f"{text}; the journal has them"))
    return found


def non_finite_text(metrics: Sequence[NonFinite], *, seen_from_the_start: bool = True) -> str:
    """Which metrics are non-finite; the step is the first one only if all values were seen."""
    first = metrics[0]
    is_now = first.finite_since == 0
    when = "since" if is_now and seen_from_the_start else "at"
    text = f"{first.name} {'is' if is_now else 'was'} {json_number(first.value)} {when} step {first.step:,}"
    others = [one.name for one in metrics[1:]]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        text += f"; also {', '.join(others[:3])}{more}"
    return text


def no_episodes(env_step: int, episodes: int, limits: Limits) -> str:
    """That so many steps should have ended an episode; empty when they have, or nobody asks."""
    if not limits.no_episode_steps or env_step < limits.no_episode_steps or episodes:
        return ""
    return f"{env_step:,} steps and no finished episode"


def still_the_same(before: Iterable[Alarm], now: Iterable[Alarm]) -> tuple[Alarm, ...]:
    """Today's alarms, each as old as it is. Counts grow; how long a silence lasts is not written down every second."""
    known = {alarm.code: alarm for alarm in before}
    return tuple(
        alarm
        if alarm.code not in known
        else replace(alarm, since=known[alarm.code].since)
        if alarm.code in LASTING_ALARMS
        else known[alarm.code]
        for alarm in now
    )
