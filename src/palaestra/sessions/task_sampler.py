"""`TaskSampler` chooses the next task: uniformly, by how often each fails or has a learning signal, or by a curriculum.

It has its own random number generator and continues exactly from a saved state. `TRAINING_SEEDS` and the seeds for
evaluation, `HELD_OUT`, are disjoint.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from palaestra.config import Section
from palaestra.errors import ConfigError
from palaestra.sessions.task import TaskRequest

TRAINING_SEEDS = range(0, 1_000_000_000)
HELD_OUT = range(1_000_000_000, 2_000_000_000)


class TaskChoice(Section):
    """One task to train on."""

    task: str = Field(pattern=r"^[^/\s]+/\S+$")
    """`suite/name`, as `palaestra tasks` lists them."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The task's own parameters, such as `difficulty`."""
    weight: float = Field(default=1.0, gt=0)
    """Relative frequency of the task, before the sampler adjusts it."""

    @property
    def key(self) -> str:
        """The name of the task and its parameters in results."""
        shown = ",".join(f"{name}={value}" for name, value in sorted(self.params.items()))
        return f"{self.task}[{shown}]" if shown else self.task


class SamplerConfig(Section):
    """How the next task is chosen."""

    name: Literal["uniform", "error_weighted", "dynamic", "curriculum"] = "uniform"
    """`uniform`: by weight. `error_weighted`: tasks that fail more often are drawn more often. `dynamic`: mostly tasks
    with a success rate between `low` and `high`, where groups have successes and failures to compare. `curriculum`: the
    tasks in order, moving on when the current one succeeds often enough."""
    window: int = Field(default=64, ge=1)
    """Number of recent episodes per task over which its success rate is computed."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """`error_weighted`: share of its weight that a solved task keeps, against forgetting. `dynamic`: share that a task
    outside of `low` to `high` keeps, so that a change of its success rate is noticed."""
    low: float = Field(default=0.1, ge=0, le=1)
    """`dynamic`: lowest success rate over the window at which a task keeps its weight."""
    high: float = Field(default=0.9, ge=0, le=1)
    """`dynamic`: highest success rate over the window at which a task keeps its weight."""
    warmup: int = Field(default=16, ge=0)
    """`dynamic`: number of results of a task, at most `window`, before its success rate counts. Until then it keeps its
    weight."""
    advance_at: float = Field(default=0.8, gt=0, le=1)
    """`curriculum`: success rate over the window at which the next task begins."""
    review: float = Field(default=0.25, ge=0, lt=1)
    """`curriculum`: share of draws from tasks already passed."""
    seeds: int | None = Field(default=None, ge=1)
    """Number of seeds per task to train on. null: a new seed for every draw."""


class TaskSampler:
    """Draws tasks according to their recent results."""

    def __init__(self, choices: Sequence[TaskChoice], config: SamplerConfig, *, seed: int) -> None:
        keys = [choice.key for choice in choices]
        if not keys:
            raise ConfigError("tasks", [], "no task is given", "Name one: tasks=[{task: click_target/button}]")
        if len(set(keys)) != len(keys):
            duplicate = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError("tasks", duplicate, "is listed twice", "Give it once, with a weight")
        if config.low >= config.high:
            reason = f"is not below sampler.high, which is {config.high:g}"
            raise ConfigError("sampler.low", config.low, reason, "Give the lower success rate, then the higher")
        self.choices = tuple(choices)
        self.config = config
        self.rung = 0
        """`curriculum`: index of the current task; earlier ones are passed."""
        self._results: dict[str, deque[bool]] = {key: deque(maxlen=config.window) for key in keys}
        self._rng = random.Random(f"tasks {seed}")

    def draw(self) -> tuple[TaskChoice, TaskRequest]:
        """The next task, with a seed to train on."""
        choice = self._rng.choices(self.choices, weights=list(self.shares()))[0]
        limit = TRAINING_SEEDS.stop if self.config.seeds is None else self.config.seeds
        return choice, TaskRequest(choice.task, self._rng.randrange(limit), choice.params)

    def report(self, key: str, success: bool) -> None:
        """Record the result of an episode; failures of the session are not recorded."""
        self._results[key].append(success)
        if self.config.name == "curriculum" and self.rung < len(self.choices) - 1:
            current = self.choices[self.rung].key
            is_full = len(self._results[current]) == self.config.window
            self.rung += is_full and self._rate(current) >= self.config.advance_at

    def shares(self) -> Iterator[float]:
        """The relative frequency of each task, not normalised."""
        for place, choice in enumerate(self.choices):
            yield choice.weight * self._priority(place, choice)

    def success(self) -> Mapping[str, float]:
        """The success rate of each task over its window."""
        return {key: self._rate(key) for key, results in self._results.items() if results}

    def _rate(self, key: str) -> float:
        """Success rate over the window; 0 without results, so that a new task counts as unsolved."""
        return sum(self._results[key]) / max(1, len(self._results[key]))

    def state(self) -> dict[str, Any]:
        """The complete state as plain JSON."""
        kind, numbers, gauss = self._rng.getstate()
        return {
            "rng": [kind, list(numbers), gauss],
            "rung": self.rung,
            "records": {key: [len(results), list(results)] for key, results in self._results.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; tasks that it does not have start without results."""
        kind, numbers, gauss = state["rng"]
        self._rng.setstate((kind, tuple(numbers), gauss))
        self.rung = min(int(state["rung"]), len(self.choices) - 1)
        for key, (_, results) in state["records"].items():
            if key in self._results:
                self._results[key] = deque(results, maxlen=self.config.window)

    def _priority(self, place: int, choice: TaskChoice) -> float:
        if self.config.name == "uniform":
            return 1.0
        if self.config.name == "error_weighted":
            return max(self.config.floor, 1.0 - self._rate(choice.key))
        if self.config.name == "dynamic":
            is_new = len(self._results[choice.key]) < min(self.config.warmup, self.config.window)
            is_useful = self.config.low <= self._rate(choice.key) <= self.config.high
            return 1.0 if is_new or is_useful else self.config.floor
        if place > self.rung:
            return 0.0
        if self.rung == 0:
            return 1.0
        passed = sum(earlier.weight for earlier in self.choices[: self.rung])
        return (1.0 - self.config.review) / choice.weight if place == self.rung else self.config.review / passed


def held_out(choices: Sequence[TaskChoice], episodes: int, *, first: int = 0) -> list[tuple[TaskChoice, TaskRequest]]:
    """`episodes` tasks for evaluation, evenly over the choices, on held-out seeds; always the same."""
    if not 0 <= first <= len(HELD_OUT) - episodes:
        limit = len(HELD_OUT) - episodes
        reason = f"counts from the first held-out seed, {HELD_OUT.start}, and there are {len(HELD_OUT)} of them"
        raise ConfigError("--seed", first, reason, f"Give a number from 0 to {limit}")
    return [
        (choice := choices[number % len(choices)], TaskRequest(choice.task, HELD_OUT[first + number], choice.params))
        for number in range(episodes)
    ]
