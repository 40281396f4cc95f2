"""`TabularSource`: acts in one environment with a table, and returns the transitions in order, each once.

Two ways to step give the same transitions: through Gymnasium, or through the transition table of a toy text environment
(`env.transition_table`) in one kernel. The policy draws two random numbers for each choice from its own generator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from palaestra.actor.compatibility import check_spaces
from palaestra.env.spaces import allocate_row
from palaestra.env.transition_table import TransitionTable
from palaestra.env.vector import EpisodeEnd, Snapshot, VectorEnv
from palaestra.errors import ConfigError, EnvironmentContractError
from palaestra.experience.replay import TransitionBatch
from palaestra.kernels.table_walk import choose_action, walk_table
from palaestra.policy.tabular import TabularPolicy
from palaestra.transport.source import Batch, EpisodeStats, ExperienceSource, SavedState, Timing, TrainingProgress

_BLOCK = 4096
"""Random numbers that are drawn together."""
_COLUMNS = ("observation", "action", "reward", "next_observation", "terminated", "next_action")


class TabularRules(Protocol):
    """How an algorithm explores; `TabularAlgorithm` has all of it."""

    config: Any

    @property
    def chooses_next(self) -> bool:
        """Whether a target needs the action that the policy chooses in the next state."""

    def exploration(self, progress: float) -> float:
        """Probability of a random action."""


class UniformStream:
    """Uniform random numbers of a generator, drawn in blocks and used in order."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator
        self._block = np.empty(0)
        self._used = 0

    def reserve(self, count: int) -> NDArray[np.float64]:
        """The next `count` numbers or more; `consume` says how many were used."""
        if len(self._block) - self._used < count:
            fresh = self.generator.random(max(_BLOCK, count))
            self._block = np.concatenate([self._block[self._used :], fresh])
            self._used = 0
        return self._block[self._used :]

    def consume(self, count: int) -> None:
        """Count numbers as used."""
        self._used += count

    def state(self) -> tuple[dict[str, Any], torch.Tensor]:
        """The state of the generator, and the numbers that were drawn and not used."""
        return dict(self.generator.bit_generator.state), torch.from_numpy(self._block[self._used :].copy())

    def load_state(self, generator: dict[str, Any], left: torch.Tensor) -> None:
        """Continue from `state`."""
        self.generator.bit_generator.state = generator
        self._block, self._used = left.numpy().copy(), 0


