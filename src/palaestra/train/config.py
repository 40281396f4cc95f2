"""The configuration of a training run in vector environments or on a dataset.

`load_config` reads a file, applies overrides, accepts the spellings of the specifications, and validates all sections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from palaestra.actor.asynchronous import AsyncConfig
from palaestra.config import Section, parse_section
from palaestra.config.packaged import read_config
from palaestra.env.make import EnvConfig
from palaestra.errors import ConfigError
from palaestra.experience.vla_buffer import check_whole_segments
from palaestra.files.home import Home
from palaestra.learner.ppo import PPOConfig
from palaestra.learner.registry import ALGORITHMS, build_algorithm, config_of, find_algorithm, find_experience
from palaestra.policy.config import PolicyConfig
from palaestra.policy.device import DEVICE_PATTERN, check_device_name
from palaestra.telemetry import TelemetryConfig
from palaestra.transport.ray_cluster import ActorsConfig

MAX_SEED = 2**32 - 1
"""The largest seed. Evaluation adds to it, and torch accepts at most 64 bits."""


LOG_STEPS = 1_000
"""Environment steps between two telemetry records of a run on transitions, if `trainer.log_interval` is not given."""
EVALUATIONS = 10
"""Evaluations of an offline run, if `trainer.eval_every` is not given."""
TRANSITION_POLICY: dict[str, Any] = {"hidden": (256, 256), "activation": "relu"}
"""Settings of the policy of a run on transitions that are not given."""
DEFAULT_LENGTH = 100_000
"""Length of a run that does not give one, in environment steps or, offline, in gradient steps."""


class DatasetConfig(Section):
    """A dataset of transitions to learn from, alone or before and beside the environment."""

    id: str = Field(min_length=1, json_schema_extra={"x-choices": "datasets"})
    """Its name in `palaestra datasets list`."""
    steps_per_update: int = Field(default=100, ge=1)
    """Gradient steps per update while learning from the dataset alone. Reports, evaluations and checkpoints happen
    between updates."""
    offline_updates: int = Field(default=0, ge=0)
    """With `trainer.total_timesteps`: gradient steps on the dataset before the first step in the environment."""
    mix: float = Field(default=0.0, ge=0, le=1)
    """With `trainer.total_timesteps`: share of every minibatch that is drawn from the dataset."""
    prefill: bool = False
    """With `trainer.total_timesteps`: copy the dataset into the replay buffer, where new steps overwrite it."""


class TrainerConfig(AsyncConfig):
    """Length of the training, collection, checkpoints and evaluation."""

    total_timesteps: int | None = Field(default=None, ge=1)
    """Total steps over all environments; the last update is completed. Give this or `iterations`; 100,000 if neither is
    given."""
    updates: int | None = Field(default=None, ge=1)
    """Length of offline learning in gradient steps; 100,000 if not given. Needs a `dataset`."""
    save_replay: bool = True
    """Whether checkpoints include the replay buffer (its filled part). Without it, a resumed run starts with an empty
    buffer."""
    iterations: int | None = Field(default=None, ge=1)
    """Length of the training in rollouts."""
    rollout_length: int = Field(default=2048, ge=1)
    """Steps of each environment per update."""
    buffer_size: int | None = Field(default=None, ge=1)
    """Alone: an alias of `rollout_length`. With `rollout_length` and asynchronous collection: capacity of the ring in
    steps per environment, a multiple of it."""
    buffer_type: Literal["standard", "vla"] = "standard"
    """`standard`: as `collection`. `vla`: alias of asynchronous collection."""
    collection: Literal["synchronous", "asynchronous"] = "synchronous"
    """`synchronous` alternates collecting and learning. `asynchronous` collects while learning, for policies with slow
    inference (docs/async.md)."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Seed of all randomness: the same seed gives the same numbers on the same machine."""
    log_interval: int = Field(default=1, ge=1)
    """Updates between two telemetry records."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Updates between checkpoints. null: by time only."""
    checkpoint_seconds: float = Field(default=60.0, gt=0)
    """Maximum seconds between checkpoints. One is always written at the start and at the end."""
    keep_checkpoints: int = Field(default=5, ge=1)
    """Number of newest checkpoints to keep, in addition to the best one."""
    eval_every: int | None = Field(default=None, ge=1)
    """Updates between evaluations in separate environments. null: no evaluation during training."""
    eval_episodes: int = Field(default=10, ge=1)
    """Episodes per evaluation."""
    device: str = Field(default="auto", pattern=DEVICE_PATTERN)
    """Device of the policy: `cpu`, `cuda`, `cuda:1`, …; `auto`: the first GPU, or the CPU if there is none.
    Environments and rollouts stay on the CPU (docs/devices.md). Small networks are fastest on `cpu`."""
    compiled: Literal["auto", "on", "off"] = "auto"
    """Compiled kernels for small networks on the CPU: `auto` if supported, `off` never, `on` raises an error if not
    supported."""
    torch_threads: int | None = Field(default=None, ge=1)
    """Threads of torch during training, also in a collector process. null: 1 for small networks and for a collector
    process, the default of torch for large networks."""

    rank_timeout: float = Field(default=1800.0, gt=0)
    """Under torchrun: seconds that a process waits for the others before training fails. Longer than an evaluation,
    which only the first process runs."""

    @field_validator("device", mode="before")
    @classmethod
    def _check_device(cls, value: Any) -> Any:
        # Raises ConfigError, which has a remedy, unlike a pydantic error.
        check_device_name(value, place="trainer.device")
        return value


