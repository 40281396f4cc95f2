"""The cells of small worlds, and the values of a table on them."""

import gymnasium
import numpy as np
import pytest

from palaestra.train.play.grid import grid_reader, read_q_table


def read(env_id, table=None, **parameters):
    env = gymnasium.make(env_id, **parameters)
    env.reset(seed=3)
    return env.unwrapped, grid_reader(env)(table)


def test_a_cell_of_a_lake_has_the_values_of_its_state():
    table = np.arange(64.0).reshape(16, 4)
    _, grid = read("FrozenLake-v1", table)
    assert grid.values[5] == (20.0, 21.0, 22.0, 23.0)
    assert grid.moves == ("left", "down", "right", "up")


def test_the_moves_of_each_world_are_those_of_its_actions():
    """From the middle of each map, every arrow leads to the neighbour that it points to."""
    steps = {"left": -1, "right": 1}
    for env_id, start, parameters in (("FrozenLake-v1", 6, {"is_slippery": False}), ("CliffWalking-v1", 13, {})):
        world, grid = read(env_id, np.zeros((16 if "Lake" in env_id else 48, 4)), **parameters)
        for action, move in enumerate(grid.moves):
            ((_, following, *_),) = world.P[start][action]
            assert following - start == {**steps, "up": -grid.columns, "down": grid.columns}[move], (env_id, move)
    world, grid = read("Taxi-v4", np.zeros((500, 6)))
    start = world.encode(2, 2, 0, 1)
    for action, move in enumerate(grid.moves[:4]):
        ((_, following, *_),) = world.P[start][action]
        row, column, *_ = world.decode(following)
        assert 5 * (row - 2) + column - 2 == {**steps, "up": -5, "down": 5}[move]
    assert grid.moves[4:] == ("pick up", "drop off")


def test_the_values_of_a_taxi_are_those_for_its_passenger_and_destination():
    table = np.zeros((500, 6))
    table[:, 0] = np.arange(500)
    world, grid = read("Taxi-v4", table)
    _, _, passenger, destination = world.decode(int(world.s))
    assert [values[0] for values in grid.values] == [
        world.encode(row, column, passenger, destination) for row in range(5) for column in range(5)
    ]
    assert grid.values[grid.agent][0] == world.s


@pytest.mark.parametrize("shape", [(16, 3), (15, 4)])
def test_a_table_of_another_size_is_not_drawn(shape):
    _, grid = read("FrozenLake-v1", np.zeros(shape))
    assert (grid.values, grid.moves) == ((), ())


@pytest.mark.parametrize("value", [None, [], [1.0], [[1.0], [1.0, 2.0]], [["a"]], [[float("nan")]], {"0": [1.0]}])
def test_what_is_not_a_table_of_numbers_counts_as_none(value):
    assert read_q_table(value) is None
    assert read_q_table([[1, 2.5]]).tolist() == [[1.0, 2.5]]
