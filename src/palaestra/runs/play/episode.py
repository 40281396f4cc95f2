"""Recorded episodes of plays: written step by step, readable after a crash, checked when they are used.

    episodes/<episode_id>/
        episode.json         environment, seed, policy, result; hashes of the other files once it is finished
        steps.jsonl          one line per step, with the place of its picture
        pictures.bin         JPEG or PNG pictures, one after the other
        observations.bin     the observations as arrays, one row per step, for learning from the episode
        episode.webm         the pictures as a video, once it was asked for

Step 0 is the beginning: its picture and observation come before the first action. A recording whose process was killed
keeps every step that was written.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.atomic import atomic_file, read_json, write_json
from palaestra.files.home import Home
from palaestra.files.run_directory import check_run_id
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.play.state import EpisodeRecord, Outcome, StepReport
from palaestra.runs.wire import JsonObject, from_json, to_json
from palaestra.strict_json import dump_json

if TYPE_CHECKING:
    from PIL.Image import Image
    from pydantic import TypeAdapter

_T = TypeVar("_T")
_EPISODE, _STEPS, _PICTURES, _OBSERVATIONS = "episode.json", "steps.jsonl", "pictures.bin", "observations.bin"
_VIDEO = "episode.webm"
_MAX_VIDEO_FPS = 60.0
_MAX_INTEGER = 2**63 - 1
_MAX_TIME = 253_402_300_799
"""Unix time of the last second of the year 9999, which is the last that `datetime` can show."""
_PICTURE_STARTS = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG": "image/png"}


@dataclass(frozen=True)
class RecordedStep:
    """A step and the place of its picture."""

    report: StepReport
    picture: tuple[int, int] | None
    """Offset and length in pictures.bin; None when no picture was taken."""


@dataclass(frozen=True)
class Demonstration:
    """An episode as arrays: T steps, and T + 1 observations."""

    observations: Mapping[str, NDArray[Any]]
    """By name; a single array has the name ``."""
    actions: NDArray[Any]
    """Numbers; or objects, for actions of several parts."""
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    by_human: NDArray[np.bool_]
    """Whether the person chose the action."""


class EpisodeWriter:
    """Records one episode. Every `add` is on disk, apart from the buffers of the operating system, when it returns."""

    def __init__(self, directory: Path, record: EpisodeRecord) -> None:
        self.record = record
        self._directory = directory
        directory.mkdir(parents=True)
        self._identity = ProcessIdentity.of(os.getpid())
        self._arrays: list[JsonObject] | None = None
        self._hashes = {name: hashlib.sha256() for name in (_STEPS, _PICTURES, _OBSERVATIONS)}
        self._files: dict[str, IO[bytes]] = {}
        try:
            for name in self._hashes:
                self._files[name] = open(directory / name, "wb", buffering=0)  # noqa: SIM115 - closed by `finish`
            self._write_record()
        except OSError:
            self.close()
            raise

    def add(self, report: StepReport, picture: bytes, observation: Mapping[str, NDArray[Any]]) -> None:
        """Append a step. `OSError` when the disk is full."""
        place = None
        if picture:
            place = [self._files[_PICTURES].tell(), len(picture)]
            self._append(_PICTURES, picture)
        arrays: list[JsonObject] = [
            {"name": name, "dtype": array.dtype.str, "shape": list(array.shape)} for name, array in observation.items()
        ]
        if self._arrays is None:
            self._arrays = arrays
            self._write_record()
        elif arrays != self._arrays:
            # Rows of different sizes, such as texts, cannot be told apart again.
            self._arrays = []
        for array in observation.values() if self._arrays else ():
            self._append(_OBSERVATIONS, np.ascontiguousarray(array).tobytes())
        line: JsonObject = {**to_json(report), "picture": place}
        self._append(_STEPS, dump_json(line, separators=(",", ":")).encode() + b"\n")
        by_human, by_agent = report.actor == "human", report.actor == "agent"
        self.record = replace(
            self.record,
            steps=report.step,
            human_steps=self.record.human_steps + by_human,
            agent_steps=self.record.agent_steps + by_agent,
            episode_return=report.episode_return,
            success=report.success,
        )

    def finish(self, outcome: Outcome, now: float, **changes: Any) -> EpisodeRecord:
        """Close the files and write the result."""
        size = sum(file.tell() for file in self._files.values())
        self.close()
        self.record = replace(self.record, outcome=outcome, ended=now, bytes=size, **changes)
        self._write_record()
        return self.record

    def close(self) -> None:
        """Close the files, as a killed process would."""
        for file in self._files.values():
            file.close()

    def discard(self) -> None:
        """Delete the recording."""
        self.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _append(self, name: str, data: bytes) -> None:
        written = self._files[name].write(data)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written to {name}")
        self._hashes[name].update(data)

    def _write_record(self) -> None:
        is_finished = self.record.ended is not None
        hashes = {name: digest.hexdigest() for name, digest in self._hashes.items()} if is_finished else {}
        identity = None if self._identity is None or is_finished else to_json(self._identity)
        document = {"schema": 1, **to_json(self.record), "arrays": self._arrays or [], "sha256": hashes}
        write_json(self._directory / _EPISODE, document | {"writer": identity}, durable=is_finished)


class EpisodeReader:
    """Reads one recorded episode. `ConfigError` when it is damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            document = read_json(directory / _EPISODE)
        except RecursionError:
            document = None
        if document is None or document.get("schema") != 1:
            raise _damage(directory, f"{_EPISODE} cannot be read")
        try:
            self._arrays: list[JsonObject] = list(document.get("arrays") or [])
            self._sha256: JsonObject = dict(document.get("sha256") or {})
            # A copied directory has a new name.
            record = _read_checked(EpisodeRecord, json.dumps(document | {"episode_id": directory.name}))
        except (TypeError, ValueError, RecursionError) as error:
            raise _damage(directory, f"{_EPISODE} is incomplete or holds wrong values ({error})") from None
        self.record = self._recover(record, document.get("writer"))

    def steps(self, first: int = 0, count: int | None = None) -> list[RecordedStep]:
        """The steps from number `first` on."""
        last = None if count is None else first + count
        return [self._read_step(number, line) for number, line in enumerate(self._read_lines()[first:last], first)]

    def picture_at(self, number: int) -> bytes:
        """The picture of a step, or the last one before it. `UnknownRun` if the episode has no such step."""
        lines = self._read_lines()
        if number >= len(lines):
            raise UnknownRun("step", number, f"the episode has {max(0, len(lines) - 1)} steps")
        # From behind: nearly every step has a picture, and a long episode has thousands of steps before it.
        for index in range(number, -1, -1):
            step = self._read_step(index, lines[index])
            if step.picture is not None:
                return self.picture(step)
        raise ConfigError("step", number, "no picture was taken until then", "The environment cannot render")

    def picture(self, step: RecordedStep) -> bytes:
        """The picture of a step; empty if it has none."""
        if step.picture is None:
            return b""
        offset, length = step.picture
        try:
            with open(self.directory / _PICTURES, "rb") as file:
                file.seek(offset)
                data = file.read(length)
        except OSError as error:
            raise _damage(self.directory, f"{_PICTURES} cannot be read ({error.strerror})") from None
        if len(data) != length or picture_type(data) is None:
            raise _damage(self.directory, f"the picture of step {step.report.step} is not one")
        return data

    def demonstration(self) -> Demonstration:
        """The episode as arrays, after checking every byte against its hash."""
        self.verify()
        steps = self.steps()
        if not self._arrays:
            raise ConfigError("episode", self.directory.name, "holds no observations", "Use its pictures instead")
        try:
            kinds = np.dtype([(str(a["name"]) or "f0", str(a["dtype"]), tuple(a["shape"])) for a in self._arrays])
            if kinds.hasobject or kinds.itemsize == 0:
                raise ValueError("rows that cannot be stored")
        except (TypeError, ValueError, KeyError, OverflowError, SyntaxError):
            raise _damage(self.directory, f"{_EPISODE} does not describe the observations") from None
        rows = np.fromfile(self.directory / _OBSERVATIONS, kinds)
        if len(rows) < len(steps):
            raise _damage(self.directory, f"{_OBSERVATIONS} holds {len(rows)} rows for {len(steps)} steps")
        moves = [step.report for step in steps[1:]]
        names = [str(array["name"]) for array in self._arrays]
        return Demonstration(
            {name: rows[name or "f0"][: len(steps)] for name in names},
            _stack_actions([move.action for move in moves]),
            np.array([move.reward for move in moves], np.float32),
            np.array([move.terminated for move in moves], np.bool_),
            np.array([move.truncated for move in moves], np.bool_),
            np.array([move.actor == "human" for move in moves], np.bool_),
        )

    def verify(self) -> None:
        """Compare every byte with the hashes; `ConfigError` if the episode is unfinished or damaged."""
        if not self._sha256:
            raise ConfigError("episode", self.directory.name, f"is {self.record.outcome}: it was never finished")
        for name in (_STEPS, _PICTURES, _OBSERVATIONS):
            try:
                with open(self.directory / name, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise _damage(self.directory, f"{name} cannot be read ({error.strerror})") from None
            if digest != self._sha256.get(name):
                raise _damage(self.directory, f"{name} was changed after it was recorded")

    def _read_lines(self) -> list[bytes]:
        try:
            # The last part is empty, or a line that a killed process left incomplete.
            return (self.directory / _STEPS).read_bytes().split(b"\n")[:-1]
        except OSError as error:
            raise _damage(self.directory, f"{_STEPS} cannot be read ({error.strerror})") from None

    def _read_step(self, number: int, line: bytes) -> RecordedStep:
        try:
            return RecordedStep(_read_checked(StepReport, line), _read_place(json.loads(line)["picture"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _damage(self.directory, f"line {number + 1} of {_STEPS} cannot be read") from None

    def _recover(self, record: EpisodeRecord, writer: Any) -> EpisodeRecord:
        """Complete the record of an episode that is still being played or was interrupted."""
        if record.ended is not None:
            return record
        try:
            identity = ProcessIdentity.from_json(writer)
            is_alive = identity is not None and identity.is_alive()
        except (OverflowError, OSError):  # a number that is no pid
            is_alive = False
        outcome: Outcome = "playing" if is_alive else "interrupted"
        reports = [step.report for step in self.steps()]
        last = reports[-1] if reports else None
        return replace(
            record,
            outcome=outcome,
            steps=last.step if last else 0,
            episode_return=last.episode_return if last else 0.0,
            human_steps=sum(report.actor == "human" for report in reports),
            agent_steps=sum(report.actor == "agent" for report in reports),
        )


def export_video(episode: EpisodeReader, path: Path | None = None) -> Path:
    """Write the pictures of an episode as a video, beside its files unless a path is given. Encodes only once."""
    from palaestra.runs.video.encoder import Encoder, require_encoder

    target = path or episode.directory / _VIDEO
    if path is None and target.exists() and episode.record.ended is not None:
        return target
    require_encoder()
    steps = [step for step in episode.steps() if step.picture is not None]
    if not steps:
        raise ConfigError("episode", episode.record.episode_id, "holds no pictures", "The environment cannot render")
    # A play that ran faster has fewer pictures than steps; the video keeps its pace.
    share = len(steps) / max(1, episode.record.steps)
    with Encoder(target, fps=max(1.0, min(_MAX_VIDEO_FPS, episode.record.fps * share))) as encoder:
        size: tuple[int, int] | None = None
        for step in steps:
            frame = _decode_picture(episode, step)
            size = size or frame.size
            encoder.add(np.asarray(frame if frame.size == size else frame.resize(size)))
        return encoder.finish()


def export_demonstration(episode: EpisodeReader, path: Path) -> Demonstration:
    """Write an episode as arrays in a NumPy file `.npz`, which loads without pickle.

    Its arrays are `observations` (or `observations/NAME` for each named one), `actions`, `rewards`, `terminated`,
    `truncated` and `by_human`. Actions of several parts are JSON texts.
    """
    demonstration = episode.demonstration()
    actions = demonstration.actions
    if actions.dtype.hasobject:
        actions = np.array([dump_json(action) for action in actions.tolist()], np.str_)
    named = {f"observations/{name}" if name else "observations": a for name, a in demonstration.observations.items()}
    with atomic_file(path) as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            **named,
            actions=actions,
            rewards=demonstration.rewards,
            terminated=demonstration.terminated,
            truncated=demonstration.truncated,
            by_human=demonstration.by_human,
        )
    return demonstration


def new_episode_directory(home: Home, episode_id: str) -> Path:
    """The directory of a new episode."""
    return home.episodes / check_run_id(episode_id)


def find_episode(home: Home, episode_id: str) -> Path:
    """The directory of an episode by its id, or by a unique prefix, even of a damaged one; else `UnknownRun`."""
    remedy = "palaestra episodes list shows them"
    try:
        check_run_id(episode_id)
    except UnknownRun:
        raise UnknownRun("episode", episode_id, "is not the id of an episode", remedy) from None
    paths = [path for path in home.episodes.glob(f"{episode_id}*") if path.is_dir()]
    paths = [path for path in paths if path.name == episode_id] or paths
    if len(paths) != 1:
        reason = f"{len(paths)} episodes begin with it" if paths else "no such episode"
        raise UnknownRun("episode", episode_id, reason, remedy)
    return paths[0]


def open_episode(home: Home, episode_id: str) -> EpisodeReader:
    """A recorded episode by its id, or by a unique prefix; `UnknownRun` if there is none."""
    return EpisodeReader(find_episode(home, episode_id))


def list_episodes(home: Home, *, env_id: str | None = None, play_id: str | None = None) -> list[EpisodeRecord]:
    """The recorded episodes, newest first; a damaged one has a `problem`."""
    records = [_read_record(path) for path in home.episodes.glob("[!.]*") if path.is_dir()]
    return sorted(
        (r for r in records if env_id in (None, r.env_id) and play_id in (None, r.play_id)),
        key=lambda record: (record.started, record.episode_id),
        reverse=True,
    )


def delete_episode(home: Home, episode_id: str) -> EpisodeRecord:
    """Delete a recorded episode, damaged or not, that is not being played."""
    path = find_episode(home, episode_id)
    record = _read_record(path)
    if record.outcome == "playing":
        raise ConfigError("episode", path.name, "is being played", "End the play first")
    shutil.rmtree(path)
    return record


def picture_type(data: bytes) -> str | None:
    """Media type of a picture; None if it is neither JPEG nor PNG."""
    return next((kind for start, kind in _PICTURE_STARTS.items() if data.startswith(start)), None)


def _read_record(directory: Path) -> EpisodeRecord:
    """The record of an episode; for a damaged one, a record with a `problem`."""
    try:
        return EpisodeReader(directory).record
    except ConfigError as error:
        record = EpisodeRecord(episode_id=directory.name, play_id="", env_id="", kind="gymnasium")
        return replace(record, outcome="interrupted", problem=error.reason)


@functools.cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # commands that read no episode start faster without it

    return TypeAdapter(kind)


def _read_checked(kind: type[_T], text: str | bytes) -> _T:
    """A record or step from its JSON, after checking every type and range; `ValueError` if one is wrong."""
    from pydantic import ValidationError

    try:
        _adapter(kind).validate_json(text, strict=True)  # type: ignore[arg-type]  # classes are hashable
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    document = json.loads(text)
    for name, value in document.items():
        if isinstance(value, int) and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
            raise ValueError(f"{name}: a number beyond 64 bits")
    for name in ("started", "ended", "time"):
        if not 0 <= (document.get(name) or 0) <= _MAX_TIME:
            raise ValueError(f"{name}: not a time")
    if not 0 < document.get("fps", 1) < math.inf:
        raise ValueError("fps: must be positive and finite")
    return from_json(kind, document)


def _read_place(place: Any) -> tuple[int, int] | None:
    """Offset and length of a picture; `ValueError` if they are not two numbers."""
    if place is None:
        return None
    offset, length = place
    if not all(type(number) is int and 0 <= number <= _MAX_INTEGER for number in (offset, length)):
        raise ValueError("not the place of a picture")
    return offset, length


def _decode_picture(episode: EpisodeReader, step: RecordedStep) -> Image:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("video", "", "Pillow is not installed", "pip install 'palaestra[serve]'") from None
    try:
        with Image.open(io.BytesIO(episode.picture(step))) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = f"the picture of step {step.report.step} cannot be decoded ({error})"
        raise _damage(episode.directory, reason) from None


def _stack_actions(actions: list[Any]) -> NDArray[Any]:
    try:
        return np.array(actions)
    except ValueError:  # parts of different shapes
        array = np.empty(len(actions), object)
        array[:] = actions
        return array


def _damage(directory: Path, reason: str) -> ConfigError:
    return ConfigError("episode", directory.name, reason, f"Delete it: palaestra episodes delete {directory.name}")
