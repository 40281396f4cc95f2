"""When environment and policy are both arrays, the collector hands the whole rollout to one kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from palaestra.actor.acting import Acting, CompiledActing
from palaestra.env.compiled_cartpole import CompiledCartPole
from palaestra.env.vector import Ended, VectorEnv
from palaestra.experience.buffer import RolloutBuffer
from palaestra.kernels.rollout import rollout_cartpole

__all__ = ["can_roll_out_whole", "roll_out_whole"]


def can_roll_out_whole(env: VectorEnv, acting: Acting) -> bool:
    """Whether one kernel can run this environment under this policy."""
    poles: Any = env
    return type(poles) is CompiledCartPole and isinstance(acting, CompiledActing) and acting.takes_raw


def roll_out_whole(poles: Any, net: Any, buffer: RolloutBuffer, noise: NDArray[np.float32]) -> list[tuple[int, Ended]]:
    """Fill the buffer; returns the episodes that ended, each with its step."""
    N, most = buffer.num_envs, buffer.num_steps * buffer.num_envs
    ended = _allocate_ended(most)
    steps = np.empty(most, np.int64)
    count = rollout_cartpole(
        noise,
        (net.actor, net.critic, net.actor_sizes, net.critic_sizes, net.activation),
        (poles.state, poles.elapsed, poles.stream, poles.limit),
        (
            buffer.observation,
            buffer.action,
            buffer.log_prob,
            buffer.value,
            buffer.reward,
            buffer.terminated,
            buffer.truncated,
        ),
        (steps, *ended),
        net.scratch(N),
        _allocate_ended(N),
    )
    who, last, lengths = ended
    return [
        (int(steps[k]), Ended(int(who[k]), last[k].copy(), float(lengths[k]), int(lengths[k]))) for k in range(count)
    ]


def _allocate_ended(count: int) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Room for the environment, the last observation and the length of episodes that end."""
    return np.empty(count, np.int64), np.empty((count, 4), np.float32), np.empty(count, np.int64)
