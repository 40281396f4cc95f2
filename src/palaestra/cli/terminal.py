"""What may go to a terminal: letters that are drawn and do nothing else, and JSON that every reader takes.

What trainers print, the names of their metrics and the reasons of their ends are theirs, and a terminal obeys some of
it: it changes its title, clears itself, writes from right to left.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["harmless", "printable", "shortened", "strict_json"]

_COLOUR = r"\x1b\[[0-9;:]*m"
_COMMAND = (
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, the clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c\n]*(?:\x1b\\|\x9c)?"  # strings to the device
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # moves, clears, reports
    r"|\x1b[ -/]*[0-~]?"
)
_DIRECTIONS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_ANY = re.compile(_COMMAND)
_COLOUR_OR_ANY = re.compile(f"({_COLOUR})|{_COMMAND}")
_UNSEEN = re.compile(rf"[\x00-\x1f\x7f-\x9f\u2028\u2029{_DIRECTIONS}]")
_UNSEEN_IN_A_LOG = re.compile(rf"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f{_DIRECTIONS}]")


def printable(text: str) -> str:
    """One line that a terminal only draws: commands to it are gone, other characters without a shape are named."""
    if text.isprintable():
        return text
    return _UNSEEN.sub(_named, _ANY.sub("", text))


def harmless(text: str) -> str:
    """Output of a trainer for a terminal: its lines, tabs and colours, and nothing else that a terminal obeys."""
    return _UNSEEN_IN_A_LOG.sub(_named, _COLOUR_OR_ANY.sub(lambda found: found[1] or "", text))


def shortened(text: str, longest: int) -> str:
    """A name that keeps its beginning and its end."""
    if len(text) <= longest:
        return text
    begin = (longest - 1) // 2
    return f"{text[:begin]}…{text[begin + 1 - longest :]}"


def strict_json(data: Any) -> str:
    """One JSON document; NaN and the infinities are strings, as in the HTTP API."""
    from palaestra.runs.wire import to_json

    return json.dumps(to_json(data), default=str, allow_nan=False)


def _named(found: re.Match[str]) -> str:
    character = found[0]
    if character in "\t\n\r":
        return " "
    return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
