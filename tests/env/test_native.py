"""Author-vectorised environments: the three autoreset modes, masks and snapshots."""

import json
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.env.faulty import Faulty

from palaestra.env.native import NativeEnv
from palaestra.env.spaces import allocate_row, random_actions
from palaestra.env.toy import Countdown, Gate, MaskedChoice, MixedSenses
from palaestra.env.vector import Snapshot
from palaestra.errors import ConfigError, EnvironmentContractError


def _native(make, n=2, mode=AutoresetMode.NEXT_STEP):
    return NativeEnv(SyncVectorEnv([make] * n, autoreset_mode=mode))


def _reset_env(env, seed=0):
    row = allocate_row(env.observation_space, env.num_envs, env.mask_size)
    env.reset(seed, row)
    return row


def _cartpole(n=4):
    return NativeEnv(gymnasium.make_vec("CartPole-v1", n, vectorization_mode="vector_entry_point"))


def test_next_step_autoreset_shows_the_final_observation_and_then_one_invalid_row():
    env = _native(partial(Countdown, length=2))
    row = _reset_env(env)
    none = np.zeros(2, np.int64)
    rows = []
    for _ in range(5):
        ended = env.step(none, row)
        rows.append((row.observation[0, 0], row.reward[0], bool(row.terminated[0]), bool(row.valid[0]), len(ended)))
    assert rows == [
        (1.0, 1.0, False, True, 0),
        (0.0, 2.0, True, True, 2),
        (2.0, 0.0, False, False, 0),
        (1.0, 1.0, False, True, 0),
        (0.0, 2.0, True, True, 2),
    ]
    assert [(e.index, e.observation.tolist(), e.episode_return, e.length) for e in ended] == [
        (0, [0.0], 3.0, 2),
        (1, [0.0], 3.0, 2),
    ]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_same_step_and_disabled_autoreset_look_alike_from_here(mode, ending):
    env = _native(partial(Countdown, length=2, ending=ending), mode=mode)
    row = _reset_env(env)
    none = np.zeros(2, np.int64)
    rows = []
    for _ in range(4):
        ended = env.step(none, row)
        rows.append((row.observation[0, 0], row.reward[0], bool(getattr(row, ending)[0]), len(ended)))
        assert row.valid.all()
    assert rows == [(1.0, 1.0, False, 0), (2.0, 2.0, True, 2), (1.0, 1.0, False, 0), (2.0, 2.0, True, 2)]
    assert [(e.observation.tolist(), e.episode_return, e.length) for e in ended] == [([0.0], 3.0, 2)] * 2


def test_only_the_episodes_that_ended_are_reset_when_autoreset_is_disabled():
    made = iter([Countdown(length=2), Countdown(length=3)])
    spaces_shared = SyncVectorEnv(
        [lambda: next(made)] * 2, autoreset_mode=AutoresetMode.DISABLED, observation_mode="different"
    )
    env = NativeEnv(spaces_shared)
    row = _reset_env(env)
    env.step(np.zeros(2, np.int64), row)
    (ended,) = env.step(np.zeros(2, np.int64), row)
    assert ended.index == 0
    assert row.observation.tolist() == [[2.0], [1.0]]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_dict_observations_are_flattened_in_every_mode(mode):
    env = _native(partial(MixedSenses, length=2, size=2), mode=mode)
    row = _reset_env(env)
    action = np.array([[1, 0], [0, 0]])
    env.step(action, row)
    ended = env.step(action, row)
    assert [e.episode_return for e in ended] == [2.0, 0.0]
    assert np.allclose(ended[0].observation["body/joints"], [0.2, -0.2])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_masks_belong_to_the_observation_in_the_row(mode):
    env = _native(partial(MaskedChoice, n=3, length=2), mode=mode)
    assert env.mask_size == 3
    row = _reset_env(env)
    rng = np.random.default_rng(0)
    for _ in range(12):
        for k, mask in zip(row.observation.tolist(), row.action_mask.tolist(), strict=True):
            assert mask == [j <= k for j in range(3)]
        env.step(random_actions(env.action_space, 2, rng, row.action_mask), row)


