"""The grid world: walls, a start, and a goal that moves between episodes."""

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import palaestra.env.make  # noqa: F401 - registers it
from palaestra.env.grid_world import MAX_EPISODE_STEPS, GridWorld
from palaestra.train.play.grid import grid_reader

UP, RIGHT, DOWN, LEFT = range(4)
SMALL = ("S#", ".G")


def walk(env, *actions):
    return [env.step(action)[:3] for action in actions]


def test_each_step_costs_one_and_walls_and_edges_stop_it():
    env = GridWorld(SMALL)
    assert env.reset(seed=0) == (0, {"goal": (1, 1)})

    # Into the wall, out of the world, down, right to the goal.
    assert walk(env, RIGHT, UP, DOWN, RIGHT) == [
        (0, -1.0, False), (0, -1.0, False), (2, -1.0, False), (3, -1.0, True),
    ]  # fmt: skip


def test_the_goal_moves_when_its_episode_begins():
    env = GridWorld(("S..", "..G"), later_goals=[[2, 1, 0], [1, 0, 1]])

    goals = [env.reset()[1]["goal"] for _ in range(4)]

    assert goals == [(2, 1), (0, 1), (1, 0), (1, 0)]
    assert walk(env, RIGHT) == [(1, -1.0, True)]


@pytest.mark.parametrize(
    ("rows", "later", "reason"),
    [
        (("S.", "G"), (), "equal length"),
        (("S.", "GX"), (), "characters"),
        (("..", "SS"), (), "one S and one G"),
        (SMALL, [[1, 1, 0]], "not a free cell"),
        (SMALL, [[1, 5, 0]], "not a free cell"),
    ],
)
def test_a_world_that_makes_no_sense_is_refused(rows, later, reason):
    with pytest.raises(ValueError, match=reason):
        GridWorld(rows, later_goals=later)


def test_it_is_registered_keeps_the_contract_of_gymnasium_and_draws_its_cells():
    env = gymnasium.make("palaestra/GridWorld-v0", render_mode="rgb_array")
    check_env(env.unwrapped, skip_render_check=False)

    assert env.spec.max_episode_steps == MAX_EPISODE_STEPS
    env.reset(seed=0)
    grid = grid_reader(env)(None)
    assert (grid.columns, grid.agent, grid.cells[:5]) == (8, 0, ("start", "floor", "floor", "floor", "wall"))
    assert grid.cells[63] == "goal"
    assert env.render().shape == (256, 256, 3)
    env.close()
