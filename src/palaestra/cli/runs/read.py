"""Commands that read runs: list, show, logs, videos, export. They need no service and start none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from palaestra.cli.app import localize_commands
from palaestra.cli.terminal import (
    JsonOption,
    RunArgument,
    format_bytes,
    print_json,
    sanitize_line,
    sanitize_output,
)
from palaestra.errors import ConfigError
from palaestra.files.home import Home

if TYPE_CHECKING:
    from palaestra.runs.phase import Phase
    from palaestra.runs.reader import RunReader
    from palaestra.runs.record import RunRecord

_T = TypeVar("_T")
_MAX_LISTED = 30
_POLL_INTERVAL_S = 0.2


def list_runs(
    phase: Annotated[
        list[str] | None, typer.Option(metavar="PHASE", help="Only runs in this phase; may be repeated.")
    ] = None,
    runner: Annotated[str | None, typer.Option(metavar="RUNNER", help="Only runs of this runner.")] = None,
    env: Annotated[str | None, typer.Option(metavar="ENV", help="Only runs in this environment.")] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Only runs with this tag.")] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="AGENT", help="Only runs of this agent, such as cleanrl/dqn.")
    ] = None,
    search: Annotated[
        str,
        typer.Option(metavar="WORDS", help="Only runs with these words in id, agent, env, tags or reason."),
    ] = "",
    where: Annotated[
        str, typer.Option(metavar="QUERY", help="Only matching runs, such as 'env=CartPole-v1 and return>400'.")
    ] = "",
    sort: Annotated[
        str, typer.Option(metavar="NAME", help="Sort by a field, key or metric, largest first; NAME:asc reverses.")
    ] = "",
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Maximum number of runs.")] = None,
    everything: Annotated[bool, typer.Option("--all", help=f"Show all, not only the newest {_MAX_LISTED}.")] = False,
    archived: Annotated[bool, typer.Option("--archived", help="Show archived runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first, or those of a query.

    A query compares fields (env, phase, return, step, seed, tag, elapsed, ...), configuration keys and metrics with =,
    !=, <, <=, >, >= and ~ (contains), combined by and, or, not and parentheses.
    """
    phases = None if not phase else [_parse_phase(name) for name in phase]
    shown_limit = limit or (None if everything or as_json else _MAX_LISTED + 1)
    words = search.split()
    filters = {"phases": phases, "runner": runner, "env_id": env, "tag": tag, "agent_id": agent, "search": words}
    records = query(lambda reader: _find_runs(reader, where, sort, shown_limit, {**filters, "archived": archived}))
    if as_json:
        print_json(records)
        return
    if not records:
        filtered = phases or runner or env or tag or agent or words or archived or where
        hint = localize_commands("No runs yet. Try: palaestra runs start cartpole")
        print("No matching run." if filtered else hint)
        return
    from palaestra.cli.runs.table import format_runs

    shown = records if everything or limit else records[:_MAX_LISTED]
    print("\n".join(format_runs(shown)))
    if len(records) > len(shown):
        first = "first" if sort else "newest"
        print(f"Showing the {first} {_MAX_LISTED}; use --all for all.", file=sys.stderr)


def _find_runs(reader: RunReader, where: str, sort: str, limit: int | None, filters: dict[str, Any]) -> list[RunRecord]:
    if not where and not sort:
        return reader.runs(**filters, limit=limit)
    from palaestra.runs.analysis.query import select_runs

    return select_runs(reader, reader.runs(**filters), where=where, sort=sort, limit=limit)


def _parse_phase(name: str) -> Phase:
    from palaestra.runs.phase import Phase

    try:
        return Phase(name)
    except ValueError:
        raise ConfigError("--phase", name, "no such phase", f"Known: {', '.join(Phase)}") from None


