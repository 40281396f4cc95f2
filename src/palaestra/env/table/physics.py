"""Quasi-static physics of discs on a table: positions without velocities.

Friction stops everything that is not pushed, so a step consists of a few small moves, each followed by pushing
overlapping discs apart. Lengths are in table sides.
"""

from __future__ import annotations

import math
from typing import TypeAlias

Position: TypeAlias = tuple[float, float]

GRIPPER_RADIUS = 0.045
BLOCK_RADIUS = 0.06
_MAX_MOVE = 0.03
"""Longest move of the gripper at a time: less than a radius, so that it cannot jump over the centre of a block."""


def distance(one: Position, other: Position) -> float:
    """Distance between two positions."""
    return math.sqrt((one[0] - other[0]) ** 2 + (one[1] - other[1]) ** 2)


def clip_to_table(x: float, y: float, radius: float) -> Position:
    """The nearest position at which a disc of this radius is entirely on the table."""
    return min(max(x, radius), 1.0 - radius), min(max(y, radius), 1.0 - radius)


def push_blocks(gripper: Position, blocks: list[Position], right: float, up: float) -> tuple[Position, list[Position]]:
    """Positions of gripper and blocks after the gripper moved by (right, up)."""
    reach = max(abs(right), abs(up))
    touching = GRIPPER_RADIUS + BLOCK_RADIUS
    if all(distance(gripper, block) > touching + 1.5 * reach for block in blocks):
        return clip_to_table(gripper[0] + right, gripper[1] + up, GRIPPER_RADIUS), blocks
    moves = max(1, math.ceil(math.hypot(right, up) / _MAX_MOVE))
    for _ in range(moves):
        target = clip_to_table(gripper[0] + right / moves, gripper[1] + up / moves, GRIPPER_RADIUS)
        positions = list(blocks)
        for i, block in enumerate(positions):
            if distance(target, block) < touching:
                positions[i] = clip_to_table(*_separate(target, block, touching), BLOCK_RADIUS)
                _push_neighbours(positions, i)
        for block in positions:
            # The gripper slides around a block that is stuck at the edge or behind another stuck block.
            if distance(target, block) < touching:
                target = clip_to_table(*_separate(block, target, touching), GRIPPER_RADIUS)
        if _has_overlap(target, positions):
            break  # jammed: undo this move
        gripper, blocks = target, positions
    return gripper, blocks


def _push_neighbours(positions: list[Position], mover: int) -> None:
    """Push away the blocks that the moved one touches; if they are stuck, move it back instead."""
    for i, block in enumerate(positions):
        if i != mover and distance(positions[mover], block) < 2.0 * BLOCK_RADIUS:
            positions[i] = clip_to_table(*_separate(positions[mover], block, 2.0 * BLOCK_RADIUS), BLOCK_RADIUS)
            if distance(positions[mover], positions[i]) < 2.0 * BLOCK_RADIUS:
                positions[mover] = clip_to_table(
                    *_separate(positions[i], positions[mover], 2.0 * BLOCK_RADIUS), BLOCK_RADIUS
                )


def _has_overlap(gripper: Position, blocks: list[Position]) -> bool:
    touching, tolerance = GRIPPER_RADIUS + BLOCK_RADIUS, 1e-6
    return any(distance(gripper, block) < touching - tolerance for block in blocks) or any(
        distance(blocks[i], blocks[k]) < 2.0 * BLOCK_RADIUS - tolerance for i in range(len(blocks)) for k in range(i)
    )


def _separate(fixed: Position, free: Position, gap: float) -> Position:
    """The position of `free` after it is pushed straight away from `fixed` to the distance `gap`."""
    apart = distance(fixed, free)
    if apart < 1e-9:
        return fixed[0] + gap, fixed[1]
    scale = gap / apart
    return fixed[0] + (free[0] - fixed[0]) * scale, fixed[1] + (free[1] - fixed[1]) * scale
