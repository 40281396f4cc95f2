"""What can be stored and shown: texts that are text, numbers that fit into 64 bits.

Asked at the door, where it refuses, and once more before the index, where it never does: one odd value in one run's
files must not keep others from being listed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from palaestra.runs.record import Alarm, CheckpointRecord, RunRecord

__all__ = ["LARGEST", "storable", "storable_checkpoint", "text_fault", "value_fault"]

LARGEST = 2**63 - 1
"""The largest number that the registry can hold."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NUMBERS = ("attempt", "priority", "env_step", "episodes", "bytes_on_disk")
_NUMBERS_OR_NONE = ("total_steps", "seed")
_TEXTS = ("runner", "agent_id", "env_id", "reason", "code", "tracking_url")


def text_fault(text: str, longest: int | None = None, *, one_line: bool = True) -> str:
    """Why a text cannot be stored; empty when it can."""
    if not _is_utf8(text):
        return "is not valid UTF-8"
    if "\0" in text or (one_line and _CONTROL.search(text)):
        return "holds a control character or a line break"
    if longest is not None and len(text) > longest:
        return f"is longer than {longest:,} characters"
    return ""


def value_fault(value: Any) -> str:
    """Why plain data, nested to any depth, cannot be stored; empty when it can. Names the place."""
    for place, found in _leaves(value, ""):
        fault = ""
        if isinstance(found, str):
            fault = text_fault(found, one_line=False)
        elif isinstance(found, int) and not -LARGEST <= found <= 2 * LARGEST + 1:
            fault = "is a number beyond 64 bits"
        elif isinstance(found, float) and not math.isfinite(found):
            # JSON would make null of it, and null means the default.
            fault = "is not a finite number"
        if fault:
            return f"at {ascii(place)[1:-1]}: {fault}" if place else fault
    return ""


def storable(record: RunRecord) -> RunRecord:
    """The row as the index can hold it: what does not fit is cut to what does."""
    changes: dict[str, Any] = {name: _whole(getattr(record, name), 0) for name in _NUMBERS}
    changes |= {name: _whole(getattr(record, name), None) for name in _NUMBERS_OR_NONE}
    changes |= {name: _text(getattr(record, name)) for name in _TEXTS}
    if not all(_is_utf8(tag) for tag in record.tags):
        changes["tags"] = tuple(_text(tag) for tag in record.tags)
    if not all(_is_utf8(alarm.text) for alarm in record.alarms):
        changes["alarms"] = tuple(Alarm(alarm.code, _text(alarm.text), alarm.since) for alarm in record.alarms)
    changed = {name: value for name, value in changes.items() if value is not getattr(record, name)}
    return replace(record, **changed) if changed else record


def storable_checkpoint(record: CheckpointRecord) -> CheckpointRecord:
    """The row of a checkpoint as the index can hold it; `ValueError` when it is of other kinds than a row is."""
    if not all(isinstance(getattr(record, name), str) for name in ("checkpoint_id", "path", "sha256")):
        raise ValueError("its id, path or hash is no text")
    if not isinstance(record.created, int | float) or not isinstance(record.verified, int | float | None):
        raise ValueError("a time in it is no number")
    changes: dict[str, Any] = {name: _whole(getattr(record, name), 0) for name in ("attempt", "size_bytes")}
    changes["env_step"] = _whole(record.env_step, None)
    texts = ("run_id", "agent_id", "env_id", "format", "step_source")
    changes |= {name: _text(str(getattr(record, name))) for name in texts}
    changed = {name: value for name, value in changes.items() if value != getattr(record, name)}
    return replace(record, **changed) if changed else record


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(value: Any) -> Any:
    fits = not isinstance(value, str) or _is_utf8(value)
    return value if fits else value.encode("utf-8", "replace").decode()


def _whole(value: Any, otherwise: int | None) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -LARGEST <= value <= LARGEST else max(-LARGEST, min(LARGEST, value))
    return otherwise


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    waiting = [(place, value)]
    while waiting:
        where, found = waiting.pop()
        if isinstance(found, dict):
            for key, item in found.items():
                yield f"{where}.{key}".lstrip("."), key
                waiting.append((f"{where}.{key}".lstrip("."), item))
        elif isinstance(found, list | tuple):
            waiting.extend((f"{where}[{number}]", item) for number, item in enumerate(found))
        else:
            yield where, found
