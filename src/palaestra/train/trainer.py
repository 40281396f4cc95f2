"""`Trainer`: training from Python, for notebooks and custom loops.

`collect_rollouts`, `learn` and `train` can be used alone and overridden; `train` calls the overrides. Components and
loop are those of a run (`train.vector`, `train.run`). A trainer prints nothing, and writes files only in
`save_checkpoint`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import torch
from torch import nn

from palaestra.actor.asynchronous import AsyncConfig, AsynchronousSource
from palaestra.actor.cluster.rollout_source import ClusterSource
from palaestra.actor.collector import Collector, default_seed
from palaestra.actor.policy_actor import Compiled
from palaestra.actor.synchronous import SynchronousSource
from palaestra.env.make import EnvConfig, as_vector_env
from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.learner.algorithm import RolloutAlgorithm
from palaestra.learner.checkpoint import load_checkpoint, save_checkpoint
from palaestra.learner.ppo import PPO
from palaestra.policy.device import Device, choose_device, device_of
from palaestra.train.config import RunConfig, make_algorithm
from palaestra.train.evaluation import make_env_and_policy
from palaestra.train.run import run_updates, wrap_checkpoint_errors
from palaestra.train.vector import VectorTraining, training_settings
from palaestra.transport.source import Batch, EpisodeStats

if TYPE_CHECKING:
    from tensordict import TensorDict

    from palaestra.experience.rollout import Rollout

History: TypeAlias = list[dict[str, float]]
"""One dictionary of metrics per logged update; see docs/metrics.md."""

Callback: TypeAlias = Callable[["Trainer", dict[str, float]], bool | None]
"""Called after every update; returning False ends training."""


class Trainer:
    """Trains one policy in one environment with one algorithm."""

    def __init__(
        self,
        policy: nn.Module,
        env: Any,
        algorithm: RolloutAlgorithm | None = None,
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
        """`env`: a `VectorEnv`, a Gymnasium environment (vector or single), a list of them, or an id.

        `seed`: seed of all randomness. None: 0, and a different one for each further trainer of the same policy.
        `buffer_type="vla"`, or settings in `asynchronous`: collect asynchronously. `buffer_size`: default of the
        `rollout_length` of `train`; if that is given, the capacity of the ring. `batch_size`: overrides that of the
        algorithm. `env_config`: environments of a collector process, if `env` is an object. `device` (`auto`, `cpu`,
        `cuda:1`, …): moves the policy to this device; None: leaves it where it is.
        """
        _check_settings(policy, algorithm, buffer_type, buffer_size, compiled, torch_threads)
        if device is not None:
            policy.to(choose_device(device))
        if asynchronous is None and buffer_type == "vla":
            asynchronous = AsyncConfig()
        if asynchronous is not None:
            _check_collection(self)
        algorithm = algorithm or PPO()
        self.policy = policy
        self.seed = default_seed(policy) if seed is None else seed
        self.training = VectorTraining(
            policy,
            as_vector_env(env),
            algorithm if batch_size is None else algorithm.with_settings(batch_size=batch_size),
            seed=self.seed,
            normalize_reward=normalize_reward,
            compiled=compiled,
            torch_threads=torch_threads,
            asynchronous=asynchronous,
            env_config=env_config or _env_config(env),
        )
        self.env = self.training.env
        self.last_episodes: list[EpisodeStats] = []
        self._buffer_size = buffer_size

    def collect_rollouts(self, n_steps: int) -> Rollout:
        """Act for `n_steps` steps in every environment; returns a rollout in its own memory."""
        if n_steps < 1:
            raise ConfigError("collect_rollouts(n_steps)", n_steps, "must be at least 1")
        source = self.training.source
        assert not isinstance(source, ClusterSource)
        with self.training.limit_threads():
            if isinstance(source, AsynchronousSource):
                source.sync_weights()
            buffer = source.collector.collect(n_steps, policy_version=self.n_updates)
        self.last_episodes = list(source.collector.episodes)
        source.progress.add(n_steps * self.env.num_envs, self.last_episodes)
        return cast("Rollout", buffer.get())

    def learn(self, rollout: Rollout | TensorDict | Mapping[str, Any] | Sequence[Rollout]) -> dict[str, float]:
        """Improve the policy on one or several rollouts, which are not modified. Advantages are computed for each."""
        several = rollout if isinstance(rollout, list | tuple) else [rollout]
        if not several:
            raise ExperienceError("learn: an empty list of rollouts. Collect at least one.")
        with self.training.limit_threads():
            metrics = self.training.learner.learn(several)
        self.training.source.progress.updates = self.n_updates
        return metrics

    def train(
        self,
        total_timesteps: int,
        rollout_length: int | None = None,
        log_interval: int = 1,
        callback: Callback | None = None,
    ) -> History:
        """Collect and learn until `total_timesteps` steps in total, including earlier calls.

        `rollout_length`: steps of each environment per update; default: `buffer_size` of the trainer, or 2048.
        """
        length = rollout_length if rollout_length is not None else self._buffer_size or 2048
        if total_timesteps < 1 or length < 1 or log_interval < 1:
            raise ConfigError(
                "train(total_timesteps, rollout_length, log_interval)",
                (total_timesteps, length, log_interval),
                "each must be at least 1",
            )
        training = self.training
        if isinstance(training.source, AsynchronousSource):
            _check_collection(self)
        ring = None if rollout_length is None else self._buffer_size
        training.check_memory(length, ring)
        history: History = []
        if self.total_timesteps >= total_timesteps:
            training.planned_timesteps = total_timesteps
            return history
        source: Any = _CustomCollection(self) if _overrides(self, "collect_rollouts") else training.source
        learner: Any = _CustomLearning(self) if _overrides(self, "learn") else training.learner
        with training.limit_threads():
            training.start(total_timesteps, length, ring)
            try:
                for batch, metrics in run_updates(source, learner, training.publisher, training.is_complete):
                    self.last_episodes = list(batch.episodes)
                    if self.n_updates % log_interval == 0 or training.is_complete():
                        history.append(metrics)
                    if callback is not None and callback(self, metrics) is False:
                        break
            finally:
                training.source.close()
        return history

    def save_checkpoint(self, path: str | Path, *, about: Mapping[str, Any] | None = None) -> str:
        """Write a checkpoint with everything needed to continue; returns its SHA-256."""
        training = self.training
        return save_checkpoint(
            Path(path),
            kind=training.kind,
            policy=training.save_policy(),
            learner=training.learner.state(),
            source=training.source.state(),
            progress=training.progress_facts(),
            about=dict(about or {}),
        )

    def load_checkpoint(self, path: str | Path) -> bool:
        """Continue from a checkpoint; returns whether the environments were restored exactly."""
        with wrap_checkpoint_errors(Path(path)):
            return self.training.load(load_checkpoint(Path(path), kind="vector"))

    @property
    def algorithm(self) -> RolloutAlgorithm:
        """The algorithm; may be replaced between two updates."""
        return self.training.learner.algorithm

    @algorithm.setter
    def algorithm(self, algorithm: RolloutAlgorithm) -> None:
        _check_algorithm(algorithm)
        self.training.learner.algorithm = algorithm

    @property
    def collector(self) -> Collector:
        """The collector of the environments."""
        assert not isinstance(self.training.source, ClusterSource)
        return self.training.source.collector

    @property
    def device(self) -> torch.device:
        """Device of the policy; environments and rollouts stay on the CPU."""
        return device_of(self.policy)

    @property
    def n_updates(self) -> int:
        """Number of updates, which is the version of the weights."""
        return self.training.learner.version

    @property
    def total_timesteps(self) -> int:
        """Collected steps over all environments."""
        return self.training.source.progress.steps

    @property
    def num_episodes(self) -> int:
        """Number of finished episodes."""
        return self.training.source.progress.episodes

    @property
    def episode_rewards(self) -> deque[float]:
        """Returns of the last hundred episodes."""
        return self.training.source.progress.returns

    @property
    def episode_lengths(self) -> deque[int]:
        """Lengths of the last hundred episodes."""
        return self.training.source.progress.lengths

    @property
    def collector_failures(self) -> list[str]:
        """Errors of replaced asynchronous collectors."""
        return getattr(self.training.source, "failures", [])


def build_trainer(config: RunConfig) -> Trainer:
    """A trainer from a configuration."""
    if config.actors.backend != "local":
        reason = "a Trainer collects on this machine"
        raise ConfigError(
            "actors.backend", config.actors.backend, reason, "Use palaestra.train.train or palaestra train"
        )
    env, policy = make_env_and_policy(config)
    try:
        return Trainer(
            policy,
            env,
            make_algorithm(config.algorithm, "rollouts"),
            buffer_size=config.trainer.buffer_size,
            **training_settings(config),
        )
    except BaseException:
        env.close()
        raise


class _CustomCollection:
    """The source of a trainer whose `collect_rollouts` is overridden."""

    def __init__(self, trainer: Trainer) -> None:
        assert isinstance(trainer.training.source, SynchronousSource)
        self._trainer, self._source = trainer, trainer.training.source
        self.metrics, self.raise_if_failed = self._source.metrics, self._source.raise_if_failed
        self.release, self.requeue = self._source.release, self._source.requeue

    def next_batch(self) -> Batch[Any]:
        began, before = time.perf_counter(), self._source.progress.steps
        rollout = self._trainer.collect_rollouts(self._source.num_steps)
        steps, seconds = self._source.progress.steps - before, time.perf_counter() - began
        return Batch(rollout, self._trainer.last_episodes, steps, {"collect_seconds": seconds})


class _CustomLearning:
    """The learner of a trainer whose `learn` is overridden."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.weights = trainer, trainer.training.learner.weights

    @property
    def version(self) -> int:
        return self._trainer.n_updates

    def update(self, experience: Any, *, poll: Callable[[], None] | None = None) -> dict[str, float]:
        # The override may keep the rollout, and the source reuses its memory.
        rollout: Any = experience.get().clone() if isinstance(experience, RolloutBuffer) else experience
        return self._trainer.learn(rollout)


