"""CartPole's equations, compiled: the dynamics, bounds and rewards of Gymnasium's CartPole-v1 in float64.

Each environment carries its own random stream (splitmix64, one 64-bit word), so that N environments in one kernel are
as independent, and as easy to put on disk, as N objects. `env.compiled_cartpole` and `kernels.rollout` drive it.
"""

from __future__ import annotations

import math

import numpy as np

from palaestra.kernels.compile import compiled

__all__ = ["begin_cartpole", "step_cartpole"]

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, TAU = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TOTAL, POLE_LENGTH = CART + POLE, POLE * HALF_LENGTH
TRACK, LEAN = 2.4, 12 * 2 * math.pi / 360


@compiled
def _uniform(stream, i):
    # splitmix64: constants and shifts as published by its authors.
    stream[i] += np.uint64(0x9E3779B97F4A7C15)
    z = stream[i]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def begin_cartpole(i, state, elapsed, stream, observation):
    """Start an episode in environment `i` and write its first observation."""
    elapsed[i] = 0
    for j in range(4):
        state[i, j] = _uniform(stream, i) * 0.1 - 0.05
        observation[i, j] = np.float32(state[i, j])


@compiled
def step_cartpole(action, state, elapsed, stream, limit, row, ended):
    """Step every environment; returns how many episodes ended and describes each in `ended`."""
    observation, reward, terminated, truncated = row
    who, last, lengths = ended
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
        fell = abs(state[i, 0]) > TRACK or abs(state[i, 2]) > LEAN
        late = elapsed[i] >= limit
        reward[i], terminated[i], truncated[i] = np.float32(1.0), fell, late
        for j in range(4):
            observation[i, j] = np.float32(state[i, j])
        if fell or late:
            who[count], lengths[count] = i, elapsed[i]
            for j in range(4):
                last[count, j] = observation[i, j]
            begin_cartpole(i, state, elapsed, stream, observation)
            count += 1
    return count
