"""`TrajectoryArchive`: trajectories on disk, one file each, with an index for listing and filtering.

    trajectories/00000001_<episode>.safetensors     written atomically, with a digest
                 index.jsonl                        one line per trajectory, or {"removed": file}; append-only

The files are authoritative. The index is a cache: a torn, missing or wrong line is detected by listing the directory,
read from the file, and written again by the next writer. Other files in the directory are ignored. Writers hold a lock;
readers do not.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience.trajectory import Outcome, Trajectory

INDEX, LOCK = "index.jsonl", ".index.lock"
_FILE_NAME = re.compile(r"(\d{8,})_[\w.-]*\.safetensors", re.ASCII)
_TEMPORARY = re.compile(r"\.(\d{8,}_[\w.-]*\.safetensors)\.\d+\.tmp", re.ASCII)


@dataclass(frozen=True)
class TrajectoryEntry:
    """Summary of a trajectory in the index."""

    file: str
    """File name in the archive; empty if not archived."""
    bytes: int
    episode_id: str
    task: str
    seed: int
    params: Mapping[str, Any]
    instruction: str
    outcome: Outcome
    reason: str
    reward: float
    steps: int
    unreadable_turns: int
    versions: tuple[int, int]
    seconds: float
    started_at: float
    group: str = ""
    attempt: int = 0

    @classmethod
    def of(cls, trajectory: Trajectory, *, file: str = "", size: int = 0) -> TrajectoryEntry:
        """The entry of a trajectory."""
        task = trajectory.task
        return cls(
            file=file,
            bytes=size,
            episode_id=trajectory.episode_id,
            task=str(task.get("task", "")),
            seed=int(task.get("seed") or 0),
            params=dict(task.get("params") or {}),
            instruction=str(task.get("instruction", "")),
            outcome=trajectory.outcome,
            reason=trajectory.reason,
            reward=trajectory.total_reward(),
            steps=len(trajectory),
            unreadable_turns=sum(turn.action is None for turn in trajectory.turns),
            versions=trajectory.versions,
            seconds=trajectory.seconds,
            started_at=trajectory.started_at,
            group=trajectory.group,
            attempt=trajectory.attempt,
        )

    @property
    def success(self) -> bool:
        """Whether the task was solved."""
        return self.outcome is Outcome.SUCCESS

    @property
    def spec(self) -> tuple[str, str, int]:
        """Task, parameters and seed, which determine the first screen."""
        return self.task, json.dumps(self.params, sort_keys=True, default=str), self.seed

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self) | {"outcome": self.outcome.value, "versions": list(self.versions)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> TrajectoryEntry:
        """The entry from JSON; ValueError, TypeError or KeyError if it is invalid."""
        oldest, newest = facts["versions"]
        entry = cls(**{**facts, "outcome": Outcome(facts["outcome"]), "versions": (int(oldest), int(newest))})
        for name, kind in _KINDS.items():
            if not isinstance(getattr(entry, name), kind):
                raise TypeError(f"{name} = {getattr(entry, name)!r}")
        if not _FILE_NAME.fullmatch(entry.file):
            raise ValueError(f"{entry.file!r} is not the name of an archived file")
        return entry


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("file", "episode_id", "task", "instruction", "reason", "group"), str),
    **dict.fromkeys(("bytes", "seed", "steps", "unreadable_turns", "attempt"), int),
    **dict.fromkeys(("reward", "seconds", "started_at"), int | float),
    "params": Mapping,
}


class ArchiveSize(NamedTuple):
    """Number of trajectories and their size on disk."""

    trajectories: int
    bytes: int


@dataclass
class _Index:
    """The contents of an index file, and how much of it was read."""

    listed: dict[str, TrajectoryEntry] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    read_to: int = 0
    inode: int = 0
    highest: int = 0
    """The highest file number so far."""

    def read(self, line: bytes) -> None:
        """Apply one line; an invalid one is ignored, because the files have the same information."""
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            facts = json.loads(line)
            if "removed" not in facts:
                self.add(TrajectoryEntry.from_facts(facts))
            # Removed files are deleted, so the name must not point outside the directory.
            elif _FILE_NAME.fullmatch(facts["removed"]):
                self.remove(facts["removed"])

    def add(self, entry: TrajectoryEntry) -> None:
        self.listed[entry.file] = entry
        self.highest = max(self.highest, _number(entry.file))

    def remove(self, name: str) -> None:
        self.removed.add(name)
        self.listed.pop(name, None)
        self.highest = max(self.highest, _number(name))


class TrajectoryArchive:
    """The trajectories in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damaged: dict[str, str] = {}
        """Unreadable files and the reasons. They are kept but not listed."""
        self._index = _Index()
        self._is_repaired = False
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ writing

    def append(self, trajectory: Trajectory) -> TrajectoryEntry:
        """Add a trajectory. It is listed afterwards, also in other processes."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("archive", str(self.directory), f"cannot be written ({error.strerror})") from None
        with self._write_lock():
            name = f"{self._index.highest + 1:08d}_{_slug(trajectory.episode_id)}.safetensors"
            path = self.directory / name
            trajectory.save(path)
            entry = TrajectoryEntry.of(trajectory, file=name, size=path.stat().st_size)
            self._write([entry.facts()])
            self._index.add(entry)
        return entry

    def keep(self, newest: int, *, successes: int = 0) -> ArchiveSize:
        """Remove all but the `newest` trajectories and `successes` older successes; returns what was removed."""
        if newest < 0 or successes < 0:
            raise ConfigError("archive.keep", min(newest, successes), "must not be negative")
        if not self.directory.is_dir():
            return _size_of([])
        with self._write_lock():
            old = self.entries()[: -newest or None]
            solved = [entry for entry in old if entry.success]
            spared = {entry.file for entry in solved[max(0, len(solved) - successes) :]}
            gone = [entry for entry in old if entry.file not in spared]
            # Written first: after a crash, a remaining file is known to be removed.
            self._write([{"removed": entry.file} for entry in gone])
            for entry in gone:
                self._index.remove(entry.file)
                (self.directory / entry.file).unlink(missing_ok=True)
        return _size_of(gone)

    # ------------------------------------------------------------------ reading

    def entries(
        self, *, task: str | None = None, outcome: Outcome | None = None, version: int | None = None
    ) -> list[TrajectoryEntry]:
        """Entries, oldest first, filtered by task, outcome or policy version."""
        return [
            entry
            for entry in self._list_files()
            if (task is None or entry.task == task)
            and (outcome is None or entry.outcome is outcome)
            and (version is None or entry.versions[0] <= version <= entry.versions[1])
        ]

    def load(self, entries: Iterable[TrajectoryEntry] | None = None) -> Iterator[Trajectory]:
        """Load trajectories one at a time, skipping missing and damaged files."""
        for entry in self.entries() if entries is None else entries:
            trajectory = self._load(entry.file)
            if trajectory is not None:
                yield trajectory

    def size(self) -> ArchiveSize:
        """Number of trajectories and their size on disk."""
        return _size_of(self.entries())

    def __len__(self) -> int:
        return len(self.entries())

    def _list_files(self) -> list[TrajectoryEntry]:
        """Entries of the files in the directory, from the index if it is valid, else from the files."""
        with self._lock:
            self._read_index()
            files = sorted(self._files(), key=lambda pair: (_number(pair[0]), pair[0]))
            return [entry for name, size in files if (entry := self._describe(name, size)) is not None]

    def _files(self) -> Iterator[tuple[str, int]]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.directory) as directory:
            for file in directory:
                if _FILE_NAME.fullmatch(file.name) and file.name not in self._index.removed:
                    self._index.highest = max(self._index.highest, _number(file.name))
                    with suppress(FileNotFoundError):
                        yield file.name, file.stat().st_size

    def _describe(self, name: str, size: int) -> TrajectoryEntry | None:
        entry = self._index.listed.get(name)
        if entry is not None and entry.bytes == size:
            return entry
        trajectory = None if name in self.damaged else self._load(name)
        if trajectory is None:
            return None
        entry = TrajectoryEntry.of(trajectory, file=name, size=size)
        self._index.add(entry)
        return entry

    def _load(self, name: str) -> Trajectory | None:
        try:
            return Trajectory.load(self.directory / name)
        except FileNotFoundError:
            pass
        except (ExperienceError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self.damaged[name] = str(error)
        return None

    def _read_index(self) -> bytes:
        """Read the lines added since the last call; returns an incomplete last line."""
        try:
            with (self.directory / INDEX).open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._index.inode or facts.st_size < self._index.read_to:
                    self._index = _Index(inode=facts.st_ino, highest=self._index.highest)
                file.seek(self._index.read_to)
                *lines, rest = file.read().split(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            self._index = _Index(highest=self._index.highest)
            return b""
        for line in lines:
            self._index.read(line)
            self._index.read_to += len(line) + 1
        return rest

    def _repair(self) -> None:
        """With the lock held: end a torn line, add missing entries, delete leftovers of a crash."""
        if self._read_index():
            self._write([], first=b"\n")
        listed = dict(self._index.listed)
        present = self._list_files()
        self._write([entry.facts() for entry in present if listed.get(entry.file) != entry])
        for file in self.directory.iterdir():
            # Its writer no longer holds the lock, so it is not being written.
            if file.name in self._index.removed or _TEMPORARY.fullmatch(file.name):
                file.unlink(missing_ok=True)

    def _write(self, lines: list[dict[str, Any]], first: bytes = b"") -> None:
        data = first + b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        if data:
            with (self.directory / INDEX).open("ab") as file:
                file.write(data)

    @contextmanager
    def _write_lock(self) -> Iterator[None]:
        """Hold the lock of writers in all processes, with an up-to-date index."""
        with self._lock:
            fd = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                # The lock file is not empty if the last writer crashed. Repairing every time would be slow.
                if not self._is_repaired or os.fstat(fd).st_size:
                    self._repair()
                    self._is_repaired = True
                else:
                    self._read_index()
                os.pwrite(fd, b"writing\n", 0)
                yield
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)


def _size_of(entries: Sequence[TrajectoryEntry]) -> ArchiveSize:
    return ArchiveSize(len(entries), sum(entry.bytes for entry in entries))


def _number(name: str) -> int:
    match = _FILE_NAME.fullmatch(name)
    return int(match[1]) if match else 0


def _slug(text: str) -> str:
    """The episode id as a portable part of a file name."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII)[:80].strip("-.")


