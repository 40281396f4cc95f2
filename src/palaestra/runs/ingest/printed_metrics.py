"""Finds metrics in the text that a program prints for people: pairs, tables, progress bars and JSON lines.

`RULES` describes what is recognised, with examples; `palaestra runs start --explain` prints them and a test checks
them. Names stay as they are printed, with `_` for a space. Text in which no rule finds a number is ordinary output.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from palaestra.runs.wire import JsonObject
from palaestra.strict_json import read_number
from palaestra.telemetry.event import TrainingStep

MAX_TEXT = 2_000
"""Longer lines are searched for JSON only."""
MAX_NAMES = 2_000
"""Names of metrics that are found in the output of one program. Further names are ignored."""
_MAX_PAIRS = 200
_MAX_KEYS = 10_000
_MAX_NAME = 100
_MAX_DEPTH = 5
_MAX_STEP = 2**63 - 1


class Rule(NamedTuple):
    """One way in which programs print metrics."""

    title: str
    example: str
    step: int
    metrics: Mapping[str, float]


_SB3_TABLE = """-----------------------------
| rollout/           |      |
|    ep_rew_mean     | 22.4 |
| time/              |      |
|    total_timesteps | 2048 |
-----------------------------"""
_JSON = '{"step": 100, "loss": 0.25, "eval": {"acc": 0.9}}'
_KERAS = "Epoch 2/9\n375/375 [=====] - 2s 4ms/step - loss: 0.25 - accuracy: 0.92"
_BAR = "45%|####5     | 45/100 [00:01<00:01, 34.50it/s, loss=0.25]"
_RESULT = "Test set: Average loss: 0.05, Accuracy: 98/100 (98%)"
_RESULTS = {"Test_set/Average_loss": 0.05, "Test_set/Accuracy": 0.98}

RULES: tuple[Rule, ...] = (
    Rule("a JSON object per line", _JSON, 100, {"loss": 0.25, "eval/acc": 0.9}),
    Rule("key=value", "global_step=128, episodic_return=[21.]", 128, {"episodic_return": 21.0}),
    Rule("key: value", "Epoch: 3 | loss: 0.41 | val acc: 87.5%", 3, {"loss": 0.41, "val_acc": 87.5}),
    Rule("words after a step", "iter 100: loss 2.31, time 12.5ms", 100, {"loss": 2.31, "time": 12.5}),
    Rule("a position in an epoch", "Train Epoch: 2 [640/6000 (11%)] Loss: 0.31", 6640, {"Loss": 0.31}),
    Rule("a result", _RESULT, 1, _RESULTS),
    Rule("a progress bar", _BAR, 45, {"loss": 0.25}),
    Rule("an epoch of Keras", _KERAS, 750, {"loss": 0.25, "accuracy": 0.92}),
    Rule("a table with two columns, as of Stable-Baselines3", _SB3_TABLE, 2048, {"rollout/ep_rew_mean": 22.4}),
)
"""What is recognised. Each example is parsed as it is shown."""

STEP_NAMES: tuple[frozenset[str], ...] = (
    frozenset({"global_step", "total_timesteps", "num_timesteps", "timesteps", "timestep", "total_steps", "env_steps",
               "env_step", "total_env_steps", "environment_steps", "frames", "total_frames"}),
    frozenset({"step", "iter", "iteration", "it", "update", "n_iter", "training_iteration", "round", "generation"}),
    frozenset({"batch", "minibatch"}),
    frozenset({"episode", "ep"}),
    frozenset({"epoch"}),
)  # fmt: skip
"""Names of the step, the best first."""

_NOT_A_STEP = frozenset("per max min num number every warmup n each best last_best size".split())
_STOPWORDS = frozenset("with and in at of is the to for a after".split())
_IGNORED = frozenset("eta pid port line seed version rank local_rank world_size exit_code".split())
_TIMES = frozenset("time timestamp ts wall_time created datetime date _timestamp _runtime _wandb".split())
_LEVELS = r"(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)"

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]")
_LOG_PREFIX = re.compile(
    r"^\s*(?:[\[(]?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?[\])]?[\s,:-]*)?"
    rf"(?:[\[(]?{_LEVELS}[\])]?[\s:-]+)?"
)
_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
    r"|nan\b|inf(?:inity)?\b)"
)
_WORD = r"[A-Za-z_][\w@/.-]{0,59}"
_PAIR = re.compile(
    rf"(?<![\w.@/-])['\"]?(?P<key>{_WORD}(?: {_WORD}){{0,3}})['\"]?(?P<sep>\s*[:=]\s*|\s{{1,8}})"
    rf"(?:[A-Za-z_][\w.]{{0,20}}\()?\[?\s*(?P<value>{_NUMBER})(?P<over>\s?/\s?\d+)?"
    r"(?:\s?(?:%|ms\b|us\b|s\b|sec\b|secs\b|seconds\b|it/s\b|x\b))?(?=$|[\s,;|)\]}]|:(?:\s|$))",
    re.IGNORECASE,
)
_EPOCH = re.compile(r"\bepoch\b[\s:#=(\[]{0,6}(\d{1,9})(?![\d.])", re.IGNORECASE)
_PROGRESS = re.compile(
    r"(?:^|[\[|])\s*(?P<at>\d{1,15})\s*/\s*(?P<of>\d{1,15})(?=\s*[\[\](|\u2501]|\s+(?:batches|steps|iterations)\b)"
)
_PHASE = re.compile(r"^[^\w'\"{]*([A-Za-z][A-Za-z ]{1,30}):\s+(?!(?:nan|inf)\b)(?=[A-Za-z])", re.IGNORECASE)
_HINT = re.compile(r"[:=]|(?:iter|step|epoch|episode|update|round|generation|batch|\bit|\bep)[\w\]]*\s", re.IGNORECASE)
"""Every line with a metric matches it, and most lines of prose do not."""
_ROW = re.compile(r"^\s*[|\u2502]\s*([^|\u2502]{1,120}?)\s*[|\u2502]\s*([^|\u2502]{0,60}?)\s*[|\u2502]\s*$")
_BORDER = re.compile(r"^[\s+|\u2500-\u257f]*[-=_\u2500-\u257f]{4,}[-=_+|\s\u2500-\u257f]*$")
_DIGIT = re.compile(r"\d|\bnan\b|\binf", re.IGNORECASE)
_WHOLE = re.compile(rf"\s*({_NUMBER})\s*%?\s*", re.IGNORECASE)


class _Pair(NamedTuple):
    """A name and a number in a line."""

    name: str
    value: float
    total: int | None
    """The number after a slash."""
    has_sign: bool
    """There is `:` or `=` between them."""
    is_decimal: bool


class PrintedMetrics:
    """Reads the lines of one output in their order. `state` is what another instance continues from."""

    def __init__(self, state: JsonObject | None = None) -> None:
        state = state or {}
        self._step: int | None = state.get("step")
        self._lines = int(state.get("lines", 0))
        self._epoch: int | None = state.get("epoch")
        self._epoch_zero = bool(state.get("epoch_zero", False))
        self._length = int(state.get("length", 0))
        """Positions per epoch, or length of the progress bar."""
        self._position, self._base = int(state.get("position", 0)), int(state.get("base", 0))
        self._section = str(state.get("section", ""))
        self._once: dict[str, JsonObject] = dict(state.get("once", {}))
        """Lines without a step, by their first name, while no step is known: a count, and values to hold back."""
        self._has_metrics = bool(state.get("has_metrics", False))
        self._rows: dict[str, float] = {name: float(value) for name, value in state.get("rows", {}).items()}
        self._names: set[str] = set()

    def state(self) -> JsonObject:
        """The state as JSON data."""
        table = {"section": self._section, "rows": {name: _storable(value) for name, value in self._rows.items()}}
        return {
            "step": self._step,
            "lines": self._lines,
            "epoch": self._epoch,
            "epoch_zero": self._epoch_zero,
            "length": self._length,
            "position": self._position,
            "base": self._base,
            "has_metrics": self._has_metrics,
            **({"once": self._once} if self._once else {}),
            **(table if self._rows or self._section else {}),
        }

    def parse_json(self, line: str) -> TrainingStep | None:
        """The metrics of a line that is a JSON object, or ends with one; None if it has no number."""
        start = line.find("{")
        if start < 0 or not line.rstrip().endswith("}") or '"' not in line:
            return None
        try:
            data = json.loads(line[start:])
        except (ValueError, RecursionError):
            return None
        numbers = dict(islice(_flatten(data), _MAX_KEYS)) if isinstance(data, dict) else {}
        name = _find_step(numbers)
        step = None if name is None else int(numbers.pop(name))
        return self._make_step(step, numbers)

    def parse(self, line: str) -> list[TrainingStep]:
        """The metrics of a line of text; a table is complete with the line after it."""
        if len(line) > MAX_TEXT:
            return self.flush()
        line = _ANSI.sub("", line)
        row = _ROW.match(line)
        if row is not None and self._add_row(row[1], row[2]):
            return []
        steps = self.flush()
        if _HINT.search(line) is None or _DIGIT.search(line) is None or _BORDER.match(line):
            return steps
        return [*steps, *self._parse_pairs(_LOG_PREFIX.sub("", line, count=1))]

    def finish(self) -> list[TrainingStep]:
        """Complete a table, and of a program that has no other metrics return what it printed once."""
        steps = self.flush()
        if self._has_metrics:
            return steps
        held = [entry["held"] for entry in self._once.values() if "held" in entry]
        self._once = {}
        steps += [step for values in held if (step := self._make_step(1, _restore(values))) is not None]
        return steps

    def flush(self) -> list[TrainingStep]:
        """Complete a table."""
        rows, self._rows, self._section = self._rows, {}, ""
        if not rows:
            return []
        name = _find_step(rows)
        step = self._make_step(None if name is None else int(rows.pop(name)), rows)
        return [] if step is None else [step]

    def _add_row(self, name: str, text: str) -> bool:
        if not text and name.endswith("/"):
            self._section = name
            return True
        number = _WHOLE.fullmatch(text)
        if number is None:
            # A row with text, such as the name of an environment.
            return bool(self._rows or self._section)
        if len(self._rows) < _MAX_PAIRS:
            self._rows[f"{self._section}{_clean(name)}"] = _to_float(number[1])
        return True

    def _parse_pairs(self, line: str) -> list[TrainingStep]:
        phase, pairs = "", list[_Pair]()
        match = _PHASE.match(line)
        if match is not None and _step_rank(match[1]) is None:
            phase = f"{_clean(match[1])}/"
        for pair_match in _PAIR.finditer(line):
            pairs.append(_read_pair(pair_match))
            if len(pairs) == _MAX_PAIRS:
                break
        ranked = [(rank, pair) for pair in pairs if (rank := _rank(pair)) is not None]
        step, used = self._find_position(line, ranked, has_pairs=bool(pairs))
        if not ranked:
            # Without a word for the step, only marked pairs count, and only beside a measurement.
            pairs = [pair for pair in pairs if pair.has_sign]
            if step is None and not any(pair.is_decimal or pair.total for pair in pairs):
                return []
        metrics: dict[str, float] = {}
        for pair in pairs:
            if pair not in used and pair.name.lower() not in _IGNORED:
                ratio = pair.value / pair.total if pair.total else pair.value
                metrics.setdefault(f"{phase}{pair.name}", ratio)
        if not metrics:
            self._step = self._step if step is None else step
            return []
        if step is None and self._step is None:
            return self._hold_back(metrics)
        made = self._make_step(step, metrics)
        return [] if made is None else [made]

    def _hold_back(self, metrics: dict[str, float]) -> list[TrainingStep]:
        """Hold back a line without a step until it is repeated: what is printed once is mostly a setting."""
        name = next(iter(metrics))
        entry = self._once.get(name)
        if entry is None:
            if len(self._once) < _MAX_PAIRS:
                held = {key: _storable(value) for key, value in metrics.items()}
                self._once[name] = {"count": 1, "held": held}
            return []
        entry["count"] += 1
        lines = [(1, _restore(entry.pop("held", {}))), (entry["count"], metrics)]
        steps = [self._make_step(count, values) for count, values in lines]
        self._step = None
        return [step for step in steps if step is not None]

    def _find_position(
        self, line: str, ranked: list[tuple[int, _Pair]], *, has_pairs: bool
    ) -> tuple[int | None, list[_Pair]]:
        """The step of a line, and the pairs that say it."""
        epoch_rank = len(STEP_NAMES) - 1
        epochs = [pair for rank, pair in ranked if rank == epoch_rank]
        bracketed = _EPOCH.search(line) if not epochs else None
        epoch = int(epochs[0].value) if epochs else int(bracketed[1]) if bracketed else None
        if epoch is not None:
            self._epoch_zero = self._epoch_zero or (self._epoch is None and epoch == 0)
            self._epoch = epoch
        best = min((one for one in ranked if one[0] != epoch_rank), default=None, key=lambda one: one[0])
        if best is not None:
            rank, pair = best
            of = pair.total
            # `Step [100/600]` and `batch 3` count within an epoch, `global_step` and `iter` count on.
            if self._epoch is not None and (rank == 2 or (rank == 1 and of is not None and epoch is not None)):
                return self._in_epoch(int(pair.value), of or self._length), [pair, *epochs]
            return int(pair.value), [pair]
        # A bar without numbers beside it may be a download.
        progress = _PROGRESS.search(line) if has_pairs else None
        if progress is not None and 1 < int(progress["of"]) >= int(progress["at"]):
            return self._in_epoch(int(progress["at"]), int(progress["of"])), epochs
        if epoch is None:
            return None, []
        start = (epoch - (0 if self._epoch_zero else 1)) * self._length
        return (max(self._step or 0, start) if self._length else epoch), epochs

    def _in_epoch(self, position: int, length: int) -> int:
        if self._epoch is not None:
            self._length = max(length, self._length) if length < self._position else length
            return max(0, self._epoch - (0 if self._epoch_zero else 1)) * self._length + position
        if position < self._position and length == self._length:
            # The same progress bar begins again.
            self._base += length
        self._position, self._length = position, length
        return self._base + position

    def _make_step(self, step: int | None, metrics: Mapping[str, float]) -> TrainingStep | None:
        kept = {}
        for name, value in metrics.items():
            if name in self._names or len(self._names) < MAX_NAMES:
                self._names.add(name)
                kept[name] = value
        if not kept:
            return None
        self._has_metrics = True
        if step is None:
            # A line without a step belongs to the last one; a program that prints none has its lines counted.
            self._lines += self._step is None
            return TrainingStep(0, self._lines if self._step is None else self._step, kept)
        self._step = min(step, _MAX_STEP)
        return TrainingStep(0, self._step, kept)


def _read_pair(match: re.Match[str]) -> _Pair:
    words = match["key"].split(" ")
    while len(words) > 1 and words[0].lower() in _STOPWORDS:
        words.pop(0)
    text, over = match["value"], match["over"]
    decimal = any(character in text.lower() for character in ".en") or "%" in match[0]
    return _Pair(
        _clean(" ".join(words)),
        _to_float(text),
        None if over is None else int(over.strip(" /")),
        match["sep"].strip() != "",
        decimal,
    )


def _clean(name: str) -> str:
    return re.sub(r"\s+", "_", name.strip().rstrip(".:"))[:_MAX_NAME]


def _to_float(text: str) -> float:
    return float(text.replace(",", ""))


def _storable(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _restore(values: Mapping[str, float | str]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _rank(pair: _Pair) -> int | None:
    is_count = not pair.is_decimal and 0 <= pair.value <= _MAX_STEP
    return _step_rank(pair.name) if is_count else None


def _step_rank(name: str) -> int | None:
    """How well a name says the step: 0 is best; None if it is no name of a step."""
    last = name.lower().rpartition("/")[2].replace(" ", "_").replace("-", "_")
    for rank, names in enumerate(STEP_NAMES):
        if last in names:
            return rank
    *before, word = last.split("_")
    if before and not _NOT_A_STEP.intersection(before):
        return next((rank for rank, names in enumerate(STEP_NAMES) if rank and word in names), None)
    return None


def _find_step(numbers: Mapping[str, float]) -> str | None:
    """The name of the step among numbers; the first of the best."""
    ranked = [
        (rank, order, name)
        for order, (name, value) in enumerate(numbers.items())
        if (rank := _step_rank(name.removeprefix("_"))) is not None and value >= 0 and float(value).is_integer()
    ]
    return min(ranked)[2] if ranked else None


def _flatten(data: JsonObject, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    """Numbers of nested data as `section/name`; `metrics` and `data` are no sections."""
    for key, value in data.items():
        if not isinstance(key, str) or (not prefix and key.lower() in _TIMES):
            continue
        name = f"{prefix}{key}"[:_MAX_NAME]
        if isinstance(value, dict):
            if depth < _MAX_DEPTH:
                inner = "" if not prefix and key in ("metrics", "data") else f"{name}/"
                yield from _flatten(value, inner, depth + 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value) if abs(value) < 1e300 else math.copysign(math.inf, value)
        elif value in ("NaN", "Infinity", "-Infinity"):
            yield name, read_number(value)
