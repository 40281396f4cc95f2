"""`palaestra runs`: the table of its commands. Those that read are apart from those that change something."""

from __future__ import annotations

import typer

from palaestra.cli.runs_changing import archive, delete, drain, gc, restore, resume, start, stop, tensorboard, watch
from palaestra.cli.runs_reading import compare, export_tensorboard, list_runs, logs, show, videos

__all__ = ["runs_app"]

runs_app = typer.Typer(
    name="runs",
    help="Start, watch, stop, resume and compare runs of any trainer.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

runs_app.command("start")(start)
runs_app.command("list")(list_runs)
runs_app.command("show")(show)
runs_app.command("watch")(watch)
runs_app.command("logs")(logs)
runs_app.command("stop")(stop)
runs_app.command("resume")(resume)
runs_app.command("compare")(compare)
runs_app.command("export-tensorboard")(export_tensorboard)
runs_app.command("tensorboard")(tensorboard)
runs_app.command("videos")(videos)
runs_app.command("archive")(archive)
runs_app.command("restore")(restore)
runs_app.command("delete")(delete)
runs_app.command("gc")(gc)
runs_app.command("drain")(drain)
