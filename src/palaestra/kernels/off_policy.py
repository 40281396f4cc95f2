"""Kernels of learning from transitions: the heads of the losses, and the optimiser with the target network.

The matrix products are calls of torch (`policy.off_policy.fused`); everything between them is here, one pass over
memory each. Gradients are derived by hand; tests compare them with autograd.
"""

from __future__ import annotations

import math

import numpy as np

from palaestra.kernels.compile import compile_kernel

_LOG_SQRT_2PI = np.float32(0.5 * math.log(2.0 * math.pi))
_LOG_2 = np.float32(math.log(2.0))
MAX_ADVANTAGE_WEIGHT = 100.0
"""Largest weight of a sample in the regression of IQL."""
_MIN, _MAX = np.float32(-20.0), np.float32(2.0)  # LOG_STD_MIN and LOG_STD_MAX of the distributions


@compile_kernel
def adam_polyak(params, grads, first, second, target, rate, scale, eps, step, tau):
    """One step of Adam with the gradient times `scale`, after which the target moves by `tau` towards the weights."""
    one, b1, b2 = np.float32(1.0), np.float32(0.9), np.float32(0.999)
    size = np.float32(rate / (1.0 - 0.9**step))
    root = np.float32(1.0 / math.sqrt(1.0 - 0.999**step))
    for i in range(params.shape[0]):
        g = grads[i] * scale
        m = b1 * first[i] + (one - b1) * g
        v = b2 * second[i] + (one - b2) * g * g
        first[i] = m
        second[i] = v
        p = params[i] - size * m / (np.sqrt(v) * root + eps)
        params[i] = p
        target[i] = (one - tau) * target[i] + tau * p


@compile_kernel
def td_targets(q1, q2, log_prob, alpha, reward, terminated, gamma, td_target):
    """`reward + gamma * (smaller value - alpha * log_prob)`, and the reward alone after termination."""
    for r in range(reward.shape[0]):
        future = min(q1[r, 0], q2[r, 0]) - alpha * log_prob[r]
        td_target[r] = reward[r] if terminated[r] else reward[r] + gamma * future


@compile_kernel
def squared_head(values, target, factor, d_values):
    """`d_values = factor * (values - target)`; returns the mean squared error and the mean value."""
    n = target.shape[0]
    loss, total = 0.0, 0.0
    for r in range(n):
        e = values[r, 0] - target[r]
        d_values[r, 0] = factor * e
        loss += e * e
        total += values[r, 0]
    return loss / n, total / n


@compile_kernel
def taken_squared_head(values, action, target, factor, d_values):
    """`squared_head` for one value per discrete action."""
    n = target.shape[0]
    loss, total = 0.0, 0.0
    for r in range(n):
        for j in range(values.shape[1]):
            d_values[r, j] = np.float32(0.0)
        e = values[r, action[r]] - target[r]
        d_values[r, action[r]] = factor * e
        loss += e * e
        total += values[r, action[r]]
    return loss / n, total / n


@compile_kernel
def min_q_head(q1, q2, factor, d_q1, d_q2):
    """Gradient `factor` to the smaller of two values; returns the mean of the smaller ones."""
    n = q1.shape[0]
    total = 0.0
    for r in range(n):
        first = q1[r, 0] <= q2[r, 0]
        d_q1[r, 0] = factor if first else np.float32(0.0)
        d_q2[r, 0] = np.float32(0.0) if first else factor
        total += q1[r, 0] if first else q2[r, 0]
    return total / n


@compile_kernel
def sample_tanh_gaussian(parameters, noise, pairs, offset, log_prob):
    """Write squashed actions to `pairs[:, offset:]` and their log-densities; returns the mean log-density."""
    n, k = noise.shape
    mean_log_prob = 0.0
    for r in range(n):
        total = np.float32(0.0)
        for j in range(k):
            log_std = min(max(parameters[r, k + j], _MIN), _MAX)
            z = noise[r, j]
            u = parameters[r, j] + np.exp(log_std) * z
            pairs[r, offset + j] = np.tanh(u)
            # softplus(-2u), without overflow.
            x = np.float32(-2.0) * u
            soft = max(x, np.float32(0.0)) + np.log1p(np.exp(-abs(x)))
            slope = np.float32(2.0) * (_LOG_2 - u - soft)
            total += np.float32(-0.5) * z * z - log_std - _LOG_SQRT_2PI - slope
        log_prob[r] = total
        mean_log_prob += total
    return mean_log_prob / n


