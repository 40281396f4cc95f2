"""The size of the image a model sees, and how a model's coordinates relate to pixels of the screen.

`image_size` is the only function that decides an image size. Images are resized to `CoordinateFrame.image` and the
processor is called with resizing off; coordinates are read against the same frame. Resizing twice, with different
limits, is the usual reason why clicks miss.

Conversion between coordinate spaces is integer arithmetic on the centres of pixels. Encoding and decoding a pixel gives
the same pixel if the space is at least as fine as the screen, and otherwise one that is at most one cell away. Numbers
outside the space are rejected. Fractions are rounded to the nearest whole number, halves to even; if rounding alone
would leave the space or the screen, the last row or column is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from palaestra.errors import ConfigError
from palaestra.policy.codecs.decoding import DecodeError, abbreviate
from palaestra.sessions.action import Point
from palaestra.sessions.screen import Size

MAX_ASPECT = 200


@dataclass(frozen=True)
class CoordinateFrame:
    """The size of a screen, the size of the image made of it, and the position of the mouse pointer."""

    screen: Size
    image: Size
    pointer: Point | None = None
    """Needed by grammars whose drags start at the pointer; None if unknown."""

    def __post_init__(self) -> None:
        for name, size in (("screen", self.screen), ("image", self.image)):
            if size.width < 1 or size.height < 1:
                raise ConfigError(f"frame.{name}", (size.width, size.height), "must be at least one pixel each way")
        if self.pointer is not None:
            x, y = self.pointer
            if not (0 <= x < self.screen.width and 0 <= y < self.screen.height):
                size = self.screen
                raise ConfigError("frame.pointer", (x, y), f"is not on the screen of {size.width} x {size.height}")


@dataclass(frozen=True)
class ImageRule:
    """What a model's vision tower requires of an image."""

    factor: int
    """Both sides are multiples of it: the patch size times the number of patches merged along a side."""
    min_pixels: int
    """Smaller images are enlarged to at least this area."""
    max_pixels: int
    """Larger images are shrunk to at most this area; it bounds the number of image tokens."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ConfigError("image.factor", self.factor, "must be at least 1")
        if not 1 <= self.min_pixels <= self.max_pixels:
            bounds = (self.min_pixels, self.max_pixels)
            raise ConfigError("image.min_pixels, image.max_pixels", bounds, "must be positive and in this order")

    def frame(self, screen: Size, *, pointer: Point | None = None) -> CoordinateFrame:
        """The frame of a screen under this rule."""
        size = image_size(screen, factor=self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        return CoordinateFrame(screen, size, pointer)


def image_size(screen: Size, *, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """The size to resize a screenshot to: multiples of `factor`, area between `min_pixels` and `max_pixels`.

    The arithmetic is that of Qwen's `smart_resize`, banker's rounding included.
    """
    width, height = screen.width, screen.height
    if min(width, height) < 1:
        raise ConfigError("screen", (width, height), "must be at least one pixel each way")
    if max(width, height) / min(width, height) > MAX_ASPECT:
        reason = f"one side is more than {MAX_ASPECT} times the other"
        raise ConfigError("screen", (width, height), reason, "Crop the picture before it is shown")
    across, down = (max(factor, round(side / factor) * factor) for side in (width, height))
    if across * down > max_pixels:
        beta = math.sqrt(width * height / max_pixels)
        # A long thin screen would shrink to a side of 0; keep at least one patch.
        across, down = (max(factor, math.floor(side / beta / factor) * factor) for side in (width, height))
    elif across * down < min_pixels:
        beta = math.sqrt(min_pixels / (width * height))
        across, down = (math.ceil(side * beta / factor) * factor for side in (width, height))
    return Size(across, down)


IMAGE_RULES: Mapping[str, ImageRule] = MappingProxyType(
    {
        "qwen2.5-vl": ImageRule(28, 4 * 28 * 28, 16_384 * 28 * 28),
        "qwen3-vl": ImageRule(32, 65_536, 16_384 * 32 * 32),
        "ui-tars-1.0": ImageRule(28, 100 * 28 * 28, 16_384 * 28 * 28),
        "ui-tars-1.5": ImageRule(28, 100 * 28 * 28, 16_384 * 28 * 28),
        # APIs that take any image: the screen unchanged, up to the area their examples recommend.
        "anthropic": ImageRule(1, 1, 1366 * 768),
        "openai": ImageRule(1, 1, 1920 * 1200),
        # Patches of 8 pixels merged two by two, for models small enough to train on a CPU.
        "tiny": ImageRule(16, 16 * 16, 1280 * 16 * 16),
        "unscaled": ImageRule(1, 1, 4096 * 4096),
    }
)
"""The rule each family was trained with, by the name of its codec; `tiny` and `unscaled` work with any codec."""


class CoordinateSpace(Protocol):
    """How a family of models writes a point of the screen as two numbers."""

    def write(self, point: Point, frame: CoordinateFrame) -> tuple[int, int]:
        """The coordinates nearest to the centre of a pixel."""

    def read(self, x: float, y: float, frame: CoordinateFrame) -> Point:
        """The pixel at the coordinates; `DecodeError` if they lie outside the space."""


@dataclass(frozen=True)
class ImagePixels:
    """Pixels of the image the model sees."""

    def write(self, point: Point, frame: CoordinateFrame) -> tuple[int, int]:
        """The image pixel that contains the centre of the screen pixel."""
        screen, image = frame.screen, frame.image
        return _rescale(point.x, screen.width, image.width), _rescale(point.y, screen.height, image.height)

    def read(self, x: float, y: float, frame: CoordinateFrame) -> Point:
        """The screen pixel that contains the centre of the image pixel."""
        screen, image = frame.screen, frame.image
        if not (0 <= x < image.width and 0 <= y < image.height):
            raise _outside(x, y, f"the picture of {image.width} x {image.height} pixels")
        column, row = min(round(x), image.width - 1), min(round(y), image.height - 1)
        return Point(_rescale(column, image.width, screen.width), _rescale(row, image.height, screen.height))


@dataclass(frozen=True)
class Grid:
    """Fractions of the screen's width and height, from 0 to `denominator`."""

    denominator: int
    rounding: Literal["down", "nearest"]
    """How the family turns a fraction of a pixel into a pixel."""
    largest: int = 0
    """The largest number that is accepted, for families that write more than `denominator` for the edge."""

    def write(self, point: Point, frame: CoordinateFrame) -> tuple[int, int]:
        """The grid lines nearest to the pixel."""
        return self._line(point.x, frame.screen.width), self._line(point.y, frame.screen.height)

    def read(self, x: float, y: float, frame: CoordinateFrame) -> Point:
        """The pixel where two grid lines cross; the last line belongs to the last pixel."""
        largest = max(self.denominator, self.largest)
        if not (0 <= x <= largest and 0 <= y <= largest):
            raise _outside(x, y, f"the grid from 0 to {largest}")
        return Point(self._pixel(round(x), frame.screen.width), self._pixel(round(y), frame.screen.height))

    def _line(self, pixel: int, side: int) -> int:
        if self.rounding == "nearest":
            return round(pixel * self.denominator / side)
        # The line nearest to the pixel's centre, the lower of two: the upper one may be the edge of the next pixel.
        doubled = (2 * pixel + 1) * self.denominator - side
        return -(-doubled // (2 * side))

    def _pixel(self, line: int, side: int) -> int:
        scaled = line * side
        pixel = round(scaled / self.denominator) if self.rounding == "nearest" else scaled // self.denominator
        return min(pixel, side - 1)


def _rescale(cell: int, cells: int, other: int) -> int:
    """With the same edge divided into `other` cells, the one that contains the centre of `cell` of `cells`."""
    return (2 * cell + 1) * other // (2 * cells)


def _outside(x: float, y: float, space: str) -> DecodeError:
    return DecodeError("outside", f"the point ({abbreviate(x)}, {abbreviate(y)}) lies outside {space}")
