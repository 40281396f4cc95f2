"""What the files of a checkpoint say, read without torch: digest, format, environment step, scores, spaces.

A directory with a manifest is identified by the hash of that manifest, which lists the hash of every file; any other
directory by the hash of its sorted lines of name, size and hash.

Evidence for the environment step, strongest first: the state of a Palaestra checkpoint, the announcement of the
trainer, the counters in a Stable-Baselines3 zip, the file name, and the steps that the trainer had logged when it wrote
the file. Without any of these the step is unknown; the current step of the run would be that of another moment.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from palaestra.files.atomic import read_json
from palaestra.files.checkpoint import MANIFEST, POLICY, FileDigest, digest_file, manifest_files, read_state
from palaestra.files.run_directory import Attempt
from palaestra.runs.checkpoints.pickle_scan import SB3_WEIGHTS
from palaestra.runs.checkpoints.signature import normalize_signature
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.wire import JsonObject
from palaestra.telemetry.event import CheckpointSaved, decode

BDI_FORMAT = "spade_bdi"
"""Tables and plans of a BDI agent; the kind in its manifest."""
_CODE_ADDRESS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w./-]*")
_STEP_IN_NAME = re.compile(r"(?:step|ckpt|checkpoint)[_-]?(\d{1,18})(?!\d)|(?<!\d)(\d{1,18})_steps")
_MAX_HEADER_BYTES = 16 << 20
_MAX_COUNTER_BYTES = 16 << 20
_MAX_METRICS = 16
_MAX_POINTS = 4096


@dataclass(frozen=True)
class Verdict:
    """Result of a verification."""

    fits: bool
    """The bytes have the recorded hash."""
    problem: str
    """Why not; empty when they do."""
    time: float

    @property
    def verified_time(self) -> float:
        """Value for `CheckpointRecord.verified`: the time, negative when damaged."""
        return self.time if self.fits else -self.time


def digest_path(path: Path) -> FileDigest:
    """Compute the digest of a file or directory. Raises `OSError`, or `ValueError` for an invalid manifest."""
    if not path.is_dir():
        return digest_file(path)
    manifest = path / MANIFEST
    if manifest.is_file():
        raw = manifest.read_bytes()
        size = len(raw) + sum(file.size_bytes for file in manifest_files(raw, path).values())
        return FileDigest(hashlib.sha256(raw).hexdigest(), size)
    lines, size = [], 0
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest = digest_file(file)
        lines.append(f"{file.relative_to(path).as_posix()} {digest.size_bytes} {digest.sha256}\n")
        size += digest.size_bytes
    return FileDigest(hashlib.sha256("".join(lines).encode()).hexdigest(), size)


def verify(record: CheckpointRecord, clock: Callable[[], float] = time.time) -> Verdict:
    """Read every byte of a checkpoint and compare the hashes."""
    problem = _find_problem(Path(record.path), record.sha256)
    return Verdict(not problem, problem, clock())


def _find_problem(path: Path, sha256: str) -> str:
    try:
        if digest_path(path).sha256 != sha256:
            return "its SHA-256 differs: it was changed or damaged"
        manifest = path / MANIFEST
        files = manifest_files(manifest.read_bytes(), path) if manifest.is_file() else {}
        for name, expected in files.items():
            digest = digest_file(path / name)
            if digest.size_bytes != expected.size_bytes:
                problem = "is truncated" if digest.size_bytes < expected.size_bytes else "is too long"
                return f"{name} {problem} ({digest.size_bytes} of {expected.size_bytes} bytes)"
            if digest.sha256 != expected.sha256:
                return f"{name} was changed or damaged: its SHA-256 differs"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    except ValueError as error:
        return str(error)
    return ""


def detect_format(path: Path) -> str:
    """Return the format of a checkpoint by its first bytes or its manifest: one of ours, or `unknown`."""
    if path.is_dir():
        manifest = read_json(path / MANIFEST)
        if manifest is not None and manifest.get("kind") == BDI_FORMAT:
            return BDI_FORMAT
        return "palaestra" if (path / MANIFEST).is_file() else "unknown"
    try:
        with open(path, "rb") as file:
            beginning = file.read(16)
        if beginning.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(path) as archive:
                return "sb3_zip" if {SB3_WEIGHTS, "data"} <= set(archive.namelist()) else "torch_zip"
    except (OSError, zipfile.BadZipFile, NotImplementedError):
        return "unknown"
    return "safetensors" if beginning[8:9] == b"{" else "unknown"


@dataclass(frozen=True)
class PalaestraCheckpoint:
    """The metadata of a checkpoint directory written by Palaestra."""

    env_step: int = 0
    env_id: str = ""
    algorithm: str = ""
    score: float | None = None
    returns: tuple[float, ...] = ()
    """Returns of the last episodes before it was saved, at most 100."""
    env_signature: JsonObject = field(default_factory=dict)
    offline_dataset: JsonObject = field(default_factory=dict)
    """Identity of the dataset that it learned from; empty without one."""
    addresses: tuple[str, ...] = ()
    """Code that its configuration names as `module:name`; evaluating the checkpoint would import it."""

    @classmethod
    def read(cls, path: Path) -> PalaestraCheckpoint | None:
        """Read a directory; None when it is not a Palaestra checkpoint or its state is invalid."""
        state = read_state(path) if path.is_dir() else None
        if state is None:
            return None
        try:
            about = dict(state.get("about") or {})
            config = dict(about.get("config") or {})
            tasks = config.get("tasks") or [{}]
            env_id = str((config.get("env") or {}).get("id") or tasks[0].get("task") or "")
            score, progress = about.get("score"), state["progress"]
            return cls(
                env_step=int(progress.get("steps") or 0),
                env_id=env_id,
                algorithm=str((config.get("algorithm") or {}).get("name", "")),
                score=float(score) if isinstance(score, int | float) else None,
                returns=tuple(float(value) for value in progress.get("episode_rewards") or ()),
                env_signature=normalize_signature({"env_id": env_id, **_read_spaces(path / POLICY["vector"])}),
                offline_dataset=_read_dataset(about.get("dataset")),
                addresses=tuple(sorted(set(_find_addresses(config)))),
            )
        except (TypeError, ValueError, AttributeError, KeyError, IndexError):
            return None


def summarize_returns(returns: tuple[float, ...]) -> dict[str, float]:
    """Return the last, best and mean of the returns before a checkpoint; empty without returns."""
    if not returns:
        return {}
    return {"last": returns[-1], "best": max(returns), "mean_100": sum(returns) / len(returns)}


def _read_spaces(path: Path) -> JsonObject:
    """Read the observation and action space from the header of a policy file."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                return {}
            facts: JsonObject = json.loads(json.loads(file.read(length))["__metadata__"]["palaestra"])
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return {}
    return {key: facts[key] for key in ("observation_space", "action_space") if isinstance(facts.get(key), dict)}


