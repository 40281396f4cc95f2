"""The query-string dialect: `action_type=left_click&x=10&y=20`, written by clients and parsed by servers.

Writing refuses actions that the dialect cannot express exactly. Parsing refuses unknown parameters and accepts `step`
in addition to the dialect, which makes an act safe to repeat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from palaestra.config import suggest_name
from palaestra.errors import InvalidAction, SessionRefused
from palaestra.sessions import action as ui
from palaestra.sessions.action import Button, Point, UiAction
from palaestra.sessions.screen import Size

SCROLL_PX = 360
"""Pixels of the dialect's only scroll: three clicks of a wheel, 120 pixels each."""
MAX_DELAY_S = 60.0

_CLICKS: Mapping[str, tuple[Button, int]] = {
    "left_click": ("left", 1),
    "double_click": ("left", 2),
    "triple_click": ("left", 3),
    "right_click": ("right", 1),
}
_CLICK_TYPES = {clicked: action_type for action_type, clicked in _CLICKS.items()}
_SYMBOLS = {
    "Control": "ctrl", "Shift": "shift", "Alt": "alt", "Meta": "win", "Escape": "esc", "ArrowLeft": "left",
    "ArrowRight": "right", "ArrowUp": "up", "ArrowDown": "down",
    **{name: name.lower() for name in (
        "Enter", "Tab", "Backspace", "Delete", "Insert", "Home", "End", "PageUp", "PageDown", "CapsLock", "Space",
        *(f"F{n}" for n in range(1, 13)),
    )},
}  # fmt: skip
_KEYS = {action_type: name for name, action_type in _SYMBOLS.items()} | {
    "return": "Enter", "escape": "Escape", "del": "Delete", "pgup": "PageUp", "pgdn": "PageDown", "control": "Control",
    "option": "Alt", "super": "Meta", "command": "Meta", "cmd": "Meta",
}  # fmt: skip
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "screenshot": (),
    "mouse_move": ("x", "y"),
    **{action_type: ("x", "y") for action_type in _CLICKS},
    "type": ("text",),
    "keys": ("keys",),
    "scroll": ("direction", "x", "y"),
}
ACTION_TYPES = tuple(_PARAMETERS)
"""Every value of `action_type`."""


@dataclass(frozen=True)
class QueryAct:
    """A parsed query."""

    action: UiAction | None
    """None: only a screenshot."""
    step: int | None
    """Number of the act in its episode; None if it is missing."""


def write_query(action: UiAction, pointer: Point | None, screen: Size, scroll_px: int) -> dict[str, str] | None:
    """The query for an action, None if the server need not know it; `InvalidAction` if the dialect has none."""
    match action:
        case ui.Move(at):
            return {"action_type": "mouse_move", **_format_point(action, at, screen)}
        case ui.Click(at, button, times, held):
            if held or (button, times) not in _CLICK_TYPES:
                raise _not_in_dialect(
                    action, "has one to three left clicks and a single right click, without held keys"
                )
            return {"action_type": _CLICK_TYPES[button, times], **_format_point(action, at or pointer, screen)}
        case ui.TypeText(text):
            if not all(character in "\n\t" or " " <= character <= "~" for character in text):
                raise _not_in_dialect(action, "only types ASCII and would drop the rest")
            return {"action_type": "type", "text": text}
        case ui.PressKeys(keys):
            return {"action_type": "keys", "keys": "+".join(_format_key(action, key) for key in keys)}
        case ui.Scroll(at, dx, dy):
            if dx or abs(dy) != scroll_px:
                raise _not_in_dialect(action, f"only scrolls up or down by {scroll_px} pixels")
            where = {} if at is None else _format_point(action, at, screen)
            return {"action_type": "scroll", "direction": "down" if dy > 0 else "up", **where}
        case ui.Terminate() | ui.Answer():
            return None
        case _:
            raise _not_in_dialect(action, f"has no {action.kind}")


def parse_query(query: bytes) -> QueryAct:
    """Parse the query string of `GET /act`; `SessionRefused` (422) when it is invalid."""
    given: dict[str, str] = {}
    for name, value in _split_query(query):
        if name in given:
            raise _refusal(name, value, "is given twice")
        given[name] = value
    action_type = given.pop("action_type", None)
    if action_type is None:
        raise _refusal("action_type", None, "required and not given", f"One of {', '.join(ACTION_TYPES)}")
    if action_type not in _PARAMETERS:
        remedy = suggest_name(action_type[:64], ACTION_TYPES, f"One of {', '.join(ACTION_TYPES)}")
        raise _refusal("action_type", action_type, "there is no such action", remedy)
    step = _parse_integer("step", given.pop("step", None))
    _check_delay(given.pop("delay", None))
    for name, value in given.items():
        if name not in _PARAMETERS[action_type]:
            raise _refusal(
                name, value, f"{action_type} takes no such parameter", f"It takes {_format_parameters(action_type)}"
            )
    if action_type == "screenshot":
        if step is not None:
            raise _refusal("step", step, "a screenshot is not an act and has no number")
        return QueryAct(None, None)
    return QueryAct(_build_action(action_type, given), step)


