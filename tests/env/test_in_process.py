"""Stepping in this process: autoreset, time limits, faults, seeds and replayed snapshots."""

import json
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from tests.env.faulty import Faulty

from palaestra.env import in_process
from palaestra.env.in_process import InProcessEnv
from palaestra.env.spaces import allocate_row, random_actions, same_observation
from palaestra.env.toy import Bandit, Countdown, Gate, MaskedChoice, MixedSenses, TargetReach
from palaestra.env.vector import Snapshot
from palaestra.errors import ConfigError, EnvironmentContractError


def _reset_env(env, seed=0):
    row = allocate_row(env.observation_space, env.num_envs, env.mask_size)
    env.reset(seed, row)
    return row


def _make_registered(env_id):
    return partial(gymnasium.make, env_id, disable_env_checker=True)


def test_an_episode_that_ends_shows_the_next_one_and_hands_back_the_last_observation():
    env = InProcessEnv(partial(Countdown, length=3), 2)
    row = _reset_env(env)
    assert row.observation.tolist() == [[3.0], [3.0]]
    none = np.zeros(2, np.int64)
    assert env.step(none, row) == []
    assert env.step(none, row) == []
    ended = env.step(none, row)
    assert row.observation.tolist() == [[3.0], [3.0]]
    assert row.reward.tolist() == [3.0, 3.0]
    assert row.terminated.all()
    assert not row.truncated.any()
    assert row.valid.all()
    # 1 + 2 + 3
    assert [(e.index, e.observation.tolist(), e.episode_return, e.length) for e in ended] == [
        (0, [0.0], 6.0, 3),
        (1, [0.0], 6.0, 3),
    ]
    env.step(none, row)
    assert not row.terminated.any()
    assert row.reward.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_time_limit_truncates_and_is_the_shorter_of_two(layers):
    def make():
        env = Countdown(length=10)
        for limit in (4, 6)[:layers]:
            env = TimeLimit(env, limit)
        return env

    env = InProcessEnv(make, 1)
    row = _reset_env(env)
    ends = [e.length for _ in range(9) for e in env.step(np.zeros(1, np.int64), row)]
    assert ends == [4, 4]
    lone = TimeLimit(Countdown(length=4), 4)
    both = InProcessEnv(lambda: lone, 1)
    row = _reset_env(both)
    for _ in range(4):
        both.step(np.zeros(1, np.int64), row)
    assert row.terminated.all()
    assert row.truncated.all()


def test_environments_with_their_own_limits_are_cut_each_at_its_own():
    env = InProcessEnv.from_envs(
        [TimeLimit(Countdown(length=10), 2), TimeLimit(Countdown(length=10), 3), Countdown(10)]
    )
    row = _reset_env(env)
    ends = [(t, e.index) for t in range(1, 7) for e in env.step(np.zeros(3, np.int64), row)]
    assert ends == [(2, 0), (3, 1), (4, 0), (6, 0), (6, 1)]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1"])
def test_the_data_is_what_gymnasium_gives_in_a_plain_loop(env_id):
    env = InProcessEnv(_make_registered(env_id), 3)
    row = _reset_env(env, seed=5)
    peers = [gymnasium.make(env_id) for _ in range(3)]
    for i, peer in enumerate(peers):
        seed = int(np.random.SeedSequence([5, i]).generate_state(1)[0])
        assert np.array_equal(peer.reset(seed=seed)[0].astype(np.float32), row.observation[i])
    rng = np.random.default_rng(0)
    for _ in range(250):
        actions = random_actions(env.action_space, 3, rng)
        ended = {e.index: e for e in env.step(actions, row)}
        for i, peer in enumerate(peers):
            seen, reward, terminated, truncated, _ = peer.step(actions[i])
            assert (np.float32(reward), terminated, truncated) == (
                row.reward[i],
                row.terminated[i],
                row.truncated[i],
            )
            if terminated or truncated:
                assert np.array_equal(ended[i].observation, seen.astype(np.float32))
                seen, _ = peer.reset()
            assert np.array_equal(row.observation[i], seen.astype(np.float32))
    env.close()


def test_actions_are_the_environments_own_numbers():
    env = InProcessEnv(partial(Bandit, best=1, first_arm=5), 3)
    row = _reset_env(env)
    env.step(np.array([5, 6, 7]), row)
    assert row.reward.tolist() == [0.0, 1.0, 0.0]


def test_masks_follow_the_observation_they_belong_to():
    env = InProcessEnv(partial(MaskedChoice, n=3, length=2), 2)
    assert env.mask_size == 3
    row = _reset_env(env)
    rng = np.random.default_rng(0)
    for _ in range(20):
        for k, mask in zip(row.observation.tolist(), row.action_mask.tolist(), strict=True):
            assert mask == [j <= k for j in range(3)]
        env.step(random_actions(env.action_space, 2, rng, row.action_mask), row)


