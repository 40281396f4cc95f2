"""Small worlds of cells as data, so that they can be drawn sharply: toy text environments and MiniGrid.

A policy with a table of action values shows them on the cells, as seen from the current situation: in Taxi, the values
of a cell are those for the passenger and the destination of this moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from palaestra.env.vector import GymEnv
from palaestra.runs.play.state import CellGrid

_LAKE = {b"S": "start", b"F": "ice", b"H": "hole", b"G": "goal"}
_TAXI_STOPS = ("red", "green", "yellow", "blue")


QTable: TypeAlias = NDArray[np.float64]
"""Values of actions, one row per state."""
GridReader: TypeAlias = Callable[[QTable | None], CellGrid]
_DIGITS = 4


class _Kind(NamedTuple):
    """How worlds of one class are read."""

    read: Callable[[Any], CellGrid]
    states: Callable[[Any], Sequence[int]] | None = None
    """The state of each cell, as the agent would observe it there; None when cells are not states."""
    moves: tuple[str, ...] = ()


def grid_reader(env: GymEnv) -> GridReader | None:
    """A function that reads the current cells, with the values of a table; None for environments without cells."""
    world: Any = env.unwrapped
    kind = _KINDS.get(type(world).__name__)
    if kind is None and hasattr(world, "grid") and hasattr(world, "agent_pos") and hasattr(world, "agent_dir"):
        kind = _Kind(_read_minigrid)
    return None if kind is None else lambda table: _read(kind, world, table)


def read_q_table(value: Any) -> QTable | None:
    """The table that a policy process sent; None if it sent none, or not a table of finite numbers."""
    try:
        table = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return None
    return table if table.ndim == 2 and table.size and bool(np.isfinite(table).all()) else None


def _read(kind: _Kind, world: Any, table: QTable | None) -> CellGrid:
    grid = kind.read(world)
    if table is None or kind.states is None or table.shape[1] != len(kind.moves):
        return grid
    states = kind.states(world)
    if max(states) >= len(table):
        return grid
    values = tuple(map(tuple, table[states].round(_DIGITS).tolist()))
    return dataclasses.replace(grid, moves=kind.moves, values=values)


def _cell_numbers(world: Any) -> Sequence[int]:
    return range(int(world.observation_space.n))


def _taxi_states(world: Any) -> Sequence[int]:
    _, _, passenger, destination = world.decode(int(world.s))
    return [world.encode(row, column, passenger, destination) for row in range(5) for column in range(5)]


def _read_lake(world: Any) -> CellGrid:
    cells = tuple(_LAKE.get(cell, "ice") for row in world.desc for cell in row.tolist())
    return CellGrid(columns=int(world.ncol), cells=cells, agent=int(world.s))


def _read_cliff(world: Any) -> CellGrid:
    rows, columns = world.shape
    cells = []
    for row in range(rows):
        for column in range(columns):
            kind = "cliff" if world._cliff[row, column] else "floor"
            if (row, column) == (rows - 1, 0):
                kind = "start"
            elif (row, column) == (rows - 1, columns - 1):
                kind = "goal"
            cells.append(kind)
    return CellGrid(columns=columns, cells=tuple(cells), agent=int(world.s))


def _read_taxi(world: Any) -> CellGrid:
    row, column, passenger, destination = world.decode(int(world.s))
    columns = 5
    cells = ["floor"] * 25
    for (stop_row, stop_column), colour in zip(world.locs, _TAXI_STOPS, strict=True):
        cells[stop_row * columns + stop_column] = f"stop {colour}"
    # The map draws a wall between two cells as `|`.
    for wall_row in range(5):
        for wall_column in range(columns - 1):
            if world.desc[1 + wall_row, 2 * wall_column + 2] == b"|":
                cells[wall_row * columns + wall_column] += " wall-right"
    agent = row * columns + column
    stops = [r * columns + c for r, c in world.locs]
    marks = {"destination": stops[destination], "passenger": agent if passenger == 4 else stops[passenger]}
    return CellGrid(columns=columns, cells=tuple(cells), agent=agent, marks=marks)


def _read_grid_world(world: Any) -> CellGrid:
    return CellGrid(columns=int(world.shape[1]), cells=world.cells(), agent=int(world.s))


def _read_minigrid(world: Any) -> CellGrid:
    cells = []
    for row in range(world.grid.height):
        for column in range(world.grid.width):
            cell = world.grid.get(column, row)
            kind = "floor"
            if cell is not None:
                kind = cell.type if cell.type in ("wall", "floor", "goal", "lava") else f"{cell.type} {cell.color}"
                if cell.type == "door":
                    kind += " " + ("open" if cell.is_open else "locked" if cell.is_locked else "closed")
            cells.append(kind)
    column, row = (int(value) for value in world.agent_pos)
    carried = getattr(world, "carrying", None)
    agent = row * world.grid.width + column
    marks = {} if carried is None else {f"carries {carried.type} {carried.color}": agent}
    return CellGrid(
        columns=int(world.grid.width), cells=tuple(cells), agent=agent, heading=int(world.agent_dir), marks=marks
    )


_KINDS: Mapping[str, _Kind] = {
    "FrozenLakeEnv": _Kind(_read_lake, _cell_numbers, ("left", "down", "right", "up")),
    "CliffWalkingEnv": _Kind(_read_cliff, _cell_numbers, ("up", "right", "down", "left")),
    "GridWorld": _Kind(_read_grid_world, _cell_numbers, ("up", "right", "down", "left")),
    "TaxiEnv": _Kind(_read_taxi, _taxi_states, ("down", "up", "right", "left", "pick up", "drop off")),
}
