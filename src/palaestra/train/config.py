"""The configuration of a training run in vector environments.

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
from palaestra.config.file import apply_overrides, read_config_file
from palaestra.env.make import EnvConfig
from palaestra.errors import ConfigError
from palaestra.experience.vla_buffer import check_whole_segments
from palaestra.learner.ppo import PPOConfig
from palaestra.learner.registry import build_algorithm, config_of
from palaestra.policy.config import PolicyConfig
from palaestra.policy.device import DEVICE_PATTERN, check_device_name
from palaestra.telemetry import TelemetryConfig

MAX_SEED = 2**32 - 1
"""The largest seed. Evaluation adds to it, and torch accepts at most 64 bits."""


class TrainerConfig(AsyncConfig):
    """Length of the training, collection, checkpoints and evaluation."""

    total_timesteps: int | None = Field(default=None, ge=1)
    """Total steps over all environments. Give this or `iterations`; 100,000 if neither is given."""
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
    policy: PolicyConfig = PolicyConfig()
    algorithm: dict[str, Any] = Field(default_factory=dict)
    trainer: TrainerConfig = TrainerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def rollout_length(self) -> int:
        """Steps per environment and update."""
        return self.trainer.rollout_length

    @property
    def total_timesteps(self) -> int:
        """Total steps over all environments."""
        if self.trainer.total_timesteps is not None:
            return self.trainer.total_timesteps
        if self.trainer.iterations is not None:
            return self.trainer.iterations * self.rollout_length * self.env.num_envs
        return 100_000

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
    "policy": PolicyConfig,
    "trainer": TrainerConfig,
    "telemetry": TelemetryConfig,
    "ppo": PPOConfig,
}


def load_config(path: Path, assignments: Sequence[str] = (), *, seed: int | None = None) -> RunConfig:
    """The checked configuration from a file, with overrides."""
    return config_from(apply_overrides(read_config_file(path, Path("configs/ppo")), assignments), seed=seed)


def config_from(data: Mapping[str, Any], *, seed: int | None = None) -> RunConfig:
    """The checked configuration from plain data."""
    data = dict(data)
    if "env" not in data:
        raise ConfigError("env", None, "required and not given", "Name one: env.id=CartPole-v1")
    data["algorithm"] = read_algorithm(data.get("algorithm") or {}, "rollouts", "ppo")
    if seed is not None:
        data["trainer"] = {**(data.get("trainer") or {}), "seed": seed}
    data["trainer"] = _resolve_buffer_size(data.get("trainer"))
    config = parse_section(RunConfig, {key: {} if value is None else value for key, value in data.items()})
    _check_consistency(config)
    return config


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
    settings = parse_section(config_of(name, experience), {**flat, **nested}, place="algorithm")
    return {"name": name, **settings.model_dump(mode="json")}


def make_algorithm(section: Mapping[str, Any], experience: str) -> Any:
    """The algorithm that a section of a checked configuration describes."""
    settings = {key: value for key, value in section.items() if key != "name"}
    return build_algorithm(section["name"], settings, experience)


def _check_consistency(config: RunConfig) -> None:
    t = config.trainer
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
