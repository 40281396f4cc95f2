"""The query language of `runs list --where`: parsed, not evaluated as Python.

    env=CartPole-v1 and return>400
    phase=succeeded and (algorithm.learning_rate<=1e-3 or tag=baseline) and not notes~diverged

A name is a field of a run (`FIELDS`), a key of its configuration or a metric; `config.NAME` and `metric.NAME` choose
one of the latter. `~` and `!~` search text without regard to case. A run that lacks a value matches only `!=` and `!~`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from palaestra.errors import ConfigError
from palaestra.runs.analysis.metric_values import read_value
from palaestra.runs.comparison import read_configuration
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunRecord
from palaestra.runs.state.event_log import duration_s
from palaestra.runs.wire import JsonObject

FIELDS: Mapping[str, Callable[[RunRecord], object]] = {
    "id": lambda run: run.run_id,
    "name": lambda run: run.name,
    "runner": lambda run: run.runner,
    "agent": lambda run: run.agent_id,
    "env": lambda run: run.env_id,
    "phase": lambda run: str(run.phase),
    "reason": lambda run: run.reason,
    "host": lambda run: run.host,
    "tag": lambda run: run.tags,
    "notes": lambda run: run.notes,
    "favorite": lambda run: run.favorite,
    "seed": lambda run: run.seed,
    "step": lambda run: run.env_step,
    "total_steps": lambda run: run.total_steps,
    "episodes": lambda run: run.episodes,
    "return": lambda run: run.episode_return,
    "attempt": lambda run: run.attempt,
    "priority": lambda run: run.priority,
    "elapsed": lambda run: None if run.started is None else duration_s(run.started, run.ended, time.time()),
    "created": lambda run: run.created,
    "size": lambda run: run.bytes_on_disk,
}
"""Fields of a run, by name. `elapsed` is in seconds, `created` a unix time, `size` in bytes."""

_TOKEN = re.compile(
    r"""\s*(?:(?P<open>\()|(?P<close>\))|(?P<operator>==|!=|<=|>=|!~|[=<>~])
    |(?P<quoted>"[^"]*"|'[^']*')|(?P<word>[^\s()=<>~!"']+))""",
    re.VERBOSE,
)
_KEYWORDS = ("and", "or", "not")
_ORDERING = ("<", "<=", ">", ">=")
_MAX_LENGTH = 2000
_MAX_DEPTH = 50
_MAX_SUGGESTED_RUNS = 20
Condition: TypeAlias = Callable[["RunValues"], bool]


class _Token(NamedTuple):
    kind: str
    text: str
    at: int
    """Position of its first character, from 1."""


class RunValues:
    """The values of one run by name; configuration and metrics are read when they are asked for."""

    def __init__(self, reader: RunReader, record: RunRecord) -> None:
        self.record, self._reader = record, reader
        self._config: JsonObject | None = None
        self._metrics: dict[str, float | None] = {}

    def get(self, name: str) -> object:
        """The value of a field, configuration key or metric; None if the run has none."""
        if name in FIELDS:
            return FIELDS[name](self.record)
        section, _, rest = name.partition(".")
        if section == "metric" and rest:
            return self._metric(rest)
        if section == "config" and rest:
            return self.config.get(rest)
        return self.config[name] if name in self.config else self._metric(name)

    @property
    def config(self) -> JsonObject:
        """The configuration by dotted key; empty if its directory is gone."""
        if self._config is None:
            run = self._reader.home.run(self.record.run_id)
            self._config = read_configuration(run, run.attempt(max(1, self.record.attempt)))
        return self._config

    def names(self) -> list[str]:
        """Everything that can be asked of this run."""
        try:
            metrics: Iterable[str] = self._reader.metric_names(self.record.run_id)
        except ConfigError:
            metrics = ()
        return [*FIELDS, *self.config, *metrics]

    def _metric(self, name: str) -> float | None:
        if name not in self._metrics:
            self._metrics[name] = read_value(self._reader, self.record.run_id, name)
        return self._metrics[name]


