"""The rules of `VectorEnv`, executable: run `check` on your environment before you train on it.

Each rule is one sentence; a broken one is raised as an AssertionError that says it. Two copies of the environment are
driven side by side with the same random actions into rows that were filled with different rubbish beforehand: whatever
differs was either not written or not determined by the seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palaestra.env.spaces import allocate_row, copy_observation, random_actions, same_observation
from palaestra.env.vector import Ended, Observation, Snapshot, StepRow, VectorEnv

__all__ = ["check"]


def check(make_env: Callable[[], VectorEnv], *, steps: int = 200, seed: int = 7) -> None:
    """Raise AssertionError with the broken rule. `make_env` is called a few times; everything is closed again."""
    envs = [make_env(), make_env()]
    try:
        _check_pair(envs[0], envs[1], steps, seed)
        _check_snapshot(envs, make_env, steps, seed)
    finally:
        for env in envs:
            env.close()
            env.close()  # harmless when repeated


def _check_pair(one: VectorEnv, other: VectorEnv, steps: int, seed: int) -> None:
    left, right = _row(one), _row(other)
    _spoil(left, 0)
    _spoil(right, 1)
    one.reset(seed, left)
    other.reset(seed, right)
    _must(same_observation(left.observation, right.observation), "the same seed gives the same first observation")
    _check_mask(left)
    rng = np.random.default_rng(seed)
    books = _Books(one.num_envs)
    for _ in range(steps):
        action = random_actions(one.action_space, one.num_envs, rng, left.action_mask)
        _spoil(left, 0)
        _spoil(right, 1)
        ended, also = one.step(action, left), other.step(action.copy(), right)
        _must(_same_row(left, right), "every field of the row is written, and depends on seed and actions alone")
        _must(_same_ends(ended, also), "the same seed and actions end the same episodes")
        _check_mask(left)
        books.absorb(left, list(ended))
        for end in ended:
            first = copy_observation(left.observation, 0)
            _must(_same_form(end.observation, first), "Ended.observation has the form of one row, without the N")
    one.reset(seed, left)
    _must(same_observation(left.observation, _first(other, seed)), "a reset starts over, wherever the episodes were")


class _Books:
    """An independent account of every running episode, from the rows alone."""

    def __init__(self, num_envs: int) -> None:
        self._paid = np.zeros(num_envs, np.float64)
        self._size = np.zeros(num_envs, np.float64)
        self._length = np.zeros(num_envs, np.int64)
        self._paused = np.zeros(num_envs, np.bool_)

    def absorb(self, row: StepRow, ended: list[Ended]) -> None:
        over = row.terminated | row.truncated
        paused = ~row.valid
        _must(not (over & paused).any(), "an ignored action (valid = False) ends no episode")
        _must(not row.reward[paused].any(), "an ignored action (valid = False) pays nothing")
        _must(not (paused & ~self._paused).any(), "an action is ignored only right after the end of an episode")
        self._paid += row.reward
        self._size += np.abs(row.reward)
        self._length += row.valid
        told = sorted(end.index for end in ended)
        _must(told == np.flatnonzero(over).tolist(), "Ended is given once for each terminated or truncated row")
        for end in ended:
            i = end.index
            _must(end.length == self._length[i], "Ended.length counts the steps of the episode")
            # Rows hold float32, the environment may pay in float64.
            close = abs(end.episode_return - self._paid[i]) <= 1e-5 * (1.0 + self._size[i])
            _must(bool(close), "Ended.episode_return is the sum of the episode's rewards")
        self._paid[over] = self._size[over] = 0.0
        self._length[over] = 0
        self._paused = over


def _check_snapshot(envs: list[VectorEnv], make_env: Callable[[], VectorEnv], steps: int, seed: int) -> None:
    env = envs[0]
    row = _row(env)
    env.reset(seed, row)
    rng = np.random.default_rng(seed + 1)
    for _ in range(steps // 2 + 1):
        env.step(random_actions(env.action_space, env.num_envs, rng, row.action_mask), row)
    taken = env.snapshot()
    if taken is None:
        return
    try:
        facts = json.loads(json.dumps(taken.facts, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"Snapshot.facts are plain JSON: {error}") from error
    arrays = {name: np.array(array) for name, array in taken.arrays.items()}
    _must(all(a.dtype != np.dtype(object) for a in arrays.values()), "Snapshot.arrays are plain arrays")
    envs.append(make_env())
    twin, mirror = envs[-1], _row(env)
    _spoil(mirror, 1)
    _must(twin.restore(Snapshot(arrays, facts), mirror), "restore comes back to where its own snapshot was taken")
    _must(same_observation(row.observation, mirror.observation), "restore writes the observation it came back to")
    for _ in range(steps):
        action = random_actions(env.action_space, env.num_envs, rng, row.action_mask)
        ended, also = env.step(action, row), twin.step(action, mirror)
        _must(_same_row(row, mirror), "after a restore everything goes on as if nothing had happened")
        _must(_same_ends(ended, also), "after a restore episodes end with the same return and length")


def _row(env: VectorEnv) -> StepRow:
    return allocate_row(env.observation_space, env.num_envs, env.mask_size)


def _spoil(row: StepRow, kind: int) -> None:
    """Fill the row with rubbish that differs by `kind`, so that an unwritten cell shows. Masks are inputs here too."""
    parts = row.observation.values() if isinstance(row.observation, dict) else [row.observation]
    for part in parts:
        part.fill(77 + kind)
    row.reward.fill(1234.5 + kind)
    for flags in (row.terminated, row.truncated, row.valid):
        flags.fill(bool(kind))


def _first(env: VectorEnv, seed: int) -> Observation:
    row = _row(env)
    env.reset(seed, row)
    return row.observation


def _check_mask(row: StepRow) -> None:
    if row.action_mask is not None:
        _must(bool(row.action_mask.any(-1).all()), "an action mask allows at least one action")


def _same_row(one: StepRow, other: StepRow) -> bool:
    pairs: list[tuple[NDArray[Any], NDArray[Any]]] = [
        (one.reward, other.reward),
        (one.terminated, other.terminated),
        (one.truncated, other.truncated),
        (one.valid, other.valid),
    ]
    if one.action_mask is not None and other.action_mask is not None:
        pairs.append((one.action_mask, other.action_mask))
    alike = all(np.array_equal(a, b) for a, b in pairs)
    return alike and same_observation(one.observation, other.observation)


def _same_ends(one: Any, other: Any) -> bool:
    key = lambda end: end.index  # noqa: E731  two uses, one line
    pairs = list(zip(sorted(one, key=key), sorted(other, key=key), strict=False))
    return len(one) == len(other) and all(
        (a.index, a.episode_return, a.length) == (b.index, b.episode_return, b.length)
        and same_observation(a.observation, b.observation)
        for a, b in pairs
    )


def _same_form(one: Observation, other: Observation) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_form(one[key], other[key]) for key in one)
    if isinstance(one, dict) or isinstance(other, dict):
        return False
    return one.shape == other.shape and one.dtype == other.dtype


def _must(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"broken rule: {rule}")
