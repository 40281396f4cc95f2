"""`palaestra runs`: the table of its commands. Those that read are apart from those that change something."""

from __future__ import annotations

from palaestra.cli.command_table import Group

__all__ = ["RUNS"]

RUNS = Group(
    "Start, watch, stop, resume and compare runs of any trainer.",
    {
        "start": "palaestra.cli.runs_changing:start",
        "list": "palaestra.cli.runs_reading:list_runs",
        "show": "palaestra.cli.runs_reading:show",
        "watch": "palaestra.cli.runs_changing:watch",
        "logs": "palaestra.cli.runs_reading:logs",
        "stop": "palaestra.cli.runs_changing:stop",
        "resume": "palaestra.cli.runs_changing:resume",
        "compare": "palaestra.cli.runs_reading:compare",
        "export-tensorboard": "palaestra.cli.runs_reading:export_tensorboard",
        "tensorboard": "palaestra.cli.runs_changing:tensorboard",
        "videos": "palaestra.cli.runs_reading:videos",
        "archive": "palaestra.cli.runs_changing:archive",
        "restore": "palaestra.cli.runs_changing:restore",
        "delete": "palaestra.cli.runs_changing:delete",
        "gc": "palaestra.cli.runs_changing:gc",
        "drain": "palaestra.cli.runs_changing:drain",
    },
)
