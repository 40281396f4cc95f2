"""Rows, happenings and errors as plain JSON data and back: what HTTP, the client and `--json` all speak.

Free to import. A field that a later version adds is ignored by an earlier one; NaN and the infinities are strings, as
`telemetry.json_number` says.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from palaestra.errors import (
    ConfigError,
    ConsentRequired,
    IllegalTransition,
    LaunchRefused,
    PalaestraError,
    ServiceUnreachable,
    StateDirectoryLocked,
    UnknownRun,
)
from palaestra.processes.procfs import ProcessIdentity
from palaestra.redaction import Redactor
from palaestra.runs.phase import Phase
from palaestra.runs.record import Alarm, CheckpointRecord, RunEvent, RunRecord
from palaestra.strict_json import json_number, optional_number, read_numbers

__all__ = [
    "checkpoint_data",
    "checkpoint_of",
    "error_data",
    "error_of",
    "life_data",
    "life_of",
    "plain",
    "run_data",
    "run_of",
]

_T = TypeVar("_T")

_CODES: dict[type[PalaestraError], str] = {
    LaunchRefused: "refused",
    UnknownRun: "unknown_run",
    StateDirectoryLocked: "state_held",
    ConfigError: "bad_request",
    ConsentRequired: "consent_needed",
    IllegalTransition: "illegal_transition",
    ServiceUnreachable: "unreachable",
}


def run_data(record: RunRecord) -> dict[str, Any]:
    """A row as JSON data."""
    data: dict[str, Any] = plain(dataclasses.asdict(record))
    return data


def run_of(data: Mapping[str, Any]) -> RunRecord:
    """The row that was written so."""
    known = _known(RunRecord, data)
    return RunRecord(
        **{
            **known,
            "phase": Phase(data["phase"]),
            "episode_return": optional_number(data.get("episode_return")),
            "tags": tuple(data.get("tags") or ()),
            "alarms": tuple(Alarm(**_known(Alarm, alarm)) for alarm in data.get("alarms") or ()),
            "warden": ProcessIdentity.from_json(data.get("warden")),
            "trainer": ProcessIdentity.from_json(data.get("trainer")),
        }
    )


def life_data(record: RunEvent) -> dict[str, Any]:
    """A happening as JSON data."""
    data: dict[str, Any] = plain(dataclasses.asdict(record))
    return data


def life_of(data: Mapping[str, Any]) -> RunEvent:
    """The happening that was written so."""
    return RunEvent(**{**_known(RunEvent, data), "phase": Phase(data["phase"])})


def checkpoint_data(record: CheckpointRecord) -> dict[str, Any]:
    """A checkpoint's row as JSON data."""
    data: dict[str, Any] = plain(dataclasses.asdict(record))
    return data


def checkpoint_of(data: Mapping[str, Any]) -> CheckpointRecord:
    """The checkpoint's row that was written so."""
    metric, digest = optional_number(data.get("metric")), read_numbers(data.get("metrics_digest") or {})
    return CheckpointRecord(**{**_known(CheckpointRecord, data), "metric": metric, "metrics_digest": digest})


def error_data(error: PalaestraError) -> dict[str, Any]:
    """An error of ours as JSON data, without secrets."""
    redact = Redactor()
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "failed")
    data: dict[str, Any] = {"code": code, "text": redact(str(error)), "place": "", "reason": "", "remedy": ""}
    if isinstance(error, ConfigError):
        shown = redact(json.dumps(plain(error.value), default=str))
        data |= {"place": error.place, "reason": redact(error.reason), "remedy": redact(error.remedy)}
        # What is too long to be said in the sentence is too long here, and what was hidden may be JSON no more.
        data["value"] = json.loads(shown) if len(shown) <= 1000 and "***" not in shown else shown[:1000]
    if isinstance(error, ConsentRequired):
        data["digest"] = error.digest
    return data


def error_of(data: Mapping[str, Any]) -> PalaestraError:
    """The error that was written so."""
    text, code = str(data.get("text", "")), data.get("code")
    kind = next((kind for kind, known in _CODES.items() if known == code), PalaestraError)
    if issubclass(kind, ConfigError):
        return kind(
            str(data.get("place", "")), data.get("value"), str(data.get("reason", "")), str(data.get("remedy", ""))
        )
    if issubclass(kind, ConsentRequired):
        return ConsentRequired(text, str(data.get("digest", "")))
    return kind(text)


def plain(value: Any) -> Any:
    """Nested data with nothing in it that strict JSON lacks."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _known(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in data.items() if name in names}
