"""The configuration of one training run: sections that live beside what they configure, put together and checked.

`load_config` is the door: file, overrides, the spellings of the specifications, then validation across sections.
Nothing is built, launched or written here.
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

__all__ = [
    "MAX_SEED",
    "SECTIONS",
    "RunConfig",
    "TrainerConfig",
    "config_from",
    "load_config",
    "make_algorithm",
    "read_algorithm",
]

MAX_SEED = 2**32 - 1
"""The largest seed; evaluation adds to it, and torch takes no more than 64 bits."""


class TrainerConfig(AsyncConfig):
    """How long to train, in what portions, whether collecting waits for learning, and what to keep."""

    total_timesteps: int | None = Field(default=None, ge=1)
    """Steps over all environments together. Give this or `iterations`; 100,000 when neither is given."""
    iterations: int | None = Field(default=None, ge=1)
    """The same length counted in rollouts."""
    rollout_length: int = Field(default=2048, ge=1)
    """Steps in each environment per update. Longer sees more before each change and changes less often."""
    buffer_size: int | None = Field(default=None, ge=1)
    """Alone: another name for `rollout_length`, as the specifications write it. Beside `rollout_length`, in
    asynchronous collection: steps per environment that the ring holds, a multiple of it."""
    buffer_type: Literal["standard", "vla"] = "standard"
    """`standard` collects, then learns. `vla` is another name for asynchronous collection."""
    collection: Literal["synchronous", "asynchronous"] = "synchronous"
    """`synchronous` collects, then learns, in turn. `asynchronous` collects in the background while learning, for
    policies whose inference is slow (docs/async.md)."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Everything random follows from it: same seed, same numbers, on the same machine."""
    log_interval: int = Field(default=1, ge=1)
    """Updates between two lines of telemetry."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Updates between checkpoints. null: by time alone."""
    checkpoint_seconds: float = Field(default=60.0, gt=0)
    """Write a checkpoint when the last one is older than this. One is always written at the start and at the end."""
    keep_checkpoints: int = Field(default=5, ge=1)
    """How many of the newest checkpoints to keep; the best one is kept as well."""
    eval_every: int | None = Field(default=None, ge=1)
    """Updates between evaluations on separate environments. null: none while training."""
    eval_episodes: int = Field(default=10, ge=1)
    """Episodes per evaluation."""
    device: str = Field(default="auto", pattern=DEVICE_PATTERN)
    """Where the policy acts and learns: `cpu`, `cuda`, `cuda:1`, …; `auto`: the first GPU there is, or the CPU.
    Environments and rollouts stay on the CPU (docs/devices.md). Small networks are fastest on `cpu`."""
    compiled: Literal["auto", "on", "off"] = "auto"
    """Compiled kernels for small networks on the CPU: `auto` where they fit, `off` never, `on` refuses to start without
    them."""
    torch_threads: int | None = Field(default=None, ge=1)
    """Threads of torch while training, in a collector process too. null: 1 for small networks and for a collector
    process, torch's own choice for large networks."""

    @field_validator("device", mode="before")
    @classmethod
    def _device_is_a_name(cls, value: Any) -> Any:
        # A ConfigError of our own, because pydantic's has no remedy.
        check_device_name(value, place="trainer.device")
        return value


class RunConfig(Section):
    """Everything that defines a run."""

    name: str = Field(default="", max_length=80)
    """Start of the run id; the environment's name when empty."""
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
        """Steps over all environments, whichever way the length was given."""
        if self.trainer.total_timesteps is not None:
            return self.trainer.total_timesteps
        if self.trainer.iterations is not None:
            return self.trainer.iterations * self.rollout_length * self.env.num_envs
        return 100_000

    @property
    def asynchronous(self) -> AsyncConfig | None:
        """How to collect in the background; None when collecting waits for learning."""
        if self.trainer.buffer_type == "standard" and self.trainer.collection == "synchronous":
            return None
        return AsyncConfig(**{name: getattr(self.trainer, name) for name in AsyncConfig.model_fields})

    def resolved(self) -> dict[str, Any]:
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
    data["trainer"] = _trainer(data.get("trainer"))
    config = parse_section(RunConfig, {key: {} if value is None else value for key, value in data.items()})
    _check_across(config)
    return config


def _trainer(given: Any) -> Any:
    """`buffer_size` alone is another name for `rollout_length`; from here on there is one."""
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
    """`{name, cfg: {...}}` as the specifications write it, or flat; every default filled in."""
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


def _check_across(config: RunConfig) -> None:
    t = config.trainer
    if t.total_timesteps is not None and t.iterations is not None:
        raise ConfigError(
            "trainer.iterations", t.iterations, f"trainer.total_timesteps says {t.total_timesteps}", "Give one of them"
        )
    if config.asynchronous is None:
        changed = [name for name, field in AsyncConfig.model_fields.items() if getattr(t, name) != field.default]
        if changed:
            raise ConfigError(
                f"trainer.{changed[0]}", getattr(t, changed[0]), "means nothing when collecting waits for learning",
                "Add trainer.collection=asynchronous, or leave it out",
            )  # fmt: skip
    elif t.buffer_size is not None:
        check_whole_segments(t.buffer_size, config.rollout_length, place="trainer.buffer_size")
    samples, batch = config.rollout_length * config.env.num_envs, int(config.algorithm["batch_size"])
    if samples % batch:
        raise ConfigError(
            "algorithm.batch_size", batch,
            f"does not divide the {samples} samples of a rollout (trainer.rollout_length {config.rollout_length} x "
            f"env.num_envs {config.env.num_envs})",
            f"Nearest that do: {' and '.join(str(n) for n in _divisors_near(samples, batch))}",
        )  # fmt: skip


def _divisors_near(total: int, wanted: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    divisors = sorted({*small, *(total // n for n in small)})
    below = [n for n in divisors if n < wanted]
    above = [n for n in divisors if n > wanted]
    return below[-1:] + above[:1]
