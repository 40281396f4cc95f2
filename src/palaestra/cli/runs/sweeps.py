"""Commands of sweeps: list, show, stop, resume; and the part of `runs start` that starts one."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from palaestra.cli.app import localize_commands
from palaestra.cli.runs.manage import confirm, connect_service
from palaestra.cli.services import format_findings
from palaestra.cli.terminal import (
    Column,
    JsonOption,
    format_columns,
    format_table,
    format_time,
    print_json,
    sanitize_line,
    shorten,
)
from palaestra.errors import ConfigError, ConsentRequired
from palaestra.files.home import Home

if TYPE_CHECKING:
    from palaestra.runs.client.client import TrainerService
    from palaestra.runs.runner import LaunchPreview
    from palaestra.runs.spec import RunSpec
    from palaestra.runs.sweeps.report import SweepDetails, SweepRecord, TrialRecord
    from palaestra.runs.sweeps.spec import SweepSpec

_MAX_TRIALS = 30
_MAX_VALUE = 30
_POLL_S = 0.5
_SweepArgument = Annotated[
    str, typer.Argument(metavar="SWEEP", help="Sweep id or a unique prefix of it.", show_default=False)
]


def list_command(as_json: JsonOption = False) -> None:
    """List sweeps, newest first."""
    from palaestra.runs.sweeps.report import SweepReader

    records = SweepReader(Home.default()).sweeps()
    if as_json:
        print_json(records)
        return
    if not records:
        print(localize_commands("No sweeps yet. Try: palaestra runs start cartpole --seeds 1..3"))
        return
    columns = (
        Column("SWEEP", min_width=24),
        Column("STATE"),
        Column("SAMPLER", drop_order=2),
        Column("TRIALS"),
        Column("RUNS", drop_order=1),
        Column("BEST", min_width=16),
        Column("CREATED", drop_order=3),
    )
    rows = [
        (
            record.sweep_id,
            record.state,
            record.sampler,
            f"{_count_ended(record)}/{record.num_trials}",
            str(record.num_runs),
            "" if record.best is None else f"{format_interval(record.best)}  {_format_values(record.best)}",
            format_time(record.created),
        )
        for record in records
    ]
    print("\n".join(format_table(columns, rows)))


def show_command(
    sweep: _SweepArgument,
    everything: Annotated[bool, typer.Option("--all", help=f"Show all trials, not only {_MAX_TRIALS}.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the state of a sweep, its best configuration and its trials."""
    from palaestra.runs.sweeps.report import SweepReader

    details = SweepReader(Home.default()).sweep(sweep)
    if as_json:
        print_json(details)
        return
    print("\n".join(format_sweep(details, None if everything else _MAX_TRIALS)))


def stop_command(
    sweep: _SweepArgument,
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Let running runs continue; stop only queued ones.")
    ] = False,
    grace: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Seconds to wait before a run is killed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a sweep and its runs.

    Returns when their processes have ended.
    """
    _print_record(connect_service().stop_sweep(_resolve(sweep), keep_running=keep_running, grace_s=grace), as_json)


def resume_command(
    sweep: _SweepArgument,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Also continue trials that failed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a stopped sweep.

    Its stopped runs resume from their checkpoints. A run without a checkpoint is started anew.
    """
    _print_record(connect_service().resume_sweep(_resolve(sweep), retry_failed=retry_failed), as_json)


def _resolve(name: str) -> str:
    from palaestra.runs.sweeps.trial_log import find_sweep

    return find_sweep(Home.default(), name).name


