"""`runs compare`: what differs between runs, what came out at equal steps, and how certain that is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from palaestra.cli.runs.read import query
from palaestra.cli.runs.sweeps import format_number, short_keys
from palaestra.cli.terminal import (
    Column,
    JsonOption,
    format_duration,
    format_table,
    print_json,
    sanitize_line,
    shorten,
)

if TYPE_CHECKING:
    from palaestra.runs.analysis.groups import GroupComparison, RunGroup
    from palaestra.runs.reader import RunReader
    from palaestra.runs.record import RunRecord

_MAX_SIDE_BY_SIDE = 4
_MAX_DETAILED = 50
_MAX_KEYS = 6
_MAX_VALUE = 24
_MAX_RUN_ID = 28
CompareArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Run id or a unique prefix of it.", show_default=False),
]
WhereOption = Annotated[str, typer.Option(metavar="QUERY", help="Runs that match, such as 'env=CartPole-v1'.")]
SweepOption = Annotated[str, typer.Option(metavar="SWEEP", help="Runs of this sweep.")]
ByOption = Annotated[
    str | None,
    typer.Option("--by", metavar="METRIC", help="Metric to compare by. Default: that of the sweep, or the return."),
]
MinimizeOption = Annotated[
    bool | None,
    typer.Option(
        "--minimize/--maximize",
        help="Less or more of the metric is better. Default: as in the sweep, or more.",
        show_default=False,
    ),
]
AtOption = Annotated[
    int | None,
    typer.Option("--at", metavar="STEP", min=0, help="Step to compare at. Default: the last that all runs reached."),
]
PoolOption = Annotated[bool, typer.Option("--pool-envs", help="Group runs across environments.")]


def compare_command(
    runs: CompareArgument = None,
    where: WhereOption = "",
    sweep: SweepOption = "",
    by: ByOption = None,
    minimize: MinimizeOption = None,
    at: AtOption = None,
    pool_envs: PoolOption = False,
    metric: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Only metrics that contain this text; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare configurations and results of runs.

    Runs that differ only in their seed form a group, with the mean and the interquartile mean over its runs at the same
    step and 95 % intervals. Up to four runs are also shown side by side with all metrics.
    """

    def read(reader: RunReader) -> tuple[dict[str, Any], GroupComparison]:
        from palaestra.runs.analysis.groups import compare_groups
        from palaestra.runs.sweeps.selection import choose_metric, select_compared

        records = _select(reader, runs or [], where, sweep)
        unique = select_compared(reader, [record.run_id for record in records])
        by_metric, direction = choose_metric(reader, sweep, by, read_direction(minimize))
        groups = compare_groups(reader, unique, metric=by_metric, direction=direction, step=at, pool_envs=pool_envs)
        # Without --by, up to four runs are worth a look side by side whatever their metrics are called.
        if by is not None or len(unique) > _MAX_SIDE_BY_SIDE:
            require_metric(groups)
        return _compare_all(reader, records, as_json), groups

    comparison, groups = query(read)
    if metric:
        comparison["metrics"] = {
            name: values for name, values in comparison["metrics"].items() if any(text in name for text in metric)
        }
    if as_json:
        print_json({**comparison, "groups": groups})
        return
    lines: list[str] = []
    if comparison["metrics"] or len(comparison["runs"]) <= _MAX_SIDE_BY_SIDE:
        from palaestra.cli.runs.show import format_comparison

        lines = [*format_comparison(comparison), ""]
    print("\n".join([*lines, *format_groups(groups)]))


def read_direction(minimize: bool | None) -> Literal["maximize", "minimize"] | None:
    """The direction of `--minimize` and `--maximize`; None without either."""
    return None if minimize is None else "minimize" if minimize else "maximize"


def require_metric(comparison: GroupComparison) -> None:
    """Raise `ConfigError` with the metrics that the runs have if none has the one to compare by."""
    from palaestra.errors import ConfigError
    from palaestra.runs.analysis.groups import join_metrics

    if others := comparison.other_metrics:
        reason = f"no run has it; they have {join_metrics(others)}"
        raise ConfigError("--by", comparison.metric, reason, f"Use --by {shlex.quote(others[0])}")