def test_a_misspelt_or_missing_mode_means_next_step_and_an_unknown_one_is_refused():
    vector = SyncVectorEnv([Countdown] * 2)
    vector.metadata = {"autoreseet-mode": AutoresetMode.SAME_STEP}
    assert NativeEnv(vector).autoreset_mode is AutoresetMode.NEXT_STEP
    vector.metadata = {"autoreset_mode": "SomeDay"}
    with pytest.raises(ConfigError, match="SomeDay"):
        NativeEnv(vector)


def test_a_same_step_environment_that_hides_its_final_observations_is_a_fault():
    vector = SyncVectorEnv([partial(Countdown, length=1)] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    vector.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    env = NativeEnv(vector)
    row = _reset_env(env)
    with pytest.raises(EnvironmentContractError, match="final_obs"):
        env.step(np.zeros(2, np.int64), row)


def test_what_a_native_environment_raises_is_a_fault_with_its_cause():
    env = _native(partial(Faulty, fault="raise", at=1))
    row = _reset_env(env)
    with pytest.raises(EnvironmentContractError, match="the simulator fell over") as told:
        env.step(np.zeros(2, np.int64), row)
    assert isinstance(told.value.__cause__, RuntimeError)


def test_a_restored_native_cartpole_goes_on_bit_for_bit():
    env = _cartpole()
    row = _reset_env(env, seed=3)
    rng = np.random.default_rng(0)
    for _ in range(60):
        env.step(rng.integers(0, 2, 4), row)
    taken = env.snapshot()
    taken = Snapshot(taken.arrays, json.loads(json.dumps(taken.facts)))
    twin = _cartpole()
    mirror = allocate_row(twin.observation_space, 4)
    assert twin.restore(taken, mirror)
    assert np.array_equal(row.observation, mirror.observation)
    for _ in range(200):
        action = rng.integers(0, 2, 4)
        ended, also = env.step(action, row), twin.step(action, mirror)
        assert row.observation.tobytes() == mirror.observation.tobytes()
        assert np.array_equal(row.valid, mirror.valid)
        assert [(e.index, e.episode_return, e.length) for e in ended] == [
            (e.index, e.episode_return, e.length) for e in also
        ]


def test_environments_that_keep_more_than_plain_attributes_give_no_snapshot():
    env = _native(Countdown)
    _reset_env(env)
    assert env.snapshot() is None
    wrapped = NativeEnv(
        gymnasium.wrappers.vector.ClipReward(
            gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"), 0.0, 0.5
        )
    )
    _reset_env(wrapped)
    assert wrapped.snapshot() is None


def test_a_snapshot_of_another_size_is_refused_and_leaves_fresh_episodes():
    env = _cartpole(2)
    _reset_env(env)
    other = _cartpole(3)
    row = allocate_row(other.observation_space, 3)
    assert not other.restore(env.snapshot(), row)
    other.step(np.zeros(3, np.int64), row)


def test_calls_are_spread_over_the_copies_or_answered_by_the_whole():
    env = _native(Gate)
    assert env.call("set_difficulty", 4) == [4, 4]
    whole = _cartpole(3)
    assert whole.call("gravity") == [9.8] * 3
    with pytest.raises(ConfigError, match="set_difficulty"):
        whole.call("set_difficulty", 4)


def test_wrong_batch_shapes_and_early_steps_are_faults():
    env = _cartpole(2)
    row = allocate_row(env.observation_space, 2)
    with pytest.raises(EnvironmentContractError, match="before reset"):
        env.step(np.zeros(2, np.int64), row)
    env.reset(0, row)
    with pytest.raises(EnvironmentContractError, match="in step"):
        env.step(np.zeros(3, np.int64), row)
    env.close()
    env.close()
