"""A whole rollout in one kernel: acting and stepping without returning to Python in between.

For environments that are arrays themselves. The same functions that act and step one at a time, so the numbers are the
same bit for bit.
"""

from __future__ import annotations

from palaestra.kernels.cartpole import step_cartpole
from palaestra.kernels.compile import compiled
from palaestra.kernels.network import act_categorical

__all__ = ["rollout_cartpole"]


@compiled
def rollout_cartpole(noise, net, env, columns, ended, scratch, spare):
    """Fill `columns` for T steps; returns how many episodes ended, each described in `ended` with its step."""
    actor, critic, actor_sizes, critic_sizes, activation = net
    state, elapsed, stream, limit = env
    observation, action, log_prob, value, reward, terminated, truncated = columns
    when, who, last, lengths = ended
    total = 0
    for t in range(reward.shape[0]):
        act_categorical(
            observation[t],
            noise[t],
            actor,
            critic,
            actor_sizes,
            critic_sizes,
            activation,
            scratch,
            action[t],
            log_prob[t],
            value[t],
        )
        row = (observation[t + 1], reward[t], terminated[t], truncated[t])
        count = step_cartpole(action[t], state, elapsed, stream, limit, row, spare)
        for k in range(count):
            when[total], who[total], lengths[total] = t, spare[0][k], spare[2][k]
            for j in range(last.shape[1]):
                last[total, j] = spare[1][k, j]
            total += 1
    return total