@dataclass(frozen=True)
class Query:
    """A parsed query."""

    matches: Condition
    names: tuple[str, ...]
    """Names that occur in it."""


def parse_query(text: str) -> Query:
    """Parse a query. `ConfigError` names the position of the first mistake."""
    if len(text) > _MAX_LENGTH:
        raise ConfigError("where", text[:50], f"is longer than {_MAX_LENGTH:,} characters")
    parser = _Parser(text)
    condition = parser.parse_or(0)
    if parser.peek().kind != "end":
        raise parser.error("expected and, or, or the end")
    return Query(condition, tuple(dict.fromkeys(parser.names)))


class _Parser:
    """Recursive descent: `or` of `and` of `not` of comparisons."""

    def __init__(self, text: str) -> None:
        self._text, self.names = text, list[str]()
        self._tokens = list(_tokenize(text))
        self._index = 0

    def peek(self) -> _Token:
        return self._tokens[self._index]

    def parse_or(self, depth: int) -> Condition:
        if depth > _MAX_DEPTH:
            raise self.error(f"more than {_MAX_DEPTH} parentheses or nots inside each other")
        parts = [self._parse_and(depth)]
        while self._accept("or"):
            parts.append(self._parse_and(depth))
        return parts[0] if len(parts) == 1 else lambda facts: any(part(facts) for part in parts)

    def _parse_and(self, depth: int) -> Condition:
        parts = [self._parse_not(depth)]
        while self._accept("and"):
            parts.append(self._parse_not(depth))
        return parts[0] if len(parts) == 1 else lambda facts: all(part(facts) for part in parts)

    def _parse_not(self, depth: int) -> Condition:
        if self._accept("not"):
            inner = self._parse_not(depth + 1)
            if depth > _MAX_DEPTH:
                raise self.error(f"more than {_MAX_DEPTH} parentheses or nots inside each other")
            return lambda facts: not inner(facts)
        if self.peek().kind == "open":
            self._index += 1
            condition = self.parse_or(depth + 1)
            if self.peek().kind != "close":
                raise self.error("expected )")
            self._index += 1
            return condition
        return self._parse_comparison()

    def _parse_comparison(self) -> Condition:
        name = self.peek()
        if name.kind not in ("word", "quoted") or (name.kind == "word" and name.text in _KEYWORDS):
            raise self.error("expected a name, such as env or return")
        self._index += 1
        operator = self.peek()
        if operator.kind != "operator":
            raise self.error(f"expected =, !=, <, <=, >, >=, ~ or !~ after {name.text}")
        self._index += 1
        value = self.peek()
        if value.kind not in ("word", "quoted") or (value.kind == "word" and value.text in _KEYWORDS):
            raise self.error(f"expected a value after {operator.text}")
        number = None if value.kind == "quoted" else _to_number(value.text)
        if operator.text in _ORDERING and number is None:
            raise self.error(f"{operator.text} needs a number")
        self._index += 1
        self.names.append(name.text)
        compare = _COMPARISONS[operator.text]
        wanted: object = value.text if number is None else number
        return lambda facts: compare(facts.get(name.text), wanted, value.text)

    def _accept(self, keyword: str) -> bool:
        token = self.peek()
        matches = token.kind == "word" and token.text.lower() == keyword
        self._index += matches
        return matches

    def error(self, problem: str) -> ConfigError:
        token = self.peek()
        where = "at the end" if token.kind == "end" else f"at character {token.at} ({token.text!r})"
        return ConfigError("where", self._text, f"{problem} {where}", "For example: env=CartPole-v1 and return>400")


def _tokenize(text: str) -> Iterator[_Token]:
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            at = position + len(text[position:]) - len(text[position:].lstrip())
            problem = "a quote is left open" if text[at] in "\"'" else f"{text[at]!r} is not expected"
            raise ConfigError("where", text, f"{problem} at character {at + 1}")
        kind = str(match.lastgroup)
        word = match[kind]
        yield _Token(kind, word[1:-1] if kind == "quoted" else word, match.start(kind) + 1)
        position = match.end()
    yield _Token("end", "", end + 1)