def _read_dataset(dataset: object) -> JsonObject:
    """The identity of a dataset without its reference scores, which only evaluations need."""
    facts = dataset if isinstance(dataset, dict) else {}
    return {key: facts[key] for key in ("dataset_id", "sha256", "env_id", "env_kwargs") if key in facts}


def _find_addresses(value: object) -> Iterator[str]:
    if isinstance(value, str) and _CODE_ADDRESS.fullmatch(value):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _find_addresses(inner)


class CheckpointStep(NamedTuple):
    """A number of environment steps and its source."""

    env_step: int | None
    """None when unknown."""
    source: str
    """`file`, `announced`, `name`, `log` (a lower bound), `given` at the import, or `unknown`."""

    @classmethod
    def from_file(cls, path: Path) -> CheckpointStep:
        """Read the step of a file in a foreign format: from its counters, else from its name."""
        counter = _read_sb3_counter(path)
        if counter is not None:
            return cls(counter, "file")
        match = _STEP_IN_NAME.search(path.name)
        return cls(int(match[1] or match[2]), "name") if match else UNKNOWN_STEP


UNKNOWN_STEP = CheckpointStep(None, "unknown")


class AttemptSteps:
    """Finds the steps of the checkpoints of one attempt. Journal and series are read at most once, when needed."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def find_step(self, path: Path, own: PalaestraCheckpoint | None) -> CheckpointStep:
        """Return the step of a checkpoint of the attempt."""
        if own is not None:
            return CheckpointStep(own.env_step, "file")
        announcement = self.announcements.get(path)
        if announcement is not None:
            return CheckpointStep(announcement[1].env_step, "announced")
        step = CheckpointStep.from_file(path)
        return self._last_logged_step(path) if step == UNKNOWN_STEP else step

    @cached_property
    def announcements(self) -> dict[Path, tuple[float, CheckpointSaved]]:
        """Time and event of every announcement of the trainer, by path."""
        announced = list(_read_announcements(self._attempt.journal))
        return {path: one for one in announced for path in announced_paths(self._attempt, one[1].path)}

    def _last_logged_step(self, path: Path) -> CheckpointStep:
        """Return the last step that the trainer logged before it wrote the file."""
        try:
            written = path.stat().st_mtime
        except OSError:
            return UNKNOWN_STEP
        steps = [step for step, time in self._logged_steps if time <= written]
        return CheckpointStep(max(steps), "log") if steps else UNKNOWN_STEP

    @cached_property
    def _logged_steps(self) -> list[tuple[int, float]]:
        from palaestra.runs.series.reader import SeriesReader

        series = SeriesReader(self._attempt.series)
        # A line of output carries the time at which it was read, which may be long after the file was written.
        names = [name for name, info in series.names().items() if not info.source.startswith("stdout")]
        names.sort(key=lambda name: name != "episode/return")
        return [(point.step, point.time) for name in names[:_MAX_METRICS] for point in series.recent(name, _MAX_POINTS)]


def announced_paths(attempt: Attempt, announced: str) -> tuple[Path, ...]:
    """Where an announced checkpoint may be: a path relative to the attempt or to its working directory.

    A trainer on another machine announces the path of that machine, whose end is the same here.
    """
    _, separator, rest = announced.partition(f"/{attempt.path.parent.name}/{attempt.path.name}/")
    places = [announced, *([rest] if separator else [])]
    return tuple((base / place).resolve() for place in places for base in (attempt.path, attempt.work))


def _read_announcements(journal: Path) -> Iterator[tuple[float, CheckpointSaved]]:
    """Yield every `CheckpointSaved` of a journal with its time; unreadable lines are skipped."""
    try:
        with open(journal, "rb") as file:
            for line in file:
                if b'"CheckpointSaved"' in line:
                    try:
                        record = decode(line)
                    except ValueError:
                        continue
                    if isinstance(record.event, CheckpointSaved):
                        yield record.time, record.event
    except OSError:
        return


def _read_sb3_counter(path: Path) -> int | None:
    """Read the step counter of a Stable-Baselines3 zip, as JSON, so that no code in it runs."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo("data").file_size > _MAX_COUNTER_BYTES:
                return None
            steps = json.loads(archive.read("data"))["num_timesteps"]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return None
    return steps if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0 else None
