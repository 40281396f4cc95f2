"""The seven kinds of events of a run, and their encoding as lines of strict JSON.

Every record has `schema`, `kind`, `seq` and `time` beside the fields of its event. An unknown kind or a newer schema is
read as `UnknownEvent`; a line that is not a record raises `ValueError`. NaN and infinities are written as
`strict_json.json_number` does and read as floats where the schema says float; inside `Belief.beliefs`, where a string
may be a string, they stay strings. The bare words that `json.dumps` writes are read, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import index
from sys import intern
from typing import Any, NamedTuple, TypeAlias, get_args

from palaestra.strict_json import json_number, read_number, replace_non_finite

SCHEMA = 1
"""Increases when a field changes its meaning or is removed; not for a new kind or an added field."""


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One update of the learner. docs/metrics.md explains each metric."""

    update: int
    env_step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """One ended episode, with the unscaled return of the environment."""

    env_step: int
    episode: int
    env_index: int
    episode_return: float
    length: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint that was written durably. `metric` is the value that decided `best`, if any."""

    update: int
    env_step: int
    path: str
    sha256: str
    best: bool = False
    metric: float | None = None


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The run entered another phase."""

    phase: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A message; `level` is a level name of `logging` in lower case."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Belief:
    """The beliefs of a BDI agent, as a tree of plain JSON values."""

    agent: str
    beliefs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """An image or video, stored next to the journal."""

    env_step: int
    path: str


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """A record of a later version, kept unchanged."""

    schema: int
    kind: str
    fields: dict[str, Any]


Event: TypeAlias = TrainingStep | EpisodeSummary | CheckpointSaved | PhaseChanged | LogLine | Belief | Frame


class Record(NamedTuple):
    """One line of a journal: an event, its sequence number and the Unix time at which it was written."""

    seq: int
    time: float
    event: Event | UnknownEvent


def encode(event: Event | UnknownEvent, seq: int, time: float) -> str:
    """The event as one line of strict ASCII JSON, without the newline."""
    if type(event) is EpisodeSummary:
        # Thousands per second: this template takes a quarter of the time of the general encoder.
        return (
            f'{{"schema":{SCHEMA},"kind":"EpisodeSummary","seq":{seq:d},"time":{_encode_number(time)}'
            f',"env_step":{event.env_step:d},"episode":{event.episode:d},"env_index":{event.env_index:d}'
            f',"episode_return":{_encode_number(event.episode_return)},"length":{event.length:d}}}'
        )
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": type(event).__name__,
        "seq": index(seq),
        "time": json_number(time),
    }
    if isinstance(event, UnknownEvent):
        return _dumps({**replace_non_finite(event.fields), **head, "schema": event.schema, "kind": event.kind})
    for name, field in _FIELDS[type(event)].items():
        head[name] = field.write(getattr(event, name))
    return _dumps(head)


def decode(line: str | bytes) -> Record:
    """The record of a line; `ValueError` if it has none."""
    text = line if isinstance(line, str) else line.decode("utf-8")
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep to be a record") from None
    if type(data) is not dict:
        raise ValueError(f"a record is a JSON object, not {type(data).__name__}")
    try:
        seq, time = _read_int(data.pop("seq")), read_number(data.pop("time"))
    except KeyError as missing:
        raise ValueError(f"a record without {missing}") from None
    if seq < 1 or not math.isfinite(time):
        raise ValueError(f"seq {seq} must be at least 1 and time {time} a finite number")
    return Record(seq, time, parse_event(data))


def parse_event(data: dict[str, Any]) -> Event | UnknownEvent:
    """The event of a JSON object with `schema` and `kind`; `ValueError` if it is not an event."""
    fields = dict(data)
    try:
        schema, kind = _read_int(fields.pop("schema")), _read_text(fields.pop("kind"))
        if schema < 1:
            raise ValueError(f"schema {schema} must be at least 1")
        known = _KINDS.get(kind)
        if known is None or schema > SCHEMA:
            return UnknownEvent(schema, kind, fields)
        return known(**{name: field.read(fields[name]) for name, field in _FIELDS[known].items()})
    except KeyError as missing:
        raise ValueError(f"a record without {missing}") from None


_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=str)
_dumps = _encoder.encode


def _encode_number(value: float) -> str:
    number = json_number(value)
    return f'"{number}"' if isinstance(number, str) else repr(number)


def _write_metrics(metrics: dict[str, float]) -> dict[str, float | str]:
    return {str(name): json_number(value) for name, value in metrics.items()}


def _write_optional(value: float | None) -> float | str | None:
    return None if value is None else json_number(value)


def _read_int(value: Any) -> int:
    if type(value) is int:
        return value
    # Some writers have only floats and write 2048.0 for a count.
    if type(value) is float and value.is_integer():
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _read_optional_float(value: Any) -> float | None:
    return None if value is None else read_number(value)


def _read_text(value: Any) -> str:
    if type(value) is str:
        return value
    raise ValueError(f"{value!r} is not text")


def _read_flag(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise ValueError(f"{value!r} is neither true nor false")


def _read_tree(value: Any) -> dict[str, Any]:
    if type(value) is dict:
        return value
    raise ValueError(f"{value!r} is not an object")


def _read_metrics(value: Any) -> dict[str, float]:
    metrics = _read_tree(value)
    try:
        # Interned, because every update has the same names and some readers keep thousands of updates.
        return {intern(name): read_number(item) for name, item in metrics.items()}
    except ValueError:
        for name, item in metrics.items():
            try:
                read_number(item)
            except ValueError as error:
                raise ValueError(f"metrics.{name[:80]}: {error}") from None
        raise


class _Field(NamedTuple):
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


# By annotation. `dict[str, float]` are metrics, `dict[str, Any]` is a tree of JSON values.
_FIELD_TYPES = {
    "int": _Field(index, _read_int),
    "float": _Field(json_number, read_number),
    "float | None": _Field(_write_optional, _read_optional_float),
    "str": _Field(str, _read_text),
    "bool": _Field(bool, _read_flag),
    "dict[str, float]": _Field(_write_metrics, _read_metrics),
    "dict[str, Any]": _Field(replace_non_finite, _read_tree),
}
_FIELDS: dict[type[Event], dict[str, _Field]] = {
    kind: {field.name: _FIELD_TYPES[str(field.type)] for field in fields(kind)} for kind in get_args(Event)
}
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in _FIELDS}
