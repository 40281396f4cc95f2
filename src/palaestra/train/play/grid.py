"""Small worlds of cells as data, so that they can be drawn sharply: toy text environments and MiniGrid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from palaestra.env.vector import GymEnv
from palaestra.runs.play.state import CellGrid

_LAKE = {b"S": "start", b"F": "ice", b"H": "hole", b"G": "goal"}
_TAXI_STOPS = ("red", "green", "yellow", "blue")


def grid_reader(env: GymEnv) -> Callable[[], CellGrid] | None:
    """A function that reads the current cells; None for environments without cells."""
    world: Any = env.unwrapped
    name = type(world).__name__
    readers: Mapping[str, Callable[[Any], CellGrid]] = {
        "FrozenLakeEnv": _read_lake,
        "CliffWalkingEnv": _read_cliff,
        "TaxiEnv": _read_taxi,
    }
    read = readers.get(name)
    if read is None and hasattr(world, "grid") and hasattr(world, "agent_pos") and hasattr(world, "agent_dir"):
        read = _read_minigrid
    return None if read is None else lambda: read(world)


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
