"""How large the picture is that a model sees, and how that relates to the screen it acts on.

`image_size` is the only function that decides a size. Whoever prepares a picture resizes it to `Frame.image` and calls
the processor with resizing off; whoever reads a coordinate holds it against the same `Frame`. Resizing twice, with two
sets of limits, is the usual reason why clicks miss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from palaestra.errors import ConfigError
from palaestra.policy.codecs.decoding import Refusal, shown
from palaestra.sessions.action import Point
from palaestra.sessions.screen import Size

__all__ = ["IMAGE_RULES", "Frame", "Grid", "ImagePixels", "ImageRule", "Space", "image_size"]


MAX_ASPECT = 200


@dataclass(frozen=True)
class Frame:
    """One look at a screen: its size, the size of the picture made of it, and where the pointer is."""

    screen: Size
    image: Size
    pointer: Point | None = None
    """Only needed by grammars that drag from wherever the pointer is; None: not known."""

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
    """What a model's vision tower asks of a picture."""

    factor: int
    """Both sides are multiples of it: the patch size times the number of patches merged along a side."""
    min_pixels: int
    """Smaller pictures are enlarged to at least this area."""
    max_pixels: int
    """Larger pictures are shrunk to at most this area; it bounds the number of image tokens."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ConfigError("image.factor", self.factor, "must be at least 1")
        if not 1 <= self.min_pixels <= self.max_pixels:
            bounds = (self.min_pixels, self.max_pixels)
            raise ConfigError("image.min_pixels, image.max_pixels", bounds, "must be positive and in this order")

    def frame(self, screen: Size, *, pointer: Point | None = None) -> Frame:
        """The frame of a screen under this rule."""
        size = image_size(screen, factor=self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        return Frame(screen, size, pointer)


def image_size(screen: Size, *, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """The size a picture of `screen` is resized to: multiples of `factor`, an area within the two bounds.

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
        # A long thin screen would shrink to a side of nothing; one patch is the least there is.
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
        # Interfaces that take any picture: the screen as it is, up to the area their examples recommend.
        "anthropic": ImageRule(1, 1, 1366 * 768),
        "openai": ImageRule(1, 1, 1920 * 1200),
        # Patches of 8 merged two by two, for models small enough to train on a processor.
        "tiny": ImageRule(16, 16 * 16, 1280 * 16 * 16),
    }
)
"""The rule each family was trained with, under the name of its codec; `tiny` goes with any codec."""


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
