"""`palaestra eval` of a model that operates screens: held-out tasks, success with its interval, alone or in pairs."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaestra.cli.terminal import strict_json
from palaestra.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.evaluation import ScreenEvaluation
    from palaestra.sessions.provider import SessionAddress
    from palaestra.train.screen_config import ScreenRunConfig

__all__ = ["Judged", "evaluate_screens", "judge"]


@dataclass(frozen=True)
class Judged:
    """What came of playing a checkpoint on held-out tasks, alone or beside another."""

    lines: list[str]
    """For people."""
    document: dict[str, Any]
    """For programs."""
    page: Path
    archives: tuple[Path, ...]
    """The episodes: the checkpoint's, then the other's."""


def evaluate_screens(
    path: Path, other: Path | None, *, episodes: int, first: int, tasks: str, greedy: bool | None, samples: int,
    device: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Play a checkpoint on held-out tasks; with `other`, that one on the same tasks, and compare them in pairs."""
    judged = judge(
        path, other, episodes=episodes, first=first, tasks=tasks, greedy=greedy, samples=samples, device=device
    )
    if as_json:
        print(strict_json(judged.document))
        return
    print("\n".join([*judged.lines, f"Report: {judged.page}", f"Episodes: {judged.archives[0]}"]))


def judge(
    path: Path, other: Path | None, *, episodes: int, first: int = 0, tasks: str = "", greedy: bool | None = None,
    samples: int = 1, names: tuple[str, str] | None = None, device: str | None = None,
) -> Judged:  # fmt: skip
    """Play and compare; `names` are what the two are called, by default their paths.

    `device` is where the model answers; None: where it was trained.
    """
    from palaestra.evaluation import ScreenComparison, comparison_page, evaluation_page, write_page
    from palaestra.sessions.provider import find_sessions
    from palaestra.train.held_out import check_tasks, load_screen_policy

    name, rival_name = names or (str(path), str(other))
    config, policy = load_screen_policy(path, device=device)
    chosen = _with_tasks(config, tasks)
    with ExitStack() as stack:
        address = find_sessions(
            chosen.environment,
            stack,
            actors=chosen.actor_pool.target_concurrent_actors,
            session_type=chosen.actor.session_type,
        )
        check_tasks(chosen, address)
        found, kept = _played(chosen, policy, path, address, episodes, first, greedy, samples)
        document: dict[str, Any] = {"checkpoint": str(path), **found.to_json(), "trajectories": str(kept)}
        page = evaluation_page(found, f"Evaluation of {name}")
        lines, archives = [_sentence(name, found)], [kept]
        if other is not None:
            _, rival = load_screen_policy(other, device=device)
            beside, kept_too = _played(chosen, rival, other, address, episodes, first, greedy, samples)
            compared = ScreenComparison(found, beside)
            document["against"] = {"checkpoint": str(other), **beside.to_json(), "trajectories": str(kept_too)}
            document["comparison"] = compared.to_json()
            page = comparison_page(compared, f"{name} against {rival_name}", a=name, b=rival_name)
            lines += [_sentence(rival_name, beside), _verdict(compared)]
            archives.append(kept_too)
    document["page"] = str(kept.parent / "report.html")
    write_page(page, kept.parent / "report.html")
    return Judged([*lines, *_table(found)], document, kept.parent / "report.html", tuple(archives))


def _with_tasks(config: ScreenRunConfig, tasks: str) -> ScreenRunConfig:
    """The configuration with the tasks that were asked for: names separated by commas, known params kept."""
    if not tasks:
        return config
    from palaestra.config import parse_section
    from palaestra.sessions.task_sampler import TaskChoice

    known = {choice.task: choice for choice in config.tasks}
    chosen = tuple(
        known.get(name) or parse_section(TaskChoice, {"task": name}, place="--tasks")
        for name in (part.strip() for part in tasks.split(","))
        if name
    )
    if not chosen:
        raise ConfigError("--tasks", tasks, "names no task", "Write for example --tasks miniwob/click-test")
    return config.model_copy(update={"tasks": chosen})


def _played(
    config: ScreenRunConfig, policy: Any, path: Path, address: SessionAddress, episodes: int, first: int,
    greedy: bool | None, samples: int,
) -> tuple[ScreenEvaluation, Path]:  # fmt: skip
    from palaestra.evaluation import ScreenEvaluation
    from palaestra.experience.trajectory_archive import TrajectoryArchive
    from palaestra.train.held_out import play_held_out

    kept = path.parent.parent / "evaluations" / f"{path.name}-{time.strftime('%Y%m%d-%H%M%S')}" / "trajectories"
    archive, done = TrajectoryArchive(kept), 0

    def heard(trajectory: Any) -> None:
        nonlocal done
        archive.append(trajectory)
        done += 1
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{path.name}: {done} of {episodes * samples} episodes")

    played = play_held_out(
        config, policy, address, episodes=episodes, first=first, greedy=greedy, samples=samples, heard=heard
    )  # fmt: skip
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return ScreenEvaluation.from_episodes(played), kept


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f} %"


def _sentence(name: str, found: ScreenEvaluation) -> str:
    score = found.overall
    low, high = score.ci95
    failed = f"; {score.environment_failed} environment failures apart" if score.environment_failed else ""
    return (
        f"{name}: solved {_percent(score.success_rate)} (95 % interval {100 * low:.1f} to {100 * high:.1f}; "
        f"{score.episodes} held-out episodes{failed})"
    )


def _table(found: ScreenEvaluation) -> list[str]:
    lines = []
    for task, score in found.per_task.items():
        low, high = score.ci95
        shown = f"{_percent(score.success_rate):>8}   {100 * low:5.1f} to {100 * high:5.1f}   n = {score.episodes}"
        lines.append(f"  {task:<44} {shown}")
    return lines


def _verdict(compared: Any) -> str:
    pairs = compared.overall
    if pairs.difference is None:
        return "no pairs to compare"
    low, high = pairs.ci95
    return (
        f"difference {100 * pairs.difference:+.1f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f}; "
        f"exact McNemar p = {pairs.p_value:.2g}; {len(pairs)} pairs)"
    )
