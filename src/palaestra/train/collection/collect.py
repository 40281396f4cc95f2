"""Collects the episodes of a dataset in vector environments, reproducibly, and measures reference scores.

Each environment contributes the same number of steps or episodes. Taking the first that end would favour short ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from palaestra import __version__
from palaestra.env.factory import EnvFactory
from palaestra.env.make import EnvConfig, base_env_id, with_time_limit
from palaestra.env.spaces import ActionLayout, allocate_row
from palaestra.env.vector import Array, Observation, VectorEnv
from palaestra.errors import ConfigError
from palaestra.experience.datasets import DatasetFacts, Episode
from palaestra.train.collection.behaviours import Behaviour, RandomBehaviour

NUM_ENVS = 8
"""Environments that are stepped together. A part of what the data depends on, so that it is recorded."""
SCORE_SEED = 2_000_003
"""Added to the seed for reference scores, so that they use other episodes than the data."""
_BLOCK = 512


@dataclass(frozen=True)
class Amount:
    """How much to collect: steps, cutting off the last episode of each environment, or whole episodes."""

    steps: int | None = None
    episodes: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.episodes is None):
            raise ConfigError(
                "--steps", self.steps, "give either --steps or --num-episodes", "For example --steps 100000"
            )
        for option, count in (("--steps", self.steps), ("--num-episodes", self.episodes)):
            if count is not None and count < 1:
                raise ConfigError(option, count, "must be at least 1")

    def split(self, share: float) -> tuple[Amount | None, Amount | None]:
        """A share of the amount and the rest; None for nothing."""
        total = self.steps or self.episodes or 0
        first = round(total * share)
        kind = "steps" if self.steps is not None else "episodes"
        parts = (Amount(**{kind: count}) if count else None for count in (first, total - first))
        return next(parts), next(parts)

    def shares(self, num_envs: int) -> list[int]:
        """The amount for each environment."""
        total = self.steps or self.episodes or 0
        return [total // num_envs + (i < total % num_envs) for i in range(num_envs)]


def collection_config(env: EnvConfig, amount: Amount, num_envs: int = NUM_ENVS) -> EnvConfig:
    """The configuration of the environments of a collection; their episodes have a time limit in any case."""
    count = min(num_envs, amount.steps or amount.episodes or 1)
    update = {"num_envs": count, "vectorization": "auto", "action_chunk": 1}
    return with_time_limit(env).model_copy(update=update)


def describe_collection(dataset_id: str, env: EnvConfig, vector: VectorEnv, **about: Any) -> DatasetFacts:
    """The facts of a dataset that is collected in this environment."""
    env_id = base_env_id(env.id)
    versions = {name: version(name) for name in ("gymnasium", "numpy")}
    settings = {"env_kwargs": dict(env.kwargs), "max_episode_steps": env.max_episode_steps}
    return DatasetFacts(
        dataset_id=dataset_id,
        env_id=env_id,
        env_spec=_read_spec(EnvFactory(env_id, env.kwargs, env.max_episode_steps)),
        observation_space=vector.observation_space,
        action_space=vector.action_space,
        about={**about, **settings, "num_envs": vector.num_envs, "versions": {"palaestra": __version__, **versions}},
    )


def _read_spec(factory: EnvFactory) -> str:
    """The specification as JSON; empty for an environment that is not registered or has settings JSON cannot hold."""
    env = factory()
    try:
        return "" if env.spec is None else str(env.spec.to_json())
    except (TypeError, ValueError):
        return ""
    finally:
        env.close()


def measure_score(env: VectorEnv, behaviour: Behaviour, *, episodes: int, seed: int) -> float:
    """Mean return over seeded episodes."""
    episodes_played = collect_episodes(env, behaviour, Amount(episodes=episodes), seed=seed + SCORE_SEED)
    return float(np.mean([episode.total_reward for episode in episodes_played]))


def random_score(env: VectorEnv, *, episodes: int, seed: int) -> float:
    """Mean return of random actions."""
    return measure_score(env, RandomBehaviour(env.action_space), episodes=episodes, seed=seed)


def collect_episodes(env: VectorEnv, behaviour: Behaviour, amount: Amount, *, seed: int) -> Iterator[Episode]:
    """Play and yield episodes in the order in which they end; the same arguments give the same episodes."""
    N = env.num_envs
    row = allocate_row(env.observation_space, N, env.mask_size)
    rng = np.random.default_rng(np.random.SeedSequence([seed, 7]))
    block = _Block(row.observation, ActionLayout(env.action_space).empty(N))
    left = np.array(amount.shares(N))
    block.is_open[:] = left > 0
    by_steps = amount.steps is not None
    env.reset(seed, row)
    behaviour.begin(seed)
    num_played = 0
    while left.any():
        block.begin_step(row.observation)
        actions = behaviour.act(row.observation, row.action_mask, rng)
        ends = {end.index: end.observation for end in env.step(actions, row)}
        block.end_step(actions, row.reward, row.terminated, row.truncated, row.valid)
        if by_steps:
            left -= row.valid & (left > 0)
            cut = np.flatnonzero((left == 0) & block.is_open)
        else:
            left[list(ends)] -= left[list(ends)] > 0
            cut = np.array([], np.int64)
        for index in sorted({*ends, *cut.tolist()}):
            if not block.is_open[index]:
                continue
            last = ends[index] if index in ends else _row_of(row.observation, index)
            episode = block.cut(index, last)
            block.is_open[index] = left[index] > 0
            num_played += 1
            if N == 1:
                behaviour.begin(seed + num_played)
            yield episode
        block.carry_if_full()


def _row_of(observation: Observation, index: int) -> Observation:
    if isinstance(observation, dict):
        return {name: array[index] for name, array in observation.items()}
    row: Observation = observation[index]
    return row


class _Block:
    """The steps of N environments, cut into episodes. Full blocks are carried over for episodes that go on."""

    def __init__(self, observation: Observation, actions: Array) -> None:
        named = observation if isinstance(observation, dict) else {"": observation}
        self._arrays = {f"observation/{name}": _allocate(array) for name, array in named.items()}
        N = len(actions)
        self._arrays |= {"action": _allocate(actions), "reward": np.zeros((_BLOCK, N), np.float32)}
        self._arrays |= {name: np.zeros((_BLOCK, N), np.bool_) for name in ("terminated", "truncated", "valid")}
        self._start = np.zeros(N, np.int64)
        self._carried: list[list[dict[str, Array]]] = [[] for _ in range(N)]
        self._time = 0
        self.is_open = np.ones(N, np.bool_)
        """Whether the environment still contributes."""

    def begin_step(self, observation: Observation) -> None:
        named = observation if isinstance(observation, dict) else {"": observation}
        for name, array in named.items():
            self._arrays[f"observation/{name}"][self._time] = array

    def end_step(self, action: Array, reward: Array, terminated: Array, truncated: Array, valid: Array) -> None:
        results = {"action": action, "reward": reward, "terminated": terminated, "truncated": truncated, "valid": valid}
        for name, array in results.items():
            self._arrays[name][self._time] = array
        self._time += 1

    def cut(self, index: int, last: Observation) -> Episode:
        """The episode of one environment that ended with this step, and begin its next one."""
        pieces = [*self._carried[index], self._slice(index)]
        self._carried[index], self._start[index] = [], self._time
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in self._arrays}
        valid = joined.pop("valid")
        joined = {name: array[valid] for name, array in joined.items()}
        ends = last if isinstance(last, dict) else {"": last}
        observations = {
            name: np.concatenate([joined[f"observation/{name}"], np.asarray(end)[None]]) for name, end in ends.items()
        }
        # The last step of an episode that is cut off by the number of steps.
        joined["truncated"][-1] |= not joined["terminated"][-1]
        return Episode(observations, joined["action"], joined["reward"], joined["terminated"], joined["truncated"])

    def carry_if_full(self) -> None:
        if self._time < _BLOCK:
            return
        for index in np.flatnonzero(self.is_open):
            self._carried[index].append({name: array.copy() for name, array in self._slice(int(index)).items()})
        self._start[:], self._time = 0, 0

    def _slice(self, index: int) -> dict[str, Array]:
        return {name: array[self._start[index] : self._time, index] for name, array in self._arrays.items()}


def _allocate(array: Array) -> Array:
    return np.zeros((_BLOCK, *array.shape), array.dtype)
