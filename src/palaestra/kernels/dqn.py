"""Kernel of DQN: all gradient steps of an update in one call, on the memory of the torch modules."""

from __future__ import annotations

import math

import numpy as np

from palaestra.kernels.compile import compile_kernel
from palaestra.kernels.network import backward_mlp, forward_mlp
from palaestra.kernels.ppo import adam_step


@compile_kernel
def _largest(row, n):
    best = 0
    for j in range(1, n):
        if row[j] > row[best]:
            best = j
    return best


@compile_kernel
def _combine_dueling(out):
    """Turn advantages and, in the last column, a value into values of actions, in place."""
    n = out.shape[1] - 1
    for r in range(out.shape[0]):
        mean = np.float32(0.0)
        for j in range(n):
            mean += out[r, j]
        mean /= np.float32(n)
        for j in range(n):
            out[r, j] += out[r, n] - mean


@compile_kernel
def train_dqn(data, net, target, sizes, activation, double, dueling, settings, work, first, adam_steps, sums, errors):
    """Take the gradient steps of minibatches `[G, B]`; returns the one with a number that is not finite, or -1.

    `data`: observation, action (from 0), reward, next observation, continues, weight. `net`: params, first and second
    moments, gradients. `settings`: discount, rate, eps, gradient limit (0: none), target share, target interval.
    `first` and `adam_steps`: gradient steps before this call. `sums`: loss, value and gradient norm, added up.
    `errors[G, B]` receives the differences of values and targets.
    """
    observation, action, reward, next_observation, continues, weight = data
    params, moment_1, moment_2, grads = net
    discount, rate, eps, limit, share, interval = settings
    hidden, d_hidden, out, next_out, online_out, d_out, scratch = work
    steps, rows = reward.shape
    k = out.shape[1] - 1 if dueling else out.shape[1]
    for g in range(steps):
        forward_mlp(next_observation[g], target, sizes, activation, hidden, next_out, scratch)
        if dueling:
            _combine_dueling(next_out)
        if double:
            forward_mlp(next_observation[g], params, sizes, activation, hidden, online_out, scratch)
            if dueling:
                _combine_dueling(online_out)
        forward_mlp(observation[g], params, sizes, activation, hidden, out, scratch)
        if dueling:
            _combine_dueling(out)
        d_out[:] = np.float32(0.0)
        loss, value = np.float32(0.0), np.float32(0.0)
        for r in range(rows):
            best = _largest(online_out[r] if double else next_out[r], k)
            td_target = reward[g, r] + discount * next_out[r, best] * continues[g, r]
            q_taken = out[r, action[g, r]]
            error = q_taken - td_target
            errors[g, r] = error
            value += q_taken
            size = abs(error)
            if not size < np.inf:
                return g
            if size < np.float32(1.0):
                loss += np.float32(0.5) * error * error * weight[g, r]
                slope = error
            else:
                loss += (size - np.float32(0.5)) * weight[g, r]
                slope = np.float32(1.0) if error > np.float32(0.0) else np.float32(-1.0)
            slope *= weight[g, r] / np.float32(rows)
            if dueling:
                for j in range(k):
                    d_out[r, j] -= slope / np.float32(k)
                d_out[r, k] = slope
            d_out[r, action[g, r]] += slope
        backward_mlp(observation[g], params, sizes, activation, hidden, d_out, grads, d_hidden, scratch)
        total = np.float32(0.0)
        for i in range(grads.shape[0]):
            total += grads[i] * grads[i]
        norm = math.sqrt(total)
        if not math.isfinite(norm):
            return g
        scale = np.float32(1.0)
        if limit > np.float32(0.0):
            scale = min(scale, np.float32(limit / (norm + 1e-6)))
        adam_step(params, grads, moment_1, moment_2, rate, scale, eps, adam_steps + g + 1)
        sums[0] += loss / np.float32(rows)
        sums[1] += value / np.float32(rows)
        sums[2] += norm
        if (first + g + 1) % interval == 0:
            if share == np.float32(1.0):
                target[:] = params
            else:
                for i in range(target.shape[0]):
                    target[i] += share * (params[i] - target[i])
    return -1
