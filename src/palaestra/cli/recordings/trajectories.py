"""`palaestra trajectories`: list, view, score and export recorded episodes of UI agents."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.terminal import JsonOption, print_json
from palaestra.errors import ConfigError
from palaestra.files.home import Home

if TYPE_CHECKING:
    from palaestra.evaluation.viewer import TokenTexts
    from palaestra.experience.trajectory import Trajectory
    from palaestra.experience.trajectory_archive import TrajectoryArchive, TrajectoryEntry

OUTCOMES = ("success", "failure", "truncated", "unreadable", "environment_failed")

SourceArgument = Annotated[
    str, typer.Argument(metavar="RUN_OR_DIRECTORY", help="Run id, run directory or directory of trajectories.")
]
TaskOption = Annotated[str, typer.Option(metavar="TEXT", help="Only tasks whose name contains this text.")]
OutcomeOption = Annotated[str, typer.Option("--outcome", metavar="OUTCOME", help=f"Only one of {', '.join(OUTCOMES)}.")]
VersionOption = Annotated[
    int | None, typer.Option(metavar="N", help="Only episodes in which this policy version acted.")
]
LimitOption = Annotated[int, typer.Option(metavar="N", help="Only the newest N episodes (0: all).")]


def list_command(
    source: SourceArgument,
    task: TaskOption = "",
    outcome: OutcomeOption = "",
    version: VersionOption = None,
    limit: LimitOption = 0,
    as_json: JsonOption = False,
) -> None:
    """List episodes, oldest first.

    Columns: outcome, reward, steps, policy versions, task, seed, episode id.
    """
    selection = _select(source, task, outcome, version, limit)
    if as_json:
        print_json([{**entry.facts(), "archive": str(archive.directory)} for archive, entry in selection.entries])
    else:
        for _, entry in selection.entries:
            print(_format_entry(entry))
    selection.print_warnings()


def view_command(
    source: SourceArgument,
    output: Annotated[Path, typer.Option(metavar="FILE", help="HTML file to write.")] = Path("trajectories.html"),
    task: TaskOption = "",
    outcome: OutcomeOption = "",
    version: VersionOption = None,
    limit: LimitOption = 1000,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="tokenizer.json or model directory. Default: the model of the run."),
    ] = None,
    max_megabytes: Annotated[
        int, typer.Option(metavar="N", help="Store images in files beside a larger page (0: always).")
    ] = 256,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML page of screenshots, answers and actions."""
    if max_megabytes < 0:
        raise ConfigError("--max-megabytes", max_megabytes, "must not be negative")
    selection = _select(source, task, outcome, version, limit, require_match=True)
    from palaestra.evaluation import write_viewer
    from palaestra.evaluation.viewer import ViewedEpisode
    from palaestra.experience.turn_credit import read_credits

    if tokenizer is None:
        # An archive is a directory in an attempt of a run.
        texts = load_run_tokenizer(selection.archives[0].directory.parents[1])
    else:
        texts = load_tokenizer(tokenizer)
    credits = {name: one for archive in selection.archives for name, one in read_credits(archive.directory).items()}
    episodes = (ViewedEpisode(one, credit=credits.get(one.episode_id)) for one in selection.load())
    title = f"Episodes of {_short_name(source)}"
    page = write_viewer(episodes, output, title=title, texts=texts, max_bytes=max_megabytes * 2**20)
    selection.print_warnings()
    if as_json:
        print_json(page.to_json())
        return
    images = f", images in {page.picture_directory}" if page.picture_directory else ""
    print(f"{page.trajectories} episodes, {page.bytes / 2**20:.1f} MB{images}")
    print(f"Page: {page.path.resolve().as_uri()}")


