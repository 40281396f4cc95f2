"""A small world of cells with walls and a goal that can move between episodes: `palaestra/GridWorld-v0`.

It needs numpy and gymnasium only and imports nothing of ours, so that interpreters without this package load the file
by its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

MAX_EPISODE_STEPS = 100
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Change of column and row by action: up, right, down, left."""
DEFAULT_ROWS = (
    "S...#...",
    "..#.#.#.",
    "..#...#.",
    "..####..",
    "........",
    ".####.#.",
    "......#.",
    "......#G",
)
_COLOURS = {"floor": (236, 239, 241), "wall": (69, 90, 100), "start": (207, 216, 220), "goal": (102, 187, 106)}
_AGENT = (25, 118, 210)
_CELL_PIXELS = 32


class GridWorld(gymnasium.Env[Any, Any]):
    """Reach the goal: each step costs 1, so a return is minus the number of steps.

    The observation is the number of the cell, row by row; it does not say where the goal is (`info["goal"]` does). A
    step into a wall or out of the world leaves the agent where it is.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - the name and type of Gymnasium

    def __init__(
        self,
        rows: Sequence[str] = DEFAULT_ROWS,
        later_goals: Sequence[Sequence[int]] = (),
        render_mode: str | None = None,
    ) -> None:
        """Build the world.

        Args:
            rows: One text per row, of equal length: `.` is floor, `#` a wall, `S` the start, `G` the first goal.
            later_goals: Triples of episode, column and row: from that episode on (the first is 0), the goal is there.
            render_mode: `rgb_array` or None.
        """
        self.rows = tuple(str(row) for row in rows)
        width = len(self.rows[0]) if self.rows else 0
        text = "".join(self.rows)
        if not width or any(len(row) != width for row in self.rows) or set(text) - set(".#SG"):
            raise ValueError("rows must be texts of equal length that consist of the characters . # S G")
        if text.count("S") != 1 or text.count("G") != 1:
            raise ValueError("rows must have exactly one S and one G")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode {render_mode!r} is not rgb_array")
        self.shape = (len(self.rows), width)
        self.walls = np.array([cell == "#" for cell in text])
        self.start, self._first_goal = text.index("S"), text.index("G")
        self._later_goals = sorted((int(episode), self._find_cell(x, y)) for episode, x, y in later_goals)
        self.render_mode = render_mode
        self.observation_space = spaces.Discrete(len(text))
        self.action_space = spaces.Discrete(len(MOVES))
        self.episode = -1
        self.s, self.goal = self.start, self._first_goal

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.episode += 1
        goals = [self._first_goal, *(goal for episode, goal in self._later_goals if episode <= self.episode)]
        self.s, self.goal = self.start, goals[-1]
        return self.s, {"goal": self._position(self.goal)}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Move by one cell."""
        rows, columns = self.shape
        column, row = self._position(self.s)
        column, row = column + MOVES[action][0], row + MOVES[action][1]
        if 0 <= column < columns and 0 <= row < rows and not self.walls[row * columns + column]:
            self.s = row * columns + column
        is_over = self.s == self.goal
        return self.s, -1.0, is_over, False, {"goal": self._position(self.goal), "is_success": is_over}

    def render(self) -> NDArray[np.uint8] | None:
        """A picture of the cells."""
        if self.render_mode is None:
            return None
        rows, columns = self.shape
        cells = [_COLOURS[kind] for kind in self.cells()]
        picture = np.array(cells, np.uint8).reshape(rows, columns, 3)
        picture = picture.repeat(_CELL_PIXELS, axis=0).repeat(_CELL_PIXELS, axis=1)
        column, row = self._position(self.s)
        margin = _CELL_PIXELS // 4
        top, left = row * _CELL_PIXELS + margin, column * _CELL_PIXELS + margin
        picture[top : top + 2 * margin, left : left + 2 * margin] = _AGENT
        return picture

    def cells(self) -> tuple[str, ...]:
        """The kind of every cell, row by row."""
        kinds = ["wall" if wall else "floor" for wall in self.walls]
        kinds[self.start], kinds[self.goal] = "start", "goal"
        return tuple(kinds)

    def _position(self, cell: int) -> tuple[int, int]:
        return cell % self.shape[1], cell // self.shape[1]

    def _find_cell(self, column: int, row: int) -> int:
        rows, columns = self.shape
        if not (0 <= column < columns and 0 <= row < rows) or self.walls[int(row) * columns + int(column)]:
            raise ValueError(f"later_goals: column {column}, row {row} is not a free cell")
        return int(row) * columns + int(column)
