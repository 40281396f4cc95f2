"""Runs, checkpoints and events as frozen dataclasses: the one definition for registry, HTTP API, client and `--json`.

A field that is added to `RunRecord` or `CheckpointRecord` is a column of the registry (`store.database.MIGRATIONS` adds
it), a key of the JSON data and a property of the OpenAPI schema. Cheap to import.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, TypeVar

from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.phase import Phase
from palaestra.runs.wire import API_SCHEMA, JsonObject, Number, field_types
from palaestra.strict_json import dump_json

_Record = TypeVar("_Record", bound="RunRecord | CheckpointRecord")

MAX_INTEGER = 2**63 - 1
"""The largest integer that the registry can hold."""

HERE = ""
"""The machine of the service."""


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run: one line of events.jsonl."""

    __pydantic_config__ = API_SCHEMA

    seq: int
    time: float
    attempt: int
    kind: str
    """A `PhaseEvent`, or `alarm`, `alarm_over`, `adopted`, `edited`, `note`, which change no phase."""
    phase: Phase
    """The phase after the event."""
    reason: str = ""
    code: str = ""
    facts: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class BeliefRecord:
    """What a BDI agent of a run believed and intended at one time: one `Belief` of the journal."""

    __pydantic_config__ = API_SCHEMA

    seq: int
    time: float
    agent: str
    beliefs: JsonObject
    """`beliefs`, `intentions`, `plan`, `confidence`, `episode`, `step` and `q_values`, as far as the agent reports
    them. Of the `q_values`, a response holds the newest of each agent."""


@dataclass(frozen=True)
class BeliefHistory:
    """Records of an attempt in the order of time, and where to continue."""

    __pydantic_config__ = API_SCHEMA

    records: tuple[BeliefRecord, ...]
    next: str
    """Send it as `after` to receive what follows."""


@dataclass(frozen=True)
class Alarm:
    """A problem of a run that needs attention while the run continues."""

    __pydantic_config__ = API_SCHEMA

    code: str
    """`stalled`, `no_episodes`, `traceback`, `disk`, `unreadable_events`, `watchdog_gone`, `unreachable`, `drift`;
    and about metrics `non_finite`, `dropped_events`, `left_out_metrics`, which remain when the run has ended."""
    text: str
    since: float