class RunConfig(Section):
    """Everything that defines a run."""

    name: str = Field(default="", max_length=80)
    """Prefix of the run id; the name of the environment if empty."""
    env: EnvConfig
    dataset: DatasetConfig | None = None
    policy: PolicyConfig = PolicyConfig()
    algorithm: dict[str, Any] = Field(default_factory=dict)
    trainer: TrainerConfig = TrainerConfig()
    actors: ActorsConfig = ActorsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def rollout_length(self) -> int:
        """Steps per environment and update."""
        return self.trainer.rollout_length

    @property
    def total_timesteps(self) -> int:
        """Total steps over all environments; gradient steps of a run that is offline."""
        if self.trainer.total_timesteps is not None:
            return self.trainer.total_timesteps
        if self.trainer.iterations is not None:
            return self.trainer.iterations * self.rollout_length * self.env.num_envs
        if self.is_offline:
            return self.trainer.updates or DEFAULT_LENGTH
        return DEFAULT_LENGTH

    @property
    def experience(self) -> str:
        """The kind of experience of the algorithm: `rollouts` or `transitions`."""
        return find_experience(self.algorithm["name"])

    @property
    def is_offline(self) -> bool:
        """Whether the run learns from a dataset alone. Its steps are gradient steps."""
        return self.dataset is not None and self.trainer.total_timesteps is None

    @property
    def asynchronous(self) -> AsyncConfig | None:
        """Settings of asynchronous collection; None if synchronous."""
        if self.trainer.buffer_type == "standard" and self.trainer.collection == "synchronous":
            return None
        return AsyncConfig(**{name: getattr(self.trainer, name) for name in AsyncConfig.model_fields})

    def to_json(self) -> dict[str, Any]:
        """Every value as plain JSON, defaults included."""
        return self.model_dump(mode="json")


SECTIONS: dict[str, type[Section]] = {
    "run": RunConfig,
    "env": EnvConfig,
    "dataset": DatasetConfig,
    "policy": PolicyConfig,
    "trainer": TrainerConfig,
    "actors": ActorsConfig,
    "telemetry": TelemetryConfig,
    "ppo": PPOConfig,
    **{name: cls.config_class for name, cls in ALGORITHMS["transitions"].items()},
}


def load_config(path: Path | str, assignments: Sequence[str] = (), *, seed: int | None = None) -> RunConfig:
    """The checked configuration from a file, a packaged name or an environment id, with overrides."""
    return config_from(read_config(str(path)).apply_overrides(assignments), seed=seed)


