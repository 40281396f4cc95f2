"""The configuration of a training run on screens with a vision-language model.

The sections `model`, `trainer`, `actor`, `actor_pool` and `environment` accept the spellings of the specification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from palaestra.actor.task_runner import ActorConfig
from palaestra.config import Section, parse_section
from palaestra.config.file import move_keys
from palaestra.errors import CheckpointError, ConfigError
from palaestra.experience.demonstrations import DemonstrationsConfig
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.files.run_directory import find_checkpoint
from palaestra.learner.trajectories.proof import ProofConfig
from palaestra.learner.trajectories.replay import ReplayConfig
from palaestra.learner.trajectories.reward import RewardConfig
from palaestra.learner.trajectories.update import UpdateConfig
from palaestra.policy.vlm.config import ADAPTER_CONFIG, ModelConfig
from palaestra.policy.vlm.sampler import InferenceConfig
from palaestra.sessions.environment_config import ROWS_TASK, EnvironmentConfig, check_environment
from palaestra.sessions.task_sampler import SamplerConfig, TaskChoice
from palaestra.telemetry import TelemetryConfig
from palaestra.train.config import make_algorithm, read_algorithm
from palaestra.transport.ray_cluster import ActorsConfig

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
"""Keys of older checkpoints and of the specification, and their present names."""


class ScreenTrainerConfig(UpdateConfig):
    """Length of the training, batches, collection, checkpoints and evaluation."""

    batch_size: int = Field(default=32, ge=1)
    """Episodes per update."""
    num_training_steps: int = Field(default=100, ge=1)
    """Total number of updates."""
    collection: Literal["synchronous", "asynchronous"] = "synchronous"
    """`synchronous` alternates playing and learning; the same seed gives the same numbers. `asynchronous` plays while
    learning."""
    max_staleness: int = Field(default=1, ge=0)
    """With `asynchronous`: maximum number of updates between the start of an episode and learning from it. Later
    episodes are dropped and counted."""
    max_refills: int | None = Field(default=None, ge=0)
    """How many times the missing part of a batch is played again after groups without a learning signal were dropped.
    null: 3 for algorithms that compare groups, 0 for others."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of all randomness."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Updates between checkpoints. null: by time only."""
    checkpoint_seconds: float = Field(default=120.0, gt=0)
    """Maximum seconds between checkpoints. One is always written at the start and at the end."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Number of newest checkpoints to keep, in addition to the best and the first."""
    eval_every: int | None = Field(default=None, ge=1)
    """Updates between evaluations on held-out seeds. null: no evaluation during training."""
    torch_threads: int = Field(default=1, ge=1)
    """Threads of torch for learning. Leave cores for the browsers."""
    sharding: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: `ddp` gives every process all weights; `fsdp` divides the layers of the language model among the
    processes, for models that do not fit on one GPU. No effect in one process."""
    fsdp_dtype: Literal["float32", "bfloat16"] = "float32"
    """With `fsdp`: data type of forward and backward passes. Trained weights, optimiser and sums of gradients stay
    float32."""
    rank_timeout: float = Field(default=1800.0, gt=0)
    """Under torchrun: seconds that a process waits for the others before training fails. Longer than
    playing a batch and an evaluation, which only the first process does."""


class ActorPoolConfig(Section):
    """Concurrency of the actors."""

    target_concurrent_actors: int = Field(default=2, ge=1, le=10_000)
    """Number of concurrent episodes. Each needs a browser page; more episodes fill inference batches better."""


class EvaluationConfig(Section):
    """Evaluation on held-out seeds."""

    episodes: int = Field(default=100, ge=1)
    """Episodes on held-out seeds, evenly over the tasks."""
    greedy: bool = False
    """Take the most likely token instead of sampling."""


class ScreenRunConfig(Section):
    """Everything that defines a run."""

    experiment_name: str = Field(default="", max_length=80)
    """Prefix of the run id; the name of the first task if empty."""
    model: ModelConfig
    tasks: tuple[TaskChoice, ...] = (TaskChoice(task="data_entry/form"),)
    """Tasks to train on."""
    sampler: SamplerConfig = SamplerConfig()
    algorithm: dict[str, Any] = Field(default_factory=dict)
    reward: RewardConfig = RewardConfig()
    trainer: ScreenTrainerConfig = ScreenTrainerConfig()
    actor: ActorConfig = ActorConfig()
    actor_pool: ActorPoolConfig = ActorPoolConfig()
    actors: ActorsConfig = ActorsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    inference: InferenceConfig = InferenceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    proof: ProofConfig = ProofConfig()
    replay: ReplayConfig = ReplayConfig()
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    trajectories_kept: int = Field(default=2000, ge=0)
    """Number of newest trajectories to keep on disk; 0: none."""
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def name(self) -> str:
        """Prefix of the run id."""
        return self.experiment_name or self.tasks[0].task.replace("/", "-")

    @property
    def staleness(self) -> int:
        """Maximum staleness; 0 if synchronous."""
        return self.trainer.max_staleness if self.trainer.collection == "asynchronous" else 0

    def to_json(self) -> dict[str, Any]:
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
    "demonstrations": DemonstrationsConfig,
}


def screen_config_from(data: Mapping[str, Any], *, seed: int | None = None) -> ScreenRunConfig:
    """The checked configuration from plain data."""
    # An empty section, such as `actor:`, counts as missing.
    data = {key: value for key, value in data.items() if value is not None}
    data = move_keys(data, MOVED)
    data["algorithm"] = read_algorithm(data.get("algorithm") or {}, "trajectories", "rejection_sampling")
    environment = data.get("environment")
    if isinstance(environment, Mapping) and environment.get("dialect") == "query":
        # The only task of this dialect.
        data.setdefault("tasks", [{"task": ROWS_TASK}])
    if seed is not None:
        data["trainer"] = {**(data.get("trainer") or {}), "seed": seed}
    config = parse_section(ScreenRunConfig, data)
    if config.model.adapter is not None:
        config = config.model_copy(update={"model": _resolve_adapter(config.model)})
    _check_consistency(config)
    return config


def _resolve_adapter(model: ModelConfig) -> ModelConfig:
    """The section with the directory, rank and alpha of the adapter to start from.

    A run means its best checkpoint now. The configuration keeps what was found, so that a resumed run and an evaluation
    load the same adapter, also after the other run has gone on.
    """
    assert model.adapter is not None
    path = model.adapter
    if not (path / ADAPTER_CONFIG).is_file():
        checkpoint = path if (path / "policy").is_dir() else _find_run_checkpoint(str(path))
        path = checkpoint.resolve() / "policy"
    settings = read_json(path / ADAPTER_CONFIG) or {}
    # Keys that are given must agree with the adapter, which the model checks.
    keys: dict[str, Any] = {"lora_rank": settings.get("r"), "lora_alpha": settings.get("lora_alpha")}
    given = model.model_fields_set
    # A value that is not a whole number is left to the model as well.
    own = {key: int(value) for key, value in keys.items() if key not in given and _is_whole(value)}
    return model.model_copy(update={"adapter": path, **own})


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _find_run_checkpoint(name: str) -> Path:
    try:
        return find_checkpoint(name, Home.default().runs)
    except ConfigError as error:
        remedy = "Name a directory in PEFT's layout, a checkpoint or a run"
        raise CheckpointError("model.adapter", name, f"no adapter is found ({error.reason})", remedy) from None


def _check_consistency(config: ScreenRunConfig) -> None:
    algorithm = make_algorithm(config.algorithm, "trajectories")
    size = algorithm.group_size
    if algorithm.from_demonstrations and config.demonstrations.path is None:
        reason = f"{config.algorithm['name']} learns from demonstrations, and none are given"
        remedy = "Record some with palaestra demos record, and set demonstrations.path=DIR"
        raise ConfigError("demonstrations.path", None, reason, remedy)
    if config.trainer.batch_size % size:
        nearest = sorted(
            {max(size, config.trainer.batch_size // size * size), (config.trainer.batch_size // size + 1) * size}
        )
        remedy = f"Nearest that are: {' and '.join(str(number) for number in nearest)}"
        reason = f"is not a multiple of the group size {size}"
        raise ConfigError("trainer.batch_size", config.trainer.batch_size, reason, remedy)
    low, high = config.reward.assumed_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(
            "reward.assumed_range",
            [low, high],
            "is not a range",
            "Give the lowest return of an episode, then the highest",
        )
    check_environment(config.environment, group_size=size, actors=config.actor_pool.target_concurrent_actors)
    if config.trainer.fsdp_dtype != "float32" and config.trainer.sharding != "fsdp":
        reason, remedy = "has no effect without trainer.sharding=fsdp", "Add trainer.sharding=fsdp, or leave it out"
        raise ConfigError("trainer.fsdp_dtype", config.trainer.fsdp_dtype, reason, remedy)
    if config.inference.backend == "server" and not config.model.use_lora:
        reason = "engines take LoRA adapters, and model.use_lora is false"
        raise ConfigError("inference.backend", "server", reason, "Set model.use_lora=true, or use backend: thread")
    if config.inference.backend == "process" and config.trainer.collection == "synchronous":
        remedy = "Add trainer.collection=asynchronous, or leave it out"
        raise ConfigError("inference.backend", "process", "has no benefit with synchronous collection", remedy)
    if config.inference.backend != "thread" and config.actors.backend == "ray":
        reason = "with actors.backend=ray the sampler is an actor of the cluster"
        raise ConfigError("inference.backend", config.inference.backend, reason, "Leave it out")
