"""`runs plot`: learning curves and the Pareto front of runs as a picture or a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaestra.cli.runs.compare import (
    AtOption,
    ByOption,
    CompareArgument,
    MinimizeOption,
    PoolOption,
    SweepOption,
    WhereOption,
    read_direction,
    require_metric,
)
from palaestra.cli.runs.read import query
from palaestra.cli.terminal import JsonOption, print_json
from palaestra.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.runs.reader import RunReader

_SUFFIXES = (".html", ".svg", ".png")


def plot_command(
    runs: CompareArgument = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write: .html, .svg or .png.")] = Path(
        "curves.html"
    ),
    where: WhereOption = "",
    sweep: SweepOption = "",
    by: ByOption = None,
    minimize: MinimizeOption = None,
    at: AtOption = None,
    pool_envs: PoolOption = False,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Draw the result against time instead of curves (.svg, .png).")
    ] = False,
    title: Annotated[str, typer.Option(metavar="TEXT", help="Title of the picture. Default: the metric.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Draw learning curves of runs.

    Runs that differ only in their seed are one curve: their mean with a 95 % band. The HTML file holds everything it
    needs: it shows values under the mouse, hides groups, and has the comparison and the Pareto front.
    """
    if out.suffix.lower() not in _SUFFIXES:
        raise ConfigError("--out", str(out), "is not .html, .svg or .png", "Write for example --out curves.html")
    if pareto and out.suffix.lower() == ".html":
        raise ConfigError("--pareto", True, "is for pictures", "The HTML page always has it")

    def draw(reader: RunReader) -> tuple[bytes, int]:
        from palaestra.runs.analysis.groups import compare_groups
        from palaestra.runs.plots.curves import build_curves
        from palaestra.runs.plots.drawing import to_png, to_svg
        from palaestra.runs.plots.figure import draw_curves, draw_pareto
        from palaestra.runs.plots.page import build_page
        from palaestra.runs.sweeps.selection import choose_metric, select_compared

        records = select_compared(reader, runs or [], where=where, sweep=sweep)
        metric, direction = choose_metric(reader, sweep, by, read_direction(minimize))
        groups = compare_groups(reader, records, metric=metric, direction=direction, step=at, pool_envs=pool_envs)
        require_metric(groups)
        heading = title or groups.metric
        if pareto:
            figure = draw_pareto(groups, heading)
        else:
            curves = build_curves(reader, groups)
            if out.suffix.lower() == ".html":
                return build_page(groups, curves, heading).encode(), len(records)
            figure = draw_curves(curves, heading)
        return to_png(figure) if out.suffix.lower() == ".png" else to_svg(figure).encode(), len(records)

    from palaestra.files.atomic import write_bytes

    content, num_runs = query(draw)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, content, durable=False)
    if as_json:
        print_json({"path": str(out.resolve()), "runs": num_runs, "bytes": len(content)})
    else:
        print(f"{num_runs} runs in {out}")
