"""`TrajectoryArchive`: trajectories on disk, one file each, with an index to list and filter them by.

    trajectories/00000001_<episode>.safetensors     written whole or not at all, with a digest
                 index.jsonl                        one line per trajectory, or {"removed": file}; only appended to

The files are the truth and the index is a convenience: a line that is torn, lost or wrong is found by looking at the
directory, read from the file itself, and written again by the next writer. Files that are not ours are left alone.
Writers take turns through a lock; readers lock nothing.
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

__all__ = ["ArchiveSize", "TrajectoryArchive", "TrajectoryEntry", "archives_in", "entries_in", "picture_file_name"]

INDEX, LOCK = "index.jsonl", ".index.lock"
_OURS = re.compile(r"(\d{8,})_[\w.-]*\.safetensors", re.ASCII)
_TEMPORARY = re.compile(r"\.(\d{8,}_[\w.-]*\.safetensors)\.\d+\.tmp", re.ASCII)


@dataclass(frozen=True)
class TrajectoryEntry:
    """What is known of a trajectory without opening it."""

    file: str
    """Its name in the archive; empty while it is in none."""
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
        """The entry that describes a trajectory."""
        task = trajectory.task
        return cls(
            file, size, trajectory.episode_id, str(task.get("task", "")), int(task.get("seed") or 0),
            dict(task.get("params") or {}), str(task.get("instruction", "")), trajectory.outcome, trajectory.reason,
            trajectory.total_reward(), len(trajectory), sum(turn.action is None for turn in trajectory.turns),
            trajectory.versions, trajectory.seconds, trajectory.started_at, trajectory.group, trajectory.attempt,
        )  # fmt: skip

    @property
    def success(self) -> bool:
        """Whether the verifier said so."""
        return self.outcome is Outcome.SUCCESS

    @property
    def spec(self) -> tuple[str, str, int]:
        """Task, parameters and seed: episodes of one spec saw the same first screen."""
        return self.task, json.dumps(self.params, sort_keys=True, default=str), self.seed

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self) | {"outcome": self.outcome.value, "versions": list(self.versions)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> TrajectoryEntry:
        """The entry that `facts` describes; ValueError, TypeError or KeyError when they describe none."""
        oldest, newest = facts["versions"]
        entry = cls(**{**facts, "outcome": Outcome(facts["outcome"]), "versions": (int(oldest), int(newest))})
        for name, kind in _KINDS.items():
            if not isinstance(getattr(entry, name), kind):
                raise TypeError(f"{name} = {getattr(entry, name)!r}")
        if not _OURS.fullmatch(entry.file):
            raise ValueError(f"{entry.file!r} is no file of ours")
        return entry


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("file", "episode_id", "task", "instruction", "reason", "group"), str),
    **dict.fromkeys(("bytes", "seed", "steps", "unreadable_turns", "attempt"), int),
    **dict.fromkeys(("reward", "seconds", "started_at"), int | float),
    "params": Mapping,
}


class ArchiveSize(NamedTuple):
    """How much there is of something."""

    trajectories: int
    bytes: int


@dataclass
class _Index:
    """What the lines of an index say so far, and how much of it was read."""

    listed: dict[str, TrajectoryEntry] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    read_to: int = 0
    inode: int = 0
    highest: int = 0
    """The largest number that any file ever had."""

    def read(self, line: bytes) -> None:
        """Believe one line, or ignore it: whatever it said can be read from the files."""
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            facts = json.loads(line)
            if "removed" not in facts:
                self.remember(TrajectoryEntry.from_facts(facts))
            # A name from outside the pattern could lead out of the directory, and this one gets removed.
            elif _OURS.fullmatch(facts["removed"]):
                self.forget(facts["removed"])

    def remember(self, entry: TrajectoryEntry) -> None:
        self.listed[entry.file] = entry
        self.highest = max(self.highest, _number(entry.file))

    def forget(self, name: str) -> None:
        self.removed.add(name)
        self.listed.pop(name, None)
        self.highest = max(self.highest, _number(name))


class TrajectoryArchive:
    """The trajectories in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damaged: dict[str, str] = {}
        """Files of ours that could not be read, and why. They are kept, and listed nowhere."""
        self._index = _Index()
        self._mended = False
        self._alone = threading.RLock()

    # ------------------------------------------------------------------ writing

    def append(self, trajectory: Trajectory) -> TrajectoryEntry:
        """Keep a trajectory. When this returns it is listed, also by other processes."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("archive", str(self.directory), f"cannot be written ({error.strerror})") from None
        with self._turn():
            name = f"{self._index.highest + 1:08d}_{_slug(trajectory.episode_id)}.safetensors"
            path = self.directory / name
            trajectory.save(path)
            entry = TrajectoryEntry.of(trajectory, file=name, size=path.stat().st_size)
            self._write([entry.facts()])
            self._index.remember(entry)
        return entry

    def keep(self, newest: int, *, successes: int = 0) -> ArchiveSize:
        """Remove all but the newest, and up to so many older successes; says how much was removed."""
        if newest < 0 or successes < 0:
            raise ConfigError("archive.keep", min(newest, successes), "must not be negative")
        if not self.directory.is_dir():
            return _size_of([])
        with self._turn():
            old = self.entries()[: -newest or None]
            solved = [entry for entry in old if entry.success]
            spared = {entry.file for entry in solved[max(0, len(solved) - successes) :]}
            gone = [entry for entry in old if entry.file not in spared]
            # Said before it is done: a file that outlives a crash here is known to be unwanted, not mistaken for new.
            self._write([{"removed": entry.file} for entry in gone])
            for entry in gone:
                self._index.forget(entry.file)
                (self.directory / entry.file).unlink(missing_ok=True)
        return _size_of(gone)

    # ------------------------------------------------------------------ reading

    def entries(
        self, *, task: str | None = None, outcome: Outcome | None = None, version: int | None = None
    ) -> list[TrajectoryEntry]:
        """Oldest first; only those of a task, an outcome, or with a token of one policy version."""
        return [
            entry
            for entry in self._present()
            if (task is None or entry.task == task)
            and (outcome is None or entry.outcome is outcome)
            and (version is None or entry.versions[0] <= version <= entry.versions[1])
        ]

    def load(self, entries: Iterable[TrajectoryEntry] | None = None) -> Iterator[Trajectory]:
        """The trajectories themselves, one at a time. What is gone or damaged by then is left out."""
        for entry in self.entries() if entries is None else entries:
            trajectory = self._load(entry.file)
            if trajectory is not None:
                yield trajectory

    def size(self) -> ArchiveSize:
        """How many there are, and what they take on disk."""
        return _size_of(self.entries())

    def __len__(self) -> int:
        return len(self.entries())

    def _present(self) -> list[TrajectoryEntry]:
        """What the directory holds, described by the index where that can be believed and by the files elsewhere."""
        with self._alone:
            self._read_index()
            files = sorted(self._files(), key=lambda pair: (_number(pair[0]), pair[0]))
            return [entry for name, size in files if (entry := self._describe(name, size)) is not None]

    def _files(self) -> Iterator[tuple[str, int]]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.directory) as directory:
            for file in directory:
                if _OURS.fullmatch(file.name) and file.name not in self._index.removed:
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
        self._index.remember(entry)
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
        """Take in the lines added since the last look; gives what is left over behind the last whole one."""
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

    def _mend(self) -> None:
        """With the lock held: end a torn line, index what the index does not know, clear away what a crash left."""
        if self._read_index():
            self._write([], first=b"\n")
        listed = dict(self._index.listed)
        present = self._present()
        self._write([entry.facts() for entry in present if listed.get(entry.file) != entry])
        for file in self.directory.iterdir():
            # Whoever was writing it held the lock that is ours now.
            if file.name in self._index.removed or _TEMPORARY.fullmatch(file.name):
                file.unlink(missing_ok=True)

    def _write(self, lines: list[dict[str, Any]], first: bytes = b"") -> None:
        data = first + b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        if data:
            with (self.directory / INDEX).open("ab") as file:
                file.write(data)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other writer, here or in another process, is at it; then see what they left."""
        with self._alone:
            fd = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                # The mark is still there when the last writer came to grief. Looking at every file each time
                # would make a long run slow.
                if not self._mended or os.fstat(fd).st_size:
                    self._mend()
                    self._mended = True
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
    match = _OURS.fullmatch(name)
    return int(match[1]) if match else 0