def config_from(data: Mapping[str, Any], *, seed: int | None = None) -> RunConfig:
    """The checked configuration from plain data."""
    data = dict(data)
    if "env" not in data and not data.get("dataset"):
        raise ConfigError("env", None, "required and not given", "Name one: env.id=CartPole-v1")
    given = data.get("algorithm") or {}
    experience = find_experience(given.get("name")) if isinstance(given, Mapping) else "rollouts"
    data["algorithm"] = read_algorithm(given, experience, "ppo")
    if isinstance(data.get("dataset"), Mapping):
        # Before the environment, which may be that of the dataset.
        dataset = parse_section(DatasetConfig, data["dataset"], place="dataset")
        if experience == "rollouts":
            raise _rollouts_only("dataset", dataset.id, data["algorithm"]["name"])
    if experience == "transitions":
        data |= _transition_defaults(data)
    if seed is not None:
        data["trainer"] = {**(data.get("trainer") or {}), "seed": seed}
    data["trainer"] = _resolve_buffer_size(data.get("trainer"))
    optional = {"dataset"}
    config = parse_section(
        RunConfig, {key: {} if value is None and key not in optional else value for key, value in data.items()}
    )
    if experience == "transitions":
        _check_transitions(config)
    else:
        _check_rollouts(config)
    return config


