"""The runs that a comparison or a plot is about: named, found by a query, or those of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from palaestra.errors import ConfigError
from palaestra.runs.analysis.groups import MAX_COMPARED
from palaestra.runs.analysis.metric_values import metric_name
from palaestra.runs.analysis.query import select_runs
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunRecord
from palaestra.runs.sweeps.report import SweepReader


def select_compared(
    reader: RunReader, names: Sequence[str] = (), *, where: str = "", sweep: str = "", at_least: int = 1
) -> list[RunRecord]:
    """Runs by id or prefix, of a sweep and by a query, each once. A query alone searches all runs.

    With ids or a sweep, the query keeps those of them that match. `ConfigError` if there are too few or too many.
    """
    records = [reader.run(name) for name in names]
    if sweep:
        log = SweepReader(reader.home).log(sweep)
        wanted = {log.run_id(trial, seed) for trial in log.trials.values() for seed in trial.runs}
        records += [record for record in reader.runs() if record.run_id in wanted]
    if not names and not sweep:
        records = reader.runs() if where else []
    if where:
        records = select_runs(reader, records, where=where)
    unique = list({record.run_id: record for record in records}.values())
    if where and not unique:
        reason = "no run matches" if not names and not sweep else "none of the given runs matches"
        raise ConfigError("where", where, reason, "palaestra runs list --where QUERY shows what a query matches")
    if not at_least <= len(unique) <= MAX_COMPARED:
        number = "no run" if not unique else f"{len(unique):,} run{'s' if len(unique) > 1 else ''}"
        limits = f"{at_least} to {MAX_COMPARED:,} runs are needed"
        raise ConfigError("runs", number, limits, "Name runs, or use --where or --sweep")
    return unique


def choose_metric(
    reader: RunReader, sweep: str, metric: str | None, direction: Literal["maximize", "minimize"] | None
) -> tuple[str, Literal["maximize", "minimize"]]:
    """The metric and direction of a comparison: as given, otherwise those of the sweep, otherwise the return.

    The direction of a sweep is that of its own metric, so it does not apply to another one.
    """
    if sweep and (metric is None or direction is None):
        spec = SweepReader(reader.home).log(sweep).spec
        metric = spec.metric if metric is None else metric
        if direction is None and metric_name(metric) == metric_name(spec.metric):
            direction = spec.direction
    return metric or "return", direction or "maximize"
