"""The configuration of a run that teaches a vision-language model to operate screens.

The sections of the specification (`model`, `trainer`, `actor`, `actor_pool`, `environment`) are read as it writes them;
`tasks`, `sampler`, `algorithm`, `reward`, `inference`, `evaluation`, `proof` and `replay` are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from palaestra.actor.task_runner import ActorConfig
from palaestra.config import Section, parse_section
from palaestra.config.file import move_keys
from palaestra.errors import ConfigError
from palaestra.learner.trajectories.proof import ProofConfig
from palaestra.learner.trajectories.replay import ReplayConfig
from palaestra.learner.trajectories.reward import RewardConfig
from palaestra.learner.trajectories.update import UpdateConfig
from palaestra.policy.vlm.config import ModelConfig
from palaestra.policy.vlm.sampler import InferenceConfig
from palaestra.sessions.environment_config import EnvironmentConfig, check_environment
from palaestra.sessions.query_tasks import ROWS_TASK
from palaestra.sessions.task_sampler import SamplerConfig, TaskChoice
from palaestra.telemetry import TelemetryConfig
from palaestra.train.config import make_algorithm, read_algorithm

__all__ = ["SCREEN_SECTIONS", "ScreenRunConfig", "ScreenTrainerConfig", "screen_config_from"]

MOVED = {
    "actor.unreadable_reward": "reward.unreadable_reply",
    "environment.max_retries": "actor.retries",
    "model.freeze_vision_encoder": "model.freeze_vision",
    "model.lora_custom_modules": "model.lora_target_modules",
    "model.temperature": "actor.temperature",
    "model.torch_dtype": "model.dtype",
    "trainer.algorithm": "algorithm.name",
    "trainer.reward_threshold": "algorithm.reward_threshold",
    "trainer.save_every": "trainer.checkpoint_every",
}
"""Keys of older checkpoints and of the specification's configurations, and where they are read now."""


class ScreenTrainerConfig(UpdateConfig):
    """How long to train, on how many episodes at a time, and what to keep."""

    batch_size: int = Field(default=32, ge=1)
    """Episodes per update. More give a steadier gradient and fewer updates."""
    num_training_steps: int = Field(default=100, ge=1)
    """Updates in all."""
    collection: Literal["synchronous", "asynchronous"] = "synchronous"
    """`synchronous` plays, then learns; the same seed gives the same numbers. `asynchronous` goes on playing while it
    learns."""
    max_staleness: int = Field(default=1, ge=0)
    """With `asynchronous`: updates that may lie between an episode's beginning and its being learned from. What comes
    later is dropped and counted."""
    max_refills: int | None = Field(default=None, ge=0)
    """How many times the missing part of a batch is played again after groups that teach nothing were dropped. null: 3
    for algorithms that compare groups, none for others."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Everything random follows from it."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Updates between checkpoints. null: by time alone."""
    checkpoint_seconds: float = Field(default=120.0, gt=0)
    """Write a checkpoint when the last one is older than this. One is always written at the start and at the end."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """How many of the newest to keep; the best one and the first are kept as well."""
    eval_every: int | None = Field(default=None, ge=1)
    """Updates between evaluations on held-out seeds. null: none while training."""
    torch_threads: int = Field(default=1, ge=1)
    """Threads of torch that learn. On a machine of two cores the browsers need the other one."""


class ActorPoolConfig(Section):
    """How many play at once."""

    target_concurrent_actors: int = Field(default=2, ge=1, le=10_000)
    """Episodes at the same time. Each is a browser page; more fill the batches of inference better."""


class EvaluationConfig(Section):
    """How success is measured."""

    episodes: int = Field(default=100, ge=1)
    """Episodes on held-out seeds, evenly over the tasks."""
    greedy: bool = False
    """Take the likeliest token instead of drawing. False: the policy is measured as it acts."""


class ScreenRunConfig(Section):
    """Everything that defines a run."""

    experiment_name: str = Field(default="", max_length=80)
    """Start of the run id; the first task's name when empty."""
    model: ModelConfig
    tasks: tuple[TaskChoice, ...] = (TaskChoice(task="data_entry/form"),)
    """What to train on."""
    sampler: SamplerConfig = SamplerConfig()
    algorithm: dict[str, Any] = Field(default_factory=dict)
    reward: RewardConfig = RewardConfig()
    trainer: ScreenTrainerConfig = ScreenTrainerConfig()
    actor: ActorConfig = ActorConfig()
    actor_pool: ActorPoolConfig = ActorPoolConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    inference: InferenceConfig = InferenceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    proof: ProofConfig = ProofConfig()
    replay: ReplayConfig = ReplayConfig()
    trajectories_kept: int = Field(default=2000, ge=0)
    """How many of the newest trajectories stay on disk; 0 keeps none."""
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.experiment_name or self.tasks[0].task.replace("/", "-")

    @property
    def staleness(self) -> int:
        """How far behind the newest weights an episode may begin."""
        return self.trainer.max_staleness if self.trainer.collection == "asynchronous" else 0

    def resolved(self) -> dict[str, Any]:
        """Every value as plain JSON, defaults included."""
        return self.model_dump(mode="json")


SCREEN_SECTIONS: dict[str, type[Section]] = {
    "ui": ScreenRunConfig,
    "model": ModelConfig,
    "ui_trainer": ScreenTrainerConfig,
    "actor": ActorConfig,
    "actor_pool": ActorPoolConfig,
    "environment": EnvironmentConfig,
    "inference": InferenceConfig,
    "evaluation": EvaluationConfig,
    "sampler": SamplerConfig,
    "task": TaskChoice,
    "reward": RewardConfig,
    "proof": ProofConfig,
    "replay": ReplayConfig,
}


def screen_config_from(data: Mapping[str, Any], *, seed: int | None = None) -> ScreenRunConfig:
    """The checked configuration from plain data."""
    # `actor:` with nothing behind it says nothing.
    data = {key: value for key, value in data.items() if value is not None}
    data = move_keys(data, MOVED)
    data["algorithm"] = read_algorithm(data.get("algorithm") or {}, "trajectories", "rejection_sampling")
    environment = data.get("environment")
    if isinstance(environment, Mapping) and environment.get("dialect") == "query":
        # The one task there is; ours needs a server of ours.
        data.setdefault("tasks", [{"task": ROWS_TASK}])
    if seed is not None:
        data["trainer"] = {**(data.get("trainer") or {}), "seed": seed}
    config = parse_section(ScreenRunConfig, data)
    _check_across(config)
    return config


def _check_across(config: ScreenRunConfig) -> None:
    size = make_algorithm(config.algorithm, "trajectories").group_size
    if config.trainer.batch_size % size:
        nearest = sorted(
            {max(size, config.trainer.batch_size // size * size), (config.trainer.batch_size // size + 1) * size}
        )
        raise ConfigError(
            "trainer.batch_size", config.trainer.batch_size, f"is not made of whole groups of {size}",
            f"Nearest that are: {' and '.join(str(number) for number in nearest)}",
        )  # fmt: skip
    low, high = config.reward.assumed_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(
            "reward.assumed_range", [low, high], "is no range", "Give the least an episode is paid, then the most"
        )
    check_environment(config.environment, group_size=size, actors=config.actor_pool.target_concurrent_actors)
    if config.inference.backend == "process" and config.trainer.collection == "synchronous":
        raise ConfigError(
            "inference.backend", "process", "gains nothing when playing waits for learning",
            "Add trainer.collection=asynchronous, or leave it out",
        )  # fmt: skip
