"""Tasks: what a client requests, the resolved specification, and the verifier's judgement.

The same `TaskSpec` always gives the same screen. A session that broke has no `TaskProgress`; it raises `SessionFailed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.screen import Size
from palaestra.strict_json import find_lone_surrogate

SCHEMA = 1
"""Version of every document on the wire."""

MAX_SEED = 2**53 - 1
"""The largest integer that JavaScript represents exactly."""


@dataclass(frozen=True)
class TaskRequest:
    """A request for a task: `suite/name`, a seed, and parameters of the task."""

    task: str
    seed: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        suite, slash, name = self.task.partition("/") if isinstance(self.task, str) else ("", "", "")
        if not (suite and slash and name):
            raise SessionRefused("bad_request", f"task = {self.task!r}: is not of the form suite/name.", status=422)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            text = f"seed = {self.seed!r}: must be a whole number from 0 to 2^53 - 1."
            raise SessionRefused("bad_request", text, status=422)
        if not isinstance(self.params, Mapping):
            raise SessionRefused("bad_request", f"params = {self.params!r}: is not a mapping.", status=422)
        for place, value in (("task", self.task), ("params", self.params)):
            if (broken := find_lone_surrogate(value)) is not None:
                raise SessionRefused("bad_request", f"{place}: {_surrogate_message(broken)}.", status=422)

    @property
    def suite(self) -> str:
        """The part before the slash."""
        return self.task.partition("/")[0]

    @property
    def name(self) -> str:
        """The part after it."""
        return self.task.partition("/")[2]

    def resolve(
        self, instruction: str, step_limit: int, screen: Size, reward_range: tuple[float, float] | None
    ) -> TaskSpec:
        """The specification of the requested task."""
        params = dict(self.params)
        return TaskSpec(self.suite, self.name, self.seed, params, instruction, step_limit, screen, reward_range)


@dataclass(frozen=True)
class TaskSpec:
    """A resolved task."""

    suite: str
    name: str
    seed: int
    params: Mapping[str, Any]
    instruction: str
    """The instruction for the agent."""
    step_limit: int
    """Maximum number of actions in an episode."""
    screen: Size
    reward_range: tuple[float, float] | None = None
    """The lowest and the highest reward of an episode; the highest only for a solved one. None: not declared."""

    def __post_init__(self) -> None:
        # No tokenizer and no file accepts it; later code would fail without naming the task.
        if find_lone_surrogate(self.instruction) is not None:
            text = f"the instruction of {self.suite}/{self.name}: {_surrogate_message(self.instruction)}"
            raise SessionFailed("bad_instruction", text)

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        declared = {} if self.reward_range is None else {"reward_range": list(self.reward_range)}
        return {
            "task": f"{self.suite}/{self.name}",
            "seed": self.seed,
            "params": dict(self.params),
            "instruction": self.instruction,
            "step_limit": self.step_limit,
            "width": self.screen.width,
            "height": self.screen.height,
            **declared,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> TaskSpec:
        """The spec from the JSON of `facts`."""
        suite, _, name = str(facts["task"]).partition("/")
        return cls(
            suite,
            name,
            int(facts["seed"]),
            dict(facts["params"]),
            str(facts["instruction"]),
            int(facts["step_limit"]),
            Size(int(facts["width"]), int(facts["height"])),
            _read_range(facts.get("reward_range")),
        )


@dataclass(frozen=True)
class TaskProgress:
    """The verifier's judgement of an episode so far."""

    reward: float
    """The total reward of the episode so far."""
    done: bool
    success: bool
    truncated: bool = False
    """Whether the episode ended at the step limit."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Details of the task, such as which rows were submitted."""

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "schema": SCHEMA,
            "reward": self.reward,
            "done": self.done,
            "success": self.success,
            "truncated": self.truncated,
            "detail": dict(self.detail),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> TaskProgress:
        """The progress from the JSON of `facts`; a document of another schema is refused."""
        if int(facts.get("schema", 0)) != SCHEMA:
            text = f"schema = {facts.get('schema')!r}: this version understands {SCHEMA}."
            raise SessionRefused("bad_schema", text, status=502)
        return cls(
            float(facts["reward"]),
            bool(facts["done"]),
            bool(facts["success"]),
            bool(facts.get("truncated", False)),
            dict(facts.get("detail", {})),
        )


def _read_range(given: Any) -> tuple[float, float] | None:
    """A declared reward range; ValueError or TypeError when it is invalid."""
    if given is None:
        return None
    low, high = (float(bound) for bound in given)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"reward_range = {given!r}: must be two finite numbers, the smaller one first")
    return low, high


def _surrogate_message(text: str) -> str:
    return f"the text {text[:200]!r} holds half of a surrogate pair, which UTF-8 cannot encode"
