"""The trainer: collect, learn, and both in turn. Each of the three is usable alone, and may be overridden.

Owns the counters, the shuffles, the optimiser and the collector; decides between the compiled and the plain path.
It prints nothing and writes a file only when asked for a checkpoint: whoever drives `train` passes a callback.
Everything that matters to the next number is in the checkpoint; a synchronous trainer that loads it continues bit for
bit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from palaestra.actor.acting import Compiled
from palaestra.actor.async_config import AsyncConfig
from palaestra.actor.asynchronous import AsyncCollection
from palaestra.actor.collector import Collector, Episode, default_seed
from palaestra.actor.fit import check_fit, rollout_spec
from palaestra.actor.memory_estimate import check_memory
from palaestra.actor.reward_scale import RewardScale
from palaestra.actor.source import InTurn, Segment, Source
from palaestra.env.catalogue import EnvConfig, as_vector_env
from palaestra.env.vector import Snapshot
from palaestra.errors import CheckpointError, CollectorFailed, ConfigError, ExperienceError, NonFiniteError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import Columns
from palaestra.experience.rollout_check import check_columns
from palaestra.learner.adam import Adam
from palaestra.learner.checkpoint import read_checkpoint, write_checkpoint
from palaestra.learner.compiled import CompiledLearner
from palaestra.learner.input import columns_of, moved
from palaestra.learner.off_policy import prepare, stale_steps, staleness_metrics
from palaestra.learner.ppo import PPO, TrainBatch, joined
from palaestra.learner.returns import explained_variance
from palaestra.learner.update import learn_plainly, where_it_broke
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.compiled import CompiledActorCritic, why_not_compiled
from palaestra.policy.device import Device, choose_device, device_of
from palaestra.policy.fingerprint import policy_fingerprint
from palaestra.policy.flat import FlatParameters
from palaestra.policy.storage import load_weights, policy_bytes
from palaestra.threads import few_threads

if TYPE_CHECKING:
    from tensordict import TensorDict

    from palaestra.experience.rollout import Rollout

__all__ = ["Callback", "History", "Trainer"]

History: TypeAlias = list[dict[str, float]]
"""One dictionary of metrics per logged update; docs/metrics.md explains each."""

Callback: TypeAlias = Callable[["Trainer", dict[str, float]], bool | None]
"""Called after every update; returning False ends training."""

SMALL_NETWORK = 200_000
"""Parameters below which a second torch thread costs more in waiting than it gives."""


class Trainer:
    """Trains one policy in one environment with one algorithm."""

    def __init__(
        self,
        policy: nn.Module,
        env: Any,
        algorithm: PPO | None = None,
        *,
        seed: int | None = None,
        normalize_reward: bool = False,
        compiled: Compiled = "auto",
        torch_threads: int | None = None,
        buffer_type: Literal["standard", "vla"] = "standard",
        buffer_size: int | None = None,
        batch_size: int | None = None,
        asynchronous: AsyncConfig | None = None,
        env_config: EnvConfig | None = None,
        device: Device | None = None,
    ) -> None:
        """`env`: ours, a Gymnasium environment (vector or single), a list of them, or an id.

        `seed`: everything random follows from it. None: 0, and another for each further trainer of the same policy.
        `buffer_type="vla"`, or settings in `asynchronous`, collects in the background. `buffer_size` is the
        `rollout_length` of `train` when that says none, else what the background's ring holds. `batch_size` replaces
        the algorithm's. `env_config` tells a
        collector process how to make the environments, when `env` itself does not say. `device` (`auto`, `cpu`,
        `cuda:1`, …) is where the policy is moved to, to act and to learn there; None: it stays where it is.
        """
        if device is not None:
            policy.to(choose_device(device))
        self.policy = policy
        self.env = as_vector_env(env)
        self.algorithm = algorithm or PPO()
        if batch_size is not None:
            self.algorithm = self.algorithm.with_settings(batch_size=batch_size)
        self.seed = seed = default_seed(policy) if seed is None else seed
        self.total_timesteps = 0
        self.n_updates = 0
        self.episode_rewards: deque[float] = deque(maxlen=100)
        self.episode_lengths: deque[int] = deque(maxlen=100)
        self.episode_successes: deque[bool] = deque(maxlen=100)
        self.num_episodes = 0
        self.last_episodes: list[Episode] = []
        check_fit(policy, self.env)
        # Before anybody acts: the same weights in another layout give other last digits.
        FlatParameters.refresh(policy)
        discount = self.algorithm.config.gamma if normalize_reward else None
        self._background: AsyncCollection | None = None
        if asynchronous is not None or buffer_type == "vla":
            _refuse_own_collection(self)
            self._background = AsyncCollection(
                asynchronous or AsyncConfig(), policy, self.env, seed=seed, compiled=compiled, discount=discount,
                env_config=env_config or _env_config(env), torch_threads=torch_threads or 1,
            )  # fmt: skip
            self.collector = self._background.collector
        else:
            scale = None if discount is None else RewardScale(self.env.num_envs, discount)
            self.collector = Collector(self.env, policy, seed=seed, compiled=compiled, reward_scale=scale)
        self.collector_failures: list[str] = []
        self._spec = rollout_spec(self.env, policy)
        self._shuffle = np.random.default_rng(np.random.SeedSequence([seed, 2]))
        self._compiled: Compiled = compiled
        self._threads = torch_threads
        self._adam: Adam | None = None
        self._fast: CompiledLearner | None = None
        self._buffer: RolloutBuffer | None = None
        self._planned_timesteps = 0
        self._buffer_size = buffer_size

    @property
    def device(self) -> torch.device:
        """Where the policy acts and learns; environments and rollouts stay on the CPU."""
        return device_of(self.policy)

    def check_memory(self, length: int, ring: int | None = None, *, num_envs: int | None = None) -> None:
        """Refuse rollouts of `length` steps (`ring` of them at once, in steps) that cannot fit beside the policy."""
        usual = None if self._background is None else self._background.default_segments
        segments = usual and (ring // length if ring else usual)
        epochs = self.algorithm.config.n_epochs
        check_memory(self.policy, self.env, length, n_epochs=epochs, in_background=segments, num_envs=num_envs)

    # ------------------------------------------------------------------ the three calls

    def collect_rollouts(self, n_steps: int) -> Rollout:
        """Act for `n_steps` steps in every environment and return what happened, in memory of its own."""
        with self._few_threads():
            return self._collect(n_steps, None).get()

    def learn(self, rollout: Rollout | TensorDict | Sequence[Rollout]) -> dict[str, float]:
        """Improve the policy on a rollout, or on several (each keeps its own advantages). The input stays as it is."""
        several = rollout if isinstance(rollout, list | tuple) else [rollout]
        if not several:
            raise ExperienceError("learn: an empty list of rollouts. Collect at least one.")
        with self._few_threads():
            return self._learn([columns_of(one) for one in several])

    def train(
        self,
        total_timesteps: int,
        rollout_length: int | None = None,
        log_interval: int = 1,
        callback: Callback | None = None,
    ) -> History:
        """Collect and learn until `total_timesteps` steps have been learned from in all (earlier calls included).

        `rollout_length`: steps in each environment per update; the trainer's `buffer_size`, or 2048.
        """
        length = rollout_length if rollout_length is not None else self._buffer_size or 2048
        if total_timesteps < 1 or length < 1 or log_interval < 1:
            raise ConfigError(
                "train(total_timesteps, rollout_length, log_interval)", (total_timesteps, length, log_interval),
                "each must be at least 1",
            )  # fmt: skip
        if self._background is not None:
            _refuse_own_collection(self)
        ring = None if rollout_length is None else self._buffer_size
        self.check_memory(length, ring)
        self._planned_timesteps = total_timesteps
        history: History = []
        if self.total_timesteps >= total_timesteps:
            return history
        with self._few_threads(), self._collecting(total_timesteps, length, ring) as source:
            while self.total_timesteps < total_timesteps:
                metrics = self._iterate(source, length)
                if self.n_updates % log_interval == 0 or self.total_timesteps >= total_timesteps:
                    history.append(metrics)
                if callback is not None and callback(self, metrics) is False:
                    break
        return history

    @contextmanager
    def _collecting(self, total_timesteps: int, rollout_length: int, ring: int | None) -> Iterator[Source]:
        """Where experience comes from during one `train`."""
        if self._background is None:
            turns = InTurn(self.collector, rollout_length, self.n_updates, self._buffer)
            yield turns
            self._buffer = turns.buffer
            return
        left = total_timesteps - self.total_timesteps
        segments = -(-left // (rollout_length * self.env.num_envs))
        try:
            source = self._background.start(self.n_updates, rollout_length, segments, buffer_size=ring)
            self.collector_failures = source.failures
            yield source
        finally:
            self._background.stop()

    def _iterate(self, source: Source, rollout_length: int) -> dict[str, float]:
        began = time.perf_counter()
        before = self.total_timesteps
        if _overridden(self, "collect_rollouts"):
            rollout = self.collect_rollouts(rollout_length)
            waited = collecting = time.perf_counter() - began
            metrics = self.learn(rollout)
        else:
            segment = source.take()
            waited, collecting = time.perf_counter() - began, segment.collect_seconds
            metrics = self._learn_from(segment, source)
        ended = time.perf_counter()
        metrics |= {
            "env_step": float(self.total_timesteps),
            "update": float(self.n_updates),
            "episodes": float(self.num_episodes),
            "collect_seconds": collecting,
            "learn_seconds": ended - began - waited,
            "steps_per_second": (self.total_timesteps - before) / max(ended - began, 1e-9),
        }
        if self._background is not None:
            metrics |= segment.overlap(waited, ended - began) | source.metrics()
        if self.episode_rewards:
            metrics["episode_return"] = float(np.mean(self.episode_rewards))
            metrics["episode_return_min"] = float(np.min(self.episode_rewards))
            metrics["episode_return_max"] = float(np.max(self.episode_rewards))
            metrics["episode_length"] = float(np.mean(self.episode_lengths))
        if self.episode_successes:
            metrics["success_rate"] = float(np.mean(self.episode_successes))
        return metrics

    def _learn_from(self, segment: Segment, source: Source) -> dict[str, float]:
        """Learn from a segment that was lent to us, and give it back."""
        if self._background is not None:
            self._background.note(segment)
        self._count(segment.buffer.num_steps, segment.episodes)
        try:
            if _overridden(self, "learn"):
                # Whoever overrides it may keep what it is given, and this memory is about to be filled again.
                metrics = self.learn(segment.buffer.get().clone())
            else:
                # Nobody stands between, so the experience need not leave its buffer, nor tensordict (over a second to
                # import) be there.
                # Taking turns, the weights are those that have just acted.
                known = int(segment.buffer.policy_fingerprint[-1]) if self._background is None else None
                metrics = self._learn([segment.buffer.columns()], heed=source.heed, once=True, fingerprint=known)
        except CollectorFailed:
            self._count(-segment.buffer.num_steps, ())
            source.put_back(replace(segment, episodes=()))  # they have been told
            raise
        source.give_back(segment, self.n_updates)
        return metrics

    # ------------------------------------------------------------------ what they are made of

    def _collect(self, n_steps: int, buffer: RolloutBuffer | None) -> RolloutBuffer:
        if n_steps < 1:
            raise ConfigError("collect_rollouts(n_steps)", n_steps, "must be at least 1")
        if self._background is not None:
            self._background.catch_up()
        buffer = self.collector.collect(n_steps, buffer, policy_version=self.n_updates)
        self._count(n_steps, self.collector.episodes)
        return buffer

    def _count(self, n_steps: int, episodes: Sequence[Episode]) -> None:
        self.total_timesteps += n_steps * self.env.num_envs
        self.last_episodes = list(episodes)
        self.num_episodes += len(self.last_episodes)
        for episode in self.last_episodes:
            self.episode_rewards.append(episode.episode_return)
            self.episode_lengths.append(episode.length)
            if episode.success is not None:
                self.episode_successes.append(episode.success)

    def _learn(
        self,
        rollouts: list[Columns],
        *,
        heed: Callable[[], None] | None = None,
        once: bool = False,
        fingerprint: int | None = None,
    ) -> dict[str, float]:
        """`heed` may raise in the middle of a long update; `once`: this experience does not come again.

        `fingerprint`: of the policy's weights, where it is known already.
        """
        flat = FlatParameters.refresh(self.policy)
        device = flat.vector.device
        for rollout in rollouts:
            check_columns(rollout, self._spec)
        rollouts = [moved(rollout, device) for rollout in rollouts]
        if fingerprint is None:
            fingerprint = policy_fingerprint(self.policy)
        stale = [stale_steps(rollout, self.n_updates, fingerprint) for rollout in rollouts]
        fast = self._compiled_learner(rollouts, flat)
        batch = joined(
            [
                prepare(self.algorithm, self.policy, rollout, steps, compiled=self._compiled != "off")
                for rollout, steps in zip(rollouts, stale, strict=True)
            ]
        )
        size = len(batch["advantage"])
        if size == 0:
            raise ExperienceError("learn: the rollout holds no valid step.")
        progress = self._progress(size)
        rate, clip_range = self.algorithm.learning_rate(progress), self.algorithm.clip_range(progress)
        order = self._orders(size)
        undo = self._undo_point(flat)
        try:
            if fast is not None:
                metrics = fast.learn(batch, order, rate=rate, clip_range=clip_range)
            else:
                metrics = learn_plainly(
                    self.policy, self.algorithm, self._optimizer(flat), batch, order.to(device), rate=rate,
                    clip_range=clip_range, heed=heed,
                )  # fmt: skip
        except CollectorFailed:
            undo()
            raise
        except NonFiniteError as error:
            found = where_it_broke(self.policy, batch, str(error))
            undo()
            raise found from None
        metrics |= self._about(batch, rollouts, rate, clip_range, metrics)
        metrics |= staleness_metrics(rollouts, self.n_updates, stale)
        self.n_updates += 1
        if once or all(one is None for one in stale):
            # Statistics move between rollouts, never within one, and no experience counts twice.
            self._absorb(batch)
        return metrics

    def _about(
        self, batch: TrainBatch, rollouts: list[Columns], rate: float, clip_range: float, metrics: dict[str, float]
    ) -> dict[str, float]:
        c = self.algorithm.config
        loss = metrics["policy_loss"] - c.entropy_coef * metrics["entropy"] + c.value_coef * metrics["value_loss"]
        about = {
            "loss": loss,
            "learning_rate": rate,
            "clip_range": clip_range,
            "explained_variance": explained_variance(batch["value"], batch["target"]),
            "value_mean": float(batch["value"].mean()),
            "return_mean": float(batch["target"].mean()),
            "advantage_std": float(batch["advantage"].std(correction=0)),
        }
        if "weight" in batch:
            about["behaviour_weight"] = float(batch["weight"].mean())
        if "reward_scale" in rollouts[-1] and self.collector.reward_scale is not None:
            about["reward_scale"] = float(rollouts[-1]["reward_scale"].reshape(-1)[-1])
        return about

    def _absorb(self, batch: TrainBatch) -> None:
        absorb = getattr(self.policy, "absorb", None)
        if absorb is not None:
            absorb(batch["observation"])

    def _orders(self, size: int) -> Tensor:
        epochs = self.algorithm.config.n_epochs
        order = np.empty((epochs, size), np.int64)
        for epoch in range(epochs):
            order[epoch] = self._shuffle.permutation(size)
        return torch.from_numpy(order)

    def _progress(self, size: int) -> float:
        """How much of the planned training was done before this rollout, 0 to 1."""
        if not self._planned_timesteps:
            return 0.0
        return min(1.0, max(0.0, (self.total_timesteps - size) / self._planned_timesteps))

    def _optimizer(self, flat: FlatParameters | None = None) -> Adam:
        flat = FlatParameters.of(self.policy) if flat is None else flat
        if self._adam is None:
            self._adam = Adam(flat, self.algorithm.config.adam_eps, compiled=self._compiled != "off")
        elif self._adam.flat is not flat:
            self._adam = self._adam.moved_to(flat)
        self._adam.eps = self.algorithm.config.adam_eps  # of the algorithm that the trainer has now
        return self._adam

    def _undo_point(self, flat: FlatParameters) -> Callable[[], None]:
        """Remember weights and optimiser, so that an update that breaks half way leaves the last good ones."""
        adam = self._optimizer(flat)
        vectors = (flat.vector, adam.first, adam.second)
        copies, steps = [vector.clone() for vector in vectors], dict(adam.steps)

        def undo() -> None:
            for vector, copy in zip(vectors, copies, strict=True):
                vector.copy_(copy)
            adam.steps = steps

        return undo

    def _compiled_learner(self, rollouts: list[Columns], flat: FlatParameters) -> CompiledLearner | None:
        if self._compiled == "off" or type(self.algorithm) is not PPO:
            return None
        if why_not_compiled(self.policy) is not None or any("action_mask" in rollout for rollout in rollouts):
            return None
        assert isinstance(self.policy, ActorCritic)
        known = self._fast
        if known is None or known.net.flat is not flat or known.algorithm is not self.algorithm:
            self._fast = CompiledLearner(CompiledActorCritic(self.policy), self.algorithm, self._optimizer(flat))
        return self._fast

    def _few_threads(self) -> AbstractContextManager[None]:
        wanted = self._threads
        if wanted is None and sum(p.numel() for p in self.policy.parameters()) < SMALL_NETWORK:
            wanted = 1
        return few_threads(wanted)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, path: str | Path, *, about: Mapping[str, Any] | None = None) -> str:
        """Write everything needed to continue exactly here; returns the checkpoint's SHA-256."""
        adam = self._optimizer()
        position = self.collector.snapshot() if self._background is None else self._background.snapshot()
        tensors = {"adam.first": adam.first.cpu(), "adam.second": adam.second.cpu()}
        tensors |= {f"collector.{name}": torch.from_numpy(np.array(a)) for name, a in position.arrays.items()}
        state = {
            "total_timesteps": self.total_timesteps,
            "n_updates": self.n_updates,
            "num_episodes": self.num_episodes,
            "episode_rewards": list(self.episode_rewards),
            "episode_lengths": list(self.episode_lengths),
            "episode_successes": list(self.episode_successes),
            "planned_timesteps": self._planned_timesteps,
            "adam_steps": adam.steps,
            "shuffle": self._shuffle.bit_generator.state,
            "collector": position.facts,
            "seed": self.seed,
            "about": dict(about or {}),
        }
        return write_checkpoint(Path(path), policy_bytes(self.policy), tensors, state)

    def load_checkpoint(self, path: str | Path) -> bool:
        """Continue from a checkpoint. True when the environments stand exactly where they stood, too."""
        checkpoint = read_checkpoint(Path(path))
        state, tensors = checkpoint.state, checkpoint.tensors
        adam = self._optimizer()
        if tensors["adam.first"].shape != adam.first.shape or set(state["adam_steps"]) != set(adam.steps):
            raise CheckpointError(
                "checkpoint", str(path),
                f"has {tensors['adam.first'].numel()} trained numbers, this policy has {adam.first.numel()}",
                "Use the configuration it was trained with",
            )  # fmt: skip
        load_weights(self.policy, checkpoint.policy_file)
        adam.first.copy_(tensors["adam.first"])
        adam.second.copy_(tensors["adam.second"])
        adam.steps = {name: int(steps) for name, steps in state["adam_steps"].items()}
        self.total_timesteps, self.n_updates = state["total_timesteps"], state["n_updates"]
        self.num_episodes = state["num_episodes"]
        self.episode_rewards = deque(state["episode_rewards"], maxlen=100)
        self.episode_lengths = deque(state["episode_lengths"], maxlen=100)
        self.episode_successes = deque(state.get("episode_successes", ()), maxlen=100)
        self._planned_timesteps = state["planned_timesteps"]
        self._shuffle.bit_generator.state = state["shuffle"]
        arrays = {n.removeprefix("collector."): t.numpy() for n, t in tensors.items() if n.startswith("collector.")}
        return (self._background or self.collector).restore(Snapshot(arrays, state["collector"]))


def _overridden(trainer: Trainer, method: str) -> bool:
    # A method of ours collects and learns as the trainer does.
    ours = getattr(getattr(type(trainer), method), "__module__", "").startswith("palaestra.")
    return not ours or method in vars(trainer)


def _refuse_own_collection(trainer: Trainer) -> None:
    """Collection in the background does not go through `collect_rollouts`, so an override would never be called."""
    if _overridden(trainer, "collect_rollouts"):
        raise ConfigError(
            "trainer.collection", "asynchronous",
            f"{type(trainer).__name__} overrides collect_rollouts, which collection in the background does not call",
            "Collect synchronously (trainer.collection=synchronous), where train() calls it",
        )  # fmt: skip


def _env_config(env: Any) -> EnvConfig | None:
    """How another process can make the environments, if `env` says it."""
    if isinstance(env, str):
        return EnvConfig(id=env)
    return env if isinstance(env, EnvConfig) else None
