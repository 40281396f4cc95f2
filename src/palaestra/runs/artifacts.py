"""The files of a run that users download, and checkpoints as one stream of bytes.

What a file is follows from its place in the run's directory. Everything else is not served: processes, plans, temporary
files, the working directory except for checkpoints, clips and event files, links, and files outside the run. Secrets in
texts are replaced as they are in logs.
"""

from __future__ import annotations

import hashlib
import json
import mimetypes
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal, TypeAlias

from palaestra.errors import UnknownRun
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.redaction import HIDDEN, Redactor, is_secret_key, redact_secrets
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.video.clip import CLIP_SUFFIXES
from palaestra.runs.wire import API_SCHEMA
from palaestra.strict_json import dump_json

ArtifactKind: TypeAlias = Literal[
    "config", "resolved", "command", "spec", "events", "log", "journal", "system",
    "checkpoint", "video", "trajectory", "evaluation", "tensorboard",
]  # fmt: skip

_RUN_FILES: dict[str, ArtifactKind] = {
    "config.yaml": "config",
    "resolved.json": "resolved",
    "command.json": "command",
    "spec.json": "spec",
    "events.jsonl": "events",
    "life.jsonl": "events",  # of earlier versions
}
_ATTEMPT_FILES: dict[str, ArtifactKind] = {
    "resolved.json": "resolved",
    "command.json": "command",
    "stdout.log": "log",
    "metrics.jsonl": "journal",
    "system.jsonl": "system",
}
_DIRECTORIES: dict[str, ArtifactKind] = {
    "checkpoints": "checkpoint",
    "videos": "video",
    "trajectories": "trajectory",
    "evaluations": "evaluation",
    "tensorboard": "tensorboard",
}
_TEXTS = frozenset({"config", "resolved", "command", "spec", "events", "log", "journal", "system"})
_MEDIA_TYPES = {
    ".yaml": "application/yaml",
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
    ".log": "text/plain; charset=utf-8",
    ".webm": "video/webm",
}
CHECKPOINT_SHA256, CONTENT_SHA256 = "X-Checkpoint-SHA256", "X-Content-SHA256"
"""Headers of a checkpoint that is sent."""
_EVENT_FILE = "events.out.tfevents."
_KEY_AND_VALUE = re.compile(
    r"""^(?P<head>[ \t]*(?:-[ ])?["']?(?P<key>[\w.-]+)["']?[ \t]*:[ \t]+)(?P<value>\S.*)$""", re.MULTILINE
)
_BLOCK_BYTES = 1 << 20
_MAX_VISITED = 200_000
_TAR_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A file of a run."""

    __pydantic_config__ = API_SCHEMA

    name: str
    """Name in the route that returns it: the path below the run's directory."""
    kind: ArtifactKind
    attempt: int
    """Attempt that it belongs to; 0: the run."""
    size_bytes: int
    modified: float
    media_type: str
    redacted: bool
    """A text in which secrets are replaced when it is sent. Its length may then differ, and it is sent whole."""


def list_artifacts(run: RunDirectory, kind: ArtifactKind | None = None) -> list[Artifact]:
    """The files of a run by name; with `kind`, only those."""
    matches = _KindFinder(run)
    artifacts = []
    for visited, path in enumerate(_list_files(run.path, _may_hold_artifacts)):
        if visited >= _MAX_VISITED:
            break
        name = path.relative_to(run.path).as_posix()
        file_kind = matches.find(name)
        if file_kind is not None and kind in (None, file_kind):
            with suppress(OSError):  # removed by its trainer since
                artifacts.append(_describe(name, file_kind, path.stat(follow_symlinks=False)))
    return sorted(artifacts, key=lambda artifact: artifact.name)


