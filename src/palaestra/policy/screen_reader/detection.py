"""Read a screen: run the tower and turn the peaks of its maps into detections."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from palaestra.policy.device import has_bfloat16_instructions
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, Detections, Floats, mean_colours
from palaestra.policy.screen_reader.tower import CELL, ROW, Tower, TowerOutput, to_pixels

CHAR_THRESHOLD, WIDGET_THRESHOLD = 0.35, 0.35
"""Peaks of a map below these probabilities are ignored."""
_OVERLAP = 0.3
"""Of two characters whose centres are nearer than this share of their added sides, the stronger one is kept."""
_HAS_BFLOAT16 = has_bfloat16_instructions()
"""With them, a processor runs the tower twice as fast in bfloat16."""
_MARGIN = 16
"""Rows of pixels that are kept below the last content."""


@torch.no_grad()
def detect(tower: Tower, pixels: npt.NDArray[np.uint8]) -> Detections:
    """Characters and widgets on a screen `[height, width, 3]`."""
    content = pixels[: _content_height(pixels)]
    with torch.autocast("cpu", torch.bfloat16, enabled=_HAS_BFLOAT16):
        out = tower(to_pixels([content]))
    char_symbols, char_boxes = _detect_chars(tower, out)
    widget_symbols, widget_boxes = _detect_widgets(out)
    boxes: Floats = torch.cat([char_boxes, widget_boxes]).numpy().astype(np.float32)
    return Detections(torch.cat([char_symbols, widget_symbols]).numpy(), boxes, mean_colours(pixels, boxes))


def _content_height(pixels: npt.NDArray[np.uint8]) -> int:
    """Height without the empty lower part of a screen, which would take time and have nothing on it."""
    differs = np.flatnonzero((pixels != pixels[-1, -1]).any((1, 2)))
    return min(len(pixels), (int(differs[-1]) if len(differs) else 0) + _MARGIN)


def _detect_chars(tower: Tower, out: TowerOutput) -> tuple[Tensor, Tensor]:
    """Classes [N] and boxes [N, 4] of the characters on one screen."""
    heat = out.char_heat[0].float().sigmoid()
    rows, columns = _peaks(heat, CHAR_THRESHOLD)
    logits, raw = tower.describe_chars(out.char_features[0, :, rows, columns].T.float())
    boxes = _char_boxes(rows, columns, raw)
    kept = _drop_overlapping(boxes, heat[rows, columns])
    return logits.argmax(-1)[kept], boxes[kept]


def _detect_widgets(out: TowerOutput) -> tuple[Tensor, Tensor]:
    """Symbols [N] and boxes [N, 4] of the widgets on one screen."""
    heat, kind = out.widget_heat[0].float().sigmoid().max(0)
    rows, columns = _peaks(heat, WIDGET_THRESHOLD)
    rest = out.widget_rest[0, :, rows, columns].T.float()
    symbols = FIRST_WIDGET + 2 * kind[rows, columns] + (rest[:, 0] > 0).long()
    return symbols, _widget_boxes(rows, columns, rest[:, 1:])


def _peaks(heat: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Rows and columns of local maxima above the threshold."""
    highest: Any = functional.max_pool2d(heat[None, None], 3, stride=1, padding=1)[0, 0]
    rows, columns = ((heat == highest) & (heat > threshold)).nonzero().T
    return rows, columns


def _drop_overlapping(boxes: Tensor, scores: Tensor) -> list[int]:
    """Indices without those whose centre is well inside a stronger box: a wide letter may have two peaks."""
    x, y = boxes[:, 0] + boxes[:, 2] / 2, boxes[:, 1] + boxes[:, 3] / 2
    wide, tall = boxes[:, 2], boxes[:, 3]
    reach_x, reach_y = _OVERLAP * (wide[:, None] + wide), _OVERLAP * (tall[:, None] + tall)
    is_near = ((x[:, None] - x).abs() < reach_x) & ((y[:, None] - y).abs() < reach_y)
    kept: list[int] = []
    is_free = torch.ones(len(boxes), dtype=torch.bool)
    for index in scores.argsort(descending=True).tolist():
        if is_free[index]:
            kept.append(index)
            is_free &= ~is_near[index]
    return sorted(kept)


def _char_boxes(rows: Tensor, columns: Tensor, raw: Tensor) -> Tensor:
    """Boxes from offsets to the cell's centre and the logarithms of sides relative to 6 x 12 pixels."""
    wide, tall = 6 * raw[:, 2].clamp(-3, 3).exp(), 12 * raw[:, 3].clamp(-3, 3).exp()
    x, y = columns + 0.5 + raw[:, 0], (rows + 0.5 + raw[:, 1]) * ROW
    return torch.stack([x - wide / 2, y - tall / 2, wide, tall], -1)


def _widget_boxes(rows: Tensor, columns: Tensor, raw: Tensor) -> Tensor:
    """Boxes from offsets to the cell's centre and the logarithms of sides relative to 40 x 20 pixels."""
    wide, tall = 40 * raw[:, 2].clamp(-4, 3).exp(), 20 * raw[:, 3].clamp(-4, 3).exp()
    x, y = (columns + 0.5 + raw[:, 0]) * CELL, (rows + 0.5 + raw[:, 1]) * CELL
    return torch.stack([x - wide / 2, y - tall / 2, wide, tall], -1)