def show(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show the phase, events and latest metrics of a run."""
    from palaestra.cli.runs.show import format_run, run_details

    if as_json:
        print_json(query(lambda reader: run_details(reader, run)))
    else:
        print("\n".join(query(lambda reader: format_run(reader, run))))


def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new output until the run ends.")] = False,
    tail: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only the last N lines.")] = None,
    attempt: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of the attempt. Default: the last.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the output of a run."""
    from palaestra.runs.reader import RunReader

    if as_json and follow:
        raise ConfigError("--json", True, "cannot be combined with --follow", "Leave --follow out")
    record = query(lambda reader: reader.run(run))
    run_id = record.run_id
    reader = RunReader(Home.default())
    if record.phase == "queued":
        print(sanitize_line(f"{run_id} queued: {record.reason or 'waiting for its turn'}"), file=sys.stderr)
    piece = reader.log(run_id, attempt=attempt) if tail is None else reader.last_lines(run_id, tail, attempt)
    texts = []
    while True:
        if as_json:
            texts.append(piece.text)
        else:
            sys.stdout.write(sanitize_output(piece.text) if sys.stdout.isatty() else piece.text)
            sys.stdout.flush()
        # Checked before the read, so that the last output before the end is still read.
        ended = reader.run(run_id).phase.has_ended
        offset = piece.offset
        piece = reader.log(run_id, offset, attempt=attempt)
        if piece.offset <= offset:
            if not follow or ended:
                break
            time.sleep(_POLL_INTERVAL_S)
            piece = piece._replace(text="", offset=offset)
    if as_json:
        print_json({"run_id": run_id, "text": "".join(texts)})


def export_tensorboard(
    run: RunArgument,
    into: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Target directory. Default: inside the run directory.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export the metrics of a run to TensorBoard files."""
    from palaestra.runs.tools.tensorboard import export_tensorboard as export

    target = None if into is None else into.resolve()
    report = query(lambda reader: export(reader.paths(run), target))
    if as_json:
        print_json({"directory": str(report.directory), "points": report.points})
        return
    print(f"{report.points:,} points in {report.directory}")
    if not report.points:
        print("The run has no metrics.", file=sys.stderr)
    print(f"View them with: tensorboard --logdir {report.directory}")


def videos(
    run: RunArgument,
    record: Annotated[bool, typer.Option("--record", help="Record the newest checkpoint first.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Record this checkpoint (id or prefix).")
    ] = None,
    frames: Annotated[
        int, typer.Option(metavar="N", min=1, max=200, help="Maximum number of frames of the video.")
    ] = 200,
    as_json: JsonOption = False,
) -> None:
    """List the videos of a run, or record one."""
    from palaestra.cli.runs.show import format_slowdown
    from palaestra.runs.video.clip import list_clips, measure_recording_overhead
    from palaestra.runs.video.record_video import explain_recording, record_run

    paths = query(lambda reader: reader.paths(run))
    if record or checkpoint is not None:
        record_run(Home.default(), paths, checkpoint, frames)
    clips = list_clips(paths)
    if as_json:
        print_json(clips)
        return
    for clip in clips:
        report = f"  {clip.report.frames} frames, {clip.report.slowdown:.2f} times slower" if clip.report else ""
        print(f"{clip.path}  {format_bytes(clip.size_bytes)}{report}")
    if not clips:
        run_record = query(lambda reader: reader.run(run))
        records_itself = bool(query(lambda reader: reader.document(run, "spec")).get("video"))
        print(f"No videos. {explain_recording(run_record, records_itself=records_itself)}")
        return
    pace = measure_recording_overhead(paths)
    if pace is not None:
        print(format_slowdown(pace))


def query(function: Callable[[RunReader], _T]) -> _T:
    """Call a function with a reader of the state directory; rebuild a damaged registry first."""
    from palaestra.runs.reader import RunReader
    from palaestra.runs.store.database import RegistryCorrupt

    home = Home.default()
    try:
        return function(RunReader(home))
    except RegistryCorrupt as error:
        from palaestra.runs.client.connect import ensure_service

        print(f"{error}; it is being rebuilt from the run directories", file=sys.stderr)
        ensure_service(home)
        return function(RunReader(home))
