"""Executable rules of `VectorEnv`: run `check` on your environment before you train on it.

A broken rule raises an AssertionError with the rule as its text. Two copies of the environment run with the same random
actions and write into rows that were filled with different garbage; a difference was either not written or not
determined by the seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from palaestra.env.spaces import allocate_row, copy_observation, random_actions, same_observation
from palaestra.env.vector import EpisodeEnd, Observation, Snapshot, StepRow, VectorEnv


def check(make_env: Callable[[], VectorEnv], *, steps: int = 200, seed: int = 7) -> None:
    """Raise an AssertionError for the first broken rule. Calls `make_env` a few times and closes the environments."""
    envs = [make_env(), make_env()]
    try:
        _check_pair(envs[0], envs[1], steps, seed)
        _check_snapshot(envs, make_env, steps, seed)
    finally:
        for env in envs:
            env.close()
            env.close()  # may be repeated


def _check_pair(one: VectorEnv, other: VectorEnv, steps: int, seed: int) -> None:
    left, right = _allocate_row(one), _allocate_row(other)
    _fill_with_garbage(left, 0)
    _fill_with_garbage(right, 1)
    one.reset(seed, left)
    other.reset(seed, right)
    _require(same_observation(left.observation, right.observation), "the same seed gives the same first observation")
    _check_mask(left)
    rng = np.random.default_rng(seed)
    statistics = _EpisodeStatistics(one.num_envs)
    for _ in range(steps):
        action = random_actions(one.action_space, one.num_envs, rng, left.action_mask)
        _fill_with_garbage(left, 0)
        _fill_with_garbage(right, 1)
        ended, other_ended = one.step(action, left), other.step(action.copy(), right)
        _require(_is_same_row(left, right), "every field of the row is written, and depends on seed and actions alone")
        _require(_is_same_ends(ended, other_ended), "the same seed and actions end the same episodes")
        _check_mask(left)
        statistics.update(left, list(ended))
        for end in ended:
            first = copy_observation(left.observation, 0)
            _require(
                _is_same_form(end.observation, first), "EpisodeEnd.observation has the form of one row, without the N"
            )
    one.reset(seed, left)
    _require(
        same_observation(left.observation, _first_observation(other, seed)),
        "a reset starts over at any point of the episodes",
    )


class _EpisodeStatistics:
    """Return and length of every running episode, computed from the rows alone."""

    def __init__(self, num_envs: int) -> None:
        self._return = np.zeros(num_envs, np.float64)
        self._absolute_return = np.zeros(num_envs, np.float64)
        self._length = np.zeros(num_envs, np.int64)
        self._paused = np.zeros(num_envs, np.bool_)

    def update(self, row: StepRow, ended: list[EpisodeEnd]) -> None:
        over = row.terminated | row.truncated
        paused = ~row.valid
        _require(not (over & paused).any(), "an ignored action (valid = False) ends no episode")
        _require(not row.reward[paused].any(), "an ignored action (valid = False) pays nothing")
        _require(not (paused & ~self._paused).any(), "an action is ignored only right after the end of an episode")
        self._return += row.reward
        self._absolute_return += np.abs(row.reward)
        self._length += row.valid
        indices = sorted(end.index for end in ended)
        _require(
            indices == np.flatnonzero(over).tolist(), "EpisodeEnd is given once for each terminated or truncated row"
        )
        for end in ended:
            i = end.index
            _require(end.length == self._length[i], "EpisodeEnd.length counts the steps of the episode")
            # Rows hold float32; the rewards of the environment may be float64.
            close = abs(end.episode_return - self._return[i]) <= 1e-5 * (1.0 + self._absolute_return[i])
            _require(bool(close), "EpisodeEnd.episode_return is the sum of the episode's rewards")
        self._return[over] = self._absolute_return[over] = 0.0
        self._length[over] = 0
        self._paused = over


def _check_snapshot(envs: list[VectorEnv], make_env: Callable[[], VectorEnv], steps: int, seed: int) -> None:
    env = envs[0]
    row = _allocate_row(env)
    env.reset(seed, row)
    rng = np.random.default_rng(seed + 1)
    for _ in range(steps // 2 + 1):
        env.step(random_actions(env.action_space, env.num_envs, rng, row.action_mask), row)
    snapshot = env.snapshot()
    if snapshot is None:
        return
    try:
        facts = json.loads(json.dumps(snapshot.facts, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"Snapshot.facts are plain JSON: {error}") from error
    arrays = {name: np.array(array) for name, array in snapshot.arrays.items()}
    _require(all(a.dtype != np.dtype(object) for a in arrays.values()), "Snapshot.arrays are plain arrays")
    envs.append(make_env())
    twin, mirror = envs[-1], _allocate_row(env)
    _fill_with_garbage(mirror, 1)
    _require(twin.restore(Snapshot(arrays, facts), mirror), "restore returns to the state of the snapshot")
    _require(same_observation(row.observation, mirror.observation), "restore writes the observation of the snapshot")
    for _ in range(steps):
        action = random_actions(env.action_space, env.num_envs, rng, row.action_mask)
        ended, other_ended = env.step(action, row), twin.step(action, mirror)
        _require(_is_same_row(row, mirror), "after a restore every step is as without it")
        _require(_is_same_ends(ended, other_ended), "after a restore episodes end with the same return and length")


def _allocate_row(env: VectorEnv) -> StepRow:
    return allocate_row(env.observation_space, env.num_envs, env.mask_size)


def _fill_with_garbage(row: StepRow, kind: int) -> None:
    """Fill the row with values that depend on `kind`, to detect unwritten cells. Masks are inputs, so they stay."""
    parts = row.observation.values() if isinstance(row.observation, dict) else [row.observation]
    for part in parts:
        part.fill(77 + kind)
    row.reward.fill(1234.5 + kind)
    for flags in (row.terminated, row.truncated, row.valid):
        flags.fill(bool(kind))


def _first_observation(env: VectorEnv, seed: int) -> Observation:
    row = _allocate_row(env)
    env.reset(seed, row)
    return row.observation


def _check_mask(row: StepRow) -> None:
    if row.action_mask is not None:
        _require(bool(row.action_mask.any(-1).all()), "an action mask allows at least one action")


def _is_same_row(one: StepRow, other: StepRow) -> bool:
    names = ("reward", "terminated", "truncated", "valid", "action_mask")
    same_arrays = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
    return same_arrays and same_observation(one.observation, other.observation)


def _is_same_ends(one: Sequence[EpisodeEnd], other: Sequence[EpisodeEnd]) -> bool:
    left, right = (sorted(ends, key=lambda end: end.index) for ends in (one, other))
    return len(one) == len(other) and all(
        (a.index, a.episode_return, a.length) == (b.index, b.episode_return, b.length)
        and same_observation(a.observation, b.observation)
        for a, b in zip(left, right, strict=True)
    )


def _is_same_form(one: Observation, other: Observation) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same_form(one[key], other[key]) for key in one)
    if isinstance(one, dict) or isinstance(other, dict):
        return False
    return one.shape == other.shape and one.dtype == other.dtype


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"broken rule: {rule}")