def _overrides(trainer: Trainer, method: str) -> bool:
    # Classes of the package do not change collection and learning.
    built_in = getattr(getattr(type(trainer), method), "__module__", "").startswith("palaestra.")
    return not built_in or method in vars(trainer)


def _check_collection(trainer: Trainer) -> None:
    """Raise if `collect_rollouts` is overridden: asynchronous collection does not call it."""
    if _overrides(trainer, "collect_rollouts"):
        raise ConfigError(
            "trainer.collection",
            "asynchronous",
            f"{type(trainer).__name__} overrides collect_rollouts, which asynchronous collection does not call",
            "Collect synchronously (trainer.collection=synchronous), where train() calls it",
        )


def _check_settings(
    policy: Any, algorithm: Any, buffer_type: Any, buffer_size: Any, compiled: Any, torch_threads: Any
) -> None:
    """Raise `ConfigError` for invalid arguments."""
    if not isinstance(policy, nn.Module) or not hasattr(policy, "distribution"):
        remedy = "Build one with palaestra.policy.build_policy, or see docs/algorithms.md"
        raise ConfigError("Trainer.policy", type(policy).__name__, "is not a policy", remedy)
    if algorithm is not None:
        _check_algorithm(algorithm)
    for name, value, known in (
        ("buffer_type", buffer_type, ("standard", "vla")),
        ("compiled", compiled, get_args(Compiled)),
    ):
        if value not in known:
            raise ConfigError(f"Trainer.{name}", value, "is not known", f"Use one of {', '.join(known)}")
    for name, number in (("buffer_size", buffer_size), ("torch_threads", torch_threads)):
        if number is not None and number < 1:
            raise ConfigError(f"Trainer.{name}", number, "must be at least 1", "Leave it out for the default")


def _check_algorithm(algorithm: Any) -> None:
    if not isinstance(algorithm, RolloutAlgorithm):
        name = algorithm.__name__ if isinstance(algorithm, type) else algorithm
        reason = "is a class" if isinstance(algorithm, type) else "is not an algorithm on rollouts"
        raise ConfigError("Trainer.algorithm", name, reason, "Give an instance, for example PPO(learning_rate=1e-3)")
    defect = type(algorithm).find_defect()
    if defect:
        raise ConfigError("Trainer.algorithm", type(algorithm).__name__, defect, "Define it in the class")


def _env_config(env: Any) -> EnvConfig | None:
    """The environment configuration, if `env` is an id or a configuration."""
    if isinstance(env, str):
        return EnvConfig(id=env)
    return env if isinstance(env, EnvConfig) else None
