"""`palaestra trajectories`: list what was played, look at it, score it, hand it to other programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.terminal import strict_json
from palaestra.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.experience.trajectory import Trajectory
    from palaestra.experience.trajectory_archive import TrajectoryArchive, TrajectoryEntry

__all__ = ["trajectories_app"]

trajectories_app = typer.Typer(help="Recorded episodes of UI agents.", no_args_is_help=True, rich_markup_mode=None)

OUTCOMES = ("success", "failure", "truncated", "unreadable", "environment_failed")

Where = Annotated[
    str, typer.Argument(metavar="RUN_OR_DIRECTORY", help="Run id, run directory, or any directory of trajectories.")
]
Task = Annotated[str, typer.Option(help="Only tasks whose name contains this.")]
OutcomeOption = Annotated[str, typer.Option("--outcome", help=f"Only this one of {', '.join(OUTCOMES)}.")]
Version = Annotated[int | None, typer.Option(help="Only episodes with a token of this policy version.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@trajectories_app.command("list")
def list_command(
    where: Where, task: Task = "", outcome: OutcomeOption = "", version: Version = None,
    limit: Annotated[int, typer.Option(help="Only the newest so many; 0 for all.")] = 0, as_json: Json = False,
) -> None:  # fmt: skip
    """List episodes, oldest first: outcome, reward, steps, policy versions, task, seed, id."""
    chosen = _chosen(where, task, outcome, version, limit)
    if as_json:
        print(strict_json([{**entry.facts(), "archive": str(archive.directory)} for archive, entry in chosen.found]))
    else:
        for _, entry in chosen.found:
            print(_row(entry))
    chosen.print_warnings()


@trajectories_app.command("view")
def view_command(
    where: Where,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("trajectories.html"),
    task: Task = "", outcome: OutcomeOption = "", version: Version = None,
    limit: Annotated[int, typer.Option(help="Only the newest so many; 0 for all.")] = 1000,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or a model's directory. By default that of the run's model.")
    ] = None,
    max_megabytes: Annotated[
        int, typer.Option(help="Pictures lie beside a page that would be larger; with 0 always.")
    ] = 256,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write one HTML page that shows what the model saw, wrote and did."""
    if max_megabytes < 0:
        raise ConfigError("--max-megabytes", max_megabytes, "must not be negative")
    chosen = _chosen(where, task, outcome, version, limit, wanted=True)
    from palaestra.cli.token_texts import run_texts, token_texts
    from palaestra.evaluation import write_viewer

    # An archive lies in an attempt of a run.
    texts = run_texts(chosen.archives[0].directory.parents[1]) if tokenizer is None else token_texts(tokenizer)

    made = write_viewer(chosen.load(), output, title=f"Trajectories of {where}", texts=texts,
                        max_bytes=max_megabytes * 2**20)  # fmt: skip
    chosen.print_warnings()
    if as_json:
        print(strict_json(made.to_json()))
        return
    beside = f", pictures in {made.picture_directory}" if made.picture_directory else ""
    print(f"{made.path}: {made.trajectories} episodes, {made.bytes / 2**20:.1f} MB{beside}")


@trajectories_app.command("report")
def report_command(
    where: Where,
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Compare with these, paired by task, parameters and seed.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page.")] = None,
    task: Task = "", version: Version = None,
    limit: Annotated[int, typer.Option(help="Only the newest so many; 0 for all.")] = 0, as_json: Json = False,
) -> None:  # fmt: skip
    """Score recorded episodes: success rate with its 95 % interval, by task, alone or against others."""
    chosen = _chosen(where, task, "", version, limit, wanted=True)
    rival = _chosen(against, task, "", version, limit, wanted=True) if against is not None else None

    from palaestra.evaluation import (
        ScreenComparison,
        ScreenEvaluation,
        comparison_page,
        evaluation_page,
        write_page,
    )

    found = ScreenEvaluation.from_episodes(entry for _, entry in chosen.found)
    document: dict[str, Any] = found.to_json()
    lines, page = [_sentence(where, found)], evaluation_page(found, f"Evaluation of {where}")
    if rival is not None:
        other = ScreenEvaluation.from_episodes(entry for _, entry in rival.found)
        compared = ScreenComparison(found, other)
        document |= {"against": other.to_json(), "comparison": compared.to_json()}
        lines += [_sentence(str(against), other), _verdict(compared)]
        page = comparison_page(compared, f"{where} against {against}", a=where, b=str(against))
    if output is not None:
        write_page(page, output)
        document["page"] = str(output)
    for each in (chosen, rival):
        if each is not None:
            each.print_warnings()
    print(strict_json(document) if as_json else "\n".join(lines))


