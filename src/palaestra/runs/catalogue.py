"""What can be trained and played: environments, the scripts or algorithms of runners, and whether a runner is ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from palaestra.runs.runner import Finding
from palaestra.runs.wire import API_SCHEMA


@dataclass(frozen=True, kw_only=True)
class EnvironmentInfo:
    """An environment or a screen task."""

    __pydantic_config__ = API_SCHEMA

    env_id: str
    group: str
    """What it belongs to: `Classic control`, `Toy text`, `Box2D`, `MuJoCo`, `MiniGrid`, `Screen tasks: miniwob`, …"""
    kind: Literal["gymnasium", "screen"] = "gymnasium"
    installed: bool = True
    remedy: str = ""
    """How to install what it needs; empty when nothing is missing."""
    max_episode_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class ScriptInfo:
    """A script of a runner's checkout, or an algorithm of its library."""

    __pydantic_config__ = API_SCHEMA

    name: str
    """Value of `--script`."""
    title: str
    description: str = ""
    actions: tuple[Literal["discrete", "continuous", "screen"], ...] = ()
    """Kinds of actions it can learn; empty when unknown."""


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Whether a runner could start a run here, found without starting one."""

    __pydantic_config__ = API_SCHEMA

    level: Literal["ready", "warning", "missing"]
    text: str
    remedy: str = ""
    findings: tuple[Finding, ...] = ()
