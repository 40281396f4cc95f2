"""Reports the metrics of any Python program to its run: `palaestra.log.step(100, loss=0.25)`.

The run service names a file in the environment variable `PALAESTRA_LOG`, and each call appends one line to it. Without
the variable a call does nothing. A call never raises an error, prints nothing, takes no lock and imports nothing
outside the standard library, so it is safe in threads, in forked and started processes, and in loops.

Each line is an event as docs/run-metrics.md describes it, so a program in another language appends the same lines.
The file is self-contained and may be copied into a project that does not have this package installed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

VARIABLE = "PALAESTRA_LOG"
"""The environment variable with the path of the file."""

_MAX_TEXT = 80
_encode = json.JSONEncoder(separators=(",", ":")).encode


def step(step: int, metrics: Mapping[str, Any] | None = None, /, **values: Any) -> None:
    """Report metrics at a step: `step(100, loss=0.25)` or `step(100, {"train/loss": 0.25})`.

    A value is a number, or something that `float` converts, such as a tensor with one element. Call it in one process
    of a distributed training.
    """
    if VARIABLE in os.environ:
        both = values if metrics is None else {**metrics, **values}
        numbers = {str(name): _to_number(value) for name, value in both.items()}
        _append({"kind": "TrainingStep", "time": time.time(), "env_step": _to_count(step), "metrics": numbers})


def episode(step: int, episode_return: float, length: int = 0) -> None:
    """Report an episode that ended at a step, with its return and its length."""
    if VARIABLE in os.environ:
        event = {"kind": "EpisodeSummary", "time": time.time(), "env_step": _to_count(step)}
        _append({**event, "episode_return": _to_number(episode_return), "length": _to_count(length)})


class _LogFile:
    """An open file, with the identity by which a reused descriptor is recognised."""

    __slots__ = ("descriptor", "identity", "is_torn")

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.identity = _identify(self.descriptor)
        self.is_torn = False


_files: dict[str, _LogFile] = {}


def _append(event: dict[str, Any]) -> None:
    # Errors such as a full disk must not end the program: the line is lost, and reporting continues.
    try:
        line = (_encode(event) + "\n").encode("ascii")
        file = _open(os.environ[VARIABLE])
        if file.is_torn:
            line = b"\n" + line
        # One write in append mode: lines of several threads and processes do not mix.
        file.is_torn = os.write(file.descriptor, line) != len(line)
    except Exception:  # noqa: BLE001
        return


def _open(path: str) -> _LogFile:
    file = _files.get(path)
    if file is not None:
        try:
            # A program that closes all descriptors may have reused this one for a file of its own.
            if _identify(file.descriptor) == file.identity:
                return file
        except OSError:
            pass
        _files.pop(path, None)
    opened = _LogFile(path)
    file = _files.setdefault(path, opened)
    if file is not opened:
        os.close(opened.descriptor)
    return file


def _identify(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _to_number(value: Any) -> Any:
    """The value as a number; text for what is none, so that the run shows an alarm instead of losing it silently."""
    kind = type(value)
    if kind is float or kind is int:
        return value
    try:
        return float(value)
    except Exception:  # noqa: BLE001 - a value of any class
        return _describe(value)


def _to_count(value: Any) -> Any:
    if type(value) is int:
        return value
    try:
        return int(value)
    except Exception:  # noqa: BLE001 - a value of any class
        return _describe(value)


def _describe(value: Any) -> str:
    try:
        return repr(value)[:_MAX_TEXT]
    except Exception:  # noqa: BLE001 - a value of any class
        return f"a {type(value).__name__}"
