"""The table from above, drawn in plain NumPy: colour and height images from the places of a few round things.

Owns the picture, not the task: it is told what lies where. Drawing copies small prepared stamps (one per quarter of a
pixel) instead of computing distances for every pixel, and what has not moved since the last picture is not drawn
again. That is why a picture costs microseconds, and why a place is seen to a quarter of a pixel. Driven by
`env.table`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Look", "TopView"]

_PER_PIXEL = 4
"""Places between two pixels that look different."""
_TABLE = (92, 80, 70)
"""Colour of the wood: dark enough for every block to stand out."""

Place: TypeAlias = tuple[float, float]


class Look(NamedTuple):
    """How one round thing is drawn. Lengths are in table sides."""

    colour: tuple[int, int, int]
    radius: float
    hole: float = 0.0
    """Radius of the part in the middle that is left open."""
    height: float = 0.0
    """Of its top above the table."""


class _Stamp(NamedTuple):
    keep: NDArray[np.uint16]
    """How much of the picture stays, in 256ths."""
    ink: NDArray[np.uint16]
    """What is added, in 256ths."""
    height: NDArray[np.float32]


class TopView:
    """Draws one table. The first coordinate runs to the right, the second one up, both from 0 to 1."""

    def __init__(self, size: int, *, depth: bool = False) -> None:
        self.size = size
        # Stamps may reach over the edge of the table; a margin is cheaper than clipping each of them.
        self._margin = size // 8 + 3
        whole = size + 2 * self._margin
        self._inside = (slice(self._margin, self._margin + size),) * 2
        self._bare = np.empty((whole, whole, 3), np.uint8)
        self._bare[:] = _TABLE
        self._lying = self._bare.copy()
        self._lying_height = np.zeros((whole, whole) if depth else (0, 0), np.float32)
        self._drawn: list[tuple[Look, Place]] = []

    def lay(self, things: Sequence[tuple[Look, Place]]) -> None:
        """Say what lies on the table, in the order in which it is drawn."""
        if self._drawn == things:
            return
        self._drawn = list(things)
        self._lying[:] = self._bare
        self._lying_height.fill(0.0)
        for look, place in things:
            self._stamp(self._lying, self._lying_height, look, place)

    def picture(self, above: Look, place: Place) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        """The table with one more thing above it: colours `[size, size, 3]` and, if asked for, heights."""
        colours = self._lying.copy()
        heights = self._lying_height.copy() if self._lying_height.size else self._lying_height
        self._stamp(colours, heights, above, place)
        seen = np.ascontiguousarray(colours[self._inside])
        return seen, np.ascontiguousarray(heights[self._inside]) if heights.size else None

    def _stamp(self, colours: NDArray[np.uint8], heights: NDArray[np.float32], look: Look, place: Place) -> None:
        column, right = divmod(round(place[0] * self.size * _PER_PIXEL), _PER_PIXEL)
        row, down = divmod(round((1.0 - place[1]) * self.size * _PER_PIXEL), _PER_PIXEL)
        stamp = _stamps(look, self.size)[down * _PER_PIXEL + right]
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
def _stamps(look: Look, size: int) -> list[_Stamp]:
    """One stamp for each quarter of a pixel down, then to the right; odd sides, so that there is a middle pixel."""
    radius, hole = look.radius * size, look.hole * size
    reach = math.ceil(radius + 0.5)
    made = []
    for down in range(_PER_PIXEL):
        for right in range(_PER_PIXEL):
            pixels = np.arange(-reach, reach + 1) + 0.5
            distance = np.hypot(pixels[:, None] - down / _PER_PIXEL, pixels[None, :] - right / _PER_PIXEL)
            covered = np.clip(radius + 0.5 - distance, 0.0, 1.0)
            if hole:
                covered *= np.clip(distance - hole + 0.5, 0.0, 1.0)
            share = np.round(covered * 256.0).astype(np.uint16)[:, :, None]
            ink = share * np.array(look.colour, np.uint16)
            made.append(_Stamp(256 - share, ink, np.where(covered >= 0.5, look.height, 0.0).astype(np.float32)))
    return made
