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

__all__ = ["can_roll_out_whole", "whole_rollout"]


def can_roll_out_whole(env: VectorEnv, acting: Acting) -> bool:
    """Whether one kernel can run this environment under this policy."""
    poles: Any = env
    return type(poles) is CompiledCartPole and isinstance(acting, CompiledActing) and acting.takes_raw


def whole_rollout(
    env: VectorEnv, acting: Acting, buffer: RolloutBuffer, noise: NDArray[np.float32]
) -> list[tuple[int, Ended]] | None:
    """Fill the buffer and tell which episodes ended at which step; None when it has to go step by step."""
    if not can_roll_out_whole(env, acting):
        return None
    poles: Any = env
    assert isinstance(acting, CompiledActing)
    net, T, N = acting.net, buffer.num_steps, buffer.num_envs
    most = T * N
    ended = (
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty((most, 4), np.float32),
        np.empty(most, np.int64),
    )
    spare = (np.empty(N, np.int64), np.empty((N, 4), np.float32), np.empty(N, np.int64))
    columns = (
        buffer.observation, buffer.action, buffer.log_prob, buffer.value, buffer.reward, buffer.terminated,
        buffer.truncated,
    )  # fmt: skip
    count = rollout_cartpole(
        noise,
        (net.actor, net.critic, net.actor_sizes, net.critic_sizes, net.activation),
        (poles.state, poles.elapsed, poles.stream, poles.limit),
        columns,
        ended,
        net.scratch(N),
        spare,
    )
    when, who, last, lengths = ended
    return [
        (int(when[k]), Ended(int(who[k]), last[k].copy(), float(lengths[k]), int(lengths[k]))) for k in range(count)
    ]
