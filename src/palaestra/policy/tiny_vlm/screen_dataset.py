"""A dataset of synthetic screens: pixels, widgets, instructions, and labels of every cell."""

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
    draw_instruction_bar,
    draw_screen,
)

COLUMNS, ROWS = WIDTH // FACTOR, HEIGHT // FACTOR
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
RANKS = 5
_COLOURS = tuple(COLOURS)
_NOUNS = {
    "button": ("button",),
    "input": ("textbox", "input field", "text field", "input textbox", "input"),
    "textarea": ("textarea", "text area"),
    "checkbox": ("checkbox", "box"),
    "radio": ("radio button", "radio"),
    "link": ("link",),
    "cross": ("cross", "x"),
    "tab": ("tab",),
    "square": ("square", "box", "colored box"),
}
_WIDGETS = {"input": "text", "square": "square"}
_NUMBERS = ("first", "second", "third", "fourth", "fifth")


@dataclass(frozen=True)
class Instruction:
    """An instruction and the widget it refers to."""

    text: str
    widget: Widget


def _reading_rank(screen: Screen, widget: Widget) -> int:
    """How many widgets of the same kind come before it in reading order."""
    same = [one for one in screen.widgets if one.kind == widget.kind]
    # Widgets of one row may differ by a pixel or two in height.
    return sorted(same, key=lambda one: ((one.box[1] + one.box[3]) // 24, one.box[0])).index(widget)


def write_instruction(screen: Screen, rng: random.Random) -> Instruction:
    """Write an instruction about a random widget of the screen."""
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
    text = _phrase(rng.choice(ways), widget, noun, screen, rng)
    text = text[0].upper() + text[1:]
    return Instruction(text + rng.choice((".", ".", ".", "", "!")), widget)


def _phrase(way: str, widget: Widget, noun: str, screen: Screen, rng: random.Random) -> str:
    """Refer to the widget by its label, colour, rank, corner or kind."""
    verb = rng.choice(("click", "click", "click on", "click on", "press", "select", "tap"))
    if widget.kind in ("input", "textarea") and rng.random() < 0.5:
        verb = rng.choice(("focus into", "focus on", "focus", "go to"))
    if way == "label":
        return rng.choice(_label_phrases(verb, noun, widget.label))
    if way == "colour":
        colour = "grey" if widget.colour == "gray" and rng.random() < 0.5 else widget.colour
        return f"{verb} the {colour} {rng.choice((noun, 'colored box', 'one') if widget.kind == 'square' else (noun,))}"
    if way == "cross":
        phrases = ('close the dialog box by clicking the "x"', "close the dialog", "close the window", 'click the "x"')
        return rng.choice((*phrases, "click the cross", f'{verb} the "x" button'))
    if way == "rank":
        place = min(_reading_rank(screen, widget), 4)
        number = rng.choice((ORDINALS[place], ORDINALS[place], _NUMBERS[place]))
        if widget.kind == "tab":
            return rng.choice((f"{verb} Tab #{place + 1}", f"{verb} the {number} tab", f"{verb} tab {place + 1}"))
        return f"{verb} the {number} {noun}"
    if way == "corner":
        return f"{verb} the {_corner(widget)} {noun}"
    if rng.random() < 0.3:
        return f'{verb} a "{_WIDGETS.get(widget.kind, widget.kind)}" widget'
    return f"{verb} the {noun}"


def _label_phrases(verb: str, noun: str, label: str) -> tuple[str, ...]:
    return (
        f'{verb} the {noun} "{label}"',
        f'{verb} the "{label}" {noun}',
        f"{verb} {noun} {label}",
        f'{verb} "{label}"',
        f'{verb} the {noun} labeled "{label}"',
        f'{verb} the {noun} that says "{label}"',
    )


def _corner(widget: Widget) -> str:
    x, y = widget.centre
    across = "left" if x < 60 else "right" if x > 100 else ""
    down = "top" if y < 100 else "bottom" if y > 150 else ""
    return " ".join(part for part in (down, across) if part) or "middle"


@dataclass(frozen=True)
class ScreenDataset:
    """Screens, and the labels of each cell of 16 x 16 pixels; -100 where a label does not apply."""

    pixels: npt.NDArray[np.uint8]
    """[screens, 208, 160, 3]."""
    widgets: list[list[Widget]]
    instructions: list[list[Instruction]]
    kind: Tensor
    """[screens, cells], index into `KINDS`."""
    colour: Tensor
    """[screens, cells], index into `COLOURS`."""
    rank: Tensor
    """[screens, cells], rank of the widget among its kind in reading order."""
    centre: Tensor
    """[screens, cells, 2]: centre of the widget, or of an empty cell itself; fractions of width and height."""
    letters: Tensor
    """[screens, cells, 36]: which letters the widget's label contains."""
    first: Tensor
    """[screens, cells]: the label's first letter."""

    def __len__(self) -> int:
        return len(self.pixels)


def build_dataset(count: int, *, seed: int, instructions: int) -> ScreenDataset:
    """Draw `count` screens with `instructions` instructions each."""
    rng = random.Random(seed)
    cells = COLUMNS * ROWS
    centres = torch.tensor([((c % COLUMNS + 0.5) / COLUMNS, (c // COLUMNS + 0.5) / ROWS) for c in range(cells)])
    dataset = ScreenDataset(
        pixels=np.empty((count, ROWS * FACTOR, COLUMNS * FACTOR, 3), np.uint8),
        widgets=[],
        instructions=[],
        kind=torch.zeros(count, cells, dtype=torch.long),
        colour=torch.full((count, cells), -100),
        rank=torch.full((count, cells), -100),
        centre=centres.expand(count, -1, -1).clone(),
        letters=torch.zeros(count, cells, len(LETTERS)),
        first=torch.full((count, cells), -100),
    )
    for index in range(count):
        screen = draw_screen(rng)
        written = [write_instruction(screen, rng) for _ in range(instructions)]
        if screen.has_bar:
            draw_instruction_bar(screen, rng.choice(written).text, rng)
        image = screen.image.resize((COLUMNS * FACTOR, ROWS * FACTOR), Image.Resampling.BICUBIC)
        dataset.pixels[index] = np.asarray(image)
        dataset.widgets.append(screen.widgets)
        dataset.instructions.append(written)
        _label_cells(dataset, index, screen)
    return dataset


def _label_cells(dataset: ScreenDataset, index: int, screen: Screen) -> None:
    for widget in screen.widgets:
        cells = covered_cells(widget)
        dataset.kind[index, cells] = KINDS.index(widget.kind)
        dataset.colour[index, cells] = _COLOURS.index(widget.colour) if widget.colour else -100
        dataset.rank[index, cells] = min(_reading_rank(screen, widget), RANKS - 1)
        x, y = widget.centre
        dataset.centre[index, cells] = torch.tensor([x / WIDTH, y / HEIGHT])
        letters = [LETTERS.index(letter) for letter in widget.label.lower() if letter in LETTERS]
        dataset.letters[index, cells] = 0.0
        dataset.first[index, cells] = letters[0] if letters else -100
        for letter in letters:
            dataset.letters[index, cells, letter] = 1.0


def covered_cells(widget: Widget) -> Tensor:
    """Cells whose centre is inside the widget, or the cell that contains the widget's centre."""
    left, top, right, bottom = widget.box
    x, y = widget.centre
    row_height = HEIGHT / ROWS
    columns = [c for c in range(COLUMNS) if left <= (c + 0.5) * FACTOR <= right] or [int(x // FACTOR)]
    rows = [r for r in range(ROWS) if top <= (r + 0.5) * row_height <= bottom] or [int(y // row_height)]
    return torch.tensor([min(r, ROWS - 1) * COLUMNS + min(c, COLUMNS - 1) for r in rows for c in columns])


def cut_patches(pixels: npt.NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    """Patches of many images at once, equal to those of the image processor, and the grid of each image."""
    count, height, width, _ = pixels.shape
    rows, columns = height // FACTOR, width // FACTOR
    blocks = torch.from_numpy(pixels).view(count, rows, 2, PATCH, columns, 2, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    patches = blocks.reshape(count * rows * columns * 4, 3 * PATCH * PATCH).float() / 127.5 - 1
    return patches, torch.tensor([[1, rows * 2, columns * 2]] * count)
