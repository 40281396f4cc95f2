"""From detections to a sequence of symbols in reading order.

A symbol is a character, a space, the start of a line, a wide gap or a widget. Each has a place, a size and the mean
colour of its box. Detections of the tower and labels of the browser are sorted by the same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from palaestra.policy.screen_reader.tower import CHARACTERS, WIDGETS

SPACE, LINE, GAP = (len(CHARACTERS) + place for place in range(3))
FIRST_WIDGET = GAP + 1
"""Symbols are characters, space, start of a line, wide gap, and then widgets off and on."""
SPACE_WIDTH, GAP_WIDTH = 0.16, 1.3
"""A gap between characters is a space, or separates texts, above these multiples of the text's height."""
_MAX_HEIGHT, _SAME_LINE = 24.0, 0.45
"""For sorting into lines: higher boxes count as this high, and centres on one line differ by less than this share."""

Floats = npt.NDArray[np.float32]
Box = tuple[float, float, float, float]
"""Left, top, width, height in pixels."""


@dataclass(frozen=True, eq=False)
class Detections:
    """Characters and widgets on a screen, in pixels."""

    symbols: npt.NDArray[np.int64]
    """[N] classes of characters, and `FIRST_WIDGET + 2 * kind + on` of widgets."""
    boxes: Floats
    """[N, 4]: left, top, width, height."""
    colours: Floats
    """[N, 3] from 0 to 1."""


@dataclass(frozen=True, eq=False)
class SymbolSequence:
    """Symbols in reading order, with arrays as in `Detections`."""

    symbols: npt.NDArray[np.int64]
    boxes: Floats
    colours: Floats

    def __len__(self) -> int:
        return len(self.symbols)

    def text(self) -> str:
        """The characters, with widgets in brackets and a `*` for checked or focused ones; for logs and tests."""
        parts = []
        for symbol in self.symbols.tolist():
            if symbol < len(CHARACTERS):
                parts.append(CHARACTERS[symbol])
            elif symbol >= FIRST_WIDGET:
                kind, on = divmod(symbol - FIRST_WIDGET, 2)
                parts.append(f"[{WIDGETS[kind]}{'*' if on else ''}]")
            else:
                parts.append({SPACE: " ", LINE: "\n", GAP: "  "}.get(symbol, ""))
        return "".join(parts)


def mean_colours(pixels: npt.NDArray[np.uint8], boxes: Floats) -> Floats:
    """The mean colour of each box, from 0 to 1."""
    height, width = pixels.shape[:2]
    sums = np.zeros((height + 1, width + 1, 3), np.float64)
    sums[1:, 1:] = pixels.astype(np.float64).cumsum(0).cumsum(1)
    left = np.clip(np.floor(boxes[:, 0]), 0, width - 1).astype(int)
    top = np.clip(np.floor(boxes[:, 1]), 0, height - 1).astype(int)
    right = np.clip(np.ceil(boxes[:, 0] + boxes[:, 2]), left + 1, width).astype(int)
    bottom = np.clip(np.ceil(boxes[:, 1] + boxes[:, 3]), top + 1, height).astype(int)
    total = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    means: Floats = (total / ((right - left) * (bottom - top) * 255.0)[:, None]).astype(np.float32)
    return means


def read_in_order(detections: Detections) -> SymbolSequence:
    """Sort detections into lines from left to right, with spaces and gaps between them."""
    symbols: list[int] = []
    boxes: list[Sequence[float]] = []
    colours: list[Sequence[float]] = []

    def add(symbol: int, box: Sequence[float], colour: Sequence[float]) -> None:
        symbols.append(symbol)
        boxes.append(box)
        colours.append(colour)

    for line in _split_lines(detections):
        end: float | None = None
        for place, index in enumerate(line):
            box, colour = detections.boxes[index].tolist(), detections.colours[index].tolist()
            is_widget = detections.symbols[index] >= FIRST_WIDGET
            if place == 0:
                add(LINE, (box[0], box[1], 1.0, box[3]), colour)
            elif end is not None and not is_widget:
                gap = box[0] - end
                if gap > SPACE_WIDTH * box[3]:
                    wide = gap > GAP_WIDTH * box[3]
                    add(GAP if wide else SPACE, (end, box[1], max(gap, 0.1), box[3]), colour)
            elif is_widget:
                add(GAP, (box[0], box[1], 1.0, box[3]), colour)
            add(int(detections.symbols[index]), box, colour)
            end = None if is_widget else box[0] + box[2]
    return SymbolSequence(
        np.array(symbols, np.int64),
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array(colours, np.float32).reshape(-1, 3),
    )


def _split_lines(detections: Detections) -> list[list[int]]:
    """Indices of detections by line, from top to bottom and from left to right."""
    boxes = detections.boxes
    order = sorted(range(len(boxes)), key=lambda index: float(boxes[index, 1] + boxes[index, 3] / 2))
    lines: list[list[int]] = []
    middle = tall = 0.0
    for index in order:
        _, top, _, height = boxes[index].tolist()
        centre, height = top + height / 2, min(height, _MAX_HEIGHT)
        if lines and centre - middle <= _SAME_LINE * min(tall, height):
            lines[-1].append(index)
            size = len(lines[-1])
            middle, tall = middle + (centre - middle) / size, tall + (height - tall) / size
        else:
            lines.append([index])
            middle, tall = centre, height
    for line in lines:
        line.sort(key=lambda index: _sort_key(detections, index))
    return lines


def _sort_key(detections: Detections, index: int) -> float:
    """The left edge; widgets come before the text inside them."""
    left = float(detections.boxes[index, 0])
    return left if detections.symbols[index] >= FIRST_WIDGET else left + 0.5
