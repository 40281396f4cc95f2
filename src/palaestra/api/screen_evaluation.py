"""Evaluation of UI agents: success rates on held-out tasks, alone or paired with another checkpoint."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from palaestra.errors import ConfigError
from palaestra.extras import UI_AGENTS, require_extras

if TYPE_CHECKING:
    from palaestra.evaluation import ScreenComparison, ScreenEvaluation
    from palaestra.evaluation.before_after import EpisodePair
    from palaestra.experience.trajectory import Trajectory
    from palaestra.sessions.clients.provider import SessionAddress
    from palaestra.train.screen_config import ScreenRunConfig


ShowProgress: TypeAlias = Callable[[str, str], AbstractContextManager[Callable[[int, int], None]]]
"""Called with a title and a unit; the context is called with the number that is done, and the total."""


@dataclass(frozen=True, repr=False)
class ScreenReport:
    """Result of evaluating a UI agent, alone or against another."""

    evaluation: ScreenEvaluation
    """The episodes of the checkpoint and their scores."""
    lines: list[str]
    """Text for the terminal."""
    document: dict[str, Any]
    """JSON document."""
    page: Path
    viewer: Path
    """The page with the episodes."""
    archives: tuple[Path, ...]
    """Directories of the recorded episodes: those of the checkpoint, then those of the other."""
    pair: EpisodePair | None = None
    """One episode of both, if two checkpoints were compared."""
    picture: Path | None = None
    """Picture of the pair, beside the page."""

    @property
    def episodes(self) -> int:
        """Number of episodes that count."""
        return self.evaluation.overall.episodes

    @property
    def success_rate(self) -> float | None:
        """Share of episodes that solved the task; None if every session failed."""
        return self.evaluation.overall.success_rate

    @property
    def ci95(self) -> tuple[float, float]:
        """95 % interval of the success rate (Wilson)."""
        return self.evaluation.overall.ci95

    def screenshots(self) -> list[bytes]:
        """The first screen of each recorded episode of the checkpoint, as the bytes of its picture."""
        from palaestra.experience.trajectory_archive import TrajectoryArchive

        episodes = TrajectoryArchive(self.archives[0]).load()
        firsts = ((episode, episode.turns[0].pictures) for episode in episodes if episode.turns)
        return [episode.pictures[pictures[-1]] for episode, pictures in firsts if pictures]

    def __repr__(self) -> str:
        return "<ScreenReport\n" + "\n".join([*self.lines, *self.file_lines()]) + ">"

    def file_lines(self) -> list[str]:
        """Links to the files, for the terminal."""
        files = {"Report": self.page, "Episodes": self.viewer, "Picture": self.picture}
        return [f"{name}: {path.resolve().as_uri()}" for name, path in files.items() if path is not None]


def evaluate_on_screens(
    path: Path,
    other: Path | None,
    *,
    episodes: int,
    first: int = 0,
    tasks: str = "",
    greedy: bool | None = None,
    samples: int = 1,
    names: tuple[str, str] | None = None,
    device: str | None = None,
    show_progress: ShowProgress | None = None,
) -> ScreenReport:
    """Evaluate a checkpoint on held-out tasks; with `other`, evaluate that on the same tasks and compare in pairs.

    Writes a report, a page with the episodes and, of a comparison, a picture of one episode of both, beside each other.
    `names` are display names, by default the names of the runs and their updates. `device` runs the model; None: the
    device it was trained on. `show_progress` shows how many episodes of a checkpoint have been played.
    """
    require_extras("UI agents", "vlm", "ui", only=UI_AGENTS)
    from palaestra.evaluation import ScreenComparison
    from palaestra.sessions.clients.provider import find_sessions
    from palaestra.train.held_out import check_tasks, load_screen_policy

    name, other_name = names or checkpoint_names(path, other)
    pair: EpisodePair | None = None
    comparison: ScreenComparison | None = None
    config, policy = load_screen_policy(path, device=device)
    config = _select_tasks(config, tasks)
    with ExitStack() as stack:
        address = find_sessions(
            config.environment,
            stack,
            actors=config.actor_pool.target_concurrent_actors,
            session_type=config.actor.session_type,
        )
        check_tasks(config, address)
        evaluation, directory = _play_episodes(
            config, policy, path, address, episodes, first, greedy, samples, show_progress
        )
        document: dict[str, Any] = {"checkpoint": str(path), **evaluation.to_json(), "trajectories": str(directory)}
        lines, archives = [format_score(name, evaluation)], [directory]
        if other is not None:
            _, other_policy = load_screen_policy(other, device=device)
            baseline, other_directory = _play_episodes(
                config, other_policy, other, address, episodes, first, greedy, samples, show_progress
            )
            comparison = ScreenComparison(evaluation, baseline)
            document["against"] = {
                "checkpoint": str(other),
                **baseline.to_json(),
                "trajectories": str(other_directory),
            }
            document["comparison"] = comparison.to_json()
            lines += [format_score(other_name, baseline), format_comparison(comparison)]
            archives.append(other_directory)
            pair = _load_pair(comparison, directory, other_directory, (name, other_name))
    scores = evaluation if comparison is None else comparison
    files = _write_pages(directory.parent, scores, (name, other_name), archives, pair, policy)
    document |= {kind: str(file) for kind, file in files.items()}
    for task, score in evaluation.per_task.items():
        low, high = score.ci95
        rate = "–" if score.success_rate is None else f"{100 * score.success_rate:.1f} %"
        lines.append(f"  {task:<44} {rate:>8}   {100 * low:5.1f} to {100 * high:5.1f}   n = {score.episodes}")
    pages = files["page"], files["viewer"]
    return ScreenReport(evaluation, lines, document, *pages, tuple(archives), pair, files.get("picture"))


def _write_pages(
    directory: Path,
    scores: ScreenEvaluation | ScreenComparison,
    names: tuple[str, str],
    archives: Sequence[Path],
    pair: EpisodePair | None,
    policy: Any,
) -> dict[str, Path]:
    """Write the report, the episodes that it links to, and the picture; returns the files by kind."""
    from palaestra.evaluation import ScreenEvaluation, comparison_page, evaluation_page, write_page, write_viewer
    from palaestra.evaluation.before_after import PICTURE_NAME, write_picture
    from palaestra.evaluation.report import Viewer
    from palaestra.evaluation.viewer import ViewedEpisode
    from palaestra.experience.trajectory_archive import TrajectoryArchive

    files = {"page": directory / "report.html", "viewer": directory / "episodes.html"}
    labels = names if len(archives) > 1 else ("", "")
    episodes = (
        ViewedEpisode(episode, label)
        for label, archive in zip(labels, archives, strict=False)
        for episode in TrajectoryArchive(archive).load()
    )
    title = f"Episodes: {names[0]}" + (f", and {names[1]}" if len(archives) > 1 else "")
    write_viewer(episodes, files["viewer"], title=title, texts=_token_texts(policy))
    viewer = Viewer(files["viewer"].name, labels)
    if isinstance(scores, ScreenEvaluation):
        write_page(evaluation_page(scores, f"Evaluation: {names[0]}", viewer=viewer), files["page"])
        return files
    picture, data = "", b""
    if pair is not None:
        files["picture"] = directory / PICTURE_NAME
        write_picture(pair, files["picture"])
        picture, data = PICTURE_NAME, files["picture"].read_bytes()
    page = comparison_page(
        scores,
        f"{names[0]}, compared with {names[1]}",
        a=names[0],
        b=names[1],
        picture=picture,
        picture_data=data,
        viewer=viewer,
    )
    write_page(page, files["page"])
    return files


def _token_texts(policy: Any) -> Callable[[Sequence[int]], list[str]]:
    """A function that maps token ids to texts, with the tokenizer of the model."""
    tokenizer, known = policy.loaded.tokenizer, dict[int, str]()

    def decode(token: int) -> str:
        if token not in known:
            known[token] = tokenizer.decode([token]) or str(token)
        return known[token]

    return lambda ids: [decode(int(token)) for token in ids]


def _load_pair(
    comparison: ScreenComparison, directory: Path, other_directory: Path, names: tuple[str, str]
) -> EpisodePair | None:
    """The episodes for the picture; None without pairs, or if a file cannot be read.

    `names` are those of the checkpoint and of the other.
    """
    from palaestra.evaluation.before_after import EpisodePair, choose_pair
    from palaestra.experience.trajectory_archive import TrajectoryArchive

    chosen = choose_pair(comparison)
    if chosen is None:
        return None
    loaded = []
    for path, entry in zip((directory, other_directory), chosen, strict=True):
        archive = TrajectoryArchive(path)
        same = [recorded for recorded in archive.entries() if recorded.episode_id == entry.episode_id]
        loaded += list(archive.load(same))[:1]
    if len(loaded) < 2:
        return None
    after, before = loaded
    return EpisodePair(before, after, (names[1], names[0]))


def checkpoint_names(path: Path, other: Path | None) -> tuple[str, str]:
    """Readable names of two checkpoints: what was trained and for how long; with the run id if that is ambiguous."""
    paths = [path] if other is None else [path, other]
    names = [_name_checkpoint(one, with_run=False) for one in paths]
    if len(set(names)) < len(names):
        names = [_name_checkpoint(one, with_run=True) for one in paths]
    return names[0], names[-1]


def _name_checkpoint(path: Path, *, with_run: bool) -> str:
    from palaestra.files.checkpoint import read_state

    state = read_state(path) or {}
    about, updates = state.get("about", {}), state.get("progress", {}).get("updates")
    config = about.get("config") or {}
    name = config.get("experiment_name") or config.get("name") or ""
    if with_run or not name:
        name = str(about.get("run_id") or path.absolute().name)
    if updates is None:
        return name
    return f"{name} before training" if updates == 0 else f"{name} after {updates} update{'s' * (updates != 1)}"


def _select_tasks(config: ScreenRunConfig, tasks: str) -> ScreenRunConfig:
    """The configuration with the tasks of a comma-separated list; tasks of the run keep their parameters."""
    if not tasks:
        return config
    from palaestra.config import parse_section
    from palaestra.sessions.task_sampler import TaskChoice

    known = {choice.task: choice for choice in config.tasks}
    selected = tuple(
        known.get(name) or parse_section(TaskChoice, {"task": name}, place="--tasks")
        for name in (part.strip() for part in tasks.split(","))
        if name
    )
    if not selected:
        raise ConfigError("--tasks", tasks, "names no task", "Write for example --tasks miniwob/click-test")
    return config.model_copy(update={"tasks": selected})


def _play_episodes(
    config: ScreenRunConfig,
    policy: Any,
    path: Path,
    address: SessionAddress,
    episodes: int,
    first: int,
    greedy: bool | None,
    samples: int,
    show_progress: ShowProgress | None,
) -> tuple[ScreenEvaluation, Path]:
    """Play held-out episodes; returns the evaluation and the directory of the recorded episodes."""
    from palaestra.evaluation import ScreenEvaluation
    from palaestra.experience.trajectory_archive import TrajectoryArchive
    from palaestra.train.held_out import play_held_out

    # Two evaluations of one checkpoint may begin in the same second.
    name = f"{path.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    in_run = path.parent.name == "checkpoints"
    parent = path.parent.parent if in_run else path.parent  # a saved copy lies where its owner put it
    directory = parent / "evaluations" / name / "trajectories"
    archive, done = TrajectoryArchive(directory), 0

    shown = nullcontext() if show_progress is None else show_progress(f"Evaluating {path.name}", "episodes")
    with shown as update:

        def record(trajectory: Trajectory) -> None:
            nonlocal done
            archive.append(trajectory)
            done += 1
            if update is not None:
                update(done, episodes * samples)

        played = play_held_out(
            config, policy, address, episodes=episodes, first=first, greedy=greedy, samples=samples, on_finished=record
        )
    return ScreenEvaluation.from_episodes(played), directory


def format_score(name: str, evaluation: ScreenEvaluation) -> str:
    """Success rate with its interval, on one line."""
    score = evaluation.overall
    failures = f"{score.environment_failed} environment failures excluded"
    if score.success_rate is None:
        return f"{name}: no episode counts; {failures}"
    low, high = (100 * bound for bound in score.ci95)
    return (
        f"{name}: success rate {100 * score.success_rate:.1f} % (95 % interval {low:.1f} to {high:.1f}; "
        f"{score.episodes} episodes{'; ' + failures if score.environment_failed else ''})"
    )


def format_comparison(comparison: ScreenComparison) -> str:
    """Difference of two success rates, with its interval and significance, on one line."""
    pairs = comparison.overall
    unpaired = "; {} and {} unpaired".format(*comparison.unpaired_counts) if any(comparison.unpaired_counts) else ""
    if pairs.difference is None:
        return f"no pairs to compare{unpaired}"
    low, high = (100 * bound for bound in pairs.ci95)
    return (
        f"difference {100 * pairs.difference:+.1f} points (95 % interval {low:+.1f} to {high:+.1f}; "
        f"exact McNemar p = {pairs.p_value:.2g}; {len(pairs)} pairs{unpaired})"
    )
