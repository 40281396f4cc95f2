"""The journal of a trainer that writes none: our translation of what it did write.

The same lines as a journal's, each with `from` (which file, which byte), and on the last line of every batch `resume`:
all that the translator needs to go on. Data and position are one write, so there is nothing to keep in step: whatever
follows the last `resume` is half a batch, is cut off and translated again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from palaestra.errors import ConfigError
from palaestra.telemetry.event import Event, UnknownEvent, encode

__all__ = ["Archive", "Entry", "Origin"]

_SPAN = 1 << 16


class Origin(NamedTuple):
    """Where an event was found."""

    source: str
    """`stdout:cleanrl`, `tensorboard:cleanrl`: the kind of source and its grammar or table."""
    file: str
    offset: int


class Entry(NamedTuple):
    """An event to be archived."""

    event: Event | UnknownEvent
    origin: Origin
    time: float


class Archive:
    """The one writer of a translated journal. Opening it repairs its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            end, self.seq, self.state = _last_batch(self._fd)
            if end == 0:
                _refuse_a_journal(self._fd, path)
            os.ftruncate(self._fd, end)
        except BaseException:
            self.close()
            raise
        self._size = end

    seq: int
    """Number of the last line; 0 when there is none."""
    state: dict[str, Any]
    """What the last batch was given to resume from; empty when there is none."""

    def append(self, entries: Sequence[Entry], state: dict[str, Any]) -> None:
        """Add a batch and where to resume after it; all of it, or, with an `OSError`, nothing."""
        if not entries:
            return
        lines = [
            f'{encode(event, seq, time)[:-1]},"from":{json.dumps(origin._asdict(), separators=(",", ":"))}}}'
            for seq, (event, origin, time) in enumerate(entries, start=self.seq + 1)
        ]
        lines[-1] = f'{lines[-1][:-1]},"resume":{json.dumps(state, separators=(",", ":"))}}}'
        data = memoryview("\n".join([*lines, ""]).encode("ascii"))
        size = len(data)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += size
        self.seq += len(entries)
        self.state = state

    def close(self) -> None:
        """Release the file. Harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _last_batch(fd: int) -> tuple[int, int, dict[str, Any]]:
    """Where the last whole batch ends, its last number and its state; looked for from the end in growing steps."""
    size = os.fstat(fd).st_size
    span = _SPAN
    while size:
        start = max(0, size - span)
        lines = os.pread(fd, size - start, start).split(b"\n")
        end = size - len(lines.pop())
        # Unless it is the file's first, the first line of the span has lost its beginning.
        for line in reversed(lines if start == 0 else lines[1:]):
            found = _resumed(line)
            if found is not None:
                return end, *found
            end -= len(line) + 1
        if start == 0:
            break
        span *= 4
    return 0, 0, {}


def _resumed(line: bytes) -> tuple[int, dict[str, Any]] | None:
    if b'"resume":' not in line:
        return None
    try:
        data = json.loads(line)
        seq, state = data["seq"], data["resume"]
    except (KeyError, TypeError, ValueError):
        return None
    return (seq, state) if type(seq) is int and type(state) is dict else None


def _refuse_a_journal(fd: int, path: Path) -> None:
    line, newline, _ = os.pread(fd, _SPAN, 0).partition(b"\n")
    if newline and b'"from":' not in line:
        raise ConfigError(
            "metrics.jsonl",
            str(path),
            "was written by the trainer itself and must not be translated over",
            "Name JournalFile among the sources of its runner",
        )