LASTING_ALARMS = frozenset({"non_finite", "dropped_events", "left_out_metrics"})
"""Alarms about the metrics of a run. They remain on its record when the run has ended, as the metrics do."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run in its current state. Times are unix times."""

    __pydantic_config__ = API_SCHEMA

    run_id: str
    runner: str
    agent_id: str
    """Runner and algorithm: `palaestra/ppo`, `cleanrl/dqn`."""
    env_id: str
    phase: Phase
    reason: str = ""
    """Why the run is in this phase."""
    code: str = ""
    attempt: int = 0
    """Number of the current attempt; 0 before the first."""
    supervised: bool = True
    """False for a run of `palaestra train` alone, which the service shows and never stops."""
    priority: int = 0
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    watchdog: ProcessIdentity | None = None
    """The watchdog process beside the trainer."""
    trainer: ProcessIdentity | None = None
    env_step: int = 0
    total_steps: int | None = None
    episodes: int = 0
    episode_return: Number | None = None
    """Mean of the last 100 episodes."""
    seed: int | None = None
    tags: tuple[str, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    archived: bool = False
    tracking_url: str = ""
    bytes_on_disk: int = 0
    name: str = ""
    """Title that people gave it."""
    notes: str = ""
    """Text that people wrote about it."""
    config_digest: str = ""
    """Hash of its configuration without seed and name: runs that differ in their seed only have the same one. Empty for
    runs of earlier versions that cannot be read."""
    host: str = ""
    """The machine it runs on, or may be sent to; empty for the machine of the service."""
    code_version: str = ""
    """The code of the newest attempt: a commit, with `+` and a hash of its changes, or `files-` and a hash of the
    source files. Empty until it is recorded."""
    environment_digest: str = ""
    """Hash of the Python version and the packages of the newest attempt; empty without an interpreter."""
    favorite: bool = False
    """Whether people marked it to keep: the retention policy leaves it alone."""


class RunChanges(TypedDict, total=False):
    """Fields of a `RunRecord` that change while a run is supervised, besides its phase and the reason of it."""

    attempt: int
    started: float | None
    ended: float | None
    watchdog: ProcessIdentity | None
    trainer: ProcessIdentity | None
    env_step: int
    total_steps: int | None
    episodes: int
    episode_return: float | None
    alarms: tuple[Alarm, ...]
    tracking_url: str
    bytes_on_disk: int
    config_digest: str
    host: str
    code_version: str
    environment_digest: str


class RunEdit(TypedDict, total=False):
    """Fields of a `RunRecord` that people change at any time; the event log holds them in events of kind `edited`."""

    name: str
    tags: tuple[str, ...]
    notes: str
    favorite: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """One checkpoint, saved by a run or imported."""

    __pydantic_config__ = API_SCHEMA

    checkpoint_id: str
    """First 16 hex digits of its SHA-256."""
    run_id: str
    """Empty for an imported checkpoint."""
    agent_id: str
    env_id: str
    attempt: int
    env_step: int | None
    """Environment steps it was trained for; null when unknown."""
    path: str
    """Absolute path on the service's machine."""
    sha256: str
    size_bytes: int
    format: str
    """`palaestra`, `safetensors`, `torch_zip`, `sb3_zip`, `spade_bdi`."""
    created: float
    best: bool = False
    metric: Number | None = None
    step_source: str = ""
    """How the step is known: `file`, `announced`, `name`, `log` (a lower bound), `given` or `unknown`; empty on records
    of earlier versions."""
    profile: str = "local"
    """Where it is stored: `local` in its run, `managed` as a copy made by an import."""
    env_signature: JsonObject = field(default_factory=dict)
    metrics_digest: dict[str, Number] = field(default_factory=dict)
    offline_dataset: JsonObject = field(default_factory=dict)
    """The dataset that it learned from: `dataset_id`, `sha256`, and `env_id` and `env_kwargs` of the environment in
    which it was recorded; empty for one trained in its environment."""
    verified: float | None = None
    """When its bytes last matched the hash; null: never checked; negative: they did not match at that time."""

    @property
    def step_text(self) -> str:
        """`12,000`, `11,992+` for a lower bound, or `unknown`."""
        if self.env_step is None:
            return "unknown"
        return f"{self.env_step:,}{'+' if self.step_source == 'log' else ''}"


@dataclass(frozen=True)
class CheckpointVerification:
    """Whether the bytes of a checkpoint are those that were saved."""

    __pydantic_config__ = API_SCHEMA

    checkpoint: CheckpointRecord
    fits: bool
    problem: str
    """What is wrong; empty when they are."""


def digest_config(env_id: str, spec: JsonObject, resolved: JsonObject) -> str:
    """Hash of what defines a run: its runner, environment and configuration, without seeds and names."""
    content = {key: spec[key] for key in _DEFINING_KEYS if spec.get(key)}
    content |= {"env_id": env_id, "runner": spec.get("runner") or "palaestra"}
    names = {key: value for key, value in resolved.items() if key not in _NAME_KEYS}
    text = dump_json({**content, "resolved": _without_seeds(names)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


_DEFINING_KEYS = ("script", "warm_start", "environment")
_NAME_KEYS = frozenset({"name", "exp_name"})


def _without_seeds(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_seeds(item) for key, item in value.items() if key != "seed"}
    return [_without_seeds(item) for item in value] if isinstance(value, list | tuple) else value


def fit_record(record: _Record) -> _Record:
    """Cut the values of a record to what the registry can hold, so that one odd value does not hide the others.

    Integers are clamped to 64 bits, and text that is not valid UTF-8 gets replacement characters.
    """
    changes = {}
    for name, fit in _FITTERS[type(record)].items():
        value = getattr(record, name)
        fitted = fit(value)
        if fitted is not value:
            changes[name] = fitted
    return replace(record, **changes) if changes else record


def fit_checkpoint(record: CheckpointRecord) -> CheckpointRecord:
    """`fit_record` for a record whose types are not certain; `ValueError` when its identifiers or times are wrong."""
    if not all(isinstance(getattr(record, name), str) for name in _IDENTIFIERS):
        raise ValueError("its id, path or hash is not text")
    if not isinstance(record.created, int | float) or not isinstance(record.verified, int | float | None):
        raise ValueError("one of its times is not a number")
    texts: JsonObject = {
        name: str(getattr(record, name)) for name, type_ in field_types(CheckpointRecord).items() if type_ is str
    }
    return fit_record(replace(record, **texts))


_IDENTIFIERS = frozenset({"checkpoint_id", "path", "sha256"})
"""Never changed: a changed path would name another file."""


def _fit_integer(value: object, default: int | None) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -MAX_INTEGER <= value <= MAX_INTEGER else max(-MAX_INTEGER, min(MAX_INTEGER, value))
    return default


def _fit_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value  # the registry refuses the row
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "replace").decode()
    return value


def _fit_tags(tags: tuple[str, ...]) -> tuple[str, ...]:
    fitted = tuple(_fit_text(tag) for tag in tags)
    return tags if fitted == tags else fitted


def _fit_alarms(alarms: tuple[Alarm, ...]) -> tuple[Alarm, ...]:
    fitted = tuple(replace(alarm, text=_fit_text(alarm.text)) for alarm in alarms)
    return alarms if fitted == alarms else fitted


def _fitters(kind: type[RunRecord | CheckpointRecord]) -> dict[str, Callable[[Any], Any]]:
    fitters: dict[Any, Callable[[Any], Any]] = {
        int: functools.partial(_fit_integer, default=0),
        int | None: functools.partial(_fit_integer, default=None),
        str: _fit_text,
        tuple[str, ...]: _fit_tags,
        tuple[Alarm, ...]: _fit_alarms,
    }
    types = field_types(kind).items()
    return {name: fitters[type_] for name, type_ in types if type_ in fitters and name not in _IDENTIFIERS}


_FITTERS: dict[type[Any], dict[str, Callable[[Any], Any]]] = {
    kind: _fitters(kind) for kind in (RunRecord, CheckpointRecord)
}