@compile_kernel
def tanh_gaussian_gradient(parameters, noise, pairs, offset, d_action, weight, d_parameters):
    """Gradient at the parameters for gradients `d_action` at the actions and `weight` at the log-densities."""
    n, k = noise.shape
    one, two = np.float32(1.0), np.float32(2.0)
    for r in range(n):
        for j in range(k):
            raw = parameters[r, k + j]
            log_std = min(max(raw, _MIN), _MAX)
            a = pairs[r, offset + j]
            d_u = d_action[r, j] * (one - a * a) + weight * two * a
            d_parameters[r, j] = d_u
            inside = _MIN <= raw <= _MAX
            d_parameters[r, k + j] = d_u * np.exp(log_std) * noise[r, j] - weight if inside else np.float32(0.0)


@compile_kernel
def smooth_target_action(out, noise, deviation, limit, pairs, offset):
    """Write `clip(tanh(out) + clip(deviation * noise, limit))` to `pairs[:, offset:]`."""
    one = np.float32(1.0)
    for r in range(noise.shape[0]):
        for j in range(noise.shape[1]):
            e = min(max(deviation * noise[r, j], -limit), limit)
            pairs[r, offset + j] = min(max(np.tanh(out[r, j]) + e, -one), one)


@compile_kernel
def write_tanh(out, pairs, offset):
    """Write `tanh(out)` to `pairs[:, offset:]`."""
    for r in range(out.shape[0]):
        for j in range(out.shape[1]):
            pairs[r, offset + j] = np.tanh(out[r, j])


@compile_kernel
def mean_sizes(values):
    """Mean and mean absolute value of `values[:, 0]`."""
    n = values.shape[0]
    total, size = 0.0, 0.0
    for r in range(n):
        total += values[r, 0]
        size += abs(values[r, 0])
    return total / n, size / n


@compile_kernel
def imitation_gradient(pairs, offset, action, d_action, weight, d_out):
    """Gradient at the output of a tanh actor: `d_action` plus that of `weight` times the mean squared distance.

    `pairs[:, offset:]` are the actor's actions. Returns the mean squared distance.
    """
    n, k = action.shape
    share = np.float32(2.0) * weight / np.float32(n * k)
    total = 0.0
    for r in range(n):
        for j in range(k):
            a = pairs[r, offset + j]
            e = a - action[r, j]
            d_out[r, j] = (d_action[r, j] + share * e) * (np.float32(1.0) - a * a)
            total += e * e
    return total / (n * k)


@compile_kernel
def expectile_head(value, target, expectile, d_value, advantage):
    """Gradient of the mean asymmetric squared error of values; returns the mean loss and the mean advantage."""
    n = target.shape[0]
    share = np.float32(2.0) / np.float32(n)
    loss, total = 0.0, 0.0
    for r in range(n):
        a = target[r] - value[r, 0]
        side = np.float32(1.0) - expectile if a < 0 else expectile
        d_value[r, 0] = -share * side * a
        advantage[r] = a
        loss += side * a * a
        total += a
    return loss / n, total / n


@compile_kernel
def regression_weights(advantage, beta, limit, weight):
    """`min(exp(beta * advantage), limit)`."""
    for r in range(advantage.shape[0]):
        weight[r] = min(np.exp(beta * advantage[r]), limit)


@compile_kernel
def gaussian_regression(out, log_std, action, weight, d_out, d_log_std):
    """Gradients of the mean weighted negative log-density of actions around `tanh(out)`; returns the mean loss."""
    n, k = action.shape
    share = np.float32(1.0) / np.float32(n)
    d_log_std[:] = np.float32(0.0)
    loss = 0.0
    for r in range(n):
        total = np.float32(0.0)
        for j in range(k):
            clamped = min(max(log_std[j], _MIN), _MAX)
            inverse = np.exp(-clamped)
            mean = np.tanh(out[r, j])
            z = (action[r, j] - mean) * inverse
            d_out[r, j] = -share * weight[r] * z * inverse * (np.float32(1.0) - mean * mean)
            if _MIN <= log_std[j] <= _MAX:
                d_log_std[j] += share * weight[r] * (np.float32(1.0) - z * z)
            total += np.float32(0.5) * z * z + clamped + _LOG_SQRT_2PI
        loss += weight[r] * total
    return loss / n


@compile_kernel
def categorical_regression(logits, action, weight, d_logits):
    """Gradient of the mean weighted negative log-probability of actions; returns the mean loss."""
    n, k = logits.shape
    share = np.float32(1.0) / np.float32(n)
    loss = 0.0
    for r in range(n):
        top = logits[r, 0]
        for j in range(1, k):
            top = max(top, logits[r, j])
        total = np.float32(0.0)
        for j in range(k):
            d_logits[r, j] = np.exp(logits[r, j] - top)
            total += d_logits[r, j]
        for j in range(k):
            d_logits[r, j] *= share * weight[r] / total
        d_logits[r, action[r]] -= share * weight[r]
        loss += weight[r] * (np.log(total) + top - logits[r, action[r]])
    return loss / n