def test_dict_observations_are_written_leaf_by_leaf():
    env = InProcessEnv(partial(MixedSenses, length=2, size=3), 2)
    row = _reset_env(env)
    assert set(row.observation) == {"camera", "body/joints", "body/contact", "room"}
    env.step(np.array([[1, 0], [0, 0]]), row)
    assert row.reward.tolist() == [1.0, 0.0]
    assert np.allclose(row.observation["body/joints"], [[0.1, -0.1]] * 2)
    assert row.observation["body/contact"].tolist() == [[1.0, 1.0]] * 2
    (first, _) = env.step(np.array([[1, 0], [0, 0]]), row)
    assert np.allclose(first.observation["body/joints"], [0.2, -0.2])
    assert not row.observation["body/joints"].any()


def test_what_an_environment_raises_names_the_environment_and_the_step():
    env = InProcessEnv(partial(Faulty, fault="raise", at=3), 2, first_index=4)
    row = _reset_env(env)
    none = np.zeros(2, np.int64)
    env.step(none, row)
    env.step(none, row)
    with pytest.raises(
        EnvironmentContractError,
        match=r"environment 4 \(Faulty\), 3 steps.*the simulator fell over \(.*faulty\.py:\d+, in step\)\.$",
    ) as told:
        env.step(none, row)
    assert isinstance(told.value.__cause__, RuntimeError)


def test_a_wrong_observation_shape_names_what_was_expected_and_what_came():
    env = InProcessEnv(partial(Faulty, fault="shape", at=1), 1)
    row = _reset_env(env)
    with pytest.raises(EnvironmentContractError, match=r"environment 0.*1 step into.*\(3,\).*\(2,\)"):
        env.step(np.zeros(1, np.int64), row)


def test_stepping_before_a_reset_or_with_a_wrong_batch_is_refused():
    env = InProcessEnv(Countdown, 2)
    row = allocate_row(env.observation_space, 2)
    with pytest.raises(EnvironmentContractError, match="before reset"):
        env.step(np.zeros(2, np.int64), row)
    env.reset(0, row)
    with pytest.raises(EnvironmentContractError, match=r"\(3,\), expected \(2,\)"):
        env.step(np.zeros(3, np.int64), row)


def test_environments_of_different_spaces_are_not_mixed():
    with pytest.raises(ConfigError, match=r"env\[1\].observation_space"):
        InProcessEnv.from_envs([Countdown(), TargetReach()])


def test_calls_reach_through_wrappers_to_every_environment():
    env = InProcessEnv(lambda: TimeLimit(Gate(), 5), 2)
    assert env.call("set_difficulty", 3) == [3, 3]
    row = _reset_env(env)
    assert row.observation.tolist() == [[3.0, 0.0], [3.0, 0.0]]
    with pytest.raises(ConfigError, match="set_dificulty"):
        env.call("set_dificulty", 3)


def _play(env, row, steps, seed):
    rng = np.random.default_rng(seed)
    seen = []
    for _ in range(steps):
        action = random_actions(env.action_space, env.num_envs, rng, row.action_mask)
        ended = env.step(action, row)
        seen.append((row.observation.tobytes(), row.reward.tobytes(), row.terminated.tobytes()))
        seen.extend((e.index, e.episode_return, e.length, e.observation.tobytes()) for e in ended)
    return seen


