"""Output formats: how lines of stdout become events, by kind of trainer.

Any trainer can use the format `events`: a line `@palaestra {"kind": "TrainingStep", "env_step": 2048, "metrics": {…}}`
per event, with the fields of `telemetry.event`. `schema`, `seq` and `time` are filled in, and fields with an obvious
default may be omitted. Other lines are ordinary output. A line that is marked as an event but cannot be parsed is an
error, because its metrics would be lost silently otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, get_args

from palaestra.runs.ingest.tags import TAGS
from palaestra.telemetry.event import SCHEMA, Event, LogLine, TrainingStep, UnknownEvent, parse_event

ParsedLine: TypeAlias = tuple[Event, ...] | None

_EVENT_PREFIX = "@palaestra "
_DEFAULTS = {
    **{"schema": SCHEMA, "update": 0, "episode": 0, "env_index": 0},
    **{"sha256": "", "best": False, "metric": None, "reason": "", "level": "info"},
}
_ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TRACKING_URL = re.compile(r"View run (?:.* )?at:? +(https?://\S+)")
_CLEANRL_EPISODE = re.compile(r"(?:^|[\s,])episodic_return=")
_CLEANRL_IGNORED = re.compile(r"^SPS: \d+|episodic_return=")
_CLEANRL_SAVED = re.compile(r"model saved to (\S.*)")


@dataclass(frozen=True)
class OutputFormat:
    """How one kind of trainer prints."""

    parse: Callable[[str], ParsedLine]
    """Returns the events of a line; None for ordinary output. Raises `ValueError` for a malformed event line."""
    is_episode: Callable[[str], bool] = lambda _: False
    """Whether a line announces an episode whose metrics come from another source."""


def find_tracking_url(line: str) -> str:
    """Return the URL of the run in an experiment tracker if the line contains it, else an empty string."""
    match = _TRACKING_URL.search(_ANSI_ESCAPE.sub("", line)) if "View run" in line else None
    return match.group(1) if match else ""


def _parse_events(line: str) -> ParsedLine:
    # A progress bar may precede the event on the same line.
    _, prefix, body = line.rpartition(_EVENT_PREFIX)
    body = body.strip()
    if not prefix or not body.startswith("{"):
        return None
    try:
        data = json.loads(body)
    except RecursionError:
        raise ValueError("nested too deep to be an event") from None
    event = parse_event({**_DEFAULTS, **data})
    if isinstance(event, UnknownEvent):
        if event.schema > SCHEMA:
            raise ValueError(f"schema {event.schema} is newer than {SCHEMA}")
        known = ", ".join(kind.__name__ for kind in get_args(Event))
        raise ValueError(f"unknown kind {event.kind[:80]!r} (known: {known})")
    return (event,)


def _parse_sb3(line: str) -> ParsedLine:
    events = _parse_events(line)
    if events is None:
        return None
    names = TAGS["sb3"]
    return tuple(
        replace(event, metrics={names.get(tag, tag): value for tag, value in event.metrics.items()})
        if isinstance(event, TrainingStep)
        else event
        for event in events
    )


def _parse_cleanrl(line: str) -> ParsedLine:
    if _CLEANRL_IGNORED.search(line) or find_tracking_url(line):
        return ()
    saved = _CLEANRL_SAVED.search(line)
    return (LogLine("info", f"model saved to {saved.group(1).strip()}"),) if saved else None


def _is_cleanrl_episode(line: str) -> bool:
    return "eval_episode=" not in line and _CLEANRL_EPISODE.search(line) is not None


OUTPUT_FORMATS: dict[str, OutputFormat] = {
    "events": OutputFormat(_parse_events),
    "sb3": OutputFormat(_parse_sb3),
    "cleanrl": OutputFormat(_parse_cleanrl, _is_cleanrl_episode),
    "none": OutputFormat(lambda _: ()),
}
"""Output formats by the name in `StdoutLines.format`."""
