"""Commands that start and follow runs: start, resume, watch. They use the run service, and start it if needed."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from palaestra.cli.app import localize_commands
from palaestra.cli.runs.manage import confirm, connect_service, resolve_runs
from palaestra.cli.runs.request import ProgramCommand, build_spec, get_program, resolve_checkpoint
from palaestra.cli.runs.sweeps import SweepOptions, build_sweep, parse_words, start_sweep
from palaestra.cli.terminal import (
    ConfigArgument,
    JsonOption,
    OverridesArgument,
    RunArgument,
    YesOption,
    print_json,
    sanitize_line,
)
from palaestra.errors import ConsentRequired
from palaestra.intervals import format_return

if TYPE_CHECKING:
    from palaestra.runs.client.client import TrainerService
    from palaestra.runs.record import RunRecord
    from palaestra.runs.runner import LaunchPreview
    from palaestra.runs.spec import RunSpec

_PROGRESS_INTERVAL_S = 2.0
_RETURN_WINDOW = 100
_UNREPORTED_EVENTS = ("note", "first_sign", "adopted")


_RunnerOption = Annotated[str, typer.Option(metavar="RUNNER", help="Trainer to use; see palaestra runners.")]
_ScriptOption = Annotated[
    str | None, typer.Option(metavar="SCRIPT", help="Script or algorithm of the runner, such as dqn.")
]
_PythonOption = Annotated[str | None, typer.Option(metavar="PATH", help="Python interpreter or virtual environment.")]
_OnOption = Annotated[
    str | None,
    typer.Option("--on", metavar="HOST", help="Another machine: a host or group, any, user@host or ray://host."),
]
_WarmStartOption = Annotated[
    str | None, typer.Option(metavar="CHECKPOINT", help="Start from the weights of this checkpoint.")
]
_StallAfterOption = Annotated[
    float,
    typer.Option(metavar="S", help="Seconds without output or metrics before the run is marked stalled."),
]
_GraceOption = Annotated[
    float | None, typer.Option(metavar="S", help="Seconds that a stop waits before the run is killed.")
]
_NoEpisodeOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Alarm if no episode finishes within this many steps (0: never)."),
]
_ThinOption = Annotated[int, typer.Option(metavar="N", help="Keep one value of each metric per this many steps.")]
_SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Environment variable, not a secret; may be repeated."),
]
_SeedsOption = Annotated[
    str | None,
    typer.Option(metavar="SEEDS", help="Several seeds, such as 1..5 or 1,2,7: starts a sweep."),
]
_SweepOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML file with parameters, sampler and seeds: starts a sweep."),
]
_LikeOption = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Repeat this run, with KEY=VALUE and options as changes."),
]
_ExplainOption = Annotated[
    bool, typer.Option("--explain", help="Print how the metrics of a program are found, and exit.")
]


def start(
    ctx: typer.Context,
    config_file: ConfigArgument = None,
    overrides: OverridesArgument = None,
    runner: _RunnerOption = "palaestra",
    script: _ScriptOption = None,
    env: Annotated[str | None, typer.Option(metavar="ENV", help="Environment id.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed.")] = None,
    seeds: _SeedsOption = None,
    sweep: _SweepOption = None,
    python: _PythonOption = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Prefix of the run id.")] = "",
    on: _OnOption = None,
    priority: Annotated[int, typer.Option(metavar="N", help="Higher starts sooner (-100 to 100).")] = 0,
    gpus: Annotated[int, typer.Option(metavar="N", help="Number of GPUs to lease for the run.")] = 0,
    memory_mb: Annotated[int | None, typer.Option(metavar="MB", help="Memory limit of the run.")] = None,
    nice: Annotated[int, typer.Option(metavar="N", help="CPU niceness (0 to 19; higher yields more).")] = 0,
    warm_start: _WarmStartOption = None,
    track: Annotated[str, typer.Option(metavar="MODE", help="W&B tracking: off, offline or online.")] = "off",
    video: Annotated[bool, typer.Option("--video", help="Record short videos.")] = False,
    tag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Tag of the run; may be repeated.")] = None,
    stall_after: _StallAfterOption = 600.0,
    stall_stop: Annotated[bool, typer.Option("--stall-stop", help="Stop the run when it stalls.")] = False,
    grace: _GraceOption = None,
    no_episode_steps: _NoEpisodeOption = None,
    thin_every: _ThinOption = 1,
    variables: _SetOption = None,
    like: _LikeOption = None,
    explain: _ExplainOption = False,
    yes: YesOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command without running it.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show progress until the run ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a run of a trainer or any program.

    Any program follows two dashes: palaestra runs start -- python train.py --lr 3e-4. Starts the run service if none
    is running. Both continue after this command exits. Running foreign code that you have not written after two dashes
    needs your confirmation, or --yes.
    KEY=A,B,C and --seeds start a sweep: one run for each combination of values and seeds.
    """
    if explain:
        _explain(get_program(ctx), as_json)
        return
    words, grid = parse_words(config_file, overrides or [])
    spec = build_spec(ctx, words)
    service = connect_service()
    if grid or seeds is not None or sweep is not None:
        request = build_sweep(spec, grid, seeds, sweep, seed_option=seed)
        is_typed = get_program(ctx) is not None and "command" not in request.parameters
        options = SweepOptions(yes=yes or is_typed, dry_run=dry_run, follow=follow, as_json=as_json, is_typed=is_typed)
        start_sweep(service, request, options, _print_command)
        return
    if dry_run:
        _print_dry_run(service, spec, as_json)
        return
    # A command that the user has typed needs no second confirmation.
    record = _submit(service, spec, yes, is_typed=get_program(ctx) is not None)
    _print_started(service, record, follow, as_json)


