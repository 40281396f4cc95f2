"""The recorded screen episodes of a run: listed from the index of its archives, and one episode in detail.

The archives of a run are `attempt_<n>/trajectories` (training) and `attempt_<n>/evaluations/<name>/trajectories`. The
name of an episode is the path of its file below the run's directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

from palaestra.errors import ConfigError, ExperienceError, UnknownRun
from palaestra.experience.trajectory import Outcome, Trajectory, Turn
from palaestra.experience.trajectory_archive import TrajectoryArchive, TrajectoryEntry, entries_in
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.wire import API_SCHEMA, JsonObject, Number

_FILE = re.compile(
    r"(attempt_\d{1,9}(?:/evaluations/[\w.-]{1,200})?/trajectories)/(\d{8,20}_[\w.-]{0,200}\.safetensors)", re.ASCII
)
_PNG = b"\x89PNG\r\n\x1a\n"
_CACHED_ARCHIVES, _CACHED_EPISODES = 16, 4
EpisodeKind: TypeAlias = Literal["training", "evaluation"]


@dataclass(frozen=True, kw_only=True)
class TrajectorySummary:
    """One recorded screen episode, as the index of its archive describes it."""

    __pydantic_config__ = API_SCHEMA

    file: str
    """Its name in the routes: the path below the run's directory."""
    kind: EpisodeKind
    evaluation: str
    """Name of the evaluation that recorded it; empty for training."""
    attempt: int
    """Attempt of the run."""
    episode_id: str
    task: str
    seed: int
    params: JsonObject
    instruction: str
    outcome: Outcome
    reason: str
    reward: Number
    steps: int
    unreadable_turns: int
    versions: tuple[int, int]
    """Oldest and newest policy version that acted; -1 without tokens."""
    group: str
    """Episodes of one group share task, parameters and seed."""
    session_attempt: int
    """Failed sessions of this episode before this one."""
    started_at: float
    seconds: Number
    size_bytes: int


@dataclass(frozen=True)
class TrajectoryPicture:
    """A screen in a prompt."""

    __pydantic_config__ = API_SCHEMA

    sha256: str
    """Name in the route of pictures."""
    width: int
    """In screen pixels, which actions are in, too."""
    height: int
    prompt_width: int
    """In the prompt, after scaling for the model."""
    prompt_height: int


@dataclass(frozen=True, kw_only=True)
class TrajectoryTurn:
    """One screen and one reply."""

    __pydantic_config__ = API_SCHEMA

    pictures: tuple[TrajectoryPicture, ...]
    """The screens in the prompt, in order; the last is the current one."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The sampled tokens, including the end token."""
    log_probs: tuple[Number, ...]
    """Of each sampled token, under the distribution it was sampled from."""
    versions: tuple[int, ...]
    """Policy version of each sampled token."""
    text: str
    """The reply."""
    action: JsonObject | None
    """The action in screen pixels; null if the reply was unreadable."""
    point: tuple[int, int] | None
    """Where the action points on the screen; of a drag, where it begins."""
    unreadable: str
    """Why the reply was unreadable."""
    reward: Number
    weights: str
    """Fingerprint of the weights that acted; empty if not recorded."""


@dataclass(frozen=True, kw_only=True)
class TrajectoryDocument:
    """One recorded screen episode with its turns."""

    __pydantic_config__ = API_SCHEMA

    summary: TrajectorySummary
    turns: tuple[TrajectoryTurn, ...]
    screen: tuple[int, int] | None
    """Width and height of the screen in pixels."""
    step_limit: int | None
    temperature: Number
    codec: str
    session_id: str
    last_picture: str
    """The screen after the last action; empty if not recorded."""
    detail: JsonObject = field(default_factory=dict)
    """Final details of the verifier."""


def list_trajectories(
    run: RunDirectory,
    *,
    kind: EpisodeKind | None = None,
    evaluation: str | None = None,
    attempt: int | None = None,
    task: str | None = None,
    outcome: Outcome | None = None,
    before: str | None = None,
    limit: int | None = None,
) -> list[TrajectorySummary]:
    """Episodes that match all filters, newest first; with `before`, those older than that episode.

    A resumed run repeats the episodes after its checkpoint; unless an attempt is given, only the last ones count.
    """
    summaries: list[TrajectorySummary] = []
    if kind != "evaluation" and not evaluation:
        archives = [_open_archive(path) for path in _training_directories(run, attempt)]
        summaries += [_summarize(run, archive.directory, entry) for archive, entry in entries_in(archives)[0]]
    if kind != "training":
        for path in _evaluation_directories(run, attempt):
            if evaluation in (None, path.parent.name):
                summaries += [_summarize(run, path, entry) for entry in _open_archive(path).entries()]
    summaries.sort(key=lambda one: (one.started_at, one.file), reverse=True)
    if before is not None:
        place = next((index for index, one in enumerate(summaries) if one.file == before), None)
        if place is None:
            raise UnknownRun("before", before, "the list has no such trajectory", "Read the list from its beginning")
        summaries = summaries[place + 1 :]
    return [one for one in summaries if task in (None, one.task) and outcome in (None, one.outcome)][:limit]