@pytest.mark.parametrize(
    ("env_id", "before", "after"),
    [
        ("CartPole-v1", 333, 500),
        ("LunarLander-v3", 180, 400),
        ("Pendulum-v1", 290, 450),
        ("HalfCheetah-v5", 30, 40),
    ],
)
@pytest.mark.filterwarnings("ignore:.*SwigPy.*:DeprecationWarning", "ignore:.*swigvarlink.*:DeprecationWarning")
def test_a_replayed_environment_goes_on_exactly_as_the_original(env_id, before, after, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log of its warnings wherever it runs
    env = InProcessEnv(_make_registered(env_id), 3)
    row = _reset_env(env, seed=3)
    _play(env, row, before, seed=1)
    taken = env.snapshot()
    assert taken is not None
    taken = Snapshot(taken.arrays, json.loads(json.dumps(taken.facts)))
    twin = InProcessEnv(_make_registered(env_id), 3)
    mirror = allocate_row(twin.observation_space, 3)
    assert twin.restore(taken, mirror)
    assert same_observation(row.observation, mirror.observation)
    again = twin.snapshot()
    assert again.facts == taken.facts
    assert all(np.array_equal(again.arrays[k], taken.arrays[k]) for k in taken.arrays)
    assert _play(env, row, after, seed=2) == _play(twin, mirror, after, seed=2)
    env.close()
    twin.close()


def test_a_snapshot_before_the_first_step_restores_too():
    env = InProcessEnv(_make_registered("CartPole-v1"), 2)
    row = _reset_env(env, seed=9)
    taken = env.snapshot()
    assert taken.arrays["lengths"].tolist() == [0, 0]
    twin = InProcessEnv(_make_registered("CartPole-v1"), 2)
    mirror = allocate_row(twin.observation_space, 2)
    assert twin.restore(taken, mirror)
    assert _play(env, row, 60, seed=2) == _play(twin, mirror, 60, seed=2)


def test_a_replay_that_comes_out_differently_says_so_and_leaves_fresh_episodes():
    env = InProcessEnv(partial(TargetReach, length=9), 2)
    row = _reset_env(env)
    _play(env, row, 5, seed=0)
    taken = env.snapshot()
    taken.arrays["observation"] = taken.arrays["observation"] + 1
    twin = InProcessEnv(partial(TargetReach, length=9), 2)
    mirror = allocate_row(twin.observation_space, 2)
    assert not twin.restore(taken, mirror)
    assert mirror.observation[:, 0].tolist() == [0.0, 0.0]
    ends = [e.length for _ in range(9) for e in twin.step(np.zeros((2, 1), np.float32), mirror)]
    assert ends == [9, 9]


@pytest.mark.parametrize("facts", [{}, {"kind": "replay"}, {"kind": "replay", "seeds": [1], "starts": [{"seed": 1}]}])
def test_a_snapshot_of_something_else_restores_to_nothing(facts):
    env = InProcessEnv(Countdown, 2)
    row = allocate_row(env.observation_space, 2)
    assert not env.restore(Snapshot({}, facts), row)
    assert row.observation.tolist() == [[5.0], [5.0]]


def test_an_environment_with_other_randomness_gives_no_snapshot():
    class Own(Countdown):
        np_random = None

        def reset(self, *, seed=None, options=None):
            self._t = 0
            return self._observe(), {}

    env = InProcessEnv(Own, 1)
    _reset_env(env)
    assert env.snapshot() is None


def test_actions_of_finished_episodes_are_forgotten_and_endless_ones_give_no_snapshot(monkeypatch):
    monkeypatch.setattr(in_process, "_MAX_REPLAY_STEPS", 8)
    env = InProcessEnv(partial(Countdown, length=1000), 1)
    row = _reset_env(env)
    for _ in range(16):
        env.step(np.zeros(1, np.int64), row)
    assert env.snapshot().arrays["lengths"].tolist() == [16]
    env.step(np.zeros(1, np.int64), row)
    assert env.snapshot() is None
    short = InProcessEnv(partial(Countdown, length=7), 2)
    row = _reset_env(short)
    monkeypatch.setattr(in_process, "_MAX_REPLAY_STEPS", 10**6)
    for _ in range(9000):
        short.step(np.zeros(2, np.int64), row)
    assert len(short._history) < 5000
    assert short.snapshot().arrays["lengths"].tolist() == [9000 % 7] * 2


def test_an_observation_array_that_is_reused_by_the_environment_is_copied_in_time():
    class Reuser(Countdown):
        def __init__(self):
            super().__init__(length=2)
            self._kept = np.zeros(1, np.float32)

        def _observe(self):
            self._kept[0] = self._length - self._t
            return self._kept

    env = InProcessEnv(Reuser, 1)
    row = _reset_env(env)
    env.step(np.zeros(1, np.int64), row)
    (ended,) = env.step(np.zeros(1, np.int64), row)
    assert ended.observation.tolist() == [0.0]
    assert row.observation.tolist() == [[2.0]]


def test_scalar_boxes_and_plain_lists_are_observations_too():
    class Scalar(Countdown):
        def __init__(self):
            super().__init__(length=2)
            self.observation_space = spaces.Box(0.0, 2.0, (), np.float32)

        def _observe(self):
            return np.float32(self._length - self._t)

    class Lists(Countdown):
        def _observe(self):
            return [float(self._length - self._t)]

    env = InProcessEnv(Scalar, 2)
    row = _reset_env(env)
    env.step(np.zeros(2, np.int64), row)
    assert row.observation.tolist() == [1.0, 1.0]
    lists = InProcessEnv(Lists, 1)
    row = _reset_env(lists)
    lists.step(np.zeros(1, np.int64), row)
    assert row.observation.tolist() == [[4.0]]


def test_closing_twice_closes_each_environment_once():
    closed = []

    class Noted(Countdown):
        def close(self):
            closed.append(1)

    env = InProcessEnv(Noted, 3)
    env.close()
    env.close()
    assert len(closed) == 3


@pytest.mark.parametrize("shape", [(), (1,), (1, 2), (2, 1), (2, 2), (3,)])
def test_no_wrong_shape_slips_into_a_row(shape):
    class Warped(Faulty):
        def step(self, action):
            return np.ones(shape, np.float32), 0.0, False, False, {}

    env = InProcessEnv(partial(Warped, fault="none"), 1)
    row = _reset_env(env)
    with pytest.raises(EnvironmentContractError, match="environment 0"):
        env.step(np.zeros(1, np.int64), row)
