"""A share of the environments of a run: the copies that one of several collectors steps.

Copies are seeded by their global index and the noise of the policy is drawn for all of them, so every collector sees
the numbers that one collector of all copies would see. Matrix products depend in the last digits on the number of rows.
`WholeBatch` therefore presents a share as all copies, so that the policy acts on as many rows; rows of other shares
repeat the first own row and are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from palaestra.env.factory import EnvFactory
from palaestra.env.in_process import InProcessEnv
from palaestra.env.make import COMPILED, MIN_NATIVE_ENVS, EnvConfig, make_env
from palaestra.env.vector import Array, EpisodeEnd, MethodForwarding, Snapshot, StepRow, VectorEnv
from palaestra.errors import EnvironmentContractError
from palaestra.transport.ranks import Share


def divide(total: int, parts: int) -> list[Share]:
    """Divide `total` environments into at most `parts` shares whose sizes differ by at most one."""
    parts = min(parts, total)
    bounds = [total * part // parts for part in range(parts + 1)]
    return [Share(low, high - low, total) for low, high in pairwise(bounds)]


def make_share(config: EnvConfig, share: Share, mask_size: int) -> VectorEnv:
    """Make the environments of a share; several shares step theirs one after the other, each in its process."""
    if share.count == share.total:
        return make_env(config)
    if config.backend == "gymnasium" and config.id not in COMPILED and config.vectorization != "native":
        factory = _factory(config)
        spec = factory.find_spec()
        if spec is None or spec.entry_point is not None:
            return InProcessEnv(factory, share.count, first_index=share.first, mask_size=mask_size)
    return make_env(config.model_copy(update={"num_envs": share.count}), first_index=share.first)


def shares_one_generator(config: EnvConfig, num_shares: int) -> bool:
    """Whether one machine would draw the episodes of all copies from one generator, which shares cannot."""
    is_seeded_by_index = config.backend == "envpool" or config.id in COMPILED
    if num_shares == 1 or is_seeded_by_index or config.vectorization in ("in_process", "workers"):
        return False
    if config.vectorization != "auto":
        return True
    spec = _factory(config).find_spec()
    has_native = spec is not None and spec.vector_entry_point is not None and config.action_chunk == 1
    return has_native and config.num_envs >= MIN_NATIVE_ENVS


def _factory(config: EnvConfig) -> EnvFactory:
    return EnvFactory(config.id, config.kwargs, config.max_episode_steps, config.action_chunk)


class _ForwardingEnv(MethodForwarding):
    """A vector environment around another one."""

    def __init__(self, env: VectorEnv, num_envs: int) -> None:
        self.env, self.num_envs = env, num_envs
        self.observation_space, self.action_space, self.mask_size = (
            env.observation_space,
            env.action_space,
            env.mask_size,
        )

    def snapshot(self) -> Snapshot | None:
        """The state of the inner environment."""
        return self.env.snapshot()

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each environment."""
        return self.env.call(name, *args, **kwargs)

    def has_method(self, name: str) -> bool:
        """Whether the environments have this method."""
        inner: Any = self.env
        return bool(inner.has_method(name))

    def close(self) -> None:
        """Close the inner environment."""
        self.env.close()


class WholeBatch(_ForwardingEnv):
    """A share with the rows of all environments of the run, so that the policy acts on batches of the same size."""

    def __init__(self, env: VectorEnv, share: Share) -> None:
        super().__init__(env, share.total)
        self._share = share

    def reset(self, seed: int, row: StepRow) -> None:
        """Start new episodes in the share."""
        self.env.reset(seed, self._own(row))
        self._fill_others(row)

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeEnd]:
        """Step the share. Rows of other shares are valid and never end."""
        row.reward.fill(0.0)
        row.terminated.fill(False)
        row.truncated.fill(False)
        row.valid.fill(True)
        ends = self.env.step(action[self._share.part], self._own(row))
        self._fill_others(row)
        return [end._replace(index=end.index + self._share.first) for end in ends]

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Return to a snapshot of the share."""
        is_exact = self.env.restore(snapshot, self._own(row))
        self._fill_others(row)
        return is_exact

    def _own(self, row: StepRow) -> StepRow:
        own, observation = self._share.part, row.observation
        part = (
            {name: value[own] for name, value in observation.items()}
            if isinstance(observation, dict)
            else observation[own]
        )
        mask = None if row.action_mask is None else row.action_mask[own]
        return StepRow(part, row.reward[own], row.terminated[own], row.truncated[own], row.valid[own], mask)

    def _fill_others(self, row: StepRow) -> None:
        """Repeat the first own row, which is valid in every observation space."""
        first, last = self._share.part.start, self._share.part.stop
        arrays = list(row.observation.values()) if isinstance(row.observation, dict) else [row.observation]
        for array in (*arrays, *([] if row.action_mask is None else [row.action_mask])):
            array[:first] = array[first]
            array[last:] = array[first]


class RemoteEnvs:
    """The spaces and the number of environments that exist only on other processes."""

    def __init__(self, env: VectorEnv, num_envs: int) -> None:
        """`env`: one copy, which the caller closes."""
        self.num_envs, self.mask_size = num_envs, env.mask_size
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, seed: int, row: StepRow) -> None:
        """Not possible here."""
        raise self._refusal("reset")

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeEnd]:
        """Not possible here."""
        raise self._refusal("step")

    def snapshot(self) -> Snapshot | None:
        """There is no state here."""
        return None

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Not possible here."""
        return False

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Not possible here."""
        raise self._refusal(name)

    def close(self) -> None:
        """Nothing to release."""

    def _refusal(self, name: str) -> EnvironmentContractError:
        return EnvironmentContractError(
            f"env.{name}: the environments run on the Ray cluster. Use actors.backend=local."
        )
