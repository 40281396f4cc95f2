"""CartPole kernels: dynamics, bounds and rewards of Gymnasium's CartPole-v1 in float64, and a whole rollout.

Each environment has its own random stream (splitmix64, one 64-bit word), so that the N environments of a kernel are as
independent, and as easy to save, as N objects.
"""

from __future__ import annotations

import math

import numpy as np

from palaestra.kernels.compile import compile_kernel
from palaestra.kernels.network import act_categorical

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, TAU = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TOTAL, POLE_LENGTH = CART + POLE, POLE * HALF_LENGTH
MAX_POSITION, MAX_ANGLE = 2.4, 12 * 2 * math.pi / 360


@compile_kernel
def _uniform(stream, i):
    # splitmix64, with the constants and shifts of its authors.
    stream[i] += np.uint64(0x9E3779B97F4A7C15)
    z = stream[i]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compile_kernel
def reset_cartpole(i, state, elapsed, stream, observation):
    """Start an episode in environment `i` and write its first observation."""
    elapsed[i] = 0
    for j in range(4):
        state[i, j] = _uniform(stream, i) * 0.1 - 0.05
        observation[i, j] = np.float32(state[i, j])


@compile_kernel
def step_cartpole(action, state, elapsed, stream, limit, row, ended):
    """Step every environment; returns the number of ended episodes, which are written to `ended`."""
    observation, reward, terminated, truncated = row
    indices, last, lengths = ended
    count = 0
    for i in range(state.shape[0]):
        x, x_dot, theta, theta_dot = state[i, 0], state[i, 1], state[i, 2], state[i, 3]
        force = FORCE if action[i] == 1 else -FORCE
        cos, sin = math.cos(theta), math.sin(theta)
        push = (force + POLE_LENGTH * theta_dot * theta_dot * sin) / TOTAL
        theta_acc = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE * cos * cos / TOTAL))
        x_acc = push - POLE_LENGTH * theta_acc * cos / TOTAL
        state[i, 0] = x + TAU * x_dot
        state[i, 1] = x_dot + TAU * x_acc
        state[i, 2] = theta + TAU * theta_dot
        state[i, 3] = theta_dot + TAU * theta_acc
        elapsed[i] += 1
        fell = abs(state[i, 0]) > MAX_POSITION or abs(state[i, 2]) > MAX_ANGLE
        timed_out = elapsed[i] >= limit
        reward[i], terminated[i], truncated[i] = np.float32(1.0), fell, timed_out
        for j in range(4):
            observation[i, j] = np.float32(state[i, j])
        if fell or timed_out:
            indices[count], lengths[count] = i, elapsed[i]
            for j in range(4):
                last[count, j] = observation[i, j]
            reset_cartpole(i, state, elapsed, stream, observation)
            count += 1
    return count


@compile_kernel
def rollout_cartpole(noise, net, env, columns, ended, scratch, spare):
    """Fill `columns` for T steps without returning to Python, with the same bits as acting and stepping one at a time.

    Returns the number of ended episodes, which are written to `ended` with their steps.
    """
    actor, critic, actor_sizes, critic_sizes, activation = net
    state, elapsed, stream, limit = env
    observation, action, log_prob, value, reward, terminated, truncated = columns
    steps, indices, last, lengths = ended
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
            steps[total], indices[total], lengths[total] = t, spare[0][k], spare[2][k]
            for j in range(last.shape[1]):
                last[total, j] = spare[1][k, j]
            total += 1
    return total
