"""`palaestra runs diff`: how two runs differ in configuration, code and environment."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.runs.read import query
from palaestra.cli.terminal import JsonOption, format_columns, print_json, sanitize_line, shorten

if TYPE_CHECKING:
    from palaestra.runs.differences.run_diff import RunDifference

_MAX_LINES = 200
_MAX_CELL = 60
_FirstArgument = Annotated[str, typer.Argument(metavar="FIRST", help="Run id or a unique prefix.", show_default=False)]
_SecondArgument = Annotated[
    str, typer.Argument(metavar="SECOND", help="The run to compare it with.", show_default=False)
]


def diff(
    first: _FirstArgument,
    second: _SecondArgument,
    whole: Annotated[bool, typer.Option("--all", help=f"Show all lines, not only the first {_MAX_LINES}.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how two runs differ.

    Compares configuration, command, code, packages, machine and variables.
    """
    from palaestra.runs.differences.run_diff import diff_runs

    difference = query(lambda reader: diff_runs(reader, first, second))
    if as_json:
        print_json(difference)
        return
    lines = format_difference(difference)
    shown = lines if whole else lines[:_MAX_LINES]
    print("\n".join(sanitize_line(line) for line in shown))
    if len(lines) > len(shown):
        print(f"{len(lines) - len(shown):,} more lines; use --all for all.")


def format_difference(difference: RunDifference) -> list[str]:
    """The lines of `runs diff`: a table of values, then the changed files."""
    rows = [["", *difference.runs]]
    parts = (
        ("CONFIGURATION", difference.configuration),
        ("CODE", difference.code),
        ("PACKAGES", difference.packages),
        ("MACHINE", difference.machine),
        ("VARIABLES", difference.variables),
    )
    for title, values in parts:
        if values:
            rows += [["", "", ""], [title, "", ""]]
            rows += [
                [shorten(key, _MAX_CELL), *(_format_cell(value) for value in pair)] for key, pair in values.items()
            ]
    lines = format_columns(rows)
    if difference.command:
        lines += [
            "",
            "COMMAND",
            *(f"{sign} {shlex.join(words)}" for sign, words in zip("-+", difference.command, strict=True)),
        ]
    if difference.files:
        lines += ["", "FILES", *(f"{one.change:8} {one.name}" for one in difference.files)]
        for file in difference.files:
            lines += ["", *file.text.split("\n")] if file.text else []
    if difference.is_empty:
        lines += ["", "No differences."]
    return [*lines, *(f"! {problem}" for problem in difference.missing)]


def _format_cell(value: Any) -> str:
    text = (
        "–" if value is None or value == "" else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    )
    return shorten(text, _MAX_CELL)
