"""Train the vision tower on drawn pages: where characters and widgets are, and which."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from palaestra.policy.device import has_bfloat16_instructions
from palaestra.policy.screen_reader.rendering import DrawnPage
from palaestra.policy.screen_reader.symbols import Floats
from palaestra.policy.screen_reader.tower import (
    CELL,
    CHAR_CLASSES,
    ROW,
    WIDGET_KINDS,
    WIDGETS,
    Tower,
    TowerOutput,
    to_pixels,
)

CROP_HEIGHT = 104
"""Height in pixels of the bands of pages that the tower is trained on."""
_SIGMA_X, _SIGMA_Y = 0.8, 0.45
"""Width of the peak at the centre of a character, in columns and rows of its map."""
_LOSS_WEIGHTS = {
    "char_heat": 1.0,
    "char_class": 1.0,
    "char_box": 1.0,
    "widget_heat": 0.3,
    "widget_on": 0.3,
    "widget_box": 0.3,
}


@dataclass
class VisionTargets:
    """Labels of a batch of B pages of one size."""

    pixels: Tensor
    char_heat: Tensor
    """[B, H/4, W]: bell curves around the centres of characters."""
    char_at: Tensor
    """[N, 3]: page, row, column."""
    char_class: Tensor
    """[N]"""
    char_box: Tensor
    """[N, 4]: offset of the centre from its cell's centre in cells, logarithms of the sides in units of 6 x 12 px."""
    widget_heat: Tensor
    """[B, kinds, H/8, W/8]: 1 at the centres of widgets."""
    widget_at: Tensor
    """[M, 4]: page, row, column, kind."""
    widget_on: Tensor
    """[M]: 1 if checked or focused."""
    widget_box: Tensor
    """[M, 4]: as `char_box`, in units of 40 x 20 px."""


def crop_rows(page: DrawnPage, height: int, rng: random.Random) -> DrawnPage:
    """A random band of a page, `height` rows of pixels high, around one of its characters."""
    limit = page.pixels.shape[0] - height
    if limit <= 0:
        return page
    tops = [top for *_, top, _, _ in page.chars] or [top for *_, top, _, _ in page.widgets] or [0.0]
    first = max(0, min(limit, int(rng.choice(tops)) - rng.randrange(height)))
    last = first + height
    return DrawnPage(
        page.pixels[first:last],
        [(char, x, y - first, w, h) for char, x, y, w, h in page.chars if first + 2 < y + h / 2 < last - 2],
        [(kind, on, x, y - first, w, h) for kind, on, x, y, w, h in page.widgets if first < y + h / 2 < last],
        {},
    )


