"""`ReplaySource`: acts in vector environments, records the steps in a replay buffer, and samples minibatches from it.

It owns the environments' state, the exploration noise and the buffer. The first steps are random (`learning_starts`). A
dataset may come first (a number of updates without the environment) and stay part of every minibatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from palaestra.actor.compatibility import buffer_shape, check_spaces
from palaestra.actor.policy_actor import Compiled
from palaestra.env.spaces import allocate_row, copy_observation, random_actions, write_observation
from palaestra.env.vector import Snapshot, VectorEnv
from palaestra.errors import ConfigError, EnvironmentContractError
from palaestra.experience.columns import map_column
from palaestra.experience.replay import ReplayBuffer, TransitionBatch
from palaestra.policy.device import device_of, move_to
from palaestra.policy.network import eval_mode
from palaestra.policy.off_policy.fused import FusedActor, why_not_fused
from palaestra.transport.dataset_source import DatasetSource
from palaestra.transport.source import Batch, EpisodeStats, ExperienceSource, SavedState, Timing, TrainingProgress


class ReplayRules(Protocol):
    """How an algorithm explores and samples; `TransitionAlgorithm` has all of it."""

    config: Any

    @property
    def priority_exponent(self) -> float | None:
        """Exponent of the priorities; None: sample uniformly."""

    def exploration(self, progress: float) -> float | None:
        """Amount of exploration; None: the policy explores by itself."""

    def importance_exponent(self, progress: float) -> float:
        """Exponent of the importance weights."""


class ReplaySource(ExperienceSource[TransitionBatch]):
    """Steps the environments with the policy and returns samples of the replay buffer."""

    def __init__(
        self,
        env: VectorEnv,
        policy: nn.Module,
        rules: ReplayRules,
        *,
        seed: int,
        total_timesteps: int,
        save_replay: bool = True,
        compiled: Compiled = "auto",
        dataset: DatasetSource | None = None,
        offline_updates: int = 0,
        mix: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`save_replay`: whether `state` includes the buffer. `compiled`: whether to act without autograd if possible.

        `dataset`: transitions for `offline_updates` gradient steps before the first step in the environment, and for a
        share `mix` of every minibatch after it.
        """
        check_spaces(policy, env)
        if env.mask_size:
            reason = "its actions are masked, and algorithms on transitions value masked actions as well"
            raise ConfigError("env action space", repr(env.action_space), reason, "Use ppo")
        self.env, self.rules, self.stop = env, rules, stop
        self._fused: FusedActor | None = None
        self._uses_fused = compiled != "off" and why_not_fused(policy) is None
        self.policy: Any = policy
        self.progress, self.total_timesteps = TrainingProgress(), total_timesteps
        config, shape = rules.config, buffer_shape(env, policy)
        self.buffer = ReplayBuffer(
            config.buffer_size, shape["observation"], shape["action"], priority_exponent=rules.priority_exponent
        )
        self.gradient_steps = config.train_freq * env.num_envs if config.gradient_steps == -1 else config.gradient_steps
        self.dataset, self.offline_updates, self.mix = dataset, offline_updates, mix
        self.offline_steps = 0
        """Gradient steps that were taken on the dataset alone."""
        self._seed, self._save_replay, self._started = seed, save_replay, False
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, 1]))
        self._sampling = np.random.default_rng(np.random.SeedSequence([seed, 9]))
        self._row = allocate_row(env.observation_space, env.num_envs)
        self._before = allocate_row(env.observation_space, env.num_envs).observation
        self._requeued: Batch[TransitionBatch] | None = None
        self._taken = 0
        """Steps of every environment since the last batch; more than 0 if a collection was interrupted."""
        self._episodes: list[EpisodeStats] = []
        """Episodes that ended since the last batch."""
        self.is_pretrained = offline_updates > 0
        """Whether the policy itself takes the first `learning_starts` steps, instead of random actions."""
        self._episode_metrics: tuple[int, dict[str, float]] = (-1, {})

    @property
    def is_offline(self) -> bool:
        """Whether the next batch is of the dataset alone."""
        return self.offline_steps < self.offline_updates

    def next_batch(self) -> Batch[TransitionBatch] | None:
        """Step the environments `train_freq` times and sample, or sample the dataset in the offline phase."""
        if self._requeued is not None:
            batch, self._requeued = self._requeued, None
            self.progress.add(batch.steps)
            return batch
        if self.is_offline:
            assert self.dataset is not None
            steps = min(self.dataset.steps_per_batch, self.offline_updates - self.offline_steps)
            self.offline_steps += steps
            return Batch(TransitionBatch(self.dataset.sample(steps, self.rules.config.batch_size)))
        began, config = time.perf_counter(), self.rules.config
        if self._uses_fused and (self._fused is None or not self._fused.is_current()):
            self._fused = FusedActor(self.policy, self.env.num_envs)
        # Networks that act without autograd have no dropout.
        with nullcontext() if self._uses_fused else eval_mode(self.policy), torch.no_grad():
            while self._taken < config.train_freq or self.buffer.size < config.learning_starts:
                if self.stop():
                    return None
                self._step(random=self.progress.steps < config.learning_starts and not self.is_pretrained)
                self._taken += 1
        metrics = {"collect_seconds": time.perf_counter() - began}
        batch = Batch(self._sample(), self._episodes, self._taken * self.env.num_envs, metrics)
        self._taken, self._episodes = 0, []
        return batch

    def _step(self, *, random: bool) -> None:
        """One step of every environment."""
        row, distribution = self._row, self.policy.distribution
        if not self._started:
            self.env.reset(self._seed, row)
            _check_finite("observation", row.observation)
            self._started = True
        if random:
            action = random_actions(self.env.action_space, self.env.num_envs, self._rng)
            stored = distribution.from_env(action)
        else:
            stored = self._act()
            action = distribution.to_env(stored)
        row.observation, self._before = self._before, row.observation
        ends = self.env.step(action, row)
        next_observation = row.observation
        _check_finite("observation", row.observation)
        _check_finite("reward", row.reward)
        if ends:
            next_observation = copy_observation(next_observation)
            for ended in ends:
                write_observation(next_observation, ended.index, ended.observation)
            _check_finite("final observation", next_observation)
        columns = (self._before, stored, row.reward, next_observation, row.terminated)
        if row.valid.all():
            self.buffer.add(*columns)
        else:
            keep = row.valid
            self.buffer.add(*(map_column(column, lambda part: part[keep]) for column in columns))
        at = self.progress.steps + self.env.num_envs
        ended_now = [EpisodeStats(at, end.index, end.episode_return, end.length, end.success) for end in ends]
        self._episodes += ended_now
        self.progress.add(self.env.num_envs, ended_now)

    def _act(self) -> NDArray[Any]:
        """Actions of the policy with exploration, in stored form."""
        policy, distribution = self.policy, self.policy.distribution
        amount = self.rules.exploration(self._share())
        if amount is not None:
            distribution.exploration.fill_(amount)
        uniform = distribution.noise_kind == "uniform"
        draw: Callable[..., NDArray[np.float32]] = self._rng.random if uniform else self._rng.standard_normal
        noise, observation = draw((self.env.num_envs, distribution.noise_size), dtype=np.float32), self._row.observation
        if self._fused is not None:
            return self._fused.explore(observation, noise)  # type: ignore[arg-type]
        device = device_of(policy)
        acted: NDArray[Any] = policy.explore(move_to(device, observation), move_to(device, noise)).cpu().numpy()
        return acted

    def _share(self) -> float:
        return min(1.0, self.progress.steps / self.total_timesteps)

    def _sample(self) -> TransitionBatch:
        steps, size = self.gradient_steps, self.rules.config.batch_size
        exponent = self.rules.importance_exponent(self._share())
        offline = round(size * self.mix) if self.dataset is not None else 0
        if not offline:
            return self.buffer.sample(self._sampling, steps, size, importance_exponent=exponent)
        parts = [self.dataset.sample(steps, offline)] if self.dataset is not None else []
        if offline < size:
            parts.append(self.buffer.sample(self._sampling, steps, size - offline).columns)
        names = parts[0].keys()
        return TransitionBatch({name: _concatenate([part[name] for part in parts]) for name in names})

    def release(self, batch: Batch[TransitionBatch], version: int) -> None:
        """Count the batch and update the priorities of its transitions."""
        self.progress.updates += 1
        self.buffer.update_priorities(batch.experience)

    def requeue(self, batch: Batch[TransitionBatch]) -> None:
        """Return the batch again next."""
        self.progress.add(-batch.steps)
        self._requeued = batch

    def metrics(self, batch: Batch[TransitionBatch], timing: Timing) -> dict[str, float]:
        """Counters, times and the latest episodes."""
        if self._episode_metrics[0] != self.progress.episodes:
            self._episode_metrics = self.progress.episodes, self.progress.metrics()
        amount = getattr(self.policy.distribution, "exploration", None)
        return {
            "env_step": float(self.progress.steps),
            "update": float(self.progress.updates),
            "episodes": float(self.progress.episodes),
            "learn_seconds": timing.total - timing.waited,
            "steps_per_second": batch.steps / max(timing.total, 1e-9),
            "gradient_steps_per_second": batch.experience.shape[0] / max(timing.total, 1e-9),
            "replay_size": float(self.buffer.size),
            **({} if amount is None else {"exploration": float(amount)}),
            **batch.metrics,
            **self._episode_metrics[1],
        }

    def state(self) -> SavedState:
        """Environments, random states and the filled part of the buffer."""
        inner = self.env.snapshot() if self._started else None
        arrays = {f"env/{key}": value for key, value in inner.arrays.items()} if inner else {}
        facts: dict[str, Any] = {
            "started": self._started,
            "exact": inner is not None or not self._started,
            "env": inner.facts if inner else {},
            "rng": self._rng.bit_generator.state,
            "sampling": self._sampling.bit_generator.state,
            "offline_steps": self.offline_steps,
            "pretrained": self.is_pretrained,
            "taken": self._taken,
            "episodes": [list(episode) for episode in self._episodes],
        }
        if self._save_replay:
            stored, facts["replay"] = self.buffer.state()
            arrays |= {f"replay/{name}": array for name, array in stored.items()}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        if self.dataset is not None:
            facts["dataset"] = self.dataset.state().facts
        return SavedState(tensors, facts)

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`; False if the environments start new episodes."""
        facts, arrays = state.facts, {name: tensor.numpy() for name, tensor in state.tensors.items()}
        self._rng.bit_generator.state = facts["rng"]
        self._sampling.bit_generator.state = facts["sampling"]
        self.offline_steps = int(facts["offline_steps"])
        self.is_pretrained = bool(facts.get("pretrained", False))
        self._taken = int(facts.get("taken", 0))
        self._episodes = [EpisodeStats(*episode) for episode in facts.get("episodes", ())]
        if "replay" in facts:
            replay = {name.removeprefix("replay/"): a for name, a in arrays.items() if name.startswith("replay/")}
            self.buffer.load_state(replay, facts["replay"])
        if self.dataset is not None and "dataset" in facts:
            self.dataset.load_state(SavedState({}, facts["dataset"]))
        if not (facts["started"] and facts["exact"]):
            self._started = False
            return not facts["started"]
        self.env.reset(self._seed, self._row)
        self._started = True
        inner = Snapshot({k[4:]: v for k, v in arrays.items() if k.startswith("env/")}, facts["env"])
        return self.env.restore(inner, self._row)


def _check_finite(name: str, column: Any) -> None:
    """Raise if the environment returned a number that is not finite, before it enters the buffer."""
    parts = {f"{name}/{key}": part for key, part in column.items()} if isinstance(column, dict) else {name: column}
    for name, array in parts.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            index = int(np.argwhere(~np.isfinite(array.reshape(len(array), -1)).all(-1))[0, 0])
            raise EnvironmentContractError(
                f"environment {index} returned a {name} that is not finite ({array[index]}). "
                "Fix the environment, or clip what it returns."
            )


def _concatenate(columns: list[Any]) -> Any:
    if isinstance(columns[0], dict):
        return {name: np.concatenate([column[name] for column in columns], 1) for name in columns[0]}
    return np.concatenate(columns, 1)
