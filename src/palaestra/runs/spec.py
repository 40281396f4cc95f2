"""What somebody wants to have run: the one request that the command line, Python and HTTP all make.

Names a runner and gives it its own keys; decides nothing about them (the runner's preflight does). What is stored holds
no secret: those stay in the environment of the service.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, StrictBool, ValidationInfo, field_validator

from palaestra.config import Section
from palaestra.redaction import Redactor, is_secret_name
from palaestra.runs.storable import LARGEST, text_fault, value_fault

__all__ = ["RunSpec"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LONGEST = {
    "runner": 100,
    "script": 4096,
    "checkout": 4096,
    "env_id": 300,
    "python": 4096,
    "warm_start": 4096,
    "tags": 100,
}
_MOST_GIVEN = 4 << 20


class RunSpec(Section):
    """One run to be."""

    schema_version: Literal[1] = 1
    """Of this document."""
    runner: str = "palaestra"
    """Who trains: `palaestra`, `cleanrl`, `sb3`, `echo`, or one that another package brings."""
    name: str = ""
    """How the run's id begins; empty takes the environment's name."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The runner's own keys; `palaestra runners --schema NAME` lists them."""
    given: str = ""
    """The configuration file as it was written, kept as config.yaml."""
    script: str | None = None
    """Which script of the runner's checkout (`dqn`), or the algorithm of a library (`ppo`)."""
    checkout: str | None = None
    """The checkout that the runner's scripts come from; None takes what the environment of the service names."""
    env_id: str | None = None
    """The environment; runners that have it in their configuration take it from there."""
    seed: int | None = Field(default=None, ge=0, le=LARGEST)
    """Seed of everything; None is the runner's default."""
    python: str | None = None
    """Interpreter or virtual environment to run in; None lets the runner choose."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables. Secrets are refused here, because this is stored."""
    invoked_from: Path = Field(default_factory=Path.cwd)
    """Where relative paths of the configuration begin."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Higher starts sooner; equals start in the order they came."""
    gpus: int = Field(default=0, ge=0, le=64)
    """How many GPUs the run needs for itself; it waits until so many are free and is refused if there never are."""
    memory_mb: int | None = Field(default=None, ge=64, le=1 << 32)
    """Address space the trainer may take; beyond it its allocations fail instead of the machine's."""
    nice: int = Field(default=0, ge=0, le=19)
    """How far it steps back for others on the same cores."""
    warm_start: str | None = None
    """A checkpoint (id or path) whose weights it begins with, where the runner can."""
    track: Literal["off", "offline", "online"] = "off"
    """W&B, where the runner can."""
    video: StrictBool = False
    """Record short clips while training, where the runner can; slower, and the report says by how much."""
    stop_grace_s: float | None = Field(default=None, ge=0, le=3600)
    """How long it may take to end after it was asked to; None is the runner's own."""
    stall_after_s: float = Field(default=600.0, gt=0)
    """Silence (no event, no output) after which the run is called stalled."""
    stall_action: Literal["tell", "stop"] = "tell"
    """What to do then: raise an alarm, or stop it, which ends it as `stalled`."""
    no_episode_steps: int | None = Field(default=None, ge=0, le=LARGEST)
    """Steps without a finished episode that are worth an alarm; 0 never, for trainers that have none; None is what the
    service says."""
    thin_every: int = Field(default=1, ge=1, le=LARGEST)
    """Keep one record per metric and this many steps, for trainers that log every gradient step."""
    tags: tuple[str, ...] = Field(default=(), max_length=100)
    """Words to find it by."""

    @field_validator(
        "seed", "priority", "gpus", "memory_mb", "nice", "stop_grace_s", "stall_after_s", "no_episode_steps",
        "thin_every", mode="before",
    )  # fmt: skip
    @classmethod
    def _a_number(cls, value: Any) -> Any:
        if isinstance(value, bool | str):
            raise ValueError("is not a number")
        return value

    @field_validator("name")
    @classmethod
    def _safe_name(cls, value: str) -> str:
        if value and not _NAME.fullmatch(value):
            raise ValueError("may hold letters, digits, dot, dash and underscore only, at most 63, no leading dot")
        return value

    @field_validator(*_LONGEST)
    @classmethod
    def _one_line(cls, value: str | tuple[str, ...] | None, info: ValidationInfo) -> str | tuple[str, ...] | None:
        for text in (value,) if isinstance(value, str) else value or ():
            fault = text_fault(text, _LONGEST[str(info.field_name)])
            if fault:
                raise ValueError(fault)
        return value

    @field_validator("given")
    @classmethod
    def _is_text(cls, value: str) -> str:
        fault = text_fault(value, _MOST_GIVEN, one_line=False)
        if fault:
            raise ValueError(fault)
        return value

    @field_validator("config", "environment", "invoked_from")
    @classmethod
    def _can_be_stored(cls, value: Any) -> Any:
        fault = value_fault(str(value) if isinstance(value, Path) else value)
        if fault:
            raise ValueError(fault)
        return value

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for key, text in value.items():
            if is_secret_name(key) or Redactor()(text) != text:
                what = "looks like a secret" if is_secret_name(key) else "holds a password or token"
                raise ValueError(
                    f"{key} {what} and would be stored: export it where the service starts (palaestra serve --stop "
                    "ends the one that runs), and the trainer inherits it"
                )
            if "\0" in key + text or "=" in key or not key:
                raise ValueError(f"{key!r} is not a name that an environment can hold")
        return value