def _slug(text: str) -> str:
    """What of an episode's id can stand in a file's name anywhere."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII)[:80].strip("-.")


def archives_in(directory: Path) -> list[TrajectoryArchive]:
    """Those of a run (`attempt_*/trajectories`, in order), of one attempt, or the directory itself; else none."""
    attempts = [path for path in directory.glob("attempt_*") if path.name.removeprefix("attempt_").isdecimal()]
    attempts.sort(key=lambda path: int(path.name.removeprefix("attempt_")))
    for candidates in ([path / "trajectories" for path in attempts], [directory / "trajectories"], [directory]):
        found = [TrajectoryArchive(path) for path in candidates if _is_archive(path)]
        if found:
            return found
    return []


def entries_in(archives: Sequence[TrajectoryArchive]) -> tuple[list[tuple[TrajectoryArchive, TrajectoryEntry]], int]:
    """The entries of a run's archives, oldest first, and how many episodes a later attempt played again.

    A resume starts at a checkpoint and plays what came after it once more, under the same ids; only the last archive
    that has an id counts. Within one archive the same id is another session of the episode, and stays.
    """
    listed = [(place, entry) for place, archive in enumerate(archives) for entry in archive.entries()]
    last = {entry.episode_id: place for place, entry in listed}
    kept = [(archives[place], entry) for place, entry in listed if last[entry.episode_id] == place]
    again = {entry.episode_id for place, entry in listed if last[entry.episode_id] != place}
    return kept, len(again)


def _is_archive(path: Path) -> bool:
    return path.is_dir() and ((path / INDEX).is_file() or any(_OURS.fullmatch(file.name) for file in path.iterdir()))


_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8": "jpeg"}


def picture_file_name(data: bytes) -> str:
    """SHA-256 and the kind of picture: `png`, `jpeg`, `webp`, or `bin` for anything else."""
    kinds = (kind for signature, kind in _SIGNATURES.items() if data.startswith(signature))
    kind = "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else next(kinds, "bin")
    return f"{hashlib.sha256(data).hexdigest()}.{kind}"