def read_trajectory(run: RunDirectory, file: str) -> TrajectoryDocument:
    """One episode. `UnknownRun` if there is none of this name, `ConfigError` if its file is damaged."""
    path = _find_file(run, file)
    trajectory = _load(path, file)
    limit = trajectory.task.get("step_limit")
    entry = TrajectoryEntry.of(trajectory, file=path.name, size=path.stat().st_size)
    return TrajectoryDocument(
        summary=_summarize(run, path.parent, entry),
        turns=tuple(_describe_turn(turn, trajectory) for turn in trajectory.turns),
        screen=_task_screen(trajectory),
        step_limit=limit if isinstance(limit, int) else None,
        temperature=trajectory.temperature,
        codec=trajectory.codec,
        session_id=trajectory.session_id,
        last_picture=trajectory.last_picture,
        detail=dict(trajectory.detail),
    )


def read_picture(run: RunDirectory, file: str, sha256: str) -> bytes:
    """The encoded picture of an episode, as it was taken."""
    pictures = _load(_find_file(run, file), file).pictures
    if sha256 not in pictures:
        raise UnknownRun("picture", sha256, "the trajectory has no such picture", "Its turns list them")
    return pictures[sha256]


def _training_directories(run: RunDirectory, attempt: int | None) -> list[Path]:
    attempts = (one for one in run.attempts() if attempt in (None, one.number))
    return [one.trajectories for one in attempts if one.trajectories.is_dir()]


def _evaluation_directories(run: RunDirectory, attempt: int | None) -> Iterator[Path]:
    for one in run.attempts():
        if attempt in (None, one.number):
            yield from sorted(path for path in one.path.glob("evaluations/*/trajectories") if path.is_dir())


@lru_cache(maxsize=_CACHED_ARCHIVES)
def _open_archive(directory: Path) -> TrajectoryArchive:
    # An archive reads only the lines of its index that it has not read yet.
    return TrajectoryArchive(directory)


def _summarize(run: RunDirectory, directory: Path, entry: TrajectoryEntry) -> TrajectorySummary:
    parts = directory.relative_to(run.path).parts
    is_training = len(parts) == 2
    return TrajectorySummary(
        file=f"{'/'.join(parts)}/{entry.file}",
        kind="training" if is_training else "evaluation",
        evaluation="" if is_training else parts[2],
        attempt=int(parts[0].removeprefix("attempt_")),
        episode_id=entry.episode_id,
        task=entry.task,
        seed=entry.seed,
        params=dict(entry.params),
        instruction=entry.instruction,
        outcome=entry.outcome,
        reason=entry.reason,
        reward=entry.reward,
        steps=entry.steps,
        unreadable_turns=entry.unreadable_turns,
        versions=entry.versions,
        group=entry.group,
        session_attempt=entry.attempt,
        started_at=entry.started_at,
        seconds=entry.seconds,
        size_bytes=entry.bytes,
    )


def _find_file(run: RunDirectory, file: str) -> Path:
    path = run.path / file
    # A link may name a file outside the run.
    if _FILE.fullmatch(file) is None or not path.is_file() or path.resolve() != run.path.resolve() / file:
        remedy = f"GET /runs/{run.run_id}/trajectories lists them"
        raise UnknownRun("trajectory", file, "the run has no such trajectory", remedy)
    return path


def _load(path: Path, file: str) -> Trajectory:
    stat = path.stat()
    try:
        return _load_version(path, stat.st_mtime_ns, stat.st_size)
    except (ExperienceError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError("trajectory", file, f"cannot be read ({error})") from None


@lru_cache(maxsize=_CACHED_EPISODES)
def _load_version(path: Path, modified_ns: int, size: int) -> Trajectory:
    """Load a file; cached, because its pictures are requested one by one."""
    return Trajectory.load(path)


def _describe_turn(turn: Turn, trajectory: Trajectory) -> TrajectoryTurn:
    action = None if turn.action is None else dict(turn.action)
    return TrajectoryTurn(
        pictures=tuple(
            TrajectoryPicture(sha256, *_screen_size(sha256, trajectory, size), *size)
            for sha256, size in zip(turn.pictures, turn.image_sizes, strict=True)
        ),
        prompt_ids=tuple(turn.prompt_ids.tolist()),
        token_ids=tuple(turn.token_ids.tolist()),
        log_probs=tuple(turn.log_probs.tolist()),
        versions=tuple(turn.versions.tolist()),
        text=turn.text,
        action=action,
        point=None if action is None else _find_point(action),
        unreadable=turn.unreadable,
        reward=turn.reward,
        weights=turn.weights,
    )


def _screen_size(sha256: str, trajectory: Trajectory, prompt_size: tuple[int, int]) -> tuple[int, int]:
    """Size of a picture: from its file, else of the task's screen, else in the prompt."""
    data = trajectory.pictures.get(sha256, b"")
    if data.startswith(_PNG) and len(data) >= 24:
        return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    return _task_screen(trajectory) or prompt_size


def _task_screen(trajectory: Trajectory) -> tuple[int, int] | None:
    width, height = trajectory.task.get("width"), trajectory.task.get("height")
    return (width, height) if isinstance(width, int) and isinstance(height, int) else None


def _find_point(action: JsonObject) -> tuple[int, int] | None:
    path = action.get("path")
    point = action.get("at") or (path[0] if isinstance(path, list | tuple) and path else None)
    if not isinstance(point, list | tuple) or len(point) != 2 or not all(isinstance(one, int) for one in point):
        return None
    return point[0], point[1]
