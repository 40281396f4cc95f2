"""Translates actions into the mouse and keyboard events of the DevTools protocol."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from palaestra.sessions.action import Click, Drag, Move, Point, PressKeys, Scroll, TypeText, UiAction
from palaestra.sessions.browser.cdp import Call
from palaestra.sessions.keys import MODIFIERS, Key, get_key

_BUTTONS = {"left": 1, "right": 2, "middle": 4}
_EDITING = {"a": "SelectAll", "c": "Copy", "v": "Paste", "x": "Cut", "z": "Undo", "y": "Redo"}


class InputEvents:
    """Translates actions, and remembers the position of the pointer."""

    def __init__(self) -> None:
        self._pointer = Point(0, 0)

    def build_calls(self, action: UiAction) -> Iterator[Call]:
        """The calls that perform an action, in order; none for actions without mouse or keyboard events."""
        if isinstance(action, Click):
            yield from self._click(action)
        elif isinstance(action, Move):
            yield self._mouse("mouseMoved", action.at)
        elif isinstance(action, Drag):
            yield from self._drag(action)
        elif isinstance(action, TypeText):
            yield from _type_events(action.text)
        elif isinstance(action, PressKeys):
            yield from _key_events(action.keys)
        elif isinstance(action, Scroll):
            at = action.at or self._pointer
            yield self._mouse("mouseWheel", at, deltaX=action.dx, deltaY=action.dy)

    def _mouse(self, kind: str, at: Point, **more: Any) -> Call:
        self._pointer = at
        return "Input.dispatchMouseEvent", {"type": kind, "x": at.x, "y": at.y, **more}

    def _click(self, click: Click) -> Iterator[Call]:
        at = click.at or self._pointer
        bits = sum(MODIFIERS[name] for name in click.held)
        for name in click.held:
            yield _key_event("rawKeyDown", get_key(name), bits)
        yield self._mouse("mouseMoved", at, modifiers=bits)
        mask = _BUTTONS[click.button]
        for count in range(1, click.times + 1):
            shared = {"button": click.button, "clickCount": count, "modifiers": bits}
            yield self._mouse("mousePressed", at, buttons=mask, **shared)
            yield self._mouse("mouseReleased", at, buttons=0, **shared)
        for name in reversed(click.held):
            yield _key_event("keyUp", get_key(name), 0)

    def _drag(self, drag: Drag) -> Iterator[Call]:
        mask = _BUTTONS[drag.button]
        yield self._mouse("mouseMoved", drag.path[0])
        yield self._mouse("mousePressed", drag.path[0], button=drag.button, buttons=mask, clickCount=1)
        for start, end in pairwise(drag.path):
            # Pages that measure distances do not recognise a drag that jumps.
            for part in range(1, 6):
                x = round(start.x + (end.x - start.x) * part / 5)
                y = round(start.y + (end.y - start.y) * part / 5)
                yield self._mouse("mouseMoved", Point(x, y), button=drag.button, buttons=mask)
        yield self._mouse("mouseReleased", drag.path[-1], button=drag.button, buttons=0, clickCount=1)


def _type_events(text: str) -> Iterator[Call]:
    for character in text:
        key = get_key({"\n": "Enter", "\t": "Tab"}.get(character, character))
        if not key.code:
            yield "Input.insertText", {"text": character}
            continue
        bits = MODIFIERS["Shift"] if character.isupper() else 0
        yield _key_event("keyDown" if key.text else "rawKeyDown", key, bits)
        yield _key_event("keyUp", key, bits)


def _key_events(names: tuple[str, ...]) -> Iterator[Call]:
    bits = 0
    keys = [get_key(name) for name in names]
    for name, key in zip(names, keys, strict=True):
        bits |= MODIFIERS.get(name, 0)
        # With Control or Meta held, a letter is a command and not text.
        types = key.text and not bits & (MODIFIERS["Control"] | MODIFIERS["Meta"])
        yield _key_event("keyDown" if types else "rawKeyDown", key, bits)
    for name, key in zip(reversed(names), reversed(keys), strict=True):
        bits &= ~MODIFIERS.get(name, 0)
        yield _key_event("keyUp", key, bits)


def _key_event(kind: str, key: Key, bits: int) -> Call:
    event: dict[str, Any] = {
        "type": kind,
        "key": key.name,
        "code": key.code,
        "windowsVirtualKeyCode": key.number,
        "modifiers": bits,
    }
    if kind == "keyDown":
        event["text"] = event["unmodifiedText"] = key.text
    if kind == "rawKeyDown" and bits & MODIFIERS["Control"] and key.name.lower() in _EDITING:
        event["commands"] = [_EDITING[key.name.lower()]]
    return "Input.dispatchKeyEvent", event