def _to_number(text: str) -> float | None:
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return None
    return number


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equals(value: Any, wanted: object, text: str) -> bool:
    if isinstance(value, tuple | list):
        return any(_equals(item, wanted, text) for item in value)
    if isinstance(value, bool) or value is None:
        return text.lower() == {True: "true", False: "false", None: "null"}[value]
    if _is_number(value):
        return bool(value == wanted) or (isinstance(wanted, float) and math.isnan(wanted) and math.isnan(value))
    return str(value) == text


def _contains(value: Any, wanted: object, text: str) -> bool:
    if isinstance(value, tuple | list):
        return any(_contains(item, wanted, text) for item in value)
    return value is not None and text.lower() in str(value).lower()


def _compare_numbers(compare: Callable[[float, float], bool]) -> Callable[[Any, Any, str], bool]:
    return lambda value, wanted, _: _is_number(value) and compare(float(value), wanted)


_COMPARISONS: Mapping[str, Callable[[Any, Any, str], bool]] = {
    "=": _equals,
    "==": _equals,
    "!=": lambda value, wanted, text: not _equals(value, wanted, text),
    "~": _contains,
    "!~": lambda value, wanted, text: not _contains(value, wanted, text),
    "<": _compare_numbers(lambda a, b: a < b),
    "<=": _compare_numbers(lambda a, b: a <= b),
    ">": _compare_numbers(lambda a, b: a > b),
    ">=": _compare_numbers(lambda a, b: a >= b),
}


def select_runs(
    reader: RunReader, records: Sequence[RunRecord], *, where: str = "", sort: str = "", limit: int | None = None
) -> list[RunRecord]:
    """The runs that match a query, sorted by a name: `return` largest first, `return:asc` smallest first.

    `ConfigError` for a name that no run has.
    """
    query = parse_query(where) if where.strip() else None
    name, descending = _parse_sort(sort)
    facts = [RunValues(reader, record) for record in records]
    if query is not None:
        matching = [run for run in facts if query.matches(run)]
        if not matching:
            for wanted in query.names:
                _check_known(wanted, "where", facts)
        facts = matching
    if name:
        values = {run.record.run_id: run.get(name) for run in facts}
        if facts and all(value is None for value in values.values()):
            _check_known(name, "sort", facts)
        facts = _sort(facts, values, descending)
    return [run.record for run in facts][:limit]


def _parse_sort(text: str) -> tuple[str, bool]:
    name, _, order = text.strip().rpartition(":")
    if order in ("asc", "desc") and name:
        return name, order == "desc"
    return text.strip(), True


def _sort(facts: list[RunValues], values: Mapping[str, Any], descending: bool) -> list[RunValues]:
    """Numbers by size, then texts by name, then runs without a value; equal ones stay newest first."""

    def rank(run: RunValues) -> int:
        value = values[run.record.run_id]
        if _is_number(value) and not math.isnan(value):
            return 0
        return 2 if value is None or _is_number(value) else 1

    numbers, texts, others = ([run for run in facts if rank(run) == kind] for kind in range(3))
    numbers.sort(key=lambda run: float(values[run.record.run_id]), reverse=descending)
    texts.sort(key=lambda run: str(values[run.record.run_id]), reverse=descending)
    return [*numbers, *texts, *others]


def _check_known(name: str, place: str, facts: Sequence[RunValues]) -> None:
    """Raise `ConfigError` if none of these runs has such a field, key or metric."""
    bare = re.sub(r"^(config|metric)\.", "", name)
    if name in FIELDS or any(run.get(name) is not None for run in facts):
        return
    known = dict.fromkeys(other for run in facts[:_MAX_SUGGESTED_RUNS] for other in run.names())
    if bare in known:
        return
    import difflib

    close = difflib.get_close_matches(bare, known, n=3, cutoff=0.5)
    remedy = f"Nearest: {', '.join(close)}" if close else f"Fields of every run: {', '.join(FIELDS)}"
    raise ConfigError(place, name, "no run has such a field, configuration key or metric", remedy)
