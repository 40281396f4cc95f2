"""Options that several commands share, and output that is safe for terminals and JSON readers.

Trainers choose what they print, the names of their metrics and the reasons of their failures. A terminal executes some
of these characters: it changes its title, clears the screen or reverses the writing direction.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

_RUN_HELP = "Run id or a unique prefix of it."
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=_RUN_HELP, show_default=False)]
RunsArgument = Annotated[list[str], typer.Argument(metavar="RUN", help=_RUN_HELP, show_default=False)]


def complete_config(incomplete: str) -> list[str]:
    """Names of packaged configurations, for shell completion; the shell adds file names where none matches."""
    from palaestra.config.packaged import packaged_configs

    return [name for name in packaged_configs() if name.startswith(incomplete)]


ConfigArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="Packaged name (palaestra train --list), environment id, or YAML or JSON file.",
        show_default=False,
        autocompletion=complete_config,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Override, such as algorithm.learning_rate=1e-3.", show_default=False),
]

_COLOR = r"\x1b\[[0-9;:]*m"
_SEQUENCE = (
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, the clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c\n]*(?:\x1b\\|\x9c)?"  # strings to the device
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # moves, clears, reports
    r"|\x1b[ -/]*[0-~]?"
)
_DIRECTION_MARKS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_ANY_SEQUENCE = re.compile(_SEQUENCE)
_COLOR_OR_SEQUENCE = re.compile(f"({_COLOR})|{_SEQUENCE}")
_INVISIBLE = re.compile(rf"[\x00-\x1f\x7f-\x9f\u2028\u2029{_DIRECTION_MARKS}]")
_INVISIBLE_IN_OUTPUT = re.compile(rf"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f{_DIRECTION_MARKS}]")


def sanitize_line(text: str) -> str:
    """One safe line: control sequences are removed, other invisible characters are escaped."""
    if text.isprintable():
        return text
    return _INVISIBLE.sub(_escape, _ANY_SEQUENCE.sub("", text))


def sanitize_output(text: str) -> str:
    """Output of a trainer that keeps its lines, tabs and colors, and no other control sequence."""
    return _INVISIBLE_IN_OUTPUT.sub(_escape, _COLOR_OR_SEQUENCE.sub(lambda match: match[1] or "", text))


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if character in "\t\n\r":
        return " "
    return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"


def shorten(text: str, max_length: int) -> str:
    """Replace the middle of a long name by an ellipsis."""
    if len(text) <= max_length:
        return text
    head = (max_length - 1) // 2
    return f"{text[:head]}…{text[head + 1 - max_length :]}"


def dump_json(data: Any) -> str:
    """One JSON document; NaN and the infinities are strings, as in the HTTP API."""
    from palaestra.runs.wire import to_json

    return json.dumps(to_json(data), default=str, allow_nan=False)


def print_json(data: Any) -> None:
    """Print one JSON document."""
    print(dump_json(data))


def format_columns(rows: Sequence[Sequence[str]], align_right: Sequence[bool] = ()) -> list[str]:
    """Sanitized lines with columns as wide as their widest cell."""
    rows = [[sanitize_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    align_right = [*align_right, *[False] * (len(widths) - len(align_right))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, align_right, strict=True)
        ).rstrip()
        for row in rows
    ]


@dataclass(frozen=True)
class Column:
    """A column of a table, and what happens to it on a narrow terminal."""

    title: str
    align_right: bool = False
    min_width: int | None = None
    """Its cells may be shortened to this; None: they are never shortened."""
    drop_order: int = 0
    """Columns with the largest number are left out first; 0: never left out."""


def has_color() -> bool:
    """Whether stdout is a terminal with colors, and the user has not set NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")


def terminal_width() -> int | None:
    """The width of the terminal on stdout; None for a pipe or a file, where nothing is shortened."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def emphasize(text: str, code: str = "1") -> str:
    """Text in bold, or in another style, on a terminal with colors."""
    return f"\x1b[{code}m{text}\x1b[0m" if text and has_color() else text


def color_state(text: str, state: str | None = None) -> str:
    """Text in the color of a phase or state, on a terminal with colors."""
    code = _STATE_COLORS.get(text.strip() if state is None else state, "")
    return emphasize(text, code) if code else text


_RED, _GREEN, _YELLOW, _CYAN = "31", "32", "33", "36"
_STATE_COLORS = {
    **dict.fromkeys(("failed", "killed", "lost", "refused", "FAILED"), _RED),
    **dict.fromkeys(("succeeded", "finished", "ok"), _GREEN),
    **dict.fromkeys(("stalled", "stopped", "stopping", "pruned"), _YELLOW),
    **dict.fromkeys(("running", "starting"), _CYAN),
}


def format_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """A line of titles and one line per row, fitted to a width (default: that of the terminal).

    Long cells are shortened first, then columns are left out, and a last line names them. States have colors.
    """
    width = terminal_width() if width is None else width
    cells = [[sanitize_line(cell) for cell in row] for row in ([column.title for column in columns], *rows)]
    shown = list(range(len(columns)))
    widths = _fit_widths(columns, cells, shown, width)
    while widths is None:
        last = max(shown, key=lambda index: (columns[index].drop_order, index))
        if not columns[last].drop_order:
            widths = _fit_widths(columns, cells, shown, None)
        else:
            shown.remove(last)
            widths = _fit_widths(columns, cells, shown, width)
    assert widths is not None
    lines = []
    for number, row in enumerate(cells):
        texts = []
        for index in shown:
            text = shorten(row[index], widths[index])
            padded = text.rjust(widths[index]) if columns[index].align_right else text.ljust(widths[index])
            texts.append(padded.rstrip() if index == shown[-1] else padded)
        line = "  ".join(map(color_state, texts) if number else texts).rstrip()
        lines.append(line if number else emphasize(line))
    dropped = [column.title for index, column in enumerate(columns) if index not in shown]
    return [*lines, f"Left out for the width of the terminal: {', '.join(dropped)}"] if dropped else lines


def _fit_widths(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], shown: Sequence[int], width: int | None
) -> dict[int, int] | None:
    """The widths of the shown columns, the widest ones shortened; None if they do not fit."""
    widths = {index: max(len(row[index]) for row in cells) for index in shown}
    if width is None:
        return widths
    least = {index: columns[index].min_width for index in shown}
    excess = sum(widths.values()) + 2 * (len(shown) - 1) - width
    while excess > 0:
        flexible = [index for index, limit in least.items() if limit is not None and widths[index] > limit]
        if not flexible:
            return None
        widths[max(flexible, key=widths.__getitem__)] -= 1
        excess -= 1
    return widths


def format_time(moment: float | None) -> str:
    """`2026-11-17 18:05:11` in local time; empty if it is unknown."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else ""


def format_duration(seconds: float) -> str:
    """`0:01:12`, with days in front if there are any: `2d 0:01:12`."""
    days, rest = divmod(int(seconds), 86_400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock


def format_bytes(count: float) -> str:
    """A size with three significant digits at most: `512 B`, `1.5 MB`, `340 MB`."""
    unit = "B"
    for larger in ("kB", "MB", "GB"):
        if count < 1000:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