def _transition_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """The sections with the defaults that suit a replay buffer; given keys stay as they are."""
    algorithm = data["algorithm"]
    sections: dict[str, Any] = {}
    for section in ("env", "policy", "trainer"):
        given = data.get(section) or {}
        if not isinstance(given, Mapping):
            return {}  # refused by the parser
        sections[section] = dict(given)
    env, policy, trainer = sections["env"], sections["policy"], sections["trainer"]
    dataset = data.get("dataset")
    if isinstance(dataset, Mapping) and "id" not in env and isinstance(dataset.get("id"), str):
        env |= _dataset_environment(dataset["id"])
    env.setdefault("num_envs", 1)
    policy.setdefault("name", find_algorithm(algorithm["name"], "transitions").policy)
    for key, value in TRANSITION_POLICY.items():
        policy.setdefault(key, value)
    offline = isinstance(dataset, Mapping) and trainer.get("total_timesteps") is None
    if isinstance(env["num_envs"], int) and "log_interval" not in trainer and not offline:
        trainer["log_interval"] = max(1, LOG_STEPS // max(1, algorithm["train_freq"] * env["num_envs"]))
    trainer.setdefault("checkpoint_seconds", 300.0)
    length, chunk = trainer.get("updates") or DEFAULT_LENGTH, dict(dataset or {}).get("steps_per_update", 100)
    if offline and "eval_every" not in trainer and isinstance(length, int) and isinstance(chunk, int) and chunk > 0:
        trainer["eval_every"] = max(1, length // chunk // EVALUATIONS)
    return sections


def _dataset_environment(name: str) -> dict[str, Any]:
    """The environment that a dataset was collected in."""
    from palaestra.experience.datasets.dataset import find_unverified

    # The run verifies the data when it opens it; hashing it here as well would take as long again.
    dataset = find_unverified(name, Home.default().datasets)
    if not dataset.env_id:
        remedy = "Name it: env.id=ENVIRONMENT"
        raise ConfigError("env.id", None, f"the dataset {name} does not say what it was collected in", remedy)
    facts = {"kwargs": dataset.about.get("env_kwargs"), "max_episode_steps": dataset.about.get("max_episode_steps")}
    return {"id": dataset.env_id, **{key: value for key, value in facts.items() if value}}


def _resolve_buffer_size(given: Any) -> Any:
    """Replace `buffer_size` by `rollout_length` if it is given alone."""
    if not isinstance(given, Mapping) or given.get("buffer_size") is None:
        return given
    settings = dict(given)
    length = settings["buffer_size"]
    if settings.get("rollout_length") is None:
        del settings["buffer_size"]
        return {**settings, "rollout_length": length}
    asynchronous = settings.get("buffer_type") == "vla" or settings.get("collection") == "asynchronous"
    if settings["rollout_length"] != length and not asynchronous:
        reason = f"trainer.rollout_length says {settings['rollout_length']!r}"
        raise ConfigError("trainer.buffer_size", length, reason, "Give one of them")
    return settings


def read_algorithm(given: Any, experience: str, default: str) -> dict[str, Any]:
    """Parse `{name, cfg: {...}}` or a flat mapping, and fill in defaults."""
    if not isinstance(given, Mapping):
        remedy = f"Write algorithm: {{name: {default}, …}}"
        raise ConfigError("algorithm", given, "is not a mapping", remedy)
    flat = dict(given)
    nested = flat.pop("cfg", None) or {}
    if not isinstance(nested, Mapping):
        raise ConfigError("algorithm.cfg", nested, "is not a mapping")
    for key in nested:
        if key in flat:
            raise ConfigError(
                f"algorithm.cfg.{key}", nested[key], f"algorithm.{key} says {flat[key]!r}", "Give one of them"
            )
    name = flat.pop("name", default)
    if not isinstance(name, str):
        raise ConfigError("algorithm.name", name, "is not a name", f"Write algorithm.name={default}")
    values = {**flat, **nested}
    settings = parse_section(config_of(name, experience), values, place="algorithm", other_keys=("name",))
    return {"name": name, **settings.model_dump(mode="json")}


def make_algorithm(section: Mapping[str, Any], experience: str) -> Any:
    """The algorithm that a section of a checked configuration describes."""
    settings = {key: value for key, value in section.items() if key != "name"}
    return build_algorithm(section["name"], settings, experience)


def _check_transitions(config: RunConfig) -> None:
    """Raise `ConfigError` for keys that do not fit an algorithm on transitions."""
    t, name, defaults = config.trainer, config.algorithm["name"], TrainerConfig.model_fields
    algorithm = find_algorithm(name, "transitions")
    for key in ("iterations", "rollout_length", "buffer_size", "buffer_type", "collection", *AsyncConfig.model_fields):
        if getattr(t, key) != defaults[key].default:
            reason = f"{name} learns from transitions, not from rollouts"
            raise ConfigError(f"trainer.{key}", getattr(t, key), reason, "Leave it out")
    if config.policy.name != algorithm.policy and ":" not in config.policy.name:
        reason = f"{name} trains {algorithm.policy}"
        raise ConfigError("policy.name", config.policy.name, reason, "Leave it out")
    if config.policy.name == "q_table":
        _check_table(config.policy, name)
    for key in ("normalize_reward", "normalize_observation"):
        if getattr(config.env, key) and (key == "normalize_reward" or config.dataset is None):
            reason = "a replay buffer keeps what was recorded under other statistics"
            remedy = "Leave it out"
            if key == "normalize_observation":
                remedy += ", or name the dataset whose statistics are used, also for fine-tuning: dataset.id=NAME"
            raise ConfigError(f"env.{key}", True, reason, remedy)
    if config.actors.backend != "local":
        reason = f"{name} learns from transitions, whose replay buffer is filled in this process"
        raise ConfigError("actors.backend", config.actors.backend, reason, "Leave it out, or use algorithm.name=ppo")
    if config.env.action_chunk > 1:
        raise ConfigError("env.action_chunk", config.env.action_chunk, f"{name} takes one action per step")
    if config.dataset is not None and config.algorithm.get("prioritized") and (config.is_offline or config.dataset.mix):
        reason = "minibatches of a dataset are sampled uniformly"
        remedy = "Leave it out, or copy the dataset into the replay buffer (dataset.prefill=true) without dataset.mix"
        raise ConfigError("algorithm.prioritized", True, reason, remedy)
    _check_length(config, algorithm)
    if not config.is_offline:
        _check_replay(config)


def _check_table(policy: PolicyConfig, algorithm: str) -> None:
    """Raise `ConfigError` for settings of networks. Defaults are accepted, because stored configurations have them."""
    for key in ("hidden", "activation", "distribution", "log_std_init", "image_features", "image_precision"):
        value, default = getattr(policy, key), PolicyConfig.model_fields[key].default
        if value not in (default, TRANSITION_POLICY.get(key, default)):
            reason = f"has no effect: {algorithm} learns a table, which has no network"
            raise ConfigError(f"policy.{key}", value, reason, "Leave it out, or use dqn")


def _check_length(config: RunConfig, algorithm: Any) -> None:
    """Raise `ConfigError` if the length of the run does not fit learning online or offline."""
    t, name = config.trainer, config.algorithm["name"]
    if config.dataset is None:
        if algorithm.offline_only:
            raise ConfigError("dataset", None, f"{name} learns from a dataset", "Name one: dataset.id=NAME")
        if t.updates is not None:
            reason = "counts gradient steps on a dataset, and there is none"
            raise ConfigError("trainer.updates", t.updates, reason, "Use trainer.total_timesteps, or give dataset.id")
    elif t.total_timesteps is not None:
        if algorithm.offline_only:
            reason = f"{name} learns from a dataset alone"
            raise ConfigError("trainer.total_timesteps", t.total_timesteps, reason, "Use trainer.updates")
        if t.updates is not None:
            remedy = "For learning on the dataset before the environment set dataset.offline_updates"
            raise ConfigError("trainer.updates", t.updates, "trainer.total_timesteps is given, too", remedy)
    else:
        for key in ("offline_updates", "mix", "prefill"):
            if value := getattr(config.dataset, key):
                reason = "has no effect without steps in the environment"
                remedy = "Give trainer.total_timesteps instead of trainer.updates, or leave it out"
                raise ConfigError(f"dataset.{key}", value, reason, remedy)


def _check_replay(config: RunConfig) -> None:
    """Raise `ConfigError` for a replay buffer that cannot be filled, or not before the end of the run."""
    settings, total, num_envs = config.algorithm, config.total_timesteps, config.env.num_envs
    if "buffer_size" not in settings:
        return  # a table
    size, starts = settings["buffer_size"], settings["learning_starts"]
    smallest = {
        "algorithm.batch_size": settings["batch_size"],
        "algorithm.learning_starts": starts,
        "env.num_envs": num_envs,
    }
    for place, least in smallest.items():
        if size < least:
            remedy = f"Raise it, or lower {place}"
            raise ConfigError("algorithm.buffer_size", size, f"is smaller than {place} ({least:,})", remedy)
    prefilled = config.dataset is not None and config.dataset.prefill
    if starts > total and not prefilled:
        reason = f"the run ends after {total:,} steps, before the first update"
        raise ConfigError("algorithm.learning_starts", starts, reason, "Lower it, or raise trainer.total_timesteps")


def _rollouts_only(place: str, value: Any, name: str) -> ConfigError:
    known = ", ".join(ALGORITHMS["transitions"])
    return ConfigError(place, value, f"{name} learns from rollouts", f"Use one of {known}")


def _check_rollouts(config: RunConfig) -> None:
    t = config.trainer
    if t.updates is not None:
        raise _rollouts_only("trainer.updates", t.updates, config.algorithm["name"])
    if t.total_timesteps is not None and t.iterations is not None:
        raise ConfigError(
            "trainer.iterations", t.iterations, f"trainer.total_timesteps says {t.total_timesteps}", "Give one of them"
        )
    if config.asynchronous is None:
        changed = [name for name, field in AsyncConfig.model_fields.items() if getattr(t, name) != field.default]
        if changed:
            remedy = "Add trainer.collection=asynchronous, or leave it out"
            reason = "has no effect with synchronous collection"
            raise ConfigError(f"trainer.{changed[0]}", getattr(t, changed[0]), reason, remedy)
    elif t.overflow != "block" and config.actors.backend == "ray":
        reason = "the segments of a cluster are given to all actors together, and are never overwritten"
        raise ConfigError("trainer.overflow", t.overflow, reason, "Use trainer.overflow=block")
    elif t.buffer_size is not None:
        check_whole_segments(t.buffer_size, config.rollout_length, place="trainer.buffer_size")
    samples, batch = config.rollout_length * config.env.num_envs, int(config.algorithm["batch_size"])
    if samples % batch:
        sizes = f"trainer.rollout_length {config.rollout_length} x env.num_envs {config.env.num_envs}"
        reason = f"does not divide the {samples} samples of a rollout ({sizes})"
        remedy = f"Nearest that do: {' and '.join(str(n) for n in _divisors_near(samples, batch))}"
        raise ConfigError("algorithm.batch_size", batch, reason, remedy)


def _divisors_near(total: int, wanted: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    divisors = sorted({*small, *(total // n for n in small)})
    below = [n for n in divisors if n < wanted]
    above = [n for n in divisors if n > wanted]
    return below[-1:] + above[:1]