def _print_dry_run(service: TrainerService, spec: RunSpec, as_json: bool) -> None:
    prepared = service.prepare_training(spec)
    if as_json:
        print_json(prepared)
    else:
        _print_command(prepared, sys.stdout)
    if prepared.command is None:
        raise typer.Exit(2)


def _print_started(service: TrainerService, record: RunRecord, follow: bool, as_json: bool) -> None:
    if follow:
        print(f"{record.run_id} {record.phase}", file=sys.stderr)
        _watch_run(service, record.run_id, as_json)
    elif as_json:
        print_json(record)
    else:
        print(f"{record.run_id} {record.phase}")
        print(localize_commands(f"Watch it with: palaestra runs watch {record.run_id}"), file=sys.stderr)


start.command_class = ProgramCommand  # type: ignore[attr-defined]


def _explain(program: list[str] | None, as_json: bool) -> None:
    from palaestra.cli.runs.explain import describe_program, describe_rules, format_program, format_rules

    if as_json:
        print_json({**describe_rules(), **(describe_program(program) if program else {})})
    else:
        print("\n".join([*format_rules(), *(format_program(program) if program else [])]))


def watch(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show the progress of a run until it ends.

    Exit code 1 if it does not succeed.
    """
    (run_id,) = resolve_runs([run])
    _watch_run(connect_service(), run_id, as_json)


def resume(
    run: RunArgument,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Configuration change, such as trainer.total_timesteps=200000.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="CHECKPOINT", help="Id, prefix, file name or path. Default: the newest undamaged."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="HOST", help="Another machine than before; empty: this one."),
    ] = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Resume an ended run from a checkpoint.

    KEY=VALUE changes its configuration, for example to train for more steps. A damaged checkpoint is skipped, and the
    output says so. A resume that is refused changes nothing.
    """
    from palaestra.config.file import parse_override

    values = dict(map(parse_override, changes or []))
    service = connect_service()
    (run_id,) = resolve_runs([run])
    path = resolve_checkpoint(checkpoint)
    try:
        record = service.resume_run(run_id, checkpoint=path, changes=values, on=on)
    except ConsentRequired as error:
        print(error, file=sys.stderr)
        confirm("run this foreign code", yes)
        record = service.resume_run(run_id, error.digest, checkpoint=path, changes=values, on=on)
    if as_json:
        print_json(record)
    else:
        reason = f": {record.reason}" if record.reason else ""
        print(sanitize_line(f"{record.run_id} {record.phase}, attempt {record.attempt + 1}{reason}"))


def _submit(service: TrainerService, spec: RunSpec, yes: bool, *, is_typed: bool = False) -> RunRecord:
    from palaestra.files.run_directory import new_run_id

    # The id is chosen here, so that an interrupted command can still say which run to stop.
    run_id, digest = new_run_id(spec.name or spec.env_id or spec.script or spec.runner), None
    try:
        return service.submit(spec, run_id=run_id)
    except KeyboardInterrupt:
        _print_stop_hint(service, run_id)
        raise
    except ConsentRequired:
        prepared = service.prepare_training(spec)
        if not is_typed or prepared.command is None:
            _print_command(prepared, sys.stderr)
            confirm("run this foreign code", yes)
        run_id, digest = prepared.run_id or run_id, prepared.digest
    try:
        return service.submit(spec, digest, run_id)
    except KeyboardInterrupt:
        _print_stop_hint(service, run_id)
        raise


def _print_stop_hint(service: TrainerService, run_id: str) -> None:
    """Tell how to stop a run whose submission was interrupted after the request was sent."""
    is_queued = service.home.run(run_id).path.is_dir()
    state = f"{run_id} was queued" if is_queued else f"The request was sent, and the service may still queue {run_id}"
    print(localize_commands(f"{state}; stop it with: palaestra runs stop {run_id}"), file=sys.stderr)


def _print_command(prepared: LaunchPreview, out: TextIO) -> None:
    """Print the findings of the preflight, and the command that would run."""
    from palaestra.cli.services import format_findings

    for line in format_findings(prepared.findings):
        print(line, file=out)
    if prepared.command is not None:
        print(f"command  {shlex.join(prepared.command['argv'])}", file=out)
        print(f"in       {prepared.command['cwd']}", file=out)
        for injection in prepared.command["injected"]:
            print(f"injects  {injection['path']} ({injection['why']})", file=out)
        for name, value in prepared.environment.items():
            print(f"sets     {name}={shlex.quote(value)}", file=out)


def _watch_run(service: TrainerService, run_id: str, as_json: bool) -> None:
    from palaestra.cli.runs.table import format_outcome
    from palaestra.runs.tools.wandb import read_tracking

    try:
        record = _follow(service, run_id)
    except KeyboardInterrupt:
        print(localize_commands(f"{run_id} continues; stop it with: palaestra runs stop {run_id}"), file=sys.stderr)
        raise
    if as_json:
        print_json(record)
    else:
        print(format_outcome(record))
    tracking = read_tracking(service.home.run(run_id), record.tracking_url)
    if tracking.url:
        print(f"On W&B: {tracking.url}", file=sys.stderr)
    if tracking.sync_command:
        print(f"Upload it to W&B with: {tracking.sync_command}   ({tracking.remedy})", file=sys.stderr)
    if record.phase != "succeeded":
        raise typer.Exit(1)


def _follow(service: TrainerService, run_id: str) -> RunRecord:
    """Print events and progress to stderr until the run ends; returns its last record."""
    from palaestra.cli.runs.table import format_reason
    from palaestra.runs.record import RunEvent
    from palaestra.telemetry.event import EpisodeSummary, LogLine, TrainingStep

    def log(text: str) -> None:
        print(f"  {sanitize_line(text)}", file=sys.stderr, flush=True)

    returns: list[float] = []
    last_progress = 0.0
    record = service.run(run_id)
    if record.phase == "queued":
        log(f"queued: {record.reason or 'waiting for its turn'}")
    for item in service.stream_events(run_id):
        if isinstance(item, RunEvent):
            if item.kind not in _UNREPORTED_EVENTS:
                reason = format_reason(item.kind, item.reason)
                log(f"{item.kind.replace('_', ' ')}{': ' + reason if reason else ''}")
            continue
        event = item.event
        if isinstance(event, EpisodeSummary):
            returns = [*returns[-_RETURN_WINDOW + 1 :], event.episode_return]
        elif isinstance(event, LogLine):
            log(event.text)
        elif isinstance(event, TrainingStep) and time.monotonic() - last_progress >= _PROGRESS_INTERVAL_S:
            last_progress = time.monotonic()
            mean = f"   return {format_return(sum(returns) / len(returns))}" if returns else ""
            log(f"step {event.env_step:,}{mean}")
    return service.run(run_id)
