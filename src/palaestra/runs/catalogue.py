"""What can be trained and played: environments, scripts or algorithms of runners, datasets, readiness of runners.

A runner may implement the protocols at the end; `runs.runners.catalogues` has the defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from palaestra.runs.runner import Finding, Machine
from palaestra.runs.wire import API_SCHEMA, JsonObject

if TYPE_CHECKING:
    from palaestra.runs.spec import RunSpec


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
    newest: bool = True
    """Whether there is no later version of it."""


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
    saves_checkpoints: bool = True
    """Whether it can save what it has learned; for some scripts only with an option, which the description names."""
    plays: bool = False
    """Whether its checkpoints can act in plays."""
    warm_start: bool = False
    """Whether it can begin with the weights of a checkpoint."""
    installed: bool = True
    remedy: str = ""
    """How to install what it needs; empty when nothing is missing."""


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A screen task."""

    __pydantic_config__ = API_SCHEMA

    task: str
    """Suite and name: `miniwob/click-button`."""
    suite: str
    parameters: JsonObject = field(default_factory=dict)
    """JSON Schema of its parameters, such as `difficulty`."""


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """A dataset to learn from."""

    __pydantic_config__ = API_SCHEMA

    dataset_id: str
    """The id of Minari: `pendulum/medium-v0`."""
    path: str
    state: Literal["verified", "unchecked", "damaged", "unverified"]
    """`verified`: the files are those whose SHA-256 matched; `unchecked`: their sizes match; `damaged`: they do not, or
    the dataset cannot be read; `unverified`: there is no manifest to compare with, and it cannot be used."""
    problem: str = ""
    """Why it is damaged or unverified."""
    env_id: str = ""
    """The environment that the data comes from; empty if it is unknown."""
    total_steps: int = 0
    total_episodes: int = 0
    random_score: float | None = None
    """Mean return of random actions."""
    expert_score: float | None = None
    """Mean return of an expert."""
    size_bytes: int = 0
    created: float = 0.0
    """Unix time of its data."""
    last_used: float = 0.0
    """Unix time at which it was last opened for learning, or made."""
    sha256: str = ""
    """Digest of its manifest, which identifies the data."""
    about: JsonObject = field(default_factory=dict)
    """How it was made: policy, seed, checkpoint and so on."""
    used_by: tuple[str, ...] = ()
    """Ids of queued and running runs whose configuration or command names it."""


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Whether a runner could start a run here, found without starting one."""

    __pydantic_config__ = API_SCHEMA

    level: Literal["ready", "warning", "missing"]
    text: str
    remedy: str = ""
    findings: tuple[Finding, ...] = ()

    @classmethod
    def from_findings(cls, findings: Sequence[Finding]) -> Readiness:
        """The first refusal, else the first warning, else that nothing is missing."""
        levels: dict[str, Literal["warning", "missing"]] = {"refused": "missing", "warning": "warning"}
        for level, name in levels.items():
            finding = next((finding for finding in findings if finding.level == level), None)
            if finding is not None:
                text = f"{finding.check.partition(':')[2]} {finding.text}".strip()
                return cls(level=name, text=text, remedy=finding.remedy, findings=tuple(findings))
        return cls(level="ready", text="Nothing is missing", findings=tuple(findings))


@runtime_checkable
class RunnerWithScripts(Protocol):
    """A runner that lists its scripts or algorithms. One without this method has none."""

    def scripts(self, spec: RunSpec, machine: Machine) -> Sequence[ScriptInfo]:
        """The values of `--script`; `spec` names interpreter and checkout. `ConfigError` if they cannot be listed."""


@runtime_checkable
class RunnerWithEnvironments(Protocol):
    """A runner with environments of its own. One without these methods trains in those of Gymnasium."""

    def environments(self, spec: RunSpec, machine: Machine, *, refresh: bool = False) -> Sequence[EnvironmentInfo]:
        """What it can train in; `refresh` does not use an earlier answer. `ConfigError` if they cannot be listed."""

    def environment_parameters(self, env_id: str, spec: RunSpec, machine: Machine) -> JsonObject:
        """JSON Schema of the parameters of an environment. `UnknownEnvironment` if there is none."""


@runtime_checkable
class RunnerWithReadiness(Protocol):
    """A runner that knows what it needs. One without this method needs a working interpreter."""

    def readiness(self, spec: RunSpec, machine: Machine) -> Sequence[Finding]:
        """What is there and what is missing, within a second; may start short-lived probes of interpreters."""


@runtime_checkable
class RunnerWithPreparation(Protocol):
    """A runner with a Python environment of its own, which its first run creates unless it was prepared before."""

    def preparation(self, machine: Machine) -> Sequence[str]:
        """The command that creates the environment, reporting on standard error; it does nothing if it exists."""
