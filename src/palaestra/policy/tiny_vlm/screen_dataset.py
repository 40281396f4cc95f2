"""Instructions about widgets of a synthetic screen, in varied words."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from palaestra.policy.tiny_vlm.architecture import FACTOR, PATCH
from palaestra.policy.tiny_vlm.screens import (
    COLOURS,
    HEIGHT,
    KINDS,
    ORDINALS,
    WIDTH,
    Screen,
    Widget,
    draw_bar,
    draw_screen,
)

__all__ = ["ACROSS", "DOWN", "LETTERS", "RANKS", "Asked", "Pool", "ask", "cells_of", "draw_pool", "patches", "rank"]


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


ACROSS, DOWN = WIDTH // FACTOR, HEIGHT // FACTOR
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
RANKS = 5
_COLOURS = tuple(COLOURS)


@dataclass(frozen=True)
class Pool:
    """Screens, and for each cell of 16 x 16 pixels what a look at it should tell."""

    pixels: npt.NDArray[np.uint8]
    """[screens, 208, 160, 3]."""
    widgets: list[list[Widget]]
    asked: list[list[Asked]]
    kind: Tensor
    """[screens, cells], index into `KINDS`."""
    colour: Tensor
    """[screens, cells], -100 where there is none."""
    rank: Tensor
    """[screens, cells], place among widgets of its kind, -100 where there is none."""
    centre: Tensor
    """[screens, cells, 2]: of the widget, or of the cell itself where there is none; parts of width and height."""
    letters: Tensor
    """[screens, cells, 36]: which letters the widget's label has."""
    first: Tensor
    """[screens, cells]: the label's first letter, -100 where there is none."""

    def __len__(self) -> int:
        return len(self.pixels)


def draw_pool(count: int, *, seed: int, questions: int) -> Pool:
    """So many screens with so many instructions each, all drawn from the seed."""
    rng = random.Random(seed)
    pixels = np.empty((count, DOWN * FACTOR, ACROSS * FACTOR, 3), np.uint8)
    cells = ACROSS * DOWN
    own = torch.tensor([((c % ACROSS + 0.5) / ACROSS, (c // ACROSS + 0.5) / DOWN) for c in range(cells)])
    pool = Pool(
        pixels, [], [], torch.zeros(count, cells, dtype=torch.long), torch.full((count, cells), -100),
        torch.full((count, cells), -100), own.expand(count, -1, -1).clone(),
        torch.zeros(count, cells, len(LETTERS)), torch.full((count, cells), -100),
    )  # fmt: skip
    for place in range(count):
        screen = draw_screen(rng)
        asked = [ask(screen, rng) for _ in range(questions)]
        if screen.barred:
            draw_bar(screen, rng.choice(asked).text, rng)
        size = ACROSS * FACTOR, DOWN * FACTOR
        pixels[place] = np.asarray(screen.image.resize(size, Image.Resampling.BICUBIC))
        pool.widgets.append(screen.widgets)
        pool.asked.append(asked)
        _mark(pool, place, screen)
    return pool


def _mark(pool: Pool, place: int, screen: Screen) -> None:
    for widget in screen.widgets:
        cells = cells_of(widget)
        pool.kind[place, cells] = KINDS.index(widget.kind)
        pool.colour[place, cells] = _COLOURS.index(widget.colour) if widget.colour else -100
        pool.rank[place, cells] = min(rank(screen, widget), RANKS - 1)
        x, y = widget.centre
        pool.centre[place, cells] = torch.tensor([x / WIDTH, y / HEIGHT])
        spelled = [LETTERS.index(letter) for letter in widget.label.lower() if letter in LETTERS]
        pool.letters[place, cells] = 0.0
        pool.first[place, cells] = spelled[0] if spelled else -100
        for letter in spelled:
            pool.letters[place, cells, letter] = 1.0


def cells_of(widget: Widget) -> Tensor:
    """Cells whose middle lies in the widget, and the one its own middle lies in."""
    left, top, right, bottom = widget.box
    x, y = widget.centre
    high = HEIGHT / DOWN
    columns = [c for c in range(ACROSS) if left <= (c + 0.5) * FACTOR <= right] or [int(x // FACTOR)]
    rows = [r for r in range(DOWN) if top <= (r + 0.5) * high <= bottom] or [int(y // high)]
    return torch.tensor([min(r, DOWN - 1) * ACROSS + min(c, ACROSS - 1) for r in rows for c in columns])


def patches(pixels: npt.NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    """Pictures cut up as the image processor cuts them, many at once: their patches, and the grid of each."""
    count, high, wide, _ = pixels.shape
    rows, columns = high // FACTOR, wide // FACTOR
    cut = torch.from_numpy(pixels).view(count, rows, 2, PATCH, columns, 2, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    flat = cut.reshape(count * rows * columns * 4, 3 * PATCH * PATCH).float() / 127.5 - 1
    return flat, torch.tensor([[1, rows * 2, columns * 2]] * count)
