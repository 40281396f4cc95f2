"""Where a model means when it names a point: the coordinate spaces of the families, as whole-number arithmetic.

A pixel is a little square; what is carried between spaces is its centre. Writing a pixel and reading it back gives the
same pixel wherever the space is at least as fine as the screen, and otherwise one at most a cell of the space away.

A number is read only if it lies within the space. Floats are rounded to the nearest whole number of the space, halves
to even; where that rounding alone would leave the space or the screen, the last row or column is meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from palaestra.policy.codecs.frame import Frame
from palaestra.policy.codecs.reading import Refusal, shown
from palaestra.sessions.action import Point

__all__ = ["Grid", "ImagePixels", "Space"]


class Space(Protocol):
    """One way to name a point of the screen by two numbers."""

    def write(self, point: Point, frame: Frame) -> tuple[int, int]:
        """The numbers nearest to the centre of a pixel."""

    def read(self, x: float, y: float, frame: Frame) -> Point:
        """The pixel two numbers mean; `Refusal` when they lie outside."""


@dataclass(frozen=True)
class ImagePixels:
    """Pixels of the picture the model sees."""

    def write(self, point: Point, frame: Frame) -> tuple[int, int]:
        """The picture's pixel under the centre of the screen's."""
        screen, image = frame.screen, frame.image
        return _under(point.x, screen.width, image.width), _under(point.y, screen.height, image.height)

    def read(self, x: float, y: float, frame: Frame) -> Point:
        """The screen's pixel under the centre of the picture's."""
        screen, image = frame.screen, frame.image
        if not (0 <= x < image.width and 0 <= y < image.height):
            raise _outside(x, y, f"the picture of {image.width} x {image.height} pixels")
        across, down = min(round(x), image.width - 1), min(round(y), image.height - 1)
        return Point(_under(across, image.width, screen.width), _under(down, image.height, screen.height))


@dataclass(frozen=True)
class Grid:
    """Parts of the screen's width and height, counted from 0 to `denominator`."""

    denominator: int
    rounding: Literal["down", "nearest"]
    """What the family does with a fraction of a pixel: cut it off, or round it."""
    largest: int = 0
    """The largest number that is read, for families that write more than `denominator` for the edge."""

    def write(self, point: Point, frame: Frame) -> tuple[int, int]:
        """The grid lines nearest to the pixel."""
        return self._line(point.x, frame.screen.width), self._line(point.y, frame.screen.height)

    def read(self, x: float, y: float, frame: Frame) -> Point:
        """The pixel at a crossing of grid lines; the last line is the last pixel's."""
        largest = max(self.denominator, self.largest)
        if not (0 <= x <= largest and 0 <= y <= largest):
            raise _outside(x, y, f"the grid from 0 to {largest}")
        return Point(self._pixel(round(x), frame.screen.width), self._pixel(round(y), frame.screen.height))

    def _line(self, pixel: int, side: int) -> int:
        if self.rounding == "nearest":
            return round(pixel * self.denominator / side)
        # The line nearest to the pixel's centre, the lower of two: the upper one may be the next pixel's edge.
        doubled = (2 * pixel + 1) * self.denominator - side
        return -(-doubled // (2 * side))

    def _pixel(self, line: int, side: int) -> int:
        along = line * side
        pixel = round(along / self.denominator) if self.rounding == "nearest" else along // self.denominator
        return min(pixel, side - 1)


def _under(pixel: int, side: int, other: int) -> int:
    """Of `other` cells along the same edge, the one that holds the centre of cell `pixel` of `side`."""
    return (2 * pixel + 1) * other // (2 * side)


def _outside(x: float, y: float, space: str) -> Refusal:
    return Refusal("outside", f"the point ({shown(x)}, {shown(y)}) lies outside {space}")
