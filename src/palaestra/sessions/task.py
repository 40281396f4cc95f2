"""What a session is asked to do, and how far it has come.

`TaskSpec` is a task with everything decided: same spec, same screen. `Progress` is the verifier's word; a session that
broke has no progress, it has an `SessionFailed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.screen import Size
from palaestra.strict_json import find_lone_surrogate

__all__ = ["MAX_SEED", "SCHEMA", "Progress", "TaskRequest", "TaskSpec"]

SCHEMA = 1
"""Version of every document on the wire."""

MAX_SEED = 2**53 - 1
"""The largest whole number that JavaScript keeps."""


@dataclass(frozen=True)
class TaskRequest:
    """What a client asks for: `suite/name`, a seed, and the task's own parameters."""

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
                raise SessionRefused("bad_request", f"{place}: {_half(broken)}.", status=422)

    @property
    def suite(self) -> str:
        """The part before the slash."""
        return self.task.partition("/")[0]

    @property
    def name(self) -> str:
        """The part after it."""
        return self.task.partition("/")[2]


@dataclass(frozen=True)
class TaskSpec:
    """A task with everything decided."""

    suite: str
    name: str
    seed: int
    params: Mapping[str, Any]
    instruction: str
    """What the agent is told, in words."""
    step_limit: int
    """Actions after which the episode is over, solved or not."""
    screen: Size
    reward_range: tuple[float, float] | None = None
    """The least and the most that a whole episode can be paid; the most is paid for a solved one and for no other.
    None: the task does not say."""

    def __post_init__(self) -> None:
        # No tokenizer and no file could take it; whoever reads it next would fail without naming the task.
        if find_lone_surrogate(self.instruction) is not None:
            text = f"the instruction of {self.suite}/{self.name}: {_half(self.instruction)}"
            raise SessionFailed("bad_instruction", text)

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        declared = {} if self.reward_range is None else {"reward_range": list(self.reward_range)}
        return {
            "task": f"{self.suite}/{self.name}", "seed": self.seed, "params": dict(self.params),
            "instruction": self.instruction, "step_limit": self.step_limit, "width": self.screen.width,
            "height": self.screen.height, **declared,
        }  # fmt: skip

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> TaskSpec:
        """The spec that `facts` describes."""
        suite, _, name = str(facts["task"]).partition("/")
        return cls(
            suite, name, int(facts["seed"]), dict(facts["params"]), str(facts["instruction"]),
            int(facts["step_limit"]), Size(int(facts["width"]), int(facts["height"])),
            _read_range(facts.get("reward_range")),
        )  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """How far a task has come, in the verifier's judgement."""

    reward: float
    """What the episode has earned so far, in all."""
    done: bool
    success: bool
    truncated: bool = False
    """Over because the step limit was reached, not because the task was."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """What the task itself has to say, such as which rows were submitted."""

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "schema": SCHEMA, "reward": self.reward, "done": self.done, "success": self.success,
            "truncated": self.truncated, "detail": dict(self.detail),
        }  # fmt: skip

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Progress:
        """The progress that `facts` describes; a document of a newer schema is refused."""
        if int(facts.get("schema", 0)) != SCHEMA:
            text = f"schema = {facts.get('schema')!r}: this version understands {SCHEMA}."
            raise SessionRefused("bad_schema", text, status=502)
        return cls(
            float(facts["reward"]), bool(facts["done"]), bool(facts["success"]), bool(facts.get("truncated", False)),
            dict(facts.get("detail", {})),
        )  # fmt: skip


def _read_range(given: Any) -> tuple[float, float] | None:
    """A declared reward range; ValueError or TypeError when it is none."""
    if given is None:
        return None
    low, high = (float(bound) for bound in given)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"reward_range = {given!r}: must be two finite numbers, the smaller one first")
    return low, high


def _half(text: str) -> str:
    return f"the text {text[:200]!r} holds half of a surrogate pair, which UTF-8 cannot carry"
