"""Actions as a person types them: `click 80 120`, `type hello`, `press Control+a`, or the wire's own JSON."""

from __future__ import annotations

import json

from palaestra.errors import InvalidAction
from palaestra.sessions.action import (
    Answer,
    Click,
    Drag,
    Move,
    Point,
    PressKeys,
    Scroll,
    Terminate,
    TypeText,
    UiAction,
    Wait,
    decode,
)

__all__ = ["HELP", "action_in_words"]

HELP = """  click X Y      double X Y     right X Y      move X Y       drag X Y X Y
  type TEXT      press Control+a               scroll DY [X Y]
  wait SECONDS   answer TEXT    done           give-up        {"kind": ...}"""


def action_in_words(line: str) -> UiAction:
    """The action a line describes; `InvalidAction` says what was expected."""
    line = line.strip()
    if line.startswith("{"):
        try:
            return decode(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise InvalidAction("action", line, f"is not JSON ({error})") from None
    word, _, rest = line.partition(" ")
    if word in ("type", "answer"):
        return TypeText(rest) if word == "type" else Answer(rest)
    if word == "press":
        # A plus sign by itself is a key as well: Control++.
        keys = ("+",) if rest.strip() == "+" else tuple(rest.strip().removesuffix("++").split("+"))
        return PressKeys((*keys, "+") if rest.strip().endswith("++") else keys)
    if word in ("done", "give-up"):
        return Terminate(word == "done")
    numbers = _numbers(line, rest)
    if word == "wait" and len(numbers) == 1:
        return Wait(numbers[0])
    whole = [_whole(line, number) for number in numbers]
    if word in ("click", "double", "right", "move") and len(whole) == 2:
        at = Point(*whole)
        if word == "move":
            return Move(at)
        return Click(at, "right" if word == "right" else "left", 2 if word == "double" else 1)
    if word == "drag" and len(whole) == 4:
        return Drag((Point(*whole[:2]), Point(*whole[2:])))
    if word == "scroll" and len(whole) in (1, 3):
        return Scroll(Point(*whole[1:]) if len(whole) == 3 else None, 0, whole[0])
    raise InvalidAction("action", line, "is not understood", "Write for example: click 80 120")


def _whole(line: str, number: float) -> int:
    # What is not a number, or endless, is not whole either.
    if not number.is_integer():
        raise InvalidAction("action", line, f"{number:g} is not a whole number", "Places are counted in pixels")
    return int(number)


def _numbers(line: str, rest: str) -> list[float]:
    try:
        return [float(part) for part in rest.replace(",", " ").split()]
    except ValueError:
        raise InvalidAction("action", line, "has words where numbers belong") from None
