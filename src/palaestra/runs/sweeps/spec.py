"""The request for a sweep: a run, the parameters to vary, the seeds, and how to choose and judge configurations.

`key=a,b,c` on the command line and the file of `--sweep` both become a `SweepSpec`. It is stored, as a `RunSpec` is.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, StrictBool, field_validator, model_validator

from palaestra.config import Section
from palaestra.config.file import parse_override, read_config_file, set_value
from palaestra.errors import ConfigError
from palaestra.runs.record import MAX_INTEGER
from palaestra.runs.spec import RunSpec, find_value_fault
from palaestra.runs.wire import JsonObject

DEFAULT_METRIC = "episode/return"
MAX_RUNS = 10_000
_MAX_SEEDS = 1000
_SEEDS = re.compile(r"(\d{1,19})(?:\.\.(\d{1,19}))?")
_OPENING, _CLOSING = "[{(", "]})"
SamplerName: TypeAlias = Literal["grid", "random", "optuna"]


class SweptParameter(Section):
    """The values that one key may take: a list, or a range of numbers."""

    values: tuple[Any, ...] = Field(default=(), max_length=1000)
    """The values to choose from; empty for a range."""
    low: int | float | None = None
    """Lowest value of a range. The range is of integers if `low`, `high` and `step` are integers."""
    high: int | float | None = None
    """Highest value of a range, included."""
    log: StrictBool = False
    """Choose uniformly on a logarithmic scale, as for learning rates."""
    step: int | float | None = None
    """Distance between two values; null: every value of the range."""

    @model_validator(mode="after")
    def _check_values(self) -> SweptParameter:
        fault = find_value_fault(list(self.values))
        if fault:
            raise ValueError(fault)
        if self.values:
            if (self.low, self.high, self.step, self.log) != (None, None, None, False):
                raise ValueError("has values and a range; give one of them")
            return self
        if self.low is None or self.high is None:
            raise ValueError("needs a list of values, or low and high")
        if not -(2**53) <= self.low <= self.high <= 2**53:
            raise ValueError(f"low {self.low} and high {self.high} are not the ends of a range")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("a logarithmic range starts above 0 and has no step")
        if self.step is not None and self.step <= 0:
            raise ValueError("step must be above 0")
        return self

    @property
    def is_integer(self) -> bool:
        """Whether a range has integers only."""
        return all(isinstance(value, int) for value in (self.low, self.high, self.step) if value is not None)

    @property
    def num_values(self) -> int | None:
        """Number of values; None for a range without steps."""
        if self.values or self.low is None or self.high is None:
            return len(self.values)
        if self.low == self.high:
            return 1
        step = self._step
        # A tenth is not exact in binary: 0.1 to 0.3 in steps of 0.1 has three values.
        return None if step is None else math.floor((self.high - self.low) / step + 1e-9) + 1

    def value(self, index: int) -> Any:
        """The value of this index, from 0, of a list or of a range with steps."""
        if self.values or self.low is None:
            return self.values[index]
        return self.low + index * (self._step or 0)

    @property
    def _step(self) -> int | float | None:
        return self.step or (1 if self.is_integer and not self.log else None)


class PruningSpec(Section):
    """When a configuration is stopped early, because others did better after as many steps."""

    method: Literal["none", "median", "hyperband"] = "none"
    """`median` stops a configuration that is worse than the median of the others, `hyperband` by successive halving."""
    every: int | None = Field(default=None, ge=1, le=MAX_INTEGER)
    """Steps between two comparisons; null: a twentieth of the steps of a run."""
    first: int = Field(default=0, ge=0, le=MAX_INTEGER)
    """Steps before the first comparison by `median`."""
    startup_trials: int = Field(default=5, ge=0, le=MAX_RUNS)
    """Configurations that `median` lets finish before it stops any."""
    reduction_factor: int = Field(default=3, ge=2, le=100)
    """One of this many configurations survives a rung of `hyperband`."""


class SweepSpec(Section):
    """The request for one sweep."""

    schema_version: Literal[1] = 1
    """Version of this document's schema."""
    base: RunSpec
    """The run that every trial changes."""
    sampler: SamplerName = "grid"
    """`grid` tries all combinations, `random` draws them, `optuna` chooses them by the results of earlier trials."""
    sampler_seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the sampler. It has nothing to do with the seeds of the runs."""
    trials: int | None = Field(default=None, ge=1, le=MAX_RUNS)
    """Number of configurations; null for a grid, which has a number of its own."""
    seeds: tuple[int, ...] = Field(default=(), max_length=_MAX_SEEDS)
    """Seeds with which every configuration is run; empty: one run with the seed of `base`."""
    parameters: dict[str, SweptParameter] = Field(default_factory=dict, max_length=100)
    """Values by dotted key of the runner's configuration."""
    metric: str = Field(default=DEFAULT_METRIC, min_length=1, max_length=200)
    """The metric that configurations are judged by: the mean of its last 100 episodes or 10 updates."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether more or less of the metric is better."""
    pruning: PruningSpec = PruningSpec()
    """When a configuration is stopped early."""
    max_unfinished: int | None = Field(default=None, ge=1, le=MAX_RUNS)
    """Runs of the sweep that are queued or running at once; null: as many as the service runs at once."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _read_seeds(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        return parse_seeds(value) if isinstance(value, str) else value

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for seed in value:
            if not 0 <= seed <= MAX_INTEGER:
                raise ValueError(f"{seed} is not a seed")
        if len(set(value)) != len(value):
            raise ValueError("a seed is given twice")
        return value

    @field_validator("parameters", mode="before")
    @classmethod
    def _read_parameters(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {key: _read_parameter(item) for key, item in value.items()}

    @model_validator(mode="after")
    def _check_size(self) -> SweepSpec:
        for key, parameter in self.parameters.items():
            if not all(key.split(".")):
                raise ValueError(f"{key!r} is not a key; write for example algorithm.learning_rate")
            if self.sampler == "grid" and not parameter.num_values:
                raise ValueError(f"{key}: a grid needs values, or a range with a step; or use sampler: random")
        if self.sampler == "grid":
            if self.trials is not None and self.trials != self.num_trials:
                raise ValueError(f"the grid has {self.num_trials:,} trials, not {self.trials:,}; leave trials out")
        elif self.trials is None:
            raise ValueError(f"sampler {self.sampler} needs a number of trials")
        elif not self.parameters:
            raise ValueError(f"sampler {self.sampler} needs parameters")
        if self.num_runs > MAX_RUNS:
            raise ValueError(f"{self.num_runs:,} runs are more than {MAX_RUNS:,}; vary less, or use sampler: random")
        return self

    @property
    def num_trials(self) -> int:
        """Number of configurations."""
        if self.sampler != "grid" and self.trials is not None:
            return self.trials
        return math.prod(parameter.num_values or 0 for parameter in self.parameters.values())

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return self.num_trials * len(self.run_seeds)

    @property
    def run_seeds(self) -> tuple[int | None, ...]:
        """The seed of each run of a configuration; None leaves the seed of `base` as it is."""
        return self.seeds or (None,)

    def build_run(self, parameters: Mapping[str, object], seed: int | None, tag: str) -> RunSpec:
        """The request for one run of a configuration."""
        config: JsonObject = copy.deepcopy(self.base.config)
        for key, value in parameters.items():
            set_value(config, key, value)
        tags = (*self.base.tags[:99], tag)
        return self.base.model_copy(
            update={"config": config, "seed": self.base.seed if seed is None else seed, "tags": tags}
        )


def _read_parameter(item: object) -> object:
    if isinstance(item, list | tuple):
        return {"values": tuple(item)}
    return item if isinstance(item, Mapping | SweptParameter) else {"values": (item,)}


def parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds of `1..5`, `1,3,7` or `1..3,10`. `ValueError` for other texts."""
    seeds: list[int] = []
    for part in text.split(","):
        match = _SEEDS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is not a seed; write for example 1..5 or 1,2,3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part.strip()} counts downwards")
        if last - first >= _MAX_SEEDS:
            raise ValueError(f"more than {_MAX_SEEDS:,} seeds")
        seeds += range(first, last + 1)
    return tuple(seeds)


