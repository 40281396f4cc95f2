"""Options that several commands share, and output that is safe for terminals and JSON readers.

Trainers choose what they print, the names of their metrics and the reasons of their failures. A terminal executes some
of these characters: it changes its title, clears the screen or reverses the writing direction.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
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
