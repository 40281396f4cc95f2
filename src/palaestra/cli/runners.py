"""`palaestra runners`: who can train here, and what each of them can do."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from palaestra.runs.runner import RunnerCapabilities

__all__ = ["runners_command"]

# Short, so that a line fits a terminal.
_CAN = {
    "resume": "resume",
    "warm_start": "warm start",
    "offline_inference": "plays",
    "video": "video",
    "tracking": "W&B",
    "live_beliefs": "beliefs",
    "needs_gpu": "GPU",
    "runs_foreign_code": "consent",
}


def runners_command(
    schema: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print the JSON Schema of a runner's keys.")
    ] = None,
    script: Annotated[str | None, typer.Option(help="With --schema: of this script or algorithm.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the runners and what each can do."""
    from palaestra.runs.runners.table import broken_runners, registered_runners, runner_named

    if schema is not None:
        from palaestra.config import parse_section
        from palaestra.runs.spec import RunSpec

        spec = parse_section(RunSpec, {"runner": schema, "script": script})
        print(json.dumps(runner_named(schema).config_schema(spec), indent=2))
        return
    found = {name: runner.capabilities for name, runner in registered_runners().items()}
    broken = broken_runners()
    if as_json:
        print(json.dumps({"runners": {name: asdict(can) for name, can in found.items()}, "broken": broken}))
        return
    for line in _matrix(found):
        print(line)
    for name, reason in broken.items():
        print(f"{name} cannot be loaded: {reason}")


def _matrix(found: dict[str, RunnerCapabilities]) -> list[str]:
    """One line per runner, one column per capability, and whom it may speak to over the network."""
    rows = [["RUNNER", *(title.upper() for title in _CAN.values()), "SPEAKS TO", "WHAT IT IS"]]
    for name, can in found.items():
        able = ("yes" if getattr(can, key) else "–" for key in _CAN)
        rows.append([name, *able, ", ".join(can.external_services) or "–", can.title])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
