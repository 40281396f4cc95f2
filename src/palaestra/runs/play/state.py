"""Plays and recorded episodes as data: the environment and its controls, the state of a play, each step, the records.

The types are the JSON of the messages and the client's values; `type` in the header of a message names them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from palaestra.runs.play.protocol import Actor, Message, Mode, pack
from palaestra.runs.wire import API_SCHEMA, JsonObject, Number, from_json, to_json

Outcome: TypeAlias = Literal["playing", "terminated", "truncated", "stopped", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An action that a person can choose with a key or a button."""

    __pydantic_config__ = API_SCHEMA

    action: Any
    label: str
    keys: tuple[str, ...] = ()
    """Names of keys as in the DOM: `ArrowLeft`, `a`, `Enter`, ` `."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One number of an action that a person moves between two bounds."""

    __pydantic_config__ = API_SCHEMA

    label: str
    low: float
    high: float
    idle: float
    """Value without input."""
    negative_keys: tuple[str, ...] = ()
    positive_keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Controls:
    """How a person acts: by choices (one of n actions), axes (numbers), or directly on a screen."""

    __pydantic_config__ = API_SCHEMA

    kind: Literal["choices", "axes", "screen", "none"]
    choices: tuple[Choice, ...] = ()
    axes: tuple[Axis, ...] = ()
    idle: Any = None
    """Action of a real-time environment without input."""


@dataclass(frozen=True, kw_only=True)
class CellGrid:
    """A small world of cells, row by row."""

    __pydantic_config__ = API_SCHEMA

    columns: int
    cells: tuple[str, ...]
    """Contents of each cell, such as `floor`, `wall`, `goal`, `hole`, `door red open`."""
    agent: int
    """Cell of the agent."""
    heading: int | None = None
    """0 right, 1 down, 2 left, 3 up; null when the agent has no heading."""
    marks: dict[str, int] = field(default_factory=dict)
    """Other things that move, by name, and their cells."""
    moves: tuple[str, ...] = ()
    """What each action does, such as `left` or `pick up`; empty without values."""
    values: tuple[tuple[float, ...], ...] = ()
    """Values of the actions in each cell, from the table of the policy; empty when it has none."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentDescription:
    """The environment of a play."""

    __pydantic_config__ = API_SCHEMA

    env_id: str
    """Gymnasium id or address, or the name of a screen task."""
    kind: Literal["gymnasium", "screen"]
    parameters: dict[str, Any] = field(default_factory=dict)
    observation_space: dict[str, Any] = field(default_factory=dict)
    action_space: dict[str, Any] = field(default_factory=dict)
    controls: Controls
    turn_based: bool
    """Whether it waits for a move of the person; other environments go on with the pace of `fps`."""
    fps: float
    """Steps per second at speed 1."""
    max_episode_steps: int | None = None
    instruction: str = ""
    """What the task asks for; empty in most Gymnasium environments."""


@dataclass(frozen=True, kw_only=True)
class PolicyStatus:
    """A policy that acts, is loading or could not be loaded."""

    __pydantic_config__ = API_SCHEMA

    state: Literal["loading", "ready", "failed", "needs_consent"]
    name: str
    """What people call it, such as `ppo, 12,000 steps`."""
    checkpoint: str
    """As requested: id, path or `random`."""
    agent_id: str = ""
    text: str = ""
    """Why it failed, or what the user has to agree to."""
    remedy: str = ""
    digest: str = ""
    """Send it as `consent` to agree."""
    notes: tuple[str, ...] = ()
    """What differs from training, for example statistics that were not saved."""


@dataclass(frozen=True, kw_only=True)
class PlayState:
    """Everything about a play that changes rarely; sent after every change and to new clients."""

    __pydantic_config__ = API_SCHEMA

    environment: EnvironmentDescription
    mode: Mode
    control: Actor
    """Who acts now."""
    paused: bool = False
    speed: float = 1.0
    seed: int | None = None
    episode: int = 0
    """Number of the episode, from 1."""
    episode_id: str = ""
    """Id of its recording; empty when it is not recorded."""
    recording: bool = True
    waiting: Literal["", "move", "policy", "reset"] = ""
    """What the play waits for: a move of the person, a policy, or a reset after the end of an episode."""
    policy: PolicyStatus | None = None
    """The policy that acts."""
    loading: PolicyStatus | None = None
    """The policy that is being loaded, or whose loading failed."""

    TYPE = "state"


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step, or the beginning of an episode (step 0). The payload is the picture, if there is one."""

    __pydantic_config__ = API_SCHEMA

    episode: int
    step: int
    action: Any = None
    actor: Actor | None = None
    reward: Number = 0.0
    episode_return: Number = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    outputs: dict[str, Any] = field(default_factory=dict)
    """What the policy reported: `value`, `probabilities`, `q_values`, `log_prob`, `text`."""
    grid: CellGrid | None = None
    width: int = 0
    height: int = 0
    """Size of the picture; 0 without one."""
    input: int = 0
    """The newest input of the person that this step has used."""
    time: float = 0.0
    """Unix time of the step."""

    TYPE = "step"

    @property
    def is_last(self) -> bool:
        """Whether the episode ended with this step."""
        return self.terminated or self.truncated


