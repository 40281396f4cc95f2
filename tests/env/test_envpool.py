"""EnvPool: its rows are ours, its traps are closed, and what it cannot do is refused."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from palaestra.env import conformance
from palaestra.env.envpool import catalogue, pool
from palaestra.env.envpool.pool import EnvPoolEnv, _derive_seeds
from palaestra.env.make import EnvConfig, known_environments, make_env, with_time_limit
from palaestra.env.spaces import allocate_row
from palaestra.errors import ConfigError, EnvironmentContractError, UnknownEnvironment


def _make(env_id="CartPole-v1", num_envs=2, **settings):
    return make_env(EnvConfig(id=env_id, backend="envpool", num_envs=num_envs, **settings))


def _reset_env(env, seed=0):
    row = allocate_row(env.observation_space, env.num_envs, env.mask_size)
    env.reset(seed, row)
    return row


def _push_right(env, row):
    return env.step(np.ones(env.num_envs, np.int64), row)


@pytest.mark.parametrize(
    ("env_id", "settings"),
    [
        ("CartPole-v1", {"max_episode_steps": 14}),
        ("Pendulum-v1", {"max_episode_steps": 37}),
        ("LunarLander-v3", {"max_episode_steps": 60}),
        ("Hopper-v5", {"max_episode_steps": 11}),
        ("FrozenLake-v1", {}),
    ],
)
def test_environments_of_envpool_keep_the_rules_of_vector_environments(env_id, settings):
    conformance.check(lambda: _make(env_id, 3, **settings), steps=80)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "settings"),
    [
        ("ALE/Pong-v5", {"max_episode_steps": 50}),
        ("Breakout-v5", {"kwargs": {"episodic_life": True}}),
        ("CarRacing-v3", {"max_episode_steps": 20}),
        ("HalfCheetah-v5", {"max_episode_steps": 60, "num_workers": 2}),
        ("FetchReach-v4", {}),
        ("MetaWorld/ButtonPress-v3", {"max_episode_steps": 30}),
    ],
)
def test_larger_environments_of_envpool_keep_the_rules_as_well(env_id, settings):
    conformance.check(lambda: _make(env_id, 3, **settings))


def test_an_ended_episode_is_followed_by_the_next_in_the_same_row():
    env = _make()
    row = _reset_env(env)
    length = 0
    while not (ended := _push_right(env, row)):
        length += 1
    end = ended[0]
    assert end.length == length + 1 == end.episode_return
    assert row.terminated[end.index]
    assert not row.truncated[end.index]
    assert abs(end.observation[2]) > 0.2095  # the pole fell over 12 degrees ...
    assert (np.abs(row.observation[end.index]) <= 0.05).all()  # ... and stands again
    assert row.valid.all()
    assert row.reward[end.index] == 1.0


def test_a_termination_in_the_last_step_of_the_time_limit_stays_a_termination():
    env = _make()
    row = _reset_env(env, seed=3)
    lengths = {}
    while len(lengths) < 2:
        for end in _push_right(env, row):
            lengths.setdefault(end.index, end.length)
    env = _make(max_episode_steps=lengths[0])
    row = _reset_env(env, seed=3)
    for _ in range(lengths[0]):
        ended = _push_right(env, row)
    assert 0 in [end.index for end in ended]
    assert row.terminated[0]
    assert row.truncated[0]


def test_a_time_limit_truncates_and_shows_the_final_observation():
    env = _make("Pendulum-v1", max_episode_steps=5)
    row = _reset_env(env)
    for t in range(5):
        before = row.observation.copy()
        ended = env.step(np.zeros((2, 1), np.float32), row)
        assert len(ended) == (2 if t == 4 else 0)
    assert row.truncated.all()
    assert not row.terminated.any()
    for end in ended:
        assert end.length == 5
        # One step of 0.05 s at 8 rad/s or less turns the pendulum by at most 0.4; a new episode starts anywhere.
        assert np.abs(end.observation[:2] - before[end.index, :2]).max() <= 0.4


def test_a_reset_with_a_seed_repeats_episodes_and_every_environment_has_its_own():
    env = _make(num_envs=3)
    first = _reset_env(env, seed=5).observation
    assert np.array_equal(_reset_env(env, seed=5).observation, first)
    assert not np.array_equal(_reset_env(env, seed=6).observation, first)
    assert len(np.unique(first, axis=0)) == 3
    seeds = _derive_seeds(5, 0, 4096)
    assert len(set(seeds)) == 4096
    assert _derive_seeds(5, 0, 3) == seeds[:3]
    assert _derive_seeds(5, 2, 3) == seeds[2:5]
    assert 0 <= min(seeds) <= max(seeds) < 2**31


def test_the_dynamics_are_those_of_gymnasium():
    env, other = _make(num_envs=1), gymnasium.make("CartPole-v1").unwrapped
    row = _reset_env(env)
    other.reset(seed=0)
    other.state = row.observation[0].astype(np.float64)
    ended = []
    while not ended:
        ended = _push_right(env, row)
        there, _, terminated, _, _ = other.step(1)
        here = ended[0].observation if ended else row.observation[0]
        assert np.abs(here - there).max() < 1e-5
        assert bool(ended) == terminated


def test_actions_of_a_wrong_shape_or_value_never_reach_envpool():
    env = _make(num_envs=2)
    row = _reset_env(env)
    for action in (np.zeros(3, np.int64), np.zeros((2, 1), np.int64), np.zeros(0, np.int64)):
        with pytest.raises(EnvironmentContractError, match=r"expected \(2,\) for 2 environments"):
            env.step(action, row)
    for value in (2, -1):
        with pytest.raises(EnvironmentContractError, match=r"is not in Discrete\(2\)"):
            env.step(np.array([0, value]), row)
    with pytest.raises(EnvironmentContractError, match="the row does not have 2 environments"):
        env.step(np.zeros(2, np.int64), allocate_row(env.observation_space, 3))
    assert _push_right(env, row) == []  # still usable


def test_a_step_needs_a_reset_and_a_closed_environment_stays_closed():
    env = _make()
    with pytest.raises(EnvironmentContractError, match=r"step\(\) was called before reset\(\)"):
        _push_right(env, allocate_row(env.observation_space, 2))
    _reset_env(env)
    env.close()
    env.close()
    with pytest.raises(EnvironmentContractError, match=r"after close\(\)"):
        _reset_env(env)


def test_an_interrupted_step_ends_the_pool_instead_of_mixing_up_its_answers(monkeypatch):
    env = _make()
    row = _reset_env(env)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(env, "_recv", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _push_right(env, row)
    with pytest.raises(EnvironmentContractError, match="before reset"):
        _push_right(env, row)


def test_positions_cannot_be_restored():
    env = _make()
    row = _reset_env(env)
    assert env.snapshot() is None
    assert env.restore(None, row) is False
    assert _push_right(env, row) == []


def test_spaces_are_those_of_one_environment_without_false_bounds():
    lander, cheetah = _make("LunarLander-v3"), _make("HalfCheetah-v5")
    assert lander.observation_space == spaces.Box(-np.inf, np.inf, (8,), np.float32)
    assert lander.action_space == spaces.Discrete(4)
    assert cheetah.observation_space.dtype == np.float32
    assert cheetah.action_space.shape == (6,)


def test_threads_follow_num_workers_and_are_one_on_one_core(monkeypatch):
    assert _make("LunarLander-v3", 4, num_workers=3).num_threads == 3
    assert _make("LunarLander-v3", 4, num_workers=9).num_threads == 4
    for cores, threads in ((1, 1), (3, 3)):
        monkeypatch.setattr(pool, "usable_cores", lambda count=cores: count)
        assert _make("LunarLander-v3", 4).num_threads == threads
        assert _make("CartPole-v1", 4).num_threads == 1


@pytest.mark.parametrize(
    ("env_id", "told"),
    [
        ("LunarLnder-v3", "neither EnvPool nor Gymnasium has this environment. Its nearest: LunarLander-v3"),
        ("palaestra/GridWorld-v0", "EnvPool has no such environment. Leave env.backend out to use the Gymnasium"),
        ("palaestra.env.toy:Countdown", "EnvPool has only its own environments. Leave env.backend out"),
        ("compiled/CartPole-v1", "EnvPool has no such environment. Leave env.backend out"),
        ("WalkerWalk-v1", "only these families are supported: Atari, Box2D, Meta-World, MuJoCo, classic control"),
    ],
)
def test_an_id_that_envpool_does_not_have_is_answered_with_what_there_is(env_id, told):
    with pytest.raises(UnknownEnvironment) as error:
        _make(env_id)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"kwargs": {"gravitas": 3}}, "env.kwargs = {'gravitas': 3}: EnvPool's CartPole-v1 does not take these"),
        ({"kwargs": {"reward_threshold": "x"}}, "env.kwargs = {'reward_threshold': 'x'}: EnvPool's CartPole-v1"),
        ({"kwargs": {"num_threads": 3}}, "env.kwargs.num_threads = 3: is not a setting of the environment. Use env.nu"),
        ({"kwargs": {"batch_size": 1}}, "env.kwargs.batch_size = 1: is not a setting of the environment. Leave"),
        ({"vectorization": "workers"}, "env.vectorization = 'workers': EnvPool steps all copies itself"),
        ({"action_chunk": 2}, "env.action_chunk = 2: EnvPool takes one action per step"),
    ],
)
def test_settings_that_envpool_does_not_take_are_refused(settings, told):
    with pytest.raises(ConfigError) as error:
        _make(**settings)
    assert told in str(error.value)


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnknownEnvironment, match=r"envpool is not installed. pip install 'palaestra\[envpool\]'"):
        _make()


def test_gymnasium_s_name_of_an_atari_game_is_understood():
    env = EnvPoolEnv("ALE/Pong-v5", 1)
    assert env.observation_space.shape == (4, 84, 84)
    assert env.action_space == spaces.Discrete(6)
    # EnvPool's own limit of 27,000 steps applies.
    config = EnvConfig(id="ALE/Pong-v5", backend="envpool")
    assert with_time_limit(config) == config


def test_the_ids_of_envpool_can_be_listed():
    ids = [known.id for known in known_environments("envpool")]
    assert {"CartPole-v1", "LunarLander-v3", "HalfCheetah-v5", "Pong-v5"} <= set(ids)
    assert ids == sorted(ids)
    assert "WalkerWalk-v1" not in ids  # dm_control
