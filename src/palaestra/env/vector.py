"""The `VectorEnv` protocol: N copies of one environment that are stepped together and write into the caller's arrays.

A `VectorEnv` resets ended episodes within the step: the row then holds the first observation of the next episode, and
the last observation of the ended one is in its `EpisodeEnd`. `terminated` means that the task ended, so the value of
the future is zero; `truncated` means that the episode was cut off, so the future is worth the value of
`EpisodeEnd.observation`. If both are true, termination wins.
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

Array: TypeAlias = NDArray[Any]
Flags: TypeAlias = NDArray[np.bool_]
Space: TypeAlias = gymnasium.Space[Any]
GymEnv: TypeAlias = gymnasium.Env[Any, Any]
Info: TypeAlias = dict[str, Any]
"""The `info` of a Gymnasium environment."""

Observation: TypeAlias = Array | dict[str, Array]
"""A batch of observations, `[N, ...]`; for a `Dict` space a dict with one array per leaf ("camera/rgb")."""


class EpisodeEnd(NamedTuple):
    """One episode that ended in this step."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    """Which of the N environments."""
    observation: Observation
    """The last observation of the episode, without the leading N (the row already holds the next episode)."""
    episode_return: float
    """Sum of the environment's unscaled rewards."""
    length: int
    """Number of steps in the episode."""
    executed: int | None = None
    """Actions of the last chunk that were executed before the end; None without action chunks."""
    success: bool | None = None
    """`info["is_success"]`; None if the environment does not report it."""


@dataclass(slots=True)
class StepRow:
    """The arrays into which one step of N environments is written: each `[N, ...]`, owned by the caller."""

    observation: Observation
    """The observation for the next action."""
    reward: NDArray[np.float32]
    terminated: Flags
    truncated: Flags
    valid: Flags
    """False where the environment ignored the action (the reset step of NEXT_STEP autoreset); not experience."""
    action_mask: Flags | None = None
    """Which actions are allowed on `observation`; None if the environment has no masks."""


@dataclass(slots=True)
class Snapshot:
    """The exact state of environments as arrays and plain JSON, so that storing it needs no pickle."""

    arrays: dict[str, Array] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


_PER_ENV = ("seeds", "starts")
"""Facts of a snapshot that have one entry per environment."""


def merge_snapshots(parts: Sequence[Snapshot | None]) -> Snapshot | None:
    """One snapshot of all environments from those of consecutive groups of them; None if one cannot be merged."""
    known = [part for part in parts if part is not None]
    # The attributes of a natively vectorised environment need not have one entry per copy.
    if len(known) < len(parts) or (len(parts) > 1 and known[0].facts.get("kind") == "attributes"):
        return None
    arrays = {key: np.concatenate([part.arrays[key] for part in known]) for key in known[0].arrays}
    merged = {key: [item for part in known for item in part.facts[key]] for key in _PER_ENV if key in known[0].facts}
    return Snapshot(arrays, known[0].facts | merged)


def slice_snapshot(snapshot: Snapshot, share: slice) -> Snapshot:
    """The part of a snapshot for some of its environments."""
    facts, arrays = dict(snapshot.facts), dict(snapshot.arrays)
    if "actions" in arrays:
        # The actions of all running episodes, one after the other.
        edges = np.concatenate([[0], np.cumsum(arrays["lengths"])])
        arrays["actions"] = arrays["actions"][edges[share.start] : edges[share.stop]]
    arrays |= {key: array[share] for key, array in arrays.items() if key != "actions"}
    facts |= {key: facts[key][share] for key in _PER_ENV if key in facts}
    return Snapshot(arrays, facts)


class VectorEnv(Protocol):
    """N copies of one environment. `conformance.check` tests an implementation."""

    num_envs: int
    observation_space: Space
    """Of one environment. Nested `Dict` spaces are flattened to one level, keys joined by "/"."""
    action_space: Space
    """Of one environment: Discrete, MultiDiscrete, MultiBinary or Box."""
    mask_size: int
    """Length of `info["action_mask"]` per environment; 0 if the environment has no masks."""

    def reset(self, seed: int, row: StepRow) -> None:
        """Start new episodes and write `observation` (and `action_mask`). The same seed gives the same episodes."""

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeEnd]:
        """Act with `action[N, ...]`, write every field of `row`, and return the episodes that ended."""

    def snapshot(self) -> Snapshot | None:
        """The current state, or None if this environment cannot restore it exactly."""

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Return to `snapshot` and write the observation. False if the state could not be reproduced."""

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each environment (looked up through wrappers), for example to set a difficulty."""

    def close(self) -> None:
        """Release all resources. May be called more than once."""


class MethodForwarding:
    """Forwards unknown methods to the environments: `env.set_difficulty(2)` is `env.call("set_difficulty", 2)`.

    `hasattr` is true if the environments have the method. Read other attributes with `call`.
    """

    in_use = ""
    """Why methods cannot be called now (an asynchronous collector is using the environments); empty if they can."""

    def has_method(self, name: str) -> bool:
        """Whether each environment or one of its wrappers has a method of this name."""
        raise NotImplementedError

    if not TYPE_CHECKING:  # a type checker would accept every misspelled name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or not self.has_method(name):
                message = f"neither {type(self).__name__} nor the environments in it have a method {name!r}"
                raise AttributeError(message, name=name, obj=self)
            if self.in_use:
                raise EnvironmentContractError(f"env.{name}: {self.in_use}")
            return partial(self.call, name)
