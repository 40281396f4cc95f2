"""How other trainers write metrics: tags of event files and lines of output, and what they are called here.

docs/metrics.md explains our names; a tag is in a table only if it means the same. All others keep their own name.
`provenance` is the way back, so that every curve can say where its numbers come from.

Any trainer can use the output format `events`: a line `@palaestra {"kind": "TrainingStep", "env_step": 2048, "metrics":
{…}}` per event, with the fields of `telemetry.event`. `schema`, `seq` and `time` are filled in, and fields with an
obvious default may be omitted. Other lines are ordinary output. A line that is marked as an event but cannot be parsed
is an error, because its metrics would be lost silently otherwise.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias, get_args

from palaestra.runs.runner import EventFiles, JournalFile, Source, StdoutLines
from palaestra.telemetry.event import SCHEMA, EpisodeSummary, Event, LogLine, TrainingStep, UnknownEvent, parse_event

ParsedLine: TypeAlias = tuple[Event, ...] | None

EVENT_PREFIX = "@palaestra "
_DEFAULTS = {
    **{"schema": SCHEMA, "update": 0, "episode": 0, "env_index": 0},
    **{"sha256": "", "best": False, "metric": None, "reason": "", "level": "info"},
}
_ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TRACKING_URL = re.compile(r"View run (?:.* )?at:? +(https?://\S+)")
_CLEANRL_EPISODE = re.compile(r"(?:^|[\s,])episodic_return=")
_CLEANRL_IGNORED = re.compile(r"^SPS: \d+|episodic_return=")
_CLEANRL_SAVED = re.compile(r"model saved to (\S.*)")

TAGS: dict[str, dict[str, str]] = {
    "cleanrl": {
        "charts/learning_rate": "learning_rate",
        "charts/SPS": "steps_per_second",
        "losses/value_loss": "value_loss",
        "losses/policy_loss": "policy_loss",
        "losses/entropy": "entropy",
        "losses/approx_kl": "approx_kl",
        "losses/clipfrac": "clip_fraction",
        "losses/explained_variance": "explained_variance",
        "losses/loss": "loss",
    },
    "sb3": {
        "rollout/ep_rew_mean": "episode_return",
        "rollout/ep_len_mean": "episode_length",
        "rollout/success_rate": "success_rate",
        "time/fps": "steps_per_second",
        "time/episodes": "episodes",
        "train/approx_kl": "approx_kl",
        "train/clip_fraction": "clip_fraction",
        "train/clip_range": "clip_range",
        "train/explained_variance": "explained_variance",
        "train/learning_rate": "learning_rate",
        "train/loss": "loss",
        "train/policy_gradient_loss": "policy_loss",
        "train/value_loss": "value_loss",
        "eval/mean_reward": "eval_return",
        "eval/mean_ep_length": "eval_length",
    },
    "corl": {
        "d4rl_normalized_score": "eval_normalized_score",
        "eval_score": "eval_return",
        "eval/reward_std": "eval_return_std",
        "eval/success_rate": "eval_success_rate",
        "batch_entropy": "entropy",
        "train_loss": "loss",
    },
    "script": {},
    "none": {},
}
"""Our metric name by tag, for each table name used in `EventFiles.tags`."""


class EpisodeTags(NamedTuple):
    """The tags of two values that are written one after the other at the end of every episode."""

    episode_return: str
    length: str


EPISODE_TAGS: dict[str, EpisodeTags] = dict.fromkeys(
    ("cleanrl", "script"), EpisodeTags("charts/episodic_return", "charts/episodic_length")
)
"""Tag tables of trainers that write single episodes."""


def provenance(sources: tuple[Source, ...], name: str) -> str:
    """Return the source of a metric: `journal`, or the kind of source and the tag there."""
    if not sources or any(isinstance(source, JournalFile) for source in sources):
        return "journal"
    for source in sources:
        if isinstance(source, EventFiles):
            return f"tensorboard:{_find_tag(source.tags, name)}"
    output_format = next((source.format for source in sources if isinstance(source, StdoutLines)), "none")
    return f"stdout:{_find_tag(output_format, name)}"


def _find_tag(table: str, name: str) -> str:
    episodes = EPISODE_TAGS.get(table)
    if episodes and name in ("episode/return", "episode/length"):
        return episodes.episode_return if name == "episode/return" else episodes.length
    return next((tag for tag, metric in TAGS.get(table, {}).items() if metric == name), name)


class PendingEpisode(NamedTuple):
    """A return whose length has not been read yet."""

    step: int
    episode_return: float
    time: float


class EpisodePairing:
    """Combines returns and lengths into episodes. A return without a length becomes an episode of length 0."""

    def __init__(self, tags: EpisodeTags, pending: PendingEpisode | None = None) -> None:
        self._tags = tags
        self.pending = pending

    def add(self, tag: str, step: int, value: float, time: float) -> list[tuple[EpisodeSummary, float]] | None:
        """Return the episodes that this value completes; None when the tag is not an episode's."""
        if tag == self._tags.episode_return:
            completed = self.flush()
            self.pending = PendingEpisode(step, value, time)
            return completed
        if tag != self._tags.length:
            return None
        if self.pending is None or self.pending.step != step:
            return self.flush()
        return self.flush(int(value) if math.isfinite(value) else 0)

    def flush(self, length: int = 0) -> list[tuple[EpisodeSummary, float]]:
        """Complete the pending episode, if any, with this length."""
        pending, self.pending = self.pending, None
        if pending is None:
            return []
        return [(EpisodeSummary(pending.step, 0, 0, pending.episode_return, length), pending.time)]


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
    _, prefix, body = line.rpartition(EVENT_PREFIX)
    body = body.strip()
    if not prefix or not body.startswith("{"):
        return None
    return (parse_event_line(body),)


def parse_event_line(text: str) -> Event:
    """The event of a JSON object without the prefix; fields with an obvious default may be missing. `ValueError`."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep to be an event") from None
    if not isinstance(data, dict):
        raise ValueError(f"an event is a JSON object, not {type(data).__name__}")
    event = parse_event({**_DEFAULTS, **data})
    if isinstance(event, UnknownEvent):
        if event.schema > SCHEMA:
            raise ValueError(f"schema {event.schema} is newer than {SCHEMA}")
        known = ", ".join(kind.__name__ for kind in get_args(Event))
        raise ValueError(f"unknown kind {event.kind[:80]!r} (known: {known})")
    return event


def _parse_tagged_events(line: str, table: str) -> ParsedLine:
    """Events whose metrics have the tags of a table."""
    events = _parse_events(line)
    if events is None:
        return None
    names = TAGS[table]
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
    "corl": OutputFormat(partial(_parse_tagged_events, table="corl")),
    "sb3": OutputFormat(partial(_parse_tagged_events, table="sb3")),
    "cleanrl": OutputFormat(_parse_cleanrl, _is_cleanrl_episode),
    "none": OutputFormat(lambda _: ()),
}
"""Output formats by the name in `StdoutLines.format`."""