def _select(reader: RunReader, names: list[str], where: str, sweep: str) -> list[RunRecord]:
    from palaestra.errors import ConfigError
    from palaestra.runs.sweeps.selection import select_compared

    if where or sweep:
        return select_compared(reader, names, where=where, sweep=sweep, at_least=2)
    if len(names) < 2:
        remedy = "Name two runs or more, or use --where or --sweep"
        raise ConfigError("runs", names, "a comparison is of two runs or more", remedy)
    return [reader.run(name) for name in names]


def _compare_all(reader: RunReader, records: Sequence[RunRecord], as_json: bool) -> dict[str, Any]:
    """The comparison side by side; without configurations and metrics where it would not be shown."""
    from palaestra.runs.comparison import compare
    from palaestra.runs.wire import to_json

    if len(records) <= (_MAX_DETAILED if as_json else _MAX_SIDE_BY_SIDE):
        return to_json(compare(reader, [record.run_id for record in records]))
    runs = [{"run": to_json(record)} for record in records]
    return {"runs": runs, "configuration": {}, "metrics": {}, "evaluations": {}}


def format_groups(comparison: GroupComparison) -> list[str]:
    """The lines of a comparison of groups: what differs, what came out, and notes."""
    groups = comparison.groups
    if comparison.other_metrics:
        return [sanitize_line(f"! {note}. Use --by {comparison.other_metrics[0]}") for note in comparison.notes]
    num_runs = sum(len(group.runs) for group in groups)
    step = "before their first step" if comparison.step is None else f"at step {comparison.step:,}"
    configurations = "1 configuration" if len(groups) == 1 else f"{len(groups)} configurations"
    lines = [
        f"{num_runs} runs of {configurations}; {comparison.metric} {step} ({comparison.window}), 95 % intervals",
        "",
    ]
    keys = list(dict.fromkeys(key for group in groups for key in group.parameters))
    names = short_keys(keys)
    shown = keys[:_MAX_KEYS]
    columns = [
        Column("GROUP"),
        *(Column(names[key], min_width=6) for key in shown),
        Column("RUNS", min_width=12),
        Column("MEAN", align_right=True),
        Column("INTERVAL"),
        Column("IQM", align_right=True, drop_order=2),
        Column("IQM INTERVAL", drop_order=3),
        Column("TIME", align_right=True, drop_order=1),
        Column("FRONT"),
    ]
    rows = [
        [
            group.label,
            *(shorten(_format_value(group.parameters.get(key)), _MAX_VALUE) for key in shown),
            _format_count(group),
            _format_optional(group.mean),
            _format_range(group.low, group.high),
            _format_optional(group.iqm),
            _format_range(group.iqm_low, group.iqm_high),
            "" if group.time_s is None else format_duration(group.time_s),
            "*" if group.on_front else "",
        ]
        for group in groups
    ]
    lines += format_table(columns, rows)
    if len(keys) > len(shown):
        lines.append(f"Also different: {', '.join(keys[_MAX_KEYS:])} (--json has the values)")
    lines += [sanitize_line(f"! {note}") for note in comparison.notes]
    if any(group.on_front for group in groups) and len(groups) > 1:
        lines.append("* no other configuration is as good in less time (Pareto front)")
    return lines


def _format_count(group: RunGroup) -> str:
    if len(group.runs) == 1:
        return shorten(group.runs[0].run_id, _MAX_RUN_ID)
    missing = len(group.runs) - group.num_values
    return f"{group.num_values} of {len(group.runs)}" if missing else str(len(group.runs))


def _format_value(value: object) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _format_optional(value: float | None) -> str:
    return "–" if value is None else format_number(value)


def _format_range(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{format_number(low)}, {format_number(high)}]"


def describe_parameters(parameters: Mapping[str, object]) -> str:
    """`learning_rate=0.001 n_epochs=4`."""
    names = short_keys(list(parameters))
    return " ".join(f"{names[key]}={_format_value(value)}" for key, value in parameters.items())