def _print_record(record: SweepRecord, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        print(_format_progress(record))


# Starting


@dataclass(frozen=True)
class SweepOptions:
    """Options of `runs start` that concern the command and not the sweep."""

    yes: bool
    dry_run: bool
    follow: bool
    as_json: bool
    is_typed: bool = False
    """Whether the user wrote the command in this call, so that it needs no confirmation."""


def parse_words(config_file: str | None, overrides: Sequence[str]) -> tuple[list[str], dict[str, tuple[Any, ...]]]:
    """The configuration file and plain assignments in one list, and the grids, `key=a,b,c`."""
    words = [*([config_file] if config_file is not None else []), *overrides]
    if not any("," in word for word in words):
        return words, {}
    from palaestra.runs.sweeps.spec import parse_grid

    first = words[:1] if words and "=" not in words[0] else []
    plain, grid = parse_grid(words[len(first) :])
    return [*first, *plain], grid


def build_sweep(
    base: RunSpec, grid: Mapping[str, tuple[Any, ...]], seeds: str | None, file: Path | None, *, seed_option: int | None
) -> SweepSpec:
    """The sweep of `--sweep`, `--seeds` and grids; the command line wins over the file.

    `seed_option` is the value of `--seed` of this command, which contradicts seeds. A `--seed` in the command of a
    program does not: it is the option whose value the seeds replace.
    """
    from palaestra.config import parse_section
    from palaestra.runs.sweeps.spec import SweepSpec, parse_seeds, read_sweep_file

    data = read_sweep_file(file) if file is not None else {}
    parameters = data.get("parameters") or {}
    if isinstance(parameters, Mapping):
        data["parameters"] = {**parameters, **{key: list(values) for key, values in grid.items()}}
    if seeds is not None:
        try:
            data["seeds"] = parse_seeds(seeds)
        except ValueError as error:
            raise ConfigError("--seeds", seeds, str(error)) from None
    if base.seed is not None and data.get("seeds"):
        if seed_option is not None or base.runner != "script":
            raise ConfigError("--seed", base.seed, "contradicts the seeds of the sweep", "Use one of them")
        base = base.model_copy(update={"seed": None})
    return parse_section(SweepSpec, {**data, "base": base}, place="sweep" if file is None else str(file))


def start_sweep(
    service: TrainerService,
    spec: SweepSpec,
    options: SweepOptions,
    print_command: Callable[[LaunchPreview, TextIO], None],
) -> None:
    """Start a sweep, or with `dry_run` print the command of its first run."""
    from palaestra.runs.sweeps.sampling import sample_parameters

    first = spec.build_run(sample_parameters(spec, 0), spec.run_seeds[0], "sweep")
    if options.dry_run:
        prepared = service.prepare_training(first)
        if options.as_json:
            print_json({"num_trials": spec.num_trials, "num_runs": spec.num_runs, "first": prepared})
        else:
            print(f"{_format_size(spec)}; the first one:")
            print_command(prepared, sys.stdout)
        if prepared.command is None:
            raise typer.Exit(2)
        return
    try:
        record = service.start_sweep(spec)
    except ConsentRequired as error:
        prepared = service.prepare_training(first)
        if options.is_typed:
            for line in format_findings([finding for finding in prepared.findings if finding.level != "ok"]):
                print(line, file=sys.stderr)
        else:
            print_command(prepared, sys.stderr)
        confirm(f"run this foreign code in {spec.num_runs} runs", options.yes)
        record = service.start_sweep(spec, error.digest)
    if options.follow:
        record = _follow_sweep(service, record)
    if options.as_json:
        print_json(record)
    else:
        print(_format_progress(record) if options.follow else f"{record.sweep_id} {record.state}: {_format_size(spec)}")
    if not options.follow:
        print(localize_commands(f"Show it with: palaestra sweeps show {record.sweep_id}"), file=sys.stderr)
    elif record.num_runs > 1:
        print(localize_commands(f"Compare with: palaestra runs compare --sweep {record.sweep_id}"), file=sys.stderr)
    if options.follow and record.trials.get("succeeded", 0) != record.num_trials:
        raise typer.Exit(1)


def _follow_sweep(service: TrainerService, record: SweepRecord) -> SweepRecord:
    """Print progress to stderr until the sweep ends; returns its last state."""
    line = ""
    try:
        while record.state == "running":
            if (progress := _format_progress(record)) != line:
                line = progress
                print(f"  {line}", file=sys.stderr, flush=True)
            time.sleep(_POLL_S)
            record = service.sweep(record.sweep_id).sweep
    except KeyboardInterrupt:
        hint = f"stop it with: palaestra sweeps stop {record.sweep_id}"
        print(f"{record.sweep_id} continues; {hint}", file=sys.stderr)
        raise
    return record


def _format_size(spec: SweepSpec) -> str:
    seeds = f" of {len(spec.seeds)} seeds" if spec.seeds else ""
    trials = "1 configuration" if spec.num_trials == 1 else f"{spec.num_trials} configurations"
    return f"{spec.num_runs} run{'s' if spec.num_runs > 1 else ''}: {trials}{seeds}"


# Text


def format_sweep(details: SweepDetails, max_trials: int | None) -> list[str]:
    """The lines of `sweeps show`."""
    sweep = details.sweep
    fields = [
        ("sweep", sweep.sweep_id),
        ("state", f"{sweep.state}{': ' + sweep.reason if sweep.reason else ''}"),
        ("sampler", sweep.sampler),
        ("metric", f"{sweep.metric} ({sweep.direction})"),
        ("seeds", ", ".join(map(str, sweep.seeds))),
        ("trials", _format_counts(sweep.trials, sweep.num_trials)),
        ("runs", "; ".join(filter(None, (f"{sweep.num_runs} in total", _format_phases(sweep))))),
        ("created", format_time(sweep.created)),
    ]
    lines = format_columns([field for field in fields if field[1]])
    if sweep.best is not None:
        values = f" with {_format_values(sweep.best)}" if sweep.best.parameters else ""
        lines += ["", f"{'Best' if sweep.num_trials > 1 else 'Result'}: {format_interval(sweep.best)}{values}"]
        lines += _explain_best(sweep, sweep.best)
    if details.trials:
        lines += ["", *_format_trials(details, max_trials)]
    return lines


def _explain_best(sweep: SweepRecord, best: TrialRecord) -> list[str]:
    if best.low is None:
        return ["  One seed says nothing about the spread: use --seeds 1..5 for an interval."]
    lines = []
    if sweep.num_tied:
        lines.append(f"  The intervals of {sweep.num_tied} other configurations overlap it.")
    if sweep.num_trials > 1:
        lines.append("  The best of many is biased upwards: confirm it with new seeds.")
    return lines


def _format_trials(details: SweepDetails, max_trials: int | None) -> list[str]:
    keys = list(details.parameters)
    names = short_keys(keys)
    columns = [
        Column("TRIAL", align_right=True),
        Column("STATE"),
        *(Column(names[key], min_width=6) for key in keys),
        Column("RUNS", drop_order=1),
        Column("MEAN"),
        Column("95 % INTERVAL"),
        Column("NOTE", min_width=12, drop_order=2),
    ]
    rows = [
        [
            str(trial.number),
            trial.state,
            *(shorten(_format_parameter(trial.parameters.get(key)), _MAX_VALUE) for key in keys),
            f"{len(trial.values)}/{max(1, len(details.sweep.seeds))}",
            "" if trial.value is None else format_number(trial.value),
            "" if trial.low is None or trial.high is None else _format_range(trial.low, trial.high),
            f"pruned at step {trial.pruned_at:,}" if trial.pruned_at is not None else shorten(trial.reason, 60),
        ]
        for trial in details.trials[:max_trials]
    ]
    lines = format_table(columns, rows)
    if max_trials is not None and len(details.trials) > max_trials:
        lines.append(f"Showing {max_trials} of {len(details.trials)} trials; use --all for all.")
    return lines


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Keys without their sections, where that is not ambiguous."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def _format_progress(record: SweepRecord) -> str:
    reason = f" ({record.reason})" if record.reason else ""
    if record.num_trials == 1:
        # Its only trial is running as long as the sweep is: count the runs.
        label, states = "mean", _format_phases(record) or ", ".join(record.trials)
        runs = f"{record.num_runs} run{'' if record.num_runs == 1 else 's'} of 1 configuration"
        counts = f"{runs}: {states}" if states else runs
    else:
        label, phases = "best", _format_phases(record)
        counts = _format_counts(record.trials, record.num_trials) + (f"; runs: {phases}" if phases else "")
    best = "" if record.best is None else f"; {label} {format_interval(record.best)} {_format_values(record.best)}"
    return sanitize_line(f"{record.sweep_id} {record.state}{reason}: {counts}{best}".rstrip())


def _format_counts(counts: Mapping[str, int], total: int) -> str:
    parts = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{total} trial{'' if total == 1 else 's'}" + (f": {parts}" if parts else "")


def _format_phases(record: SweepRecord) -> str:
    """The phases of the runs whose trial has not ended."""
    return ", ".join(f"{count} {phase}" for phase, count in record.runs.items() if phase != "planned")


def _count_ended(record: SweepRecord) -> int:
    return sum(count for state, count in record.trials.items() if state != "running")


def _format_values(trial: TrialRecord) -> str:
    names = short_keys(list(trial.parameters))
    text = " ".join(f"{names[key]}={_format_parameter(value)}" for key, value in trial.parameters.items())
    return shorten(sanitize_line(text), 100)


def _format_parameter(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_interval(trial: TrialRecord) -> str:
    """`475.2 [455.1, 495.3]`."""
    text = "" if trial.value is None else format_number(trial.value)
    return text if trial.low is None or trial.high is None else f"{text} {_format_range(trial.low, trial.high)}"


def _format_range(low: float, high: float) -> str:
    return f"[{format_number(low)}, {format_number(high)}]"


def format_number(value: float) -> str:
    """Four significant digits: `475.2`, `0.001235`, `12,346`."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
