"""The local copy of an attempt that runs on another machine: every byte is written once, at its offset.

The size of a file here is how much of it has arrived, so that nothing else has to be remembered: after a lost link or a
killed service the other side continues from there. The other machine is trusted with this attempt and nothing else: no
path leaves the directory, no link is followed.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from palaestra.errors import PalaestraError
from palaestra.runs.remote.attempt_tree import is_growing, is_mirrored, list_files
from palaestra.runs.wire import JsonObject


class MirrorConflict(PalaestraError):
    """A part of a file that does not continue what is here; the link starts again from the sizes of the files."""


class Mirror:
    """Writes what the other machine sends into the directory of an attempt."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parts = root / ".arriving"

    def state(self) -> JsonObject:
        """What is here: offsets of files that grow, versions of the others."""
        files = list_files(self._root)
        return {
            "offsets": {name: stat.st_size for name, stat in files.items() if is_growing(name)},
            "versions": {
                name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items() if not is_growing(name)
            },
        }

    def write(self, header: JsonObject, body: bytes) -> None:
        """Store one part. `MirrorConflict` if it does not fit; an `OSError` such as a full disk loses nothing."""
        name, kind = str(header["file"]), header["kind"]
        path = self._locate(name)
        if kind == "whole":
            self._write_whole(path, header, body)
        elif kind == "restart":
            path.unlink(missing_ok=True)
        else:
            self._append(path, name, int(header["offset"]), body)

    def _append(self, path: Path, name: str, offset: int, body: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size != offset:
                raise MirrorConflict(f"{name}: {offset} does not continue a file of {size} bytes")
            view = memoryview(body)
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(descriptor)

    def _write_whole(self, path: Path, header: JsonObject, body: bytes) -> None:
        # One file arrives at a time, so one place for its parts is enough.
        offset = int(header["offset"])
        with open(self._parts, "wb" if offset == 0 else "r+b") as file:
            if file.seek(0, os.SEEK_END) != offset:
                raise MirrorConflict(f"{header['file']}: a part of it is missing")
            file.write(body)
        if header["last"]:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.utime(self._parts, ns=(int(header["mtime_ns"]), int(header["mtime_ns"])))
            os.replace(self._parts, path)

    def _locate(self, name: str) -> Path:
        if not is_mirrored(name) or ".." in PurePosixPath(name).parts:
            raise MirrorConflict(f"{name!r} is not a file of an attempt that is copied")
        path = self._root
        for part in PurePosixPath(name).parts:
            path = path / part
            if path.is_symlink():
                raise MirrorConflict(f"{name!r} is behind a link")
        return path
