"""Commands that read runs: list, show, logs, compare, export. They need no service and start none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from palaestra.cli.terminal import harmless, printable, strict_json
from palaestra.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.runs.phase import Phase
    from palaestra.runs.reader import RunReader

__all__ = ["compare", "export_tensorboard", "list_runs", "logs", "show", "videos"]

_T = TypeVar("_T")
_SHOWN = 30
_LOOK_EVERY_S = 0.2

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Its id, or how the id begins.", show_default=False)]


def list_runs(
    phase: Annotated[list[str] | None, typer.Option(help="Only runs in this phase; may be repeated.")] = None,
    runner: Annotated[str | None, typer.Option(help="Only runs of this runner.")] = None,
    env: Annotated[str | None, typer.Option(help="Only runs in this environment.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only runs of this agent, such as cleanrl/dqn.")] = None,
    search: Annotated[
        str,
        typer.Option(metavar="WORDS", help="Only runs with all of these in id, agent, environment, tags or reason."),
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help=f"All of them, not the newest {_SHOWN}.")] = False,
    archived: Annotated[bool, typer.Option("--archived", help="Those that were archived instead.")] = False,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    phases = None if not phase else [_phase(word) for word in phase]
    limit = None if everything or as_json else _SHOWN + 1
    words = search.split()
    rows = asked(
        lambda reading: reading.runs(
            phases=phases, runner=runner, env_id=env, tag=tag, agent_id=agent, search=words, archived=archived,
            limit=limit,
        )
    )  # fmt: skip
    if as_json:
        from palaestra.runs.wire import to_json

        print(strict_json([to_json(row) for row in rows]))
        return
    if not rows:
        filtered = phases or runner or env or tag or agent or words or archived
        print("No run fits." if filtered else "No runs yet. Try: palaestra runs start configs/ppo/cartpole.yaml")
        return
    from palaestra.cli.runs_table import run_table

    shown = rows if everything else rows[:_SHOWN]
    for line in run_table(shown):
        print(line)
    if len(rows) > len(shown):
        print(f"The newest {_SHOWN}; --all shows every one.", file=sys.stderr)


def show(run: Run, as_json: Json = False) -> None:
    """Show one run: where it is, what happened to it, its last numbers, and how it ended."""
    from palaestra.cli.runs_shown import shown, shown_data

    if as_json:
        print(strict_json(asked(lambda reading: shown_data(reading, run))))
        return
    for line in asked(lambda reading: shown(reading, run)):
        print(line)


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last so many lines.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Of this start of the run; else of the last.")] = None,
    as_json: Json = False,
) -> None:
    """Print what a run printed."""
    from palaestra.files.home import Home
    from palaestra.runs.reader import RunReader

    if as_json and follow:
        raise ConfigError("--json", True, "one document cannot go on", "Leave --follow out")
    record = asked(lambda reading: reading.run(run))
    run_id = record.run_id
    reading = RunReader(Home.default())
    if record.phase == "queued":
        from palaestra.cli.runs_followed import waiting

        print(printable(f"{run_id} {waiting(record)}"), file=sys.stderr)
    piece = reading.log(run_id, attempt=attempt) if tail is None else reading.last_lines(run_id, tail, attempt)
    texts = []
    while True:
        texts.append(piece.text) if as_json else _write(piece.text)
        # Looked up before the reading: what was written before the end is then read.
        over = reading.run(run_id).phase.has_ended
        before = piece.offset
        piece = reading.log(run_id, before, attempt=attempt)
        if piece.offset <= before:
            if not follow or over:
                break
            time.sleep(_LOOK_EVERY_S)
            piece = piece._replace(text="", offset=before)
    if as_json:
        print(strict_json({"run_id": run_id, "text": "".join(texts)}))


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two runs or more.", show_default=False)],
    metric: Annotated[list[str] | None, typer.Option(help="Only metrics that contain this; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Put runs side by side: how they ended, what was configured differently, and their last numbers."""
    from palaestra.runs.comparison import compare as compared

    found = asked(lambda reading: compared(reading, runs))
    if metric:
        found["metrics"] = {
            name: values for name, values in found["metrics"].items() if any(word in name for word in metric)
        }
    if as_json:
        print(strict_json(found))
        return
    from palaestra.cli.runs_shown import comparison_table

    for line in comparison_table(found):
        print(line)


def export_tensorboard(
    run: Run,
    into: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to; else into the run's directory.")] = None,
    as_json: Json = False,
) -> None:
    """Write the curves of a run of any trainer as TensorBoard event files."""
    from palaestra.runs.tensorboard_export import export_run

    target = None if into is None else into.resolve()
    report = asked(lambda reading: export_run(reading, run, target))
    if as_json:
        print(strict_json({"directory": str(report.directory), "points": report.points}))
        return
    print(f"{report.points:,} points in {report.directory}")
    if not report.points:
        print("The journal of the run holds no numbers.", file=sys.stderr)
    print(f"Look at them with: tensorboard --logdir {report.directory}")


def videos(
    run: Run,
    record: Annotated[bool, typer.Option("--record", help="Film its newest checkpoint first.")] = False,
    checkpoint: Annotated[str | None, typer.Option(metavar="ID", help="With --record: film this one.")] = None,
    frames: Annotated[int, typer.Option(min=1, max=200, help="With --record: maximum number of frames.")] = 200,
    as_json: Json = False,
) -> None:
    """List a run's clips, newest first, and film one of its checkpoints when asked to."""
    from dataclasses import asdict

    from palaestra.cli.runs_shown import slowed
    from palaestra.cli.runs_table import sized
    from palaestra.runs.video.clip import clips_of
    from palaestra.runs.video.recording import film_pace

    paths = asked(lambda reading: reading.paths(run))
    if record or checkpoint is not None:
        from palaestra.files.home import Home
        from palaestra.runs.video.filming import film_run

        film_run(Home.default(), paths, checkpoint, frames)
    clips = clips_of(paths)
    if as_json:
        print(strict_json([asdict(clip) for clip in clips]))
        return
    pace = film_pace(paths) if clips else None
    for clip in clips:
        cost = f"  {clip.report.frames} frames, {clip.report.slowdown:.2f} times slower" if clip.report else ""
        print(f"{clip.path}  {sized(clip.size_bytes)}{cost}")
    if pace is not None:
        print(slowed(pace))
    if not clips:
        from palaestra.runs.video.filming import how_to_film

        record_ = asked(lambda reading: reading.run(run))
        films = bool(asked(lambda reading: reading.document(run, "spec")).get("video"))
        print(f"No clips. {how_to_film(record_, films_itself=films)}")


def asked(question: Callable[[RunReader], _T]) -> _T:
    """The answer that the state directory gives; a damaged registry is rebuilt first."""
    from palaestra.files.home import Home
    from palaestra.runs.reader import RunReader
    from palaestra.runs.store.database import RegistryCorrupt

    home = Home.default()
    try:
        return question(RunReader(home))
    except RegistryCorrupt as error:
        from palaestra.runs.client.connect import ensure_service

        print(f"{error}; it is being rebuilt from the run directories", file=sys.stderr)
        ensure_service(home)
        return question(RunReader(home))


def _phase(word: str) -> Phase:
    from palaestra.runs.phase import Phase

    try:
        return Phase(word)
    except ValueError:
        raise ConfigError("--phase", word, "no such phase", f"There are {', '.join(Phase)}") from None


def _write(text: str) -> None:
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
