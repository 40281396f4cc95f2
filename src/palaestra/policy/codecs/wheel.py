"""Turning the wheel: pixels on one side, clicks and directions on the other."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from palaestra.sessions.action import Point, Scroll

__all__ = ["DIRECTIONS", "WHEEL_PIXELS", "clicks", "turned"]

WHEEL_PIXELS = 100
"""What one click of a wheel scrolls by. Browsers do about this on common systems; no family says it."""

DIRECTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
)
"""Which way more of the page comes into view."""


def clicks(scroll: Scroll) -> tuple[str, int] | None:
    """The direction and number of clicks that scroll exactly this far; None when no number does."""
    for direction, (dx, dy) in DIRECTIONS.items():
        along = scroll.dx * dx + scroll.dy * dy
        if along > 0 and (scroll.dx, scroll.dy) == (along * dx, along * dy) and along % WHEEL_PIXELS == 0:
            return direction, along // WHEEL_PIXELS
    return None


def turned(at: Point | None, direction: str, number: int) -> Scroll:
    """The scroll that `number` clicks in a direction make."""
    dx, dy = DIRECTIONS[direction]
    return Scroll(at, dx * number * WHEEL_PIXELS, dy * number * WHEEL_PIXELS)