def report_command(
    source: SourceArgument,
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Compare with these, paired by task, parameters and seed.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page.")] = None,
    task: TaskOption = "",
    version: VersionOption = None,
    limit: LimitOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compute the success rate of recorded episodes, with 95 % interval."""
    selection = _select(source, task, "", version, limit, require_match=True)
    other = _select(against, task, "", version, limit, require_match=True) if against is not None else None

    from palaestra.api.screen_evaluation import format_comparison, format_score
    from palaestra.evaluation import (
        ScreenComparison,
        ScreenEvaluation,
        comparison_page,
        evaluation_page,
        write_page,
    )

    evaluation = ScreenEvaluation.from_episodes(entry for _, entry in selection.entries)
    document: dict[str, Any] = evaluation.to_json()
    lines, page = [format_score(source, evaluation)], evaluation_page(evaluation, f"Episodes of {_short_name(source)}")
    if other is not None:
        baseline = ScreenEvaluation.from_episodes(entry for _, entry in other.entries)
        comparison = ScreenComparison(evaluation, baseline)
        document |= {"against": baseline.to_json(), "comparison": comparison.to_json()}
        lines += [format_score(str(against), baseline), format_comparison(comparison)]
        a, b = _short_name(source), _short_name(str(against))
        page = comparison_page(comparison, f"{a}, compared with {b}", a=a, b=b)
    if output is not None:
        write_page(page, output)
        document["page"] = str(output)
    selection.print_warnings()
    if other is not None:
        other.print_warnings()
    if as_json:
        print_json(document)
    else:
        print("\n".join(lines))


def export_command(
    source: SourceArgument,
    output: Annotated[Path, typer.Option(metavar="DIRECTORY", help="New directory to write to.")],
    task: TaskOption = "",
    outcome: OutcomeOption = "",
    version: VersionOption = None,
    limit: LimitOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Export episodes as trajectories.jsonl and image files."""
    selection = _select(source, task, outcome, version, limit, require_match=True)
    count = export_trajectories(selection.load(), output)
    selection.print_warnings()
    if as_json:
        print_json({"path": str(output), "trajectories": count})
    else:
        print(f"{output}: {count} episodes")


@dataclass(frozen=True)
class _Selection:
    """Entries that match the filters, and the archives that they are in."""

    archives: list[TrajectoryArchive]
    entries: list[tuple[TrajectoryArchive, TrajectoryEntry]]
    replayed: int = 0
    """Episodes that a later attempt played again; they are not in `entries`."""

    def load(self) -> Iterator[Trajectory]:
        for archive, entry in self.entries:
            yield from archive.load([entry])

    def print_warnings(self) -> None:
        if self.replayed:
            verb = "episode was" if self.replayed == 1 else "episodes were"
            print(
                f"note: {self.replayed} {verb} played again after a resume; only the last attempt counts. Give "
                "RUN/attempt_1 for the episodes of the first attempt.",
                file=sys.stderr,
            )
        for archive in self.archives:
            for name, reason in archive.damaged.items():
                print(f"warning: {archive.directory / name} is skipped: {reason}", file=sys.stderr)


def _select(
    source: str, task: str, outcome: str, version: int | None, limit: int, *, require_match: bool = False
) -> _Selection:
    """The entries that match the filters; with `require_match`, an empty selection is an error."""
    if outcome and outcome not in OUTCOMES:
        from palaestra.config import suggest_name

        remedy = suggest_name(outcome, OUTCOMES, f"Known: {', '.join(OUTCOMES)}")
        raise ConfigError("--outcome", outcome, "is not an outcome", remedy)
    if limit < 0:
        raise ConfigError("--limit", limit, "must not be negative", "0 means all")
    from palaestra.experience.trajectory_archive import entries_in

    archives = _open_archives(source)
    entries, replayed = entries_in(archives)
    matching = [
        (archive, entry)
        for archive, entry in entries
        if task.lower() in entry.task.lower()
        and (not outcome or entry.outcome == outcome)
        and (version is None or entry.versions[0] <= version <= entry.versions[1])
    ]
    selection = _Selection(archives, matching[-limit:] if limit else matching, replayed)
    if require_match and not matching:
        selection.print_warnings()
        total = sum(len(archive) for archive in archives)
        reason = f"none of its {total} trajectories matches" if total else "holds no readable trajectory"
        raise ConfigError("trajectories", source, reason, "Loosen --task, --outcome or --version" if total else "")
    return selection


def _open_archives(source: str) -> list[TrajectoryArchive]:
    from palaestra.experience.trajectory_archive import archives_in

    directory = Path(source)
    if not source or not directory.is_dir():
        from palaestra.files.run_directory import RunDirectory

        directory = RunDirectory.find(source, Home.default().runs).path
    archives = archives_in(directory)
    if not archives:
        remedy = "Give a run that recorded some, or a directory with an index.jsonl"
        raise ConfigError("trajectories", source, "no trajectories here", remedy)
    return archives


def _short_name(source: str) -> str:
    """The name of a run for a title: its id, instead of the path of its directory."""
    path = Path(source)
    if not path.is_dir():
        return source
    parts = [part for part in path.resolve().parts if part not in ("trajectories", "checkpoints")]
    last = parts[-1] if parts else source
    return f"{parts[-2]}, {last.replace('_', ' ')}" if last.startswith("attempt_") and len(parts) > 1 else last


def _format_entry(entry: TrajectoryEntry) -> str:
    oldest, newest = entry.versions
    versions = "-" if newest < 0 else f"v{oldest}" if oldest == newest else f"v{oldest}-{newest}"
    return (
        f"{entry.outcome.value:<18} {entry.reward:>8.3g} {entry.steps:>3} steps  {versions:<9} {entry.task} "
        f"seed {entry.seed}  {entry.episode_id}"
    )


def export_trajectories(trajectories: Iterable[Trajectory], directory: Path) -> int:
    """Write `trajectories.jsonl` and `pictures/` into a new or empty directory; returns the number of trajectories."""
    from palaestra.experience.trajectory_archive import picture_file_name
    from palaestra.files.atomic import atomic_file

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError("output", str(directory), "exists and is not empty", "Name a new directory")
    try:
        (directory / "pictures").mkdir(parents=True)
    except OSError as error:
        raise ConfigError("output", str(directory), f"cannot be written ({error.strerror})") from None
    count = 0
    with atomic_file(directory / "trajectories.jsonl", durable=False) as out:
        for trajectory in trajectories:
            count += 1
            names = {}
            for sha, data in trajectory.pictures.items():
                names[sha] = f"pictures/{picture_file_name(data)}"
                if not (directory / names[sha]).exists():
                    (directory / names[sha]).write_bytes(data)
            out.write(json.dumps(_trajectory_data(trajectory, names), separators=(",", ":")).encode() + b"\n")
    return count


def _trajectory_data(trajectory: Trajectory, names: Mapping[str, str]) -> dict[str, Any]:
    """A trajectory as JSON data; `names` maps the SHA-256 of each picture to its file."""
    from palaestra.experience.trajectory import ARRAYS, SCHEMA

    turns = [
        turn.facts()
        | {name: getattr(turn, name).tolist() for name in ARRAYS}
        | {"pictures": [names.get(sha) for sha in turn.pictures]}
        for turn in trajectory.turns
    ]
    episode = trajectory.facts() | {"reward": trajectory.total_reward()}
    return {"schema": SCHEMA, **episode, "last_picture": names.get(trajectory.last_picture), "turns": turns}


def load_tokenizer(path: Path) -> TokenTexts:
    """A function that decodes token ids, from a tokenizer.json or the directory of a model."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("--tokenizer", str(path), "no such file", "Give a tokenizer.json or the directory it is in")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        remedy = "Install it: pip install 'palaestra[vlm]'"
        raise ConfigError("--tokenizer", str(path), "the tokenizers package is not installed", remedy) from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the package raises nothing narrower
        raise ConfigError("--tokenizer", str(path), f"is not a tokenizer ({error})") from None
    cache: dict[int, str] = {}

    def decode(token: int) -> str:
        if token not in cache:
            text = tokenizer.decode([token], skip_special_tokens=False)
            cache[token] = text or tokenizer.id_to_token(token) or str(token)
        return cache[token]

    return lambda ids: [decode(token) for token in ids]


def load_run_tokenizer(run: Path) -> TokenTexts | None:
    """The tokenizer of the model that a run trains; None if it is not on this machine."""
    from palaestra.policy.vlm.loading import BUILT_IN

    try:
        name = json.loads((run / "resolved.json").read_text())["model"]["name"]
        return load_tokenizer(BUILT_IN.get(name) or Path(str(name)).expanduser())
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
