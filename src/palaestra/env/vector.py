"""The environment seam: N copies of one task, stepped together, writing where the collector tells them.

A `VectorEnv` owns autoreset: when an episode ends at a step, the row's observation is already the first one of the
next episode, and the ended episode's last observation is handed back in an `Ended`. Arrays are written into the
caller's rows, so nothing is allocated per step. `terminated` means the task ended and the future is worth nothing;
`truncated` means we stopped watching and the future is worth the value of `Ended.observation`. Both may be true:
termination then wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

from palaestra.errors import EnvironmentContractError

__all__ = ["Ended", "MethodForwarding", "Observation", "Snapshot", "StepRow", "VectorEnv"]

Observation: TypeAlias = NDArray[Any] | dict[str, NDArray[Any]]
"""A batch of observations, `[N, ...]`; a `Dict` space gives a dict with one array per leaf ("camera/rgb")."""


class Ended(NamedTuple):
    """One episode that ended at this step."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody misses here
    """Which of the N environments."""
    observation: Observation
    """The last observation of the episode, without the leading N (the row already shows the next episode)."""
    episode_return: float
    """Sum of the rewards as the environment paid them."""
    length: int
    """Steps in the episode."""
    executed: int | None = None
    """Actions of the last chunk that reached the environment before the end; None without action chunks."""
    success: bool | None = None
    """What the environment said in `info["is_success"]`; None where it says nothing of the kind."""


@dataclass(slots=True)
class StepRow:
    """Where one step of N environments is written. Every array is `[N, ...]` and belongs to the caller."""

    observation: Observation
    """What to act on next."""
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    """False where the environment ignored the action (a NEXT_STEP autoreset row): no experience, only a pause."""
    action_mask: NDArray[np.bool_] | None = None
    """Which actions are allowed on `observation`; None when the environment has no masks."""


@dataclass(slots=True)
class Snapshot:
    """How to bring environments back to exactly where they are, without pickle: plain arrays and plain JSON."""

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class VectorEnv(Protocol):
    """N copies of one task. `conformance.check` proves an implementation right."""

    num_envs: int
    observation_space: gymnasium.Space[Any]
    """Of one environment. Nested `Dict` spaces are flattened to one level, keys joined by "/"."""
    action_space: gymnasium.Space[Any]
    """Of one environment: Discrete, MultiDiscrete, MultiBinary or Box."""
    mask_size: int
    """Length of `info["action_mask"]` per environment; 0 when the environment gives none."""

    def reset(self, seed: int, row: StepRow) -> None:
        """Start fresh episodes everywhere and write `observation` (and `action_mask`). Same seed, same episodes."""

    def step(self, action: NDArray[Any], row: StepRow) -> Sequence[Ended]:
        """Act with `action[N, ...]`, write every field of `row`, and tell which episodes ended."""

    def snapshot(self) -> Snapshot | None:
        """Everything needed to come back here, or None when this environment cannot promise that."""

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Come back to `snapshot` and write the observation. False when the replay did not lead to the same place."""

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each environment (looked up through wrappers), for curricula and tasks."""

    def close(self) -> None:
        """Release everything. Harmless when repeated."""


class MethodForwarding:
    """Gives a `VectorEnv` the methods of its environments: `env.set_difficulty(2)` is `env.call("set_difficulty", 2)`.

    `hasattr` tells whether the environments have one. Attributes that are no methods are read with `call`.
    """

    in_use = ""
    """Why methods of the environments cannot be called now: a collector in the background has them."""

    def has_method(self, name: str) -> bool:
        """Whether each environment has a method of this name, its own or a wrapper's."""
        raise NotImplementedError

    if not TYPE_CHECKING:  # a type checker would take every misspelling for a method of the environments

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or not self.has_method(name):
                what = f"neither {type(self).__name__} nor the environments in it have a method {name!r}"
                raise AttributeError(what, name=name, obj=self)
            if self.in_use:
                raise EnvironmentContractError(f"env.{name}: {self.in_use}")
            return partial(self.call, name)