@trajectories_app.command("export")
def export_command(
    where: Where,
    output: Annotated[Path, typer.Option(metavar="DIRECTORY", help="A new directory to write to.")],
    task: Task = "", outcome: OutcomeOption = "", version: Version = None,
    limit: Annotated[int, typer.Option(help="Only the newest so many; 0 for all.")] = 0, as_json: Json = False,
) -> None:  # fmt: skip
    """Write trajectories.jsonl and the pictures as files."""
    chosen = _chosen(where, task, outcome, version, limit, wanted=True)

    from palaestra.cli.trajectory_export import export_trajectories

    count = export_trajectories(chosen.load(), output)
    chosen.print_warnings()
    print(strict_json({"path": str(output), "trajectories": count}) if as_json else f"{output}: {count} episodes")


@dataclass(frozen=True)
class _Chosen:
    """Entries that fit, and the archives they are in."""

    archives: list[TrajectoryArchive]
    found: list[tuple[TrajectoryArchive, TrajectoryEntry]]
    played_again: int = 0
    """Episodes of an attempt that a later one played again, and that are left out."""

    def load(self) -> Iterator[Trajectory]:
        for archive, entry in self.found:
            yield from archive.load([entry])

    def print_warnings(self) -> None:
        if self.played_again:
            what = "episode was" if self.played_again == 1 else "episodes were"
            print(
                f"note: {self.played_again} {what} played again after a resume; only the last attempt's count. Give "
                "RUN/attempt_1 for those of the first.",
                file=sys.stderr,
            )
        for archive in self.archives:
            for name, why in archive.damaged.items():
                print(f"warning: {archive.directory / name} is left out: {why}", file=sys.stderr)


def _chosen(where: str, task: str, outcome: str, version: int | None, limit: int, *, wanted: bool = False) -> _Chosen:
    """What fits; with `wanted`, nothing fitting is a refusal."""
    if outcome and outcome not in OUTCOMES:
        from palaestra.config import closest_names

        close = closest_names(outcome, OUTCOMES, count=1)
        remedy = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(OUTCOMES)}"
        raise ConfigError("--outcome", outcome, "no episode ends so", remedy)
    if limit < 0:
        raise ConfigError("--limit", limit, "must not be negative", "0 means all")
    from palaestra.experience.trajectory_archive import entries_in

    archives = _archives(where)
    listed, played_again = entries_in(archives)
    found = [
        (archive, entry)
        for archive, entry in listed
        if task.lower() in entry.task.lower()
        and (not outcome or entry.outcome == outcome)
        and (version is None or entry.versions[0] <= version <= entry.versions[1])
    ]
    chosen = _Chosen(archives, found[-limit:] if limit else found, played_again)
    if wanted and not chosen.found:
        chosen.print_warnings()
        total = sum(len(archive) for archive in archives)
        reason = f"none of its {total} trajectories fits" if total else "holds no trajectory that can be read"
        raise ConfigError("trajectories", where, reason, "Loosen --task, --outcome or --version" if total else "")
    return chosen


def _archives(where: str) -> list[TrajectoryArchive]:
    from palaestra.experience.trajectory_archive import archives_in

    directory = Path(where)
    if not where or not directory.is_dir():
        from palaestra.files.home import Home
        from palaestra.files.run_directory import RunDirectory

        directory = RunDirectory.find(where, Home.default().runs).path
    found = archives_in(directory)
    if not found:
        remedy = "Give a run that archived some, or a directory with an index.jsonl"
        raise ConfigError("trajectories", where, "no trajectories here", remedy)
    return found


def _row(entry: TrajectoryEntry) -> str:
    oldest, newest = entry.versions
    versions = "-" if newest < 0 else f"v{oldest}" if oldest == newest else f"v{oldest}-{newest}"
    return (
        f"{entry.outcome.value:<18} {entry.reward:>8.3g} {entry.steps:>3} steps  {versions:<9} {entry.task} "
        f"seed {entry.seed}  {entry.episode_id}"
    )


def _sentence(name: str, found: Any) -> str:
    overall = found.overall
    if overall.success_rate is None:
        return f"{name}: no episode can be counted; {overall.environment_failed} environment failures"
    low, high = (100 * share for share in overall.ci95)
    return (
        f"{name}: solved {100 * overall.success_rate:.1f} % (95 % interval {low:.1f} to {high:.1f}) of "
        f"{overall.episodes} episodes; {overall.environment_failed} environment failures apart"
    )


def _verdict(compared: Any) -> str:
    pairs = compared.overall
    left = "{} and {} without a partner".format(*compared.unpaired)
    if pairs.difference is None:
        return f"no pairs; {left}"
    low, high = (100 * bound for bound in pairs.ci95)
    return (
        f"difference {100 * pairs.difference:+.1f} points (95 % interval {low:+.1f} to {high:+.1f}; "
        f"p = {pairs.p_value:.3g}; {len(pairs)} pairs; {left})"
    )
