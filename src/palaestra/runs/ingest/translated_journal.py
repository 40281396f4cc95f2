"""The journal of a trainer that does not write one: a translation of its output and event files.

Lines are those of a journal plus `from` (file and byte offset). The last line of every batch also has `resume`: the
state from which translation continues. Data and position are one write, so they cannot disagree. Lines after the
last `resume` are an incomplete batch, which is truncated and translated again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from palaestra.errors import ConfigError
from palaestra.runs.series.files import read_lines_backward
from palaestra.runs.wire import JsonObject
from palaestra.telemetry.event import Event, UnknownEvent, encode

_FIRST_LINE_BYTES = 1 << 16


class Origin(NamedTuple):
    """Where an event was read."""

    source: str
    """Kind of source and its format or tag table: `stdout:cleanrl`, `tensorboard:cleanrl`."""
    file: str
    offset: int


class TranslatedEvent(NamedTuple):
    """An event to append."""

    event: Event | UnknownEvent
    origin: Origin
    time: float


class TranslatedJournal:
    """The only writer of a translated journal. Opening it removes an incomplete batch at the end."""

    seq: int
    """Number of the last line; 0 when the journal is empty."""
    state: JsonObject
    """State stored with the last batch; empty when there is none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            self._size, self.seq, self.state = _read_last_batch(self._fd)
            if self._size == 0:
                _require_translated(self._fd, path)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            self.close()
            raise

    def append(self, events: Sequence[TranslatedEvent], state: JsonObject) -> None:
        """Append a batch and the state after it; after an `OSError`, nothing was appended."""
        if not events:
            return
        lines = [
            f'{encode(event, seq, time)[:-1]},"from":{json.dumps(origin._asdict(), separators=(",", ":"))}}}'
            for seq, (event, origin, time) in enumerate(events, start=self.seq + 1)
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
        self.seq += len(events)
        self.state = state

    def close(self) -> None:
        """Close the file. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _read_last_batch(fd: int) -> tuple[int, int, JsonObject]:
    """Return the end of the last complete batch, its last sequence number and its state."""
    lines = read_lines_backward(fd)
    next(lines, None)  # an incomplete line
    for line, end in lines:
        if b'"resume":' not in line:
            continue
        try:
            data = json.loads(line)
            seq, state = data["seq"], data["resume"]
        except (KeyError, TypeError, ValueError):
            continue
        if type(seq) is int and type(state) is dict:
            return end, seq, state
    return 0, 0, {}


def _require_translated(fd: int, path: Path) -> None:
    line, newline, _ = os.pread(fd, _FIRST_LINE_BYTES, 0).partition(b"\n")
    if newline and b'"from":' not in line:
        raise ConfigError(
            "metrics.jsonl",
            str(path),
            "was written by the trainer itself and must not be overwritten by a translation",
            "Add JournalFile to the sources of its runner",
        )
