"""How round things make way for each other on a table: positions in, positions out, no velocities.

Friction stops everything as soon as it is no longer pushed (quasi-static), so a step is a few small moves, after each
of which overlaps are pushed apart. Lengths are in table sides. Driven by `env.table`.
"""

from __future__ import annotations

import math
from typing import TypeAlias

__all__ = ["BLOCK", "GRIPPER", "Point", "distance", "pushed", "within_table"]

Point: TypeAlias = tuple[float, float]

GRIPPER = 0.045
BLOCK = 0.06
"""Radii."""
_SMALL = 0.03
"""The gripper moves at most this far at a time: less than a radius, so that it cannot jump over a block's centre."""


def distance(one: Point, other: Point) -> float:
    """Between two centres."""
    return math.sqrt((one[0] - other[0]) ** 2 + (one[1] - other[1]) ** 2)


def within_table(x: float, y: float, radius: float) -> Point:
    """The nearest place at which something of this radius lies on the table entirely."""
    return min(max(x, radius), 1.0 - radius), min(max(y, radius), 1.0 - radius)


def pushed(gripper: Point, blocks: list[Point], right: float, up: float) -> tuple[Point, list[Point]]:
    """Where gripper and blocks are after the gripper tried to move by (right, up)."""
    reach = max(abs(right), abs(up))
    touching = GRIPPER + BLOCK
    if all(distance(gripper, block) > touching + 1.5 * reach for block in blocks):
        return within_table(gripper[0] + right, gripper[1] + up, GRIPPER), blocks
    moves = max(1, math.ceil(math.hypot(right, up) / _SMALL))
    for _ in range(moves):
        tried = within_table(gripper[0] + right / moves, gripper[1] + up / moves, GRIPPER)
        places = list(blocks)
        for i, block in enumerate(places):
            if distance(tried, block) < touching:
                places[i] = within_table(*_clear_of(tried, block, touching), BLOCK)
                _make_way(places, i)
        for block in places:
            # A block that is stuck at the edge, or behind another one that is, makes the gripper slide around it.
            if distance(tried, block) < touching:
                tried = within_table(*_clear_of(block, tried, touching), GRIPPER)
        if _overlapping(tried, places):
            break  # jammed: what cannot be pushed apart cannot be pushed together
        gripper, blocks = tried, places
    return gripper, blocks


def _make_way(places: list[Point], mover: int) -> None:
    """Blocks that the moved one ran into go ahead of it; where they cannot, it stays behind them."""
    for i, block in enumerate(places):
        if i != mover and distance(places[mover], block) < 2.0 * BLOCK:
            places[i] = within_table(*_clear_of(places[mover], block, 2.0 * BLOCK), BLOCK)
            if distance(places[mover], places[i]) < 2.0 * BLOCK:
                places[mover] = within_table(*_clear_of(places[i], places[mover], 2.0 * BLOCK), BLOCK)


def _overlapping(gripper: Point, blocks: list[Point]) -> bool:
    touching, tolerance = GRIPPER + BLOCK, 1e-6
    return any(distance(gripper, block) < touching - tolerance for block in blocks) or any(
        distance(blocks[i], blocks[k]) < 2.0 * BLOCK - tolerance for i in range(len(blocks)) for k in range(i)
    )


def _clear_of(fixed: Point, free: Point, gap: float) -> Point:
    """Where `free` ends up when it is pushed straight away from `fixed` until they are `gap` apart."""
    apart = distance(fixed, free)
    if apart < 1e-9:
        return fixed[0] + gap, fixed[1]
    scale = gap / apart
    return fixed[0] + (free[0] - fixed[0]) * scale, fixed[1] + (free[1] - fixed[1]) * scale
