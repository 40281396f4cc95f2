"""The request for a play."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, StrictBool, field_validator, model_validator

from palaestra.config import Section
from palaestra.runs.play.protocol import MAX_SPEED, MIN_SPEED
from palaestra.runs.spec import find_text_fault, find_value_fault


class PlaySpec(Section):
    """An environment to play in, and how to begin."""

    env_id: str | None = Field(default=None, max_length=300)
    """Gymnasium id, or the address `module:factory` of an environment."""
    task: str | None = Field(default=None, max_length=300)
    """Screen task, such as `miniwob/click-button`, played in a browser."""
    parameters: dict[str, Any] = Field(default_factory=dict, max_length=100)
    """Arguments of the environment's constructor, or parameters of the task."""
    max_episode_steps: int | None = Field(default=None, ge=1, lt=2**31)
    """Truncates episodes after this many steps; null uses the environment's own limit."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the first episode; each further episode adds one."""
    mode: Literal["human", "hybrid", "agent"] = "human"
    """Who acts."""
    checkpoint: str | None = Field(default=None, max_length=4096)
    """Policy to load at once: id or path of a checkpoint, or `random`."""
    deterministic: StrictBool = True
    """Whether the policy takes its most likely action."""
    consent: str = Field(default="", max_length=64)
    """Digest that agrees to a policy that executes foreign code."""
    fps: float | None = Field(default=None, gt=0, le=240)
    """Steps per second at speed 1; null uses the environment's own rate."""
    speed: float = Field(default=1.0, ge=MIN_SPEED, le=MAX_SPEED)
    """Factor on the pace."""
    paused: StrictBool = False
    """Whether to begin paused."""
    auto_reset: StrictBool = True
    """Begin the next episode a moment after one has ended."""
    recording: StrictBool = True
    """Record episodes, with a picture of every step."""
    gateway: str | None = Field(default=None, max_length=300)
    """Gateway that opens the browser session of a task; null opens a browser on the service's machine."""
    invoked_from: Path = Field(default_factory=Path.cwd)
    """Directory from which the module of an address is imported."""

    @field_validator("env_id", "task", "checkpoint", "gateway")
    @classmethod
    def _check_text(cls, value: str | None) -> str | None:
        if value is not None:
            fault = find_text_fault(value, 4096)
            if fault or not value:
                raise ValueError(fault or "is empty")
        return value

    @field_validator("invoked_from")
    @classmethod
    def _check_directory(cls, value: Path) -> Path:
        fault = find_text_fault(str(value), 4096, one_line=False)
        if fault:
            raise ValueError(fault)
        return value

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, value: dict[str, Any]) -> dict[str, Any]:
        fault = find_value_fault(value)
        if fault:
            raise ValueError(fault)
        return value

    @model_validator(mode="after")
    def _check_environment(self) -> PlaySpec:
        if (self.env_id is None) == (self.task is None):
            raise ValueError("give either env_id or task")
        return self