def row_report(detail: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the dialect adds to `GET /progress` for tasks that count submitted rows; empty for others."""
    rows, wrong = detail.get("submitted_rows"), detail.get("wrong_submissions")
    if not isinstance(rows, list) or not isinstance(wrong, int):
        return {}
    # Rows are counted from 1 on the screen, their indices from 0.
    return {"submitted_row_indices": [row - 1 for row in rows], "num_incorrect_submissions": wrong}


def _split_query(query: bytes) -> list[tuple[str, str]]:
    try:
        text = query.decode("ascii")
        return parse_qsl(text, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=20)
    except ValueError as error:
        raise _refusal("query", query[:100].decode("latin-1"), f"is not a query string in UTF-8 ({error})") from None


def _build_action(action_type: str, given: Mapping[str, str]) -> UiAction:
    at = _parse_point(given)
    if action_type in _CLICKS or action_type == "mouse_move":
        if at is None:
            raise _refusal("x, y", None, f"{action_type} needs both")
        return ui.Move(at) if action_type == "mouse_move" else ui.Click(at, *_CLICKS[action_type])
    (needed, *_) = _PARAMETERS[action_type]
    if needed not in given:
        raise _refusal(needed, None, f"{action_type} needs it")
    value = given[needed]
    if action_type == "type":
        return ui.TypeText(value)
    if action_type == "keys":
        return ui.PressKeys(tuple(_parse_key(part) for part in value.split("+")))
    if value not in ("up", "down"):
        raise _refusal("direction", value, "is neither up nor down")
    return ui.Scroll(at, 0, SCROLL_PX if value == "down" else -SCROLL_PX)


def _parse_point(given: Mapping[str, str]) -> Point | None:
    x, y = _parse_integer("x", given.get("x")), _parse_integer("y", given.get("y"))
    if (x is None) != (y is None):
        raise _refusal("x, y", None, "one is given without the other")
    return None if x is None or y is None else Point(x, y)


def _parse_integer(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise _refusal(name, text, "is not a whole number")
    return int(text)


def _check_delay(text: str | None) -> None:
    if text is None:
        return
    try:
        delay = float(text)
    except ValueError:
        raise _refusal("delay", text, "is not a number of seconds") from None
    if not 0 <= delay <= MAX_DELAY_S:
        raise _refusal("delay", text, f"must lie between 0 and {MAX_DELAY_S:g} seconds")


def _parse_key(action_type: str) -> str:
    # Capitals are lost, as on other servers with the dialect.
    lowered = action_type.lower()
    return _KEYS.get(lowered, lowered)


def _format_parameters(action_type: str) -> str:
    return ", ".join((*_PARAMETERS[action_type], "step", "delay")) if _PARAMETERS[action_type] else "none"


def _refusal(name: str, value: object, reason: str, remedy: str = "") -> SessionRefused:
    ends = "" if not remedy else f" {remedy}" if remedy.endswith("?") else f" {remedy}."
    given = "" if value is None else f" = {str(value)[:100]!r}"
    return SessionRefused("bad_request", f"{name}{given}: {reason}.{ends}", status=422)


def _not_in_dialect(action: UiAction, reason: str) -> InvalidAction:
    return InvalidAction("action", action, f"the session's query-string dialect {reason}")


def _format_point(action: UiAction, at: Point | None, screen: Size) -> dict[str, str]:
    if at is None:
        raise _not_in_dialect(action, "needs a position, and the pointer has none yet")
    if at.x in (0, screen.width - 1) and at.y in (0, screen.height - 1):
        raise _not_in_dialect(action, "fails in the corners of the screen")
    return {"x": str(at.x), "y": str(at.y)}


def _format_key(action: UiAction, key: str) -> str:
    if key in _SYMBOLS or key == " ":
        return _SYMBOLS.get(key, "space")
    # The server splits names at "+" and makes them lower case.
    if key == "+" or key != key.lower() or not " " < key <= "~":
        raise _not_in_dialect(action, f"has no key {key!r}")
    return key
