"""Instructions about widgets of a synthetic screen, in varied words."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from palaestra.policy.tiny_vlm.screens import Screen, Widget
from palaestra.policy.tiny_vlm.words import ORDINALS

__all__ = ["Asked", "ask", "rank"]

_NOUNS = {
    "button": ("button",), "input": ("textbox", "input field", "text field", "input textbox", "input"),
    "textarea": ("textarea", "text area"), "checkbox": ("checkbox", "box"), "radio": ("radio button", "radio"),
    "link": ("link",), "cross": ("cross", "x"), "tab": ("tab",), "square": ("square", "box", "colored box"),
}  # fmt: skip
_WIDGETS = {"input": "text", "square": "square"}
_NUMBERS = ("first", "second", "third", "fourth", "fifth")


@dataclass(frozen=True)
class Asked:
    """An instruction and the widget it means."""

    text: str
    widget: Widget


def rank(screen: Screen, widget: Widget) -> int:
    """How many of the widget's kind come before it, in reading order."""
    same = sorted((one for one in screen.widgets if one.kind == widget.kind), key=lambda one: _row(one.box))
    return same.index(widget)


def _row(box: tuple[int, int, int, int]) -> tuple[int, int]:
    # Tabs and buttons of one row differ by a pixel or two, forms by a line.
    return (box[1] + box[3]) // 24, box[0]


def ask(screen: Screen, rng: random.Random) -> Asked:
    """An instruction that means a widget of the screen."""
    widget = rng.choice(screen.widgets)
    noun = rng.choice(_NOUNS[widget.kind])
    kinds = Counter(one.kind for one in screen.widgets)
    ways = ["kind"]
    if kinds[widget.kind] > 1:
        ways = ["rank", "corner"] if not widget.label else ["rank"]
    if widget.label and widget.kind != "cross":
        ways += ["label"] * (2 if kinds[widget.kind] == 1 else 1)
    if widget.colour and Counter((one.kind, one.colour) for one in screen.widgets)[widget.kind, widget.colour] == 1:
        ways += ["colour"] * (5 if widget.kind == "square" else 2)
    if widget.kind == "cross":
        ways = ["cross"]
    text = _said(rng.choice(ways), widget, noun, screen, rng)
    text = text[0].upper() + text[1:]
    return Asked(text + rng.choice((".", ".", ".", "", "!")), widget)


def _said(way: str, widget: Widget, noun: str, screen: Screen, rng: random.Random) -> str:
    verb = rng.choice(("click", "click", "click on", "click on", "press", "select", "tap"))
    if widget.kind in ("input", "textarea") and rng.random() < 0.5:
        verb = rng.choice(("focus into", "focus on", "focus", "go to"))
    if way == "label":
        return _labelled(verb, widget.label, noun, rng)
    if way == "colour":
        colour = "grey" if widget.colour == "gray" and rng.random() < 0.5 else widget.colour
        return f"{verb} the {colour} {rng.choice((noun, 'colored box', 'one') if widget.kind == 'square' else (noun,))}"
    if way == "cross":
        return rng.choice(
            ('close the dialog box by clicking the "x"', "close the dialog", "close the window", 'click the "x"',
             "click the cross", f'{verb} the "x" button')
        )  # fmt: skip
    if way == "rank":
        place = min(rank(screen, widget), 4)
        number = rng.choice((ORDINALS[place], ORDINALS[place], _NUMBERS[place]))
        if widget.kind == "tab":
            return rng.choice((f"{verb} Tab #{place + 1}", f"{verb} the {number} tab", f"{verb} tab {place + 1}"))
        return f"{verb} the {number} {noun}"
    if way == "corner":
        return f"{verb} the {_corner(widget)} {noun}"
    if rng.random() < 0.3:
        return f'{verb} a "{_WIDGETS.get(widget.kind, widget.kind)}" widget'
    return f"{verb} the {noun}"


def _labelled(verb: str, label: str, noun: str, rng: random.Random) -> str:
    return rng.choice(
        (f'{verb} the {noun} "{label}"', f'{verb} the "{label}" {noun}', f"{verb} {noun} {label}", f'{verb} "{label}"',
         f'{verb} the {noun} labeled "{label}"', f'{verb} the {noun} that says "{label}"')
    )  # fmt: skip


def _corner(widget: Widget) -> str:
    x, y = widget.centre
    across = "left" if x < 60 else "right" if x > 100 else ""
    down = "top" if y < 100 else "bottom" if y > 150 else ""
    return " ".join(part for part in (down, across) if part) or "middle"