class TabularSource(ExperienceSource[TransitionBatch]):
    """Steps one environment `train_freq` times per batch."""

    def __init__(
        self,
        env: VectorEnv,
        policy: TabularPolicy,
        rules: TabularRules,
        *,
        seed: int,
        total_timesteps: int,
        compiled: bool = True,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`compiled`: walk through the transition table of the environment, if it has one."""
        check_spaces(policy, env)
        if env.num_envs != 1:
            reason = "a table learns from one environment, step by step"
            raise ConfigError("env.num_envs", env.num_envs, reason, "Set env.num_envs=1, or start several runs")
        self.env, self.policy, self.rules, self.stop = env, policy, rules, stop
        self.progress, self.total_timesteps = TrainingProgress(), total_timesteps
        self.table = TransitionTable.of(env) if compiled else None
        """The transition table that is walked through; None: the environment is stepped."""
        self._seed, self._started = seed, False
        self._row = allocate_row(env.observation_space, 1, env.mask_size)
        self._first_state = int(policy.observation_space.start)  # type: ignore[attr-defined]
        self._choices = UniformStream(np.random.default_rng(np.random.SeedSequence([seed, 1])))
        self._outcomes: UniformStream | None = None
        self._position = np.array([0, 0, -1, 0, 0], np.int64)
        self._return = np.zeros(1)
        self._exploration = 0.0
        steps = rules.config.train_freq
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros((steps, 1), np.int64) for name in _COLUMNS}
        self._columns |= {"reward": np.zeros((steps, 1), np.float32), "terminated": np.zeros((steps, 1), np.bool_)}
        self._ends = (np.zeros(steps, np.int64), np.zeros(steps), np.zeros(steps, np.int64))
        self._requeued: Batch[TransitionBatch] | None = None

    def next_batch(self) -> Batch[TransitionBatch] | None:
        """Make the next steps; None if the run was asked to stop."""
        if self._requeued is not None:
            batch, self._requeued = self._requeued, None
            self.progress.add(batch.steps)
            return batch
        if self.stop():
            return None
        began = time.perf_counter()
        if not self._started:
            self._start()
        self._exploration = self.rules.exploration(min(1.0, self.progress.steps / self.total_timesteps))
        episodes = self._walk() if self.table is not None else self._step_environment()
        steps = len(self._columns["reward"])
        self.progress.add(steps, episodes)
        metrics = {"collect_seconds": time.perf_counter() - began}
        return Batch(TransitionBatch(self._columns), episodes, steps, metrics)

    def _start(self) -> None:
        self.env.reset(self._seed, self._row)
        self._started = True
        if self.table is not None:
            self._outcomes = UniformStream(self.table.world.np_random)
            self._position[:3] = int(self.table.world.s), 0, -1

    def _walk(self) -> list[EpisodeStats]:
        assert self.table is not None
        assert self._outcomes is not None
        steps = len(self._columns["reward"])
        # A step needs at most two outcomes (its own and a reset) and two choices of two numbers each.
        uniforms = self._outcomes.reserve(2 * steps), self._choices.reserve(4 * steps)
        self._position[3:] = 0
        count = walk_table(
            self.policy.array,
            self._exploration,
            self.table.process,
            self.table.limit,
            self._position,
            self._return,
            uniforms,
            tuple(self._columns[name][:, 0] for name in _COLUMNS),
            self._ends,
            self.rules.chooses_next,
        )
        self._outcomes.consume(int(self._position[3]))
        self._choices.consume(int(self._position[4]))
        ends = zip(*(end[:count].tolist() for end in self._ends), strict=True)
        return [EpisodeStats(self.progress.steps + last + 1, 0, total, length) for last, total, length in ends]

    def _step_environment(self) -> list[EpisodeStats]:
        columns, row, episodes = self._columns, self._row, list[EpisodeStats]()
        chooses_next, first = self.rules.chooses_next, self._first_state
        for t in range(len(columns["reward"])):
            state = int(row.observation[0]) - first  # type: ignore[index]
            pending = int(self._position[2])
            action = pending if pending >= 0 else self._choose(state)
            self._position[2] = -1
            ends = self.env.step(self.policy.distribution.to_env(np.array([action])), row)
            following = int(ends[0].observation if ends else row.observation[0]) - first  # type: ignore[arg-type,index]
            reward, terminated = row.reward[0], bool(row.terminated[0])
            _check_step(following, reward, self.policy)
            next_action = 0
            if chooses_next and not terminated:
                next_action = self._choose(following)
                if not ends:
                    self._position[2] = next_action
            values = (state, action, reward, following, terminated, next_action)
            for name, value in zip(_COLUMNS, values, strict=True):
                columns[name][t, 0] = value
            episodes += [_to_stats(end, self.progress.steps + t + 1) for end in ends]
        return episodes

    def _choose(self, state: int) -> int:
        uniforms = self._choices.reserve(2)
        self._choices.consume(2)
        return int(choose_action(self.policy.array[state], self._exploration, uniforms[0], uniforms[1]))

    def release(self, batch: Batch[TransitionBatch], version: int) -> None:
        """Count the batch."""
        self.progress.updates += 1

    def requeue(self, batch: Batch[TransitionBatch]) -> None:
        """Return the batch again next."""
        self.progress.add(-batch.steps)
        self._requeued = batch

    def metrics(self, batch: Batch[TransitionBatch], timing: Timing) -> dict[str, float]:
        """Counters, times and the latest episodes."""
        return {
            "env_step": float(self.progress.steps),
            "update": float(self.progress.updates),
            "episodes": float(self.progress.episodes),
            "learn_seconds": timing.total - timing.waited,
            "steps_per_second": batch.steps / max(timing.total, 1e-9),
            "exploration": self._exploration,
            **batch.metrics,
            **self.progress.metrics(),
        }

    def state(self) -> SavedState:
        """The position in the environment, and both random streams."""
        choices, left = self._choices.state()
        facts: dict[str, Any] = {"started": self._started, "choices": choices, "walks": self.table is not None}
        facts |= {"position": self._position[:3].tolist(), "return": float(self._return[0]), "exact": True, "env": {}}
        tensors = {"choices": left}
        if self._outcomes is not None:
            facts["outcomes"], tensors["outcomes"] = self._outcomes.state()
        elif self._started:
            inner = self.env.snapshot()
            facts["exact"] = inner is not None
            if inner is not None:
                facts["env"] = inner.facts
                tensors |= {f"env/{name}": torch.from_numpy(array) for name, array in inner.arrays.items()}
        return SavedState(tensors, facts)

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`; False if the environment starts a new episode."""
        tensors, facts = state
        self._choices.load_state(facts["choices"], tensors["choices"])
        if not facts["started"]:
            return True
        self._start()
        if facts["walks"] != (self.table is not None) or not facts["exact"]:
            return False
        if self._outcomes is not None:
            self._outcomes.load_state(facts["outcomes"], tensors["outcomes"])
        else:
            arrays = {name[4:]: tensor.numpy() for name, tensor in tensors.items() if name.startswith("env/")}
            if not self.env.restore(Snapshot(arrays, facts["env"]), self._row):
                return False
        self._position[:3] = facts["position"]
        self._return[0] = float(facts["return"])
        return True


def _to_stats(end: EpisodeEnd, env_step: int) -> EpisodeStats:
    return EpisodeStats(env_step, end.index, end.episode_return, end.length, end.success)


def _check_step(state: int, reward: np.float32, policy: TabularPolicy) -> None:
    """Raise if the environment left its spaces, before a kernel uses the number as an index."""
    count = len(policy.table)
    if not 0 <= state < count or not np.isfinite(reward):
        raise EnvironmentContractError(
            f"environment 0 returned state {state} of {count} and reward {reward}. Fix its observation space or reward."
        )
