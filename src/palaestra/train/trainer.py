"""`Trainer`, for notebooks and loops of one's own: collect, learn, and both in turn.

Each of the three is usable alone, and may be overridden: `train` calls what a subclass overrides. The parts and the
loop are those of a run (`train.vector`, `train.run`). Prints nothing, and writes a file only when asked for a
checkpoint.
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
from palaestra.train.run import refuse_malformed, run_updates
from palaestra.train.vector import VectorTraining, make_parts, training_settings
from palaestra.transport.source import Batch, EpisodeStats

if TYPE_CHECKING:
    from tensordict import TensorDict

    from palaestra.experience.rollout import Rollout

__all__ = ["Callback", "History", "Trainer", "build_trainer"]

History: TypeAlias = list[dict[str, float]]
"""One dictionary of metrics per logged update; docs/metrics.md explains each."""

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
        """`env`: ours, a Gymnasium environment (vector or single), a list of them, or an id.

        `seed`: everything random follows from it. None: 0, and another for each further trainer of the same policy.
        `buffer_type="vla"`, or settings in `asynchronous`, collects in the background. `buffer_size` is the
        `rollout_length` of `train` when that says none, else what the background's ring holds. `batch_size` replaces
        the algorithm's. `env_config` tells a collector process how to make the environments, when `env` itself does not
        say. `device` (`auto`, `cpu`, `cuda:1`, …) is where the policy is moved to, to act and to learn there; None: it
        stays where it is.
        """
        _check_settings(policy, algorithm, buffer_type, buffer_size, compiled, torch_threads)
        if device is not None:
            policy.to(choose_device(device))
        if asynchronous is None and buffer_type == "vla":
            asynchronous = AsyncConfig()
        if asynchronous is not None:
            _refuse_own_collection(self)
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
        """Act for `n_steps` steps in every environment and return what happened, in memory of its own."""
        if n_steps < 1:
            raise ConfigError("collect_rollouts(n_steps)", n_steps, "must be at least 1")
        source = self.training.source
        with self.training.limit_threads():
            if isinstance(source, AsynchronousSource):
                source.sync_weights()
            buffer = source.collector.collect(n_steps, policy_version=self.n_updates)
        self.last_episodes = list(source.collector.episodes)
        source.progress.add(n_steps * self.env.num_envs, self.last_episodes)
        return cast("Rollout", buffer.get())

    def learn(self, rollout: Rollout | TensorDict | Mapping[str, Any] | Sequence[Rollout]) -> dict[str, float]:
        """Improve the policy on a rollout, or on several (each keeps its own advantages). The input stays as it is."""
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
        """Collect and learn until `total_timesteps` steps have been learned from in all (earlier calls included).

        `rollout_length`: steps in each environment per update; the trainer's `buffer_size`, or 2048.
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
            _refuse_own_collection(self)
        ring = None if rollout_length is None else self._buffer_size
        training.check_memory(length, ring)
        history: History = []
        if self.total_timesteps >= total_timesteps:
            training.planned_timesteps = total_timesteps
            return history
        source: Any = _OwnCollection(self) if _overrides(self, "collect_rollouts") else training.source
        learner: Any = _OwnLearning(self) if _overrides(self, "learn") else training.learner
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
        """Write everything needed to continue exactly here; returns the checkpoint's SHA-256."""
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
        """Continue from a checkpoint. True when the environments stand exactly where they stood, too."""
        with refuse_malformed(Path(path)):
            return self.training.load(load_checkpoint(Path(path), kind="vector"))

    @property
    def algorithm(self) -> RolloutAlgorithm:
        """What it learns with; may be replaced between two updates."""
        return self.training.learner.algorithm

    @algorithm.setter
    def algorithm(self, algorithm: RolloutAlgorithm) -> None:
        _check_algorithm(algorithm)
        self.training.learner.algorithm = algorithm

    @property
    def collector(self) -> Collector:
        """What acts in the environments."""
        return self.training.source.collector

    @property
    def device(self) -> torch.device:
        """Where the policy acts and learns; environments and rollouts stay on the CPU."""
        return device_of(self.policy)

    @property
    def n_updates(self) -> int:
        """Updates so far, which is the version of the weights."""
        return self.training.learner.version

    @property
    def total_timesteps(self) -> int:
        """Steps of all environments together that were collected for learning."""
        return self.training.source.progress.steps

    @property
    def num_episodes(self) -> int:
        """Episodes that have ended."""
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
        """Why asynchronous collectors were replaced."""
        return getattr(self.training.source, "failures", [])


def build_trainer(config: RunConfig, *, pretrained: bool = True) -> Trainer:
    """Environment, policy, algorithm and trainer of a configuration; `pretrained` as in `build_policy`."""
    env, policy = make_parts(config, pretrained=pretrained)
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


class _OwnCollection:
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


class _OwnLearning:
    """The learner of a trainer whose `learn` is overridden."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.weights = trainer, trainer.training.learner.weights

    @property
    def version(self) -> int:
        return self._trainer.n_updates

    def update(self, experience: Any, *, poll: Callable[[], None] | None = None) -> dict[str, float]:
        # The override may keep what it is given, and the source's memory is about to be filled again.
        rollout: Any = experience.get().clone() if isinstance(experience, RolloutBuffer) else experience
        return self._trainer.learn(rollout)


def _overrides(trainer: Trainer, method: str) -> bool:
    # A method of the package collects and learns as `Trainer` does.
    ours = getattr(getattr(type(trainer), method), "__module__", "").startswith("palaestra.")
    return not ours or method in vars(trainer)


def _refuse_own_collection(trainer: Trainer) -> None:
    """Collection in the background does not go through `collect_rollouts`, so an override would never be called."""
    if _overrides(trainer, "collect_rollouts"):
        raise ConfigError(
            "trainer.collection",
            "asynchronous",
            f"{type(trainer).__name__} overrides collect_rollouts, which collection in the background does not call",
            "Collect synchronously (trainer.collection=synchronous), where train() calls it",
        )


def _check_settings(
    policy: Any, algorithm: Any, buffer_type: Any, buffer_size: Any, compiled: Any, torch_threads: Any
) -> None:
    """Refuse what would be taken for a default, or fail in the middle of training."""
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
    """How another process can make the environments, if `env` says it."""
    if isinstance(env, str):
        return EnvConfig(id=env)
    return env if isinstance(env, EnvConfig) else None
