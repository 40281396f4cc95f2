"""The files of an attempt as two machines share them: which are mirrored, and what has changed since the last look.

Files that only grow (output, journal, event files) are sent from the offset that the other side has. All others are
sent whole when they have changed. A checkpoint is complete before its line is in the journal, so whole files go first:
a line never announces a file that has not arrived. The end of the attempt, exit.json, is the very last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from palaestra.runs.wire import JsonObject

CHUNK_BYTES = 1 << 20
EXIT = "exit.json"
_LOCAL = frozenset(
    {"plan.json", "command.json", "launch.json", "process.json", "stop.json", "remote.json", "series", "source", "tmp"}
)
"""Names at the top of an attempt that each machine has for itself."""
_GROWING = frozenset({"stdout.log", "metrics.jsonl", "system.jsonl"})
_SETTLE_S = 0.5
"""A file of a foreign trainer may still be being written; it is sent when it has been unchanged for this long."""

Send = Callable[[JsonObject, bytes], None]


def is_mirrored(name: str) -> bool:
    """Whether a file of an attempt, by its relative path, is copied from machine to machine."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] in _LOCAL or PurePosixPath(name).is_absolute() or "\0" in name:
        return False
    return not any(part.startswith(".") or part.endswith(".tmp") or part == "__pycache__" for part in parts)


def is_growing(name: str) -> bool:
    """Whether bytes are only ever added to the end of a file."""
    path = PurePosixPath(name)
    return name in _GROWING or path.suffix == ".jsonl" or ".tfevents." in path.name


def list_files(root: Path) -> dict[str, os.stat_result]:
    """The mirrored regular files of an attempt by relative path, a manifest after the files beside it."""
    files: dict[str, os.stat_result] = {}
    pending = [root]
    while pending:
        directory = pending.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: (entry.name == "manifest.json", entry.name))
        except OSError:
            continue
        for entry in entries:
            name = os.path.relpath(entry.path, root)
            if not is_mirrored(name):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    files[name] = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # removed meanwhile
    return files


class AttemptTree:
    """Finds and sends what has changed in an attempt. `offsets` and `versions` are what the other side has."""

    def __init__(
        self, root: Path, offsets: dict[str, int], versions: dict[str, list[int]], *, max_whole_bytes: int | None = None
    ) -> None:
        self._root = root
        self._offsets = dict(offsets)
        self._versions = {name: (int(size), int(mtime)) for name, (size, mtime) in versions.items()}
        self._max_whole_bytes = max_whole_bytes
        self._left_out: set[str] = set()

    def send_changes(self, send: Send, *, final: bool = False) -> bool:
        """Send everything new; returns whether there was anything. `final`: the attempt has ended, files are whole."""
        # Sizes first: whatever the journal announces up to here is on the disk when the tree is listed.
        sizes = {name: size for name in self._growing_names() if (size := self._size(name)) is not None}
        sent = False
        files = list_files(self._root)
        for name, stat in files.items():
            if is_growing(name):
                sizes.setdefault(name, stat.st_size)
            elif name != EXIT and self._is_due(name, stat, final):
                sent = self._send_whole(name, stat, send) or sent
        for name, size in sorted(sizes.items()):
            sent = self._send_growth(name, size, send) or sent
        if final and EXIT in files and self._is_due(EXIT, files[EXIT], final):
            self._send_whole(EXIT, files[EXIT], send)
        return sent

    def _growing_names(self) -> Iterator[str]:
        yield from _GROWING
        yield from (name for name in list(self._offsets) if name not in _GROWING)

    def _size(self, name: str) -> int | None:
        try:
            return os.stat(self._root / name, follow_symlinks=False).st_size
        except OSError:
            return None

    def _is_due(self, name: str, stat: os.stat_result, final: bool) -> bool:
        if self._versions.get(name) == (stat.st_size, stat.st_mtime_ns):
            return False
        # Our own trainer replaces files atomically, and its checkpoints must arrive before they are announced.
        return final or not name.startswith("work/") or time.time() - stat.st_mtime >= _SETTLE_S

    def _send_whole(self, name: str, stat: os.stat_result, send: Send) -> bool:
        version = (stat.st_size, stat.st_mtime_ns)
        if self._max_whole_bytes is not None and stat.st_size > self._max_whole_bytes and name != EXIT:
            if name not in self._left_out:
                self._left_out.add(name)
                send({"kind": "left_out", "file": name, "size": stat.st_size}, b"")
            return False
        header = {"kind": "whole", "file": name, "total": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        offset = 0
        for body in _read_parts(self._root / name, 0, stat.st_size):
            last = offset + len(body) >= stat.st_size
            send({**header, "offset": offset, "last": last}, body)
            offset += len(body)
        if offset < stat.st_size:
            return False  # it became shorter: the next look sends it again from the beginning
        if not stat.st_size:
            send({**header, "offset": 0, "last": True}, b"")
        self._versions[name] = version
        return True

    def _send_growth(self, name: str, size: int, send: Send) -> bool:
        offset = self._offsets.get(name, 0)
        if size < offset:
            # The file was replaced by a shorter one: start over.
            send({"kind": "restart", "file": name}, b"")
            offset = 0
        if size == offset:
            return False
        for body in _read_parts(self._root / name, offset, size):
            send({"kind": "growth", "file": name, "offset": offset}, body)
            offset += len(body)
        self._offsets[name] = offset
        return True


def _read_parts(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """The bytes of a file between two offsets; fewer if it became shorter or unreadable."""
    # Only reading may fail here: an error of the other side must reach the sender.
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError:
        return
    with file:
        while begin < end:
            try:
                file.seek(begin)
                body = file.read(min(CHUNK_BYTES, end - begin))
            except OSError:
                return
            if not body:
                return
            yield body
            begin += len(body)
