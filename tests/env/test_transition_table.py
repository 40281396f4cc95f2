"""Walking through the table of a toy text environment visits the states that the environment visits."""

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TransformReward

from palaestra.env.in_process import InProcessEnv
from palaestra.env.make import EnvConfig, make_env
from palaestra.env.spaces import allocate_row
from palaestra.env.transition_table import TransitionTable
from palaestra.kernels.table_walk import walk_table

STEPS = 400


def walk(table, generator, uniforms, *, epsilon=1.0, values=None, chooses_next=False, limit=None):
    """Transitions and ended episodes of a walk from the current state of the world."""
    num_states, num_actions = table.first.shape[0], table.first.shape[1] - 1
    values = np.zeros((num_states, num_actions)) if values is None else values
    integers = [np.zeros(STEPS, np.int64) for _ in range(4)]
    states, actions, following, next_actions = integers
    rewards, terminated = np.zeros(STEPS, np.float32), np.zeros(STEPS, np.bool_)
    ends = (np.zeros(STEPS, np.int64), np.zeros(STEPS), np.zeros(STEPS, np.int64))
    position = np.array([int(table.world.s), 0, -1, 0, 0])
    columns = (states, actions, rewards, following, terminated, next_actions)
    count = walk_table(
        values,
        epsilon,
        table.process,
        table.limit if limit is None else limit,
        position,
        np.zeros(1),
        (generator.random(2 * STEPS), uniforms),
        columns,
        ends,
        chooses_next,
    )
    return columns, [tuple(end[i].item() for end in ends) for i in range(count)]


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("FrozenLake-v1", {}),
        ("FrozenLake8x8-v1", {}),
        ("CliffWalking-v1", {}),
        ("CliffWalking-v1", {"is_slippery": True}),
        ("Taxi-v4", {}),
        ("Taxi-v4", {"is_rainy": True}),
    ],
)
def test_a_walk_and_the_environment_agree_in_every_step_reward_and_end(env_id, kwargs):
    config = EnvConfig(id=env_id, num_envs=1, kwargs=kwargs, max_episode_steps=50, vectorization="in_process")
    env, twin = make_env(config), make_env(config)
    row = allocate_row(env.observation_space, 1, env.mask_size)
    twin_row = allocate_row(twin.observation_space, 1, twin.mask_size)
    env.reset(7, row)
    twin.reset(7, twin_row)
    table = TransitionTable.of(env)
    uniforms = np.random.default_rng(1).random(4 * STEPS)
    columns, ends = walk(table, table.world.np_random, uniforms)
    played = []
    for state, action, reward, following, terminated in zip(*(column.tolist() for column in columns[:5]), strict=True):
        assert twin_row.observation[0] == state
        ended = twin.step(np.array([action]), twin_row)
        assert (twin_row.reward[0], bool(twin_row.terminated[0])) == (reward, terminated)
        assert following == (ended[0].observation if ended else twin_row.observation[0])
        played += [(ended[0].episode_return, ended[0].length)] if ended else []
    assert [end[1:] for end in ends] == played
    assert len(played) >= 3


def test_the_next_action_is_the_action_of_the_next_step_except_after_an_end():
    env = make_env(EnvConfig(id="FrozenLake-v1", num_envs=1, vectorization="in_process"))
    env.reset(3, allocate_row(env.observation_space, 1))
    table = TransitionTable.of(env)
    columns, ends = walk(
        table, table.world.np_random, np.random.default_rng(2).random(4 * STEPS), chooses_next=True, limit=5
    )
    _, actions, _, _, terminated, next_actions = columns
    last_steps = {end[0] for end in ends}
    inner = [t for t in range(STEPS - 1) if t not in last_steps]
    assert [next_actions[t] for t in inner] == [actions[t + 1] for t in inner]
    truncated = [t for t in last_steps if not terminated[t]]
    assert truncated
    assert {int(next_actions[t]) for t in truncated} == {0, 1, 2, 3}  # chosen although no step follows


def test_a_walk_without_exploration_follows_the_table():
    env = make_env(EnvConfig(id="CliffWalking-v1", num_envs=1, vectorization="in_process"))
    env.reset(0, allocate_row(env.observation_space, 1))
    table = TransitionTable.of(env)
    values = np.zeros((48, 4))
    values[36, 0] = values[24:35, 1] = values[35, 2] = 1.0  # up, along the cliff, down to the goal
    _, ends = walk(table, table.world.np_random, np.zeros(4 * STEPS), epsilon=0.0, values=values)
    assert ends[0] == (12, -13.0, 13)
    assert len(ends) == STEPS // 13


def test_other_environments_wrappers_and_changing_passengers_have_no_table():
    assert TransitionTable.of(make_env(EnvConfig(id="CartPole-v1", num_envs=1, vectorization="in_process"))) is None
    several = EnvConfig(id="FrozenLake-v1", num_envs=2, vectorization="in_process")
    assert TransitionTable.of(make_env(several)) is None
    wrapped = InProcessEnv(lambda: TransformReward(gymnasium.make("FrozenLake-v1"), lambda r: 2 * r), 1)
    assert TransitionTable.of(wrapped) is None
    fickle = EnvConfig(id="Taxi-v4", num_envs=1, kwargs={"fickle_passenger": True}, vectorization="in_process")
    assert TransitionTable.of(make_env(fickle)) is None
