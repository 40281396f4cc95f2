"""`TransitionTable`: the transition probabilities of Gymnasium's toy text environments as arrays.

FrozenLake, CliffWalking and Taxi know their whole table `P`. A kernel that walks through it visits the same states as
the environment, because both take one random number for each step and one for each reset from the same generator, and
needs a hundredth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.envs.toy_text.taxi import TaxiEnv
from numpy.typing import NDArray

from palaestra.env.in_process import InProcessEnv
from palaestra.env.vector import VectorEnv


@dataclass(frozen=True)
class TransitionTable:
    """Outcomes of every action in every state; `kernels.table_walk` describes the arrays."""

    first: NDArray[np.int64]
    cumulative: NDArray[np.float64]
    next_state: NDArray[np.int64]
    reward: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    initial: NDArray[np.float64]
    """Cumulative probability of the first state of an episode."""
    limit: int
    """Steps after which an episode is truncated."""
    world: Any
    """The environment without wrappers."""

    @classmethod
    def of(cls, env: VectorEnv) -> TransitionTable | None:
        """The table of a single environment in this process; None if it has none, or its steps depend on more."""
        if not isinstance(env, InProcessEnv) or env.num_envs != 1:
            return None
        world: Any
        world, limit = env.unwrapped_env(0)
        # Exactly these classes and no wrapper: a subclass or a wrapper may do more than its table says.
        if type(world) not in (FrozenLakeEnv, CliffWalkingEnv, TaxiEnv) or getattr(world, "fickle_passenger", False):
            return None
        num_states, num_actions = len(world.P), len(world.P[0])
        first = np.zeros((num_states, num_actions + 1), np.int64)
        outcomes: list[tuple[float, int, float, bool]] = []
        for state in range(num_states):
            for action in range(num_actions):
                first[state, action] = len(outcomes)
                branches = world.P[state][action]
                cumulative = np.cumsum([branch[0] for branch in branches])
                outcomes += [(total, *branch[1:]) for total, branch in zip(cumulative, branches, strict=True)]
            first[state, num_actions] = len(outcomes)
        totals, following, rewards, ends = zip(*outcomes, strict=True)
        return cls(
            first,
            np.array(totals, np.float64),
            np.array(following, np.int64),
            np.array(rewards, np.float64),
            np.array(ends, np.bool_),
            np.cumsum(world.initial_state_distrib),
            limit,
            world,
        )

    @property
    def process(self) -> tuple[NDArray[Any], ...]:
        """The arrays that the kernel takes."""
        return self.first, self.cumulative, self.next_state, self.reward, self.terminated, self.initial