def open_artifact(home: Home, run: RunDirectory, name: str) -> tuple[Artifact, BinaryIO]:
    """A file by its name in the list. `UnknownRun` if there is none, or if it is not in the run."""
    kind = _KindFinder(run).find(name)
    remedy = f"GET /runs/{run.run_id}/artifacts lists them"
    unknown = UnknownRun("artifact", name, "the run has no such file", remedy)
    if kind is None:
        raise unknown
    try:
        # A pipe must not block, and a link must not be followed.
        descriptor = os.open(run.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        raise unknown from None
    file = os.fdopen(descriptor, "rb")
    facts = os.fstat(descriptor)
    # The path of what was opened, with the links of its directories resolved.
    opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if not stat.S_ISREG(facts.st_mode) or opened != run.path.resolve() / name or _is_token(facts, home):
        file.close()
        raise unknown
    return _describe(name, kind, facts), file


def read_redacted(file: BinaryIO, artifact: Artifact, redact: Redactor) -> Iterator[bytes]:
    """The text of a file with its secrets replaced, in parts of whole lines."""
    left = artifact.size_bytes
    with file:
        if artifact.name.endswith(".json"):
            yield _redact_json(file.read(left), redact)
            return
        hide = _redact_config if artifact.kind == "config" else redact
        while left > 0 and (block := file.read(min(_BLOCK_BYTES, left))):
            left -= len(block)
            if left > 0 and not block.endswith(b"\n"):
                rest = file.readline(min(_BLOCK_BYTES, left))
                left -= len(rest)
                block += rest
            yield hide(redact(block.decode("utf-8", "replace"))).encode()


def read_part(file: BinaryIO, first: int, stop: int) -> Iterator[bytes]:
    """The bytes of a file between two offsets."""
    with file:
        file.seek(first)
        while first < stop and (block := file.read(min(_BLOCK_BYTES, stop - first))):
            first += len(block)
            yield block


class CheckpointStream:
    """A checkpoint as one stream: the bytes of a file, or the files of a directory as a tar.

    The tar depends on names and contents only, so equal checkpoints have equal bytes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_directory = path.is_dir()
        self._files = sorted(_list_files(path, lambda name: True)) if self.is_directory else [path]
        self._sizes = [file.stat().st_size for file in self._files]
        self.size = self._tar_size() if self.is_directory else self._sizes[0]
        self.media_type = "application/x-tar" if self.is_directory else "application/octet-stream"

    def digest(self) -> str:
        """SHA-256 of the stream."""
        total = hashlib.sha256()
        for block in self.read():
            total.update(block)
        return total.hexdigest()

    def read(self) -> Iterator[bytes]:
        """The bytes. `OSError` if a file is shorter than at the beginning."""
        for path, size in zip(self._files, self._sizes, strict=True):
            if self.is_directory:
                yield self._header(path, size)
            sent = 0
            for block in read_part(path.open("rb"), 0, size):
                sent += len(block)
                yield block
            if sent < size:
                raise OSError(f"{path} became shorter while it was read")
            if self.is_directory:
                yield bytes(-size % _TAR_BLOCK)
        if self.is_directory:
            yield bytes(2 * _TAR_BLOCK)

    def _header(self, path: Path, size: int) -> bytes:
        entry = tarfile.TarInfo(f"{self._path.name}/{path.relative_to(self._path).as_posix()}")
        entry.size, entry.mode, entry.mtime = size, 0o644, 0
        return entry.tobuf(tarfile.PAX_FORMAT)

    def _tar_size(self) -> int:
        entries = zip(self._files, self._sizes, strict=True)
        return 2 * _TAR_BLOCK + sum(len(self._header(path, size)) + size + -size % _TAR_BLOCK for path, size in entries)


class _KindFinder:
    """Finds what a file of a run is by its name; None for files that are not served."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._checkpoints: dict[str, frozenset[str]] = {}

    def find(self, name: str) -> ArtifactKind | None:
        parts = PurePosixPath(name).parts
        if name != "/".join(parts) or any(part.startswith(".") or part == "/" for part in parts):
            return None
        if len(parts) == 1:
            return _RUN_FILES.get(name)
        number = parts[0].removeprefix("attempt_")
        if parts[0] == "tensorboard":
            return "tensorboard"
        if parts[0] == number or not (number.isascii() and number.isdecimal()):
            return None
        if len(parts) == 2:
            return _ATTEMPT_FILES.get(parts[1])
        return self._find_in_work(int(number), name) if parts[1] == "work" else _DIRECTORIES.get(parts[1])

    def _find_in_work(self, attempt: int, name: str) -> ArtifactKind | None:
        path = PurePosixPath(name)
        if path.name.startswith(_EVENT_FILE):
            return "tensorboard"
        if path.suffix in CLIP_SUFFIXES:
            return "video"
        known = self._checkpoints.get(path.parts[0])
        if known is None:
            known = self._checkpoints[path.parts[0]] = self._list_checkpoints(self._run.attempt(attempt))
        # A checkpoint may be a directory.
        return "checkpoint" if any(str(one) in known for one in (path, *path.parents)) else None

    def _list_checkpoints(self, attempt: Attempt) -> frozenset[str]:
        patterns = [*AttemptPlan.read(attempt).checkpoints, "checkpoints/*"]
        paths = (path for pattern in patterns for path in attempt.work.glob(pattern))
        return frozenset(path.relative_to(self._run.path).as_posix() for path in paths)


def _list_files(directory: Path, is_wanted: Callable[[str], bool]) -> Iterator[Path]:
    """The regular files below a directory, except in unwanted names. Links are neither listed nor followed."""
    for base, directories, names in os.walk(directory):
        directories[:] = sorted(filter(is_wanted, directories))
        for name in filter(is_wanted, names):
            path = Path(base, name)
            with suppress(OSError):
                if stat.S_ISREG(path.stat(follow_symlinks=False).st_mode):
                    yield path


def _may_hold_artifacts(name: str) -> bool:
    return not name.startswith(".") and name not in ("series", "tmp")


def _describe(name: str, kind: ArtifactKind, facts: os.stat_result) -> Artifact:
    path, first = PurePosixPath(name), name.partition("/")[0]
    guess = _MEDIA_TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    return Artifact(
        name=name,
        kind=kind,
        attempt=int(first.removeprefix("attempt_")) if first.startswith("attempt_") else 0,
        size_bytes=facts.st_size,
        modified=facts.st_mtime,
        media_type=guess or "application/octet-stream",
        redacted=kind in _TEXTS,
    )


def _is_token(facts: os.stat_result, home: Home) -> bool:
    """Whether a file is another name of the service's token."""
    try:
        return os.path.samestat(facts, os.stat(home.token))
    except OSError:
        return False


def _redact_json(data: bytes, redact: Redactor) -> bytes:
    try:
        content = redact_secrets(json.loads(data))
    except (ValueError, RecursionError):
        return redact(data.decode("utf-8", "replace")).encode()
    return redact(dump_json(content, indent=2)).encode() + b"\n"


def _redact_config(text: str) -> str:
    """YAML without the values of secret keys; its comments stay."""
    return _KEY_AND_VALUE.sub(
        lambda match: f'{match["head"]}"{HIDDEN}"' if is_secret_key(match["key"]) else match[0], text
    )