def archives_in(directory: Path) -> list[TrajectoryArchive]:
    """The archives of a run (`attempt_*/trajectories`, in order), of one attempt, or of the directory itself."""
    attempts = [path for path in directory.glob("attempt_*") if path.name.removeprefix("attempt_").isdecimal()]
    attempts.sort(key=lambda path: int(path.name.removeprefix("attempt_")))
    for candidates in ([path / "trajectories" for path in attempts], [directory / "trajectories"], [directory]):
        archives = [TrajectoryArchive(path) for path in candidates if _is_archive(path)]
        if archives:
            return archives
    return []


def entries_in(archives: Sequence[TrajectoryArchive]) -> tuple[list[tuple[TrajectoryArchive, TrajectoryEntry]], int]:
    """The entries of a run's archives, oldest first, and the number of episodes that a later attempt repeated.

    A resumed run repeats the episodes after its checkpoint under the same ids; only the last archive with an id counts.
    Within one archive, entries with the same id are different sessions of the episode, and all count.
    """
    listed = [(place, entry) for place, archive in enumerate(archives) for entry in archive.entries()]
    last = {entry.episode_id: place for place, entry in listed}
    kept = [(archives[place], entry) for place, entry in listed if last[entry.episode_id] == place]
    again = {entry.episode_id for place, entry in listed if last[entry.episode_id] != place}
    return kept, len(again)


def _is_archive(path: Path) -> bool:
    return path.is_dir() and (
        (path / INDEX).is_file() or any(_FILE_NAME.fullmatch(file.name) for file in path.iterdir())
    )


_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8": "jpeg"}


def picture_file_name(data: bytes) -> str:
    """SHA-256 and extension of a picture: `png`, `jpeg`, `webp`, or `bin` if unknown."""
    kinds = (kind for signature, kind in _SIGNATURES.items() if data.startswith(signature))
    kind = "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else next(kinds, "bin")
    return f"{hashlib.sha256(data).hexdigest()}.{kind}"
