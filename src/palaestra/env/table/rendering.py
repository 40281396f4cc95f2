"""Draws the table from above in NumPy: colour and height images of a few discs.

Drawing copies precomputed stamps (one per quarter pixel) instead of computing distances for every pixel, and caches the
background while nothing in it moves. An image therefore takes microseconds, with quarter-pixel accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from palaestra.env.table.physics import Position

_SUBPIXELS = 4
"""Distinct positions within a pixel, per axis."""
_TABLE_COLOUR = (92, 80, 70)
"""Colour of the table, darker than every block."""


class Disc(NamedTuple):
    """Appearance of one disc. Lengths are in table sides."""

    colour: tuple[int, int, int]
    radius: float
    hole: float = 0.0
    """Radius of the hole in the middle."""
    height: float = 0.0
    """Height of its top above the table."""


class _Stamp(NamedTuple):
    keep: NDArray[np.uint16]
    """Weight of the existing image, in 256ths."""
    ink: NDArray[np.uint16]
    """Added colour, in 256ths."""
    height: NDArray[np.float32]


class TableRenderer:
    """Draws one table. The first coordinate points right, the second one up, both from 0 to 1."""

    def __init__(self, size: int, *, depth: bool = False) -> None:
        self.size = size
        # Stamps may extend beyond the table; a margin is cheaper than clipping.
        self._margin = size // 8 + 3
        whole = size + 2 * self._margin
        self._inside = (slice(self._margin, self._margin + size),) * 2
        self._empty_table = np.empty((whole, whole, 3), np.uint8)
        self._empty_table[:] = _TABLE_COLOUR
        self._background = self._empty_table.copy()
        self._background_height = np.zeros((whole, whole) if depth else (0, 0), np.float32)
        self._background_discs: list[tuple[Disc, Position]] = []

    def set_background(self, discs: Sequence[tuple[Disc, Position]]) -> None:
        """Set the discs on the table, in drawing order."""
        if self._background_discs == discs:
            return
        self._background_discs = list(discs)
        self._background[:] = self._empty_table
        self._background_height.fill(0.0)
        for disc, position in discs:
            self._stamp(self._background, self._background_height, disc, position)

    def draw(self, above: Disc, position: Position) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        """The table with one more disc on top: colours `[size, size, 3]` and, with `depth`, heights `[size, size]`."""
        colours = self._background.copy()
        heights = self._background_height.copy() if self._background_height.size else self._background_height
        self._stamp(colours, heights, above, position)
        image = np.ascontiguousarray(colours[self._inside])
        return image, np.ascontiguousarray(heights[self._inside]) if heights.size else None

    def _stamp(self, colours: NDArray[np.uint8], heights: NDArray[np.float32], disc: Disc, position: Position) -> None:
        column, right = divmod(round(position[0] * self.size * _SUBPIXELS), _SUBPIXELS)
        row, down = divmod(round((1.0 - position[1]) * self.size * _SUBPIXELS), _SUBPIXELS)
        stamp = _stamps(disc, self.size)[down * _SUBPIXELS + right]
        side = len(stamp.keep)
        top, left = row + self._margin - side // 2, column + self._margin - side // 2
        part = colours[top : top + side, left : left + side]
        mixed = part * stamp.keep
        mixed += stamp.ink
        mixed >>= 8
        part[...] = mixed
        if heights.size:
            higher = heights[top : top + side, left : left + side]
            np.maximum(higher, stamp.height, out=higher)


@lru_cache(maxsize=256)
def _stamps(disc: Disc, size: int) -> list[_Stamp]:
    """One stamp for each quarter pixel, row by row; sides are odd, so that there is a middle pixel."""
    radius, hole = disc.radius * size, disc.hole * size
    reach = math.ceil(radius + 0.5)
    stamps = []
    for down in range(_SUBPIXELS):
        for right in range(_SUBPIXELS):
            pixels = np.arange(-reach, reach + 1) + 0.5
            distance = np.hypot(pixels[:, None] - down / _SUBPIXELS, pixels[None, :] - right / _SUBPIXELS)
            covered = np.clip(radius + 0.5 - distance, 0.0, 1.0)
            if hole:
                covered *= np.clip(distance - hole + 0.5, 0.0, 1.0)
            alpha = np.round(covered * 256.0).astype(np.uint16)[:, :, None]
            ink = alpha * np.array(disc.colour, np.uint16)
            stamps.append(_Stamp(256 - alpha, ink, np.where(covered >= 0.5, disc.height, 0.0).astype(np.float32)))
    return stamps