def split_values(text: str) -> list[str]:
    """Split `a,b,c` at commas, except inside quotes and brackets. `ValueError` if a quote or bracket is left open."""
    parts, start, quote, depth = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and (not text[start:index].strip() or depth):
            # Within a plain word a quote is an ordinary character, as in YAML.
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth = max(0, depth - 1)
        elif character == "," and not depth:
            parts.append(text[start:index])
            start = index + 1
    if quote or depth:
        raise ValueError(f"{'a quote' if quote else 'a bracket'} is left open")
    return [*parts, text[start:]]


def parse_grid(assignments: Sequence[str]) -> tuple[list[str], dict[str, tuple[Any, ...]]]:
    """Separate `key=value` assignments from grids, `key=a,b,c`; returns the former and the values by key.

    A literal comma is written in quotes that the shell leaves alone: `note='"a,b"'`. A list is one value: `[64,64]`.
    """
    plain, grid = [], dict[str, tuple[Any, ...]]()
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        try:
            parts = split_values(text)
        except ValueError:
            parts = [text]  # the parser of YAML names the place
        if len(parts) == 1:
            plain.append(assignment)
            continue
        if not all(part.strip() for part in parts):
            remedy = f"""Write a literal comma in quotes: {key}='"a,b"'"""
            raise ConfigError(key, text, "has an empty value between two commas", remedy)
        grid[key] = tuple(parse_override(f"{key}={part.strip()}")[1] for part in parts)
    return plain, grid


def read_sweep_file(path: Path) -> JsonObject:
    """The fields of a `SweepSpec` except `base` in a YAML or JSON file."""
    data = read_config_file(path)
    if "base" in data:
        remedy = "Give the configuration and the options of the run on the command line"
        raise ConfigError("base", str(path), "is not a key of a sweep file", remedy)
    return data