def build_targets(pages: Sequence[DrawnPage]) -> VisionTargets:
    """Labels of pages of one size."""
    pixels = to_pixels([page.pixels for page in pages])
    count, _, height, width = pixels.shape
    heat = np.zeros((count, height // ROW, width), np.float32)
    widget_heat = np.zeros((count, len(WIDGETS), height // CELL, width // CELL), np.float32)
    at, classes, boxes, widget_at, on, widget_boxes = [], [], [], [], [], []
    for index, page in enumerate(pages):
        for char, left, top, wide, tall in page.chars:
            x, y = left + wide / 2, top + tall / 2
            row, column = int(y // ROW), int(x)
            if char not in CHAR_CLASSES or not (0 <= row < heat.shape[1] and 0 <= column < width):
                continue
            _add_peak(heat[index], y / ROW - 0.5, x - 0.5)
            heat[index, row, column] = 1.0
            at.append((index, row, column))
            classes.append(CHAR_CLASSES[char])
            boxes.append((x - column - 0.5, (y / ROW) - row - 0.5, math.log(wide / 6), math.log(tall / 12)))
        for kind, is_on, left, top, wide, tall in page.widgets:
            x, y = left + wide / 2, top + tall / 2
            row, column = int(y // CELL), int(x // CELL)
            if kind not in WIDGET_KINDS or not (0 <= row < widget_heat.shape[2] and 0 <= column < widget_heat.shape[3]):
                continue
            widget_heat[index, WIDGET_KINDS[kind], row, column] = 1.0
            widget_at.append((index, row, column, WIDGET_KINDS[kind]))
            on.append(float(is_on))
            widget_boxes.append(
                (x / CELL - column - 0.5, y / CELL - row - 0.5, math.log(wide / 40), math.log(tall / 20))
            )
    return VisionTargets(
        pixels,
        torch.from_numpy(heat),
        torch.tensor(at, dtype=torch.long).view(-1, 3),
        torch.tensor(classes, dtype=torch.long),
        torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
        torch.from_numpy(widget_heat),
        torch.tensor(widget_at, dtype=torch.long).view(-1, 4),
        torch.tensor(on, dtype=torch.float32),
        torch.tensor(widget_boxes, dtype=torch.float32).view(-1, 4),
    )


def _add_peak(heat: Floats, y: float, x: float) -> None:
    """Add a bell curve around a centre given in rows and columns."""
    top, left = max(0, round(y) - 1), max(0, round(x) - 2)
    part = heat[top : round(y) + 2, left : round(x) + 3]
    rows = np.arange(top, top + part.shape[0])[:, None] - y
    columns = np.arange(left, left + part.shape[1])[None] - x
    np.maximum(part, np.exp(-0.5 * ((rows / _SIGMA_Y) ** 2 + (columns / _SIGMA_X) ** 2)).astype(np.float32), out=part)


def vision_loss(tower: Tower, out: TowerOutput, targets: VisionTargets) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and its parts."""
    page, row, column = targets.char_at.T
    logits, boxes = tower.describe_chars(out.char_features[page, :, row, column])
    widget_page, widget_row, widget_column, _ = targets.widget_at.T
    rest = out.widget_rest[widget_page, :, widget_row, widget_column].float()
    parts = {
        "char_heat": _focal_loss(out.char_heat.float(), targets.char_heat) / max(1, len(page)),
        "char_class": functional.cross_entropy(logits.float(), targets.char_class),
        "char_box": functional.smooth_l1_loss(boxes.float(), targets.char_box),
        "widget_heat": _focal_loss(out.widget_heat.float(), targets.widget_heat) / max(1, len(widget_page)),
        "widget_on": functional.binary_cross_entropy_with_logits(rest[:, 0], targets.widget_on),
        "widget_box": functional.smooth_l1_loss(rest[:, 1:], targets.widget_box),
    }
    # The mean over no characters or no widgets is not a number.
    total = torch.stack([_LOSS_WEIGHTS[name] * part for name, part in parts.items() if torch.isfinite(part)]).sum()
    return total, parts


def _focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    """CenterNet's focal loss, summed."""
    log_p, log_not = functional.logsigmoid(logits), functional.logsigmoid(-logits)
    p = log_p.exp()
    hit = (target == 1.0).float()
    positive = -hit * (1 - p) ** 2 * log_p
    negative = -(1 - hit) * (1 - target) ** 4 * p**2 * log_not
    return (positive + negative).sum()


def pretrain_vision(
    tower: Tower,
    pages: Sequence[DrawnPage],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    log: Callable[[str], None],
) -> dict[str, float]:
    """Train the tower; returns exponential averages of the parts of the loss."""
    rng = random.Random(seed)
    by_size: dict[tuple[int, ...], list[int]] = {}
    for index, page in enumerate(pages):
        by_size.setdefault(page.pixels.shape, []).append(index)
    sizes = list(by_size)
    weights = [len(by_size[size]) / size[1] for size in sizes]
    optimizer = torch.optim.AdamW(tower.parameters(), learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    averages: dict[str, float] = {}
    for step in range(steps):
        rate = learning_rate * min(1.0, (step + 1) / 50) * max(0.02, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        size = rng.choices(sizes, weights)[0]
        chosen = [crop_rows(pages[index], CROP_HEIGHT, rng) for index in rng.choices(by_size[size], k=batch_size)]
        targets = build_targets(chosen)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16_instructions()):
            out = tower(targets.pixels)
            loss, parts = vision_loss(tower, out, targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        for name, part in parts.items():
            if torch.isfinite(part):
                averages[name] = 0.98 * averages.get(name, float(part.detach())) + 0.02 * float(part.detach())
        if step % 100 == 99 or step == steps - 1:
            log(f"{step + 1}/{steps}: " + ", ".join(f"{name} {value:.3f}" for name, value in averages.items()))
    return averages
