"""The vision tower: a convolutional network that finds characters and widgets on a screen.

It has two output maps. One has a column for every pixel column and a row for every four pixel rows, and shows the
centres of characters and their classes. The other has cells of 8 pixels and shows widgets. Nothing in it depends on the
size of the screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

CHARACTERS = "".join(chr(code) for code in range(33, 127)) + "•✖▾"
"""Every character the tower can tell apart, in the order of its classes."""
WIDGETS = ("field", "button", "checkbox", "radio", "select", "textarea", "box")
CHAR_CLASSES = {char: index for index, char in enumerate(CHARACTERS)}
WIDGET_KINDS = {kind: index for index, kind in enumerate(WIDGETS)}
ROW, CELL = 4, 8
"""Height of a row of the character map and side of a cell of the widget map, in pixels."""
CHAR_BOX, WIDGET_BOX = 4, 4
"""dx, dy, log width, log height."""


class ResidualBlock(nn.Module):
    """A convolution whose output is added to its input; without effect before training."""

    def __init__(self, width: int, kernel: tuple[int, int], dilation: int = 1) -> None:
        super().__init__()
        padding = (dilation * (kernel[0] // 2), dilation * (kernel[1] // 2))
        self.conv = nn.Conv2d(width, width, kernel, padding=padding, dilation=dilation)
        self.mix = nn.Conv2d(width, width, 1)
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """The features with the block's contribution added."""
        contribution: Tensor = self.mix(functional.gelu(self.conv(x)))
        return x + contribution


@dataclass
class TowerOutput:
    """Both maps of B screens."""

    char_heat: Tensor
    """[B, H/4, W] logits."""
    char_features: Tensor
    """[B, C, H/4, W]"""
    widget_heat: Tensor
    """[B, kinds, H/8, W/8] logits."""
    widget_rest: Tensor
    """[B, 1 + 4, H/8, W/8]: logit of checked or focused, box."""


class Tower(nn.Module):
    """From pixels to a map of characters and a map of widgets."""

    def __init__(self, width: int = 48, depth: int = 4, wide: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width // 2, 3, stride=(2, 1), padding=1),
            nn.GELU(),
            nn.Conv2d(width // 2, width, (4, 3), stride=(2, 1), padding=(1, 1)),
            nn.GELU(),
        )
        self.blocks = nn.Sequential(*(ResidualBlock(width, (3, 5)) for _ in range(depth)))
        self.char_heat = nn.Conv2d(width, 1, 1)
        self.char_head = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU())
        self.char_class = nn.Linear(2 * width, len(CHARACTERS))
        self.char_box = nn.Linear(2 * width, CHAR_BOX)
        self.down = nn.Sequential(nn.Conv2d(width, wide, (2, 8), stride=(2, 8)), nn.GELU())
        self.context = nn.Sequential(*(ResidualBlock(wide, (3, 3), d) for d in (1, 2, 4, 2, 1)))
        self.widget_heat = nn.Conv2d(wide, len(WIDGETS), 1)
        self.widget_rest = nn.Conv2d(wide, 1 + WIDGET_BOX, 1)
        for heat in (self.char_heat, self.widget_heat):
            nn.init.constant_(heat.bias, -4.0)  # type: ignore[arg-type]

    def forward(self, pixels: Tensor) -> TowerOutput:
        """`pixels` are [B, 3, H, W] from -1 to 1; sides are multiples of 8."""
        x = self.blocks(self.stem(pixels.contiguous(memory_format=torch.channels_last)))
        context = self.context(self.down(x))
        return TowerOutput(self.char_heat(x).squeeze(1), x, self.widget_heat(context), self.widget_rest(context))

    def describe_chars(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits and boxes of characters from their features [N, C]."""
        hidden = self.char_head(features)
        return self.char_class(hidden), self.char_box(hidden)


def to_pixels(images: Sequence[npt.NDArray[np.uint8]]) -> Tensor:
    """Images of one size as [B, 3, H, W] from -1 to 1, padded with white to multiples of 8."""
    batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
    height, width = batch.shape[-2:]
    return functional.pad(batch, (0, -width % CELL, 0, -height % CELL), value=1.0)
