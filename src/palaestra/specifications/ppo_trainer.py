"""`PPOTrainer`: a `Trainer` with PPO settings as keyword arguments, periodic checkpoints, and rollouts by task."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping, MutableSequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.learner.ppo import PPO, PPOConfig
from palaestra.policy.device import Device
from palaestra.train.trainer import Callback, History, Trainer

if TYPE_CHECKING:
    from palaestra.experience.rollout import Rollout

TASK_ROLLOUTS = 8
"""Number of newest rollouts to keep per task."""

_TRAINER_ARGUMENTS = set(inspect.signature(Trainer).parameters) - {"policy", "env", "algorithm", "batch_size"}
_RENAMED_SETTINGS = {
    "n_steps": "train(rollout_length=…)",
    "num_steps": "train(rollout_length=…)",
    "clip_coef": "clip_range",
    "clip_epsilon": "clip_range",
    "update_epochs": "n_epochs",
    "verbose": "train(callback=…)",
}
"""Settings of other libraries whose names are too different to be suggested automatically."""


class PPOTrainer(Trainer):
    """Trains one policy in one environment with PPO."""

    def __init__(
        self,
        policy: nn.Module,
        env: Any,
        *,
        device: Device = "auto",
        checkpoint_dir: str | Path | None = None,
        save_interval: int | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: fields of `PPOConfig` (`learning_rate`, `n_epochs`, `batch_size`, …) and arguments of `Trainer`.

        `save_interval`: updates between checkpoints in `checkpoint_dir`; None: no checkpoints.
        """
        for name, ours in _RENAMED_SETTINGS.items():
            if name in settings:
                raise ConfigError(f"PPOTrainer.{name}", settings[name], "unknown key", f"Use {ours}")
        general = {name: settings.pop(name) for name in _TRAINER_ARGUMENTS if name in settings}
        algorithm = PPO(parse_section(PPOConfig, settings, place="PPOTrainer"))
        super().__init__(policy, env, algorithm, device=device, **general)
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self.save_interval = save_interval
        self._task_rollouts: dict[str, deque[Rollout]] = {}

    def collect_rollouts(self, n_steps: int, task_trajectories: MutableSequence[Rollout] | None = None) -> Rollout:
        """Act for `n_steps` steps in every environment.

        `task_trajectories` (from `get_task_trajectories`) are passed to environments with a method
        `set_task_trajectories(rollouts)` before the first step; then the new rollout is appended to them.
        """
        if task_trajectories is not None and hasattr(self.env, "set_task_trajectories"):
            self.env.call("set_task_trajectories", list(task_trajectories))
        rollout = super().collect_rollouts(n_steps)
        if task_trajectories is not None:
            task_trajectories.append(rollout)
        return rollout

    def get_task_trajectories(self, task: Any) -> MutableSequence[Rollout]:
        """The newest rollouts of a task, by its `name`, oldest first; empty for a new task."""
        return self._task_rollouts.setdefault(str(getattr(task, "name", task)), deque(maxlen=TASK_ROLLOUTS))

    def train(
        self,
        total_timesteps: int,
        rollout_length: int | None = None,
        log_interval: int = 1,
        callback: Callback | None = None,
        *,
        save_interval: int | None = None,
    ) -> History:
        """As `Trainer.train`, with a checkpoint every `save_interval` updates."""
        every = self.save_interval if save_interval is None else save_interval
        if every is None:
            return super().train(total_timesteps, rollout_length, log_interval, callback)
        if every < 1:
            raise ConfigError("train(save_interval)", every, "must be at least 1")
        self._next_checkpoint()

        def save_if_due(trainer: Trainer, metrics: dict[str, float]) -> bool | None:
            if self.n_updates % every == 0:
                self.save_checkpoint()
            return None if callback is None else callback(trainer, metrics)

        return super().train(total_timesteps, rollout_length, log_interval, save_if_due)

    def save_checkpoint(self, path: str | Path | None = None, *, about: Mapping[str, Any] | None = None) -> str:
        """As `Trainer.save_checkpoint`; the default path is in `checkpoint_dir`, by number of updates."""
        return super().save_checkpoint(self._next_checkpoint() if path is None else path, about=about)

    def _next_checkpoint(self) -> Path:
        if self.checkpoint_dir is None:
            remedy = "Give PPOTrainer(checkpoint_dir=…), or a path to save_checkpoint"
            raise ConfigError("checkpoint_dir", None, "there is no directory for checkpoints", remedy)
        return self.checkpoint_dir / f"update_{self.n_updates:08d}"
