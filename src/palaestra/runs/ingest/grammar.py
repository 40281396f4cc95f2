"""What lines of output mean, by the kind of trainer that printed them.

A trainer of anybody's speaks `events`: a line `@palaestra {"kind": "TrainingStep", "env_step": 2048, "metrics": {…}}`
for every event, with the fields of `telemetry.event`. `schema`, `seq` and `time` are ours to fill in, and what has an
obvious default may be left out. Everything else it prints is just output. A line that is marked as an event and cannot
be read as one is an error, not output: the numbers on it would vanish unnoticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, get_args

from palaestra.runs.ingest.tags import TAGS, canonical
from palaestra.telemetry.event import SCHEMA, Event, LogLine, TrainingStep, UnknownEvent, parse_event

__all__ = ["GRAMMARS", "MARK", "Grammar", "tracking_url"]

Parsed: TypeAlias = tuple[Event, ...] | None

MARK = "@palaestra "
_DEFAULTS = {
    **{"schema": SCHEMA, "update": 0, "episode": 0, "env_index": 0},
    **{"sha256": "", "best": False, "metric": None, "reason": "", "level": "info"},
}
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_URL = re.compile(r"View run (?:.* )?at:? +(https?://\S+)")
_CLEANRL_EPISODE = re.compile(r"(?:^|[\s,])episodic_return=")
_CLEANRL_OTHER = re.compile(r"^SPS: \d+|episodic_return=")
_CLEANRL_SAVED = re.compile(r"model saved to (\S.*)")


def _nothing(_: str) -> Parsed:
    return ()


def _never(_: str) -> bool:
    return False


@dataclass(frozen=True)
class Grammar:
    """How one kind of trainer prints."""

    parse: Callable[[str], Parsed]
    """The events on a line; None when it is ordinary output. `ValueError` when the line is marked as an event and
    cannot be read as one."""
    is_episode: Callable[[str], bool] = _never
    """Whether a line announces an episode whose numbers come from another source."""


def tracking_url(line: str) -> str:
    """The address at which an experiment tracker shows the run, if the line says so."""
    found = _URL.search(_ANSI.sub("", line)) if "View run" in line else None
    return found.group(1) if found else ""


def _events(line: str) -> Parsed:
    # A progress bar may stand on the same line, in front.
    _, mark, body = line.rpartition(MARK)
    body = body.strip()
    if not mark or not body.startswith("{"):
        return None
    try:
        data = json.loads(body)
    except RecursionError:
        raise ValueError("nested too deep to be an event") from None
    event = parse_event({**_DEFAULTS, **data})
    if isinstance(event, UnknownEvent):
        known = ", ".join(kind.__name__ for kind in get_args(Event))
        if event.schema > SCHEMA:
            raise ValueError(f"schema {event.schema} is newer than {SCHEMA}")
        raise ValueError(f"unknown kind {event.kind[:80]!r} (known: {known})")
    return (event,)


def _sb3(line: str) -> Parsed:
    parsed = _events(line)
    if parsed is None:
        return None
    return tuple(
        TrainingStep(e.update, e.env_step, {canonical(TAGS["sb3"], name): value for name, value in e.metrics.items()})
        if isinstance(e, TrainingStep)
        else e
        for e in parsed
    )


def _cleanrl(line: str) -> Parsed:
    if _CLEANRL_OTHER.search(line) or tracking_url(line):
        return ()
    saved = _CLEANRL_SAVED.search(line)
    return (LogLine("info", f"model saved to {saved.group(1).strip()}"),) if saved else None


def _cleanrl_episode(line: str) -> bool:
    return "eval_episode=" not in line and _CLEANRL_EPISODE.search(line) is not None


GRAMMARS: dict[str, Grammar] = {
    "events": Grammar(_events),
    "sb3": Grammar(_sb3),
    "cleanrl": Grammar(_cleanrl, _cleanrl_episode),
    "none": Grammar(_nothing),
}
"""By the name a runner gives in `StdoutLines`."""