@dataclass(frozen=True, kw_only=True)
class PlayNotice:
    """Something that the user should know."""

    __pydantic_config__ = API_SCHEMA

    level: Literal["info", "warning", "error"]
    text: str
    remedy: str = ""

    TYPE = "notice"


@dataclass(frozen=True, kw_only=True)
class PlayEnded:
    """The end of a play: no more messages follow."""

    __pydantic_config__ = API_SCHEMA

    reason: str
    failed: bool = False
    remedy: str = ""
    place: str = ""
    """The part of the request that is wrong."""

    TYPE = "ended"


@dataclass(frozen=True, kw_only=True)
class PlayRecord:
    """One play."""

    __pydantic_config__ = API_SCHEMA

    play_id: str
    env_id: str
    """Environment or screen task."""
    phase: Literal["running", "ended"]
    reason: str = ""
    """Why it ended."""
    failed: bool = False
    created: float = 0.0
    clients: int = 0
    pid: int = 0
    spec: dict[str, Any] = field(default_factory=dict)
    state: PlayState | None = None


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """Summary of a recorded episode."""

    __pydantic_config__ = API_SCHEMA

    episode_id: str
    play_id: str
    env_id: str
    kind: Literal["gymnasium", "screen"]
    parameters: dict[str, Any] = field(default_factory=dict)
    instruction: str = ""
    seed: int | None = None
    mode: Mode = "human"
    policy: str = ""
    """Name of the policy that acted; empty when none did."""
    checkpoint: str = ""
    fps: float = 30.0
    started: float = 0.0
    ended: float | None = None
    outcome: Outcome = "playing"
    """How it ended: by the environment (`terminated`, `truncated`), by a reset (`stopped`), or with its process
    (`interrupted`)."""
    success: bool | None = None
    steps: int = 0
    human_steps: int = 0
    agent_steps: int = 0
    episode_return: Number = 0.0
    bytes: int = 0
    problem: str = ""
    """Why it cannot be replayed; empty when it can."""


@dataclass(frozen=True)
class EpisodeStep:
    """A recorded step."""

    __pydantic_config__ = API_SCHEMA

    report: StepReport
    has_picture: bool


Report: TypeAlias = PlayState | StepReport | PlayNotice | PlayEnded
REPORTS: dict[str, type[Report]] = {kind.TYPE: kind for kind in (PlayState, StepReport, PlayNotice, PlayEnded)}
ALIVE = "alive"
"""Type of the message that a worker sends every second."""


def pack_report(report: Report, payload: bytes = b"") -> bytes:
    """A report as bytes."""
    return pack({"type": report.TYPE, **to_json(report)}, payload)


def read_report(message: Message) -> Report | None:
    """The report in a message; None for messages of a later version."""
    kind = REPORTS.get(message.type)
    if kind is None:
        return None
    header: JsonObject = {name: value for name, value in message.header.items() if name != "type"}
    return from_json(kind, header)
