"""Kernels of the PPO update: the arithmetic of `learner.ppo` without dispatch between operations.

`train_policy` and `train_value` run all epochs and minibatches of one update, including Adam, for an actor and a critic
that share no weights; with separate gradient clipping they are independent and may run in two threads. `train_joint`
interleaves them for one global gradient norm. Shuffled indices are passed in as `order`, so that results are
reproducible with and without kernels. Gradients are derived by hand; tests compare them with autograd.
"""

from __future__ import annotations

import math

import numpy as np

from palaestra.kernels.compile import compile_kernel
from palaestra.kernels.network import backward_mlp, forward_mlp, log_softmax_row

_LOG_SQRT_2PI = np.float32(0.5 * math.log(2.0 * math.pi))

# Indices into the `settings` vector, which `learner.compiled` fills.
RATE, CLIP, ENTROPY_COEF, TARGET_KL, MAX_NORM, ADAM_EPS, VALUE_COEF, VALUE_CLIP, NORMALIZE = range(9)
# Indices into the `sums` vector, which is returned.
POLICY_LOSS, ENTROPY, KL, CLIPPED, ACTOR_NORM, POLICY_STEPS = range(6)
VALUE_LOSS, CRITIC_NORM, VALUE_STEPS = range(6, 9)
STOPPED_AT, NON_FINITE_AT = 9, 10
NUM_SUMS = 11


@compile_kernel
def gae_columns(reward, value, next_value, terminated, truncated, discount, lam, advantage):
    """`learner.returns.gae` on `[T, N]` arrays."""
    steps, envs = reward.shape
    for n in range(envs):
        carry = np.float32(0.0)
        for t in range(steps - 1, -1, -1):
            future = np.float32(0.0) if terminated[t, n] else next_value[t, n]
            if terminated[t, n] or truncated[t, n]:
                carry = np.float32(0.0)
            carry = reward[t, n] + discount * future - value[t, n] + discount * lam * carry
            advantage[t, n] = carry


@compile_kernel
def vtrace_columns(
    reward, value, next_value, log_ratio, terminated, truncated, discount, lam, rho_bar, c_bar, advantage, target
):
    """`learner.returns.vtrace` on `[T, N]` arrays."""
    for n in range(reward.shape[1]):
        carry = np.float32(0.0)
        for t in range(reward.shape[0] - 1, -1, -1):
            future = np.float32(0.0) if terminated[t, n] else discount * next_value[t, n]
            delta = reward[t, n] + future - value[t, n]
            keep = np.float32(0.0) if terminated[t, n] or truncated[t, n] else discount * lam
            ratio = np.exp(log_ratio[t, n])
            advantage[t, n] = delta + keep * carry
            carry = min(ratio, rho_bar) * delta + keep * min(ratio, c_bar) * carry
            target[t, n] = value[t, n] + carry


@compile_kernel
def adam_step(params, grads, first, second, rate, scale, eps, step):
    """One step of Adam with the gradient times `scale`, in one pass over memory."""
    one, b1, b2 = np.float32(1.0), np.float32(0.9), np.float32(0.999)
    size = np.float32(rate / (1.0 - 0.9**step))
    root = np.float32(1.0 / math.sqrt(1.0 - 0.999**step))
    for i in range(params.shape[0]):
        g = grads[i] * scale
        m = b1 * first[i] + (one - b1) * g
        v = b2 * second[i] + (one - b2) * g * g
        first[i] = m
        second[i] = v
        params[i] -= size * m / (np.sqrt(v) * root + eps)


@compile_kernel
def _square_sum(grads):
    total = np.float32(0.0)
    for i in range(grads.shape[0]):
        total += grads[i] * grads[i]
    return total


@compile_kernel
def _clip_factor(norm, limit):
    """The factor that `torch.nn.utils.clip_grad_norm_` applies."""
    if limit <= np.float32(0.0):
        return np.float32(1.0)
    factor = limit / (norm + np.float32(1e-6))
    return factor if factor < np.float32(1.0) else np.float32(1.0)


@compile_kernel
def _copy_rows(source, order, start, count, target):
    for i in range(count):
        row = order[start + i]
        for p in range(source.shape[1]):
            target[i, p] = source[row, p]


@compile_kernel
def _policy_gradient(discrete, x, rows, data, params, sizes, activation, settings, grads, work, sums):
    """Gradient of clipped surrogate minus entropy bonus on one minibatch; returns the mean KL divergence."""
    action, log_prob_old, advantage, weight = data
    hidden, d_hidden, out, transposed = work
    n = rows.shape[0]
    k = out.shape[1]
    one, inverse_n = np.float32(1.0), np.float32(1.0) / np.float32(n)
    clip, entropy_coef = settings[CLIP], settings[ENTROPY_COEF]
    weights = params.shape[0] if discrete else params.shape[0] - k
    z = out[:n]
    forward_mlp(x, params[:weights], sizes, activation, hidden, z, transposed)
    mean, scale = np.float32(0.0), one
    if settings[NORMALIZE] > np.float32(0.0) and n > 1:
        for i in range(n):
            mean += advantage[rows[i]]
        mean *= inverse_n
        spread = np.float32(0.0)
        for i in range(n):
            spread += (advantage[rows[i]] - mean) ** 2
        scale = one / (np.sqrt(spread / np.float32(n - 1)) + np.float32(1e-8))
    loss, entropy, kl, clipped = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    if not discrete:
        grads[weights:] = np.float32(0.0)
        for j in range(k):
            entropy += params[weights + j] + np.float32(0.5) + _LOG_SQRT_2PI
            grads[weights + j] = -entropy_coef
        entropy *= np.float32(n)
    for i in range(n):
        row = rows[i]
        if discrete:
            log_softmax_row(z[i])
            log_prob = z[i, int(action[row, 0])]
        else:
            log_prob = np.float32(0.0)
            for j in range(k):
                log_std = params[weights + j]
                u = (action[row, j] - z[i, j]) * np.exp(-log_std)
                log_prob += np.float32(-0.5) * u * u - log_std - _LOG_SQRT_2PI
        log_ratio = log_prob - log_prob_old[row]
        ratio = np.exp(log_ratio)
        a = (advantage[row] - mean) * scale * weight[row]
        bounded = min(max(ratio, one - clip), one + clip)
        unclipped, clipped_loss = a * ratio, a * bounded
        is_unclipped = unclipped <= clipped_loss
        loss -= unclipped if is_unclipped else clipped_loss
        kl += ratio - one - log_ratio
        if abs(ratio - one) > clip:
            clipped += one
        d_log_prob = -unclipped * inverse_n if is_unclipped else np.float32(0.0)
        if discrete:
            chosen = int(action[row, 0])
            row_entropy = np.float32(0.0)
            for j in range(k):
                row_entropy -= np.exp(z[i, j]) * z[i, j]
            entropy += row_entropy
            for j in range(k):
                p = np.exp(z[i, j])
                indicator = one if j == chosen else np.float32(0.0)
                z[i, j] = d_log_prob * (indicator - p) + entropy_coef * inverse_n * p * (z[i, j] + row_entropy)
        else:
            for j in range(k):
                inverse = np.exp(-params[weights + j])
                u = (action[row, j] - z[i, j]) * inverse
                grads[weights + j] += d_log_prob * (u * u - one)
                z[i, j] = d_log_prob * u * inverse
    backward_mlp(x, params[:weights], sizes, activation, hidden, z, grads[:weights], d_hidden, transposed)
    sums[POLICY_LOSS] += loss * inverse_n
    sums[ENTROPY] += entropy * inverse_n
    sums[KL] += kl * inverse_n
    sums[CLIPPED] += clipped * inverse_n
    sums[POLICY_STEPS] += 1.0
    return kl * inverse_n


@compile_kernel
def _value_gradient(x, rows, data, params, sizes, activation, settings, grads, work, sums):
    """Gradient of half the (clipped) squared error of the value on one minibatch."""
    target, value_old = data
    hidden, d_hidden, out, transposed = work
    n = rows.shape[0]
    inverse_n, half = np.float32(1.0) / np.float32(n), np.float32(0.5)
    clip, coef = settings[VALUE_CLIP], settings[VALUE_COEF]
    v = out[:n]
    forward_mlp(x, params, sizes, activation, hidden, v, transposed)
    loss = np.float32(0.0)
    for i in range(n):
        row = rows[i]
        error = v[i, 0] - target[row]
        slope = error
        if clip > np.float32(0.0):
            moved = v[i, 0] - value_old[row]
            clipped_error = value_old[row] + min(max(moved, -clip), clip) - target[row]
            if clipped_error * clipped_error > error * error:
                error = clipped_error
                slope = np.float32(0.0) if abs(moved) > clip else clipped_error
        loss += half * error * error
        v[i, 0] = coef * inverse_n * slope
    backward_mlp(x, params, sizes, activation, hidden, v, grads, d_hidden, transposed)
    sums[VALUE_LOSS] += loss * inverse_n
    sums[VALUE_STEPS] += 1.0


@compile_kernel
def train_policy(discrete, observation, data, order, batch, net, sizes, activation, settings, work, x, step, sums):
    """All epochs and minibatches for the actor; returns the number of optimiser steps."""
    params, grads, first, second = net
    total = order.shape[1]
    num_steps = 0
    for epoch in range(order.shape[0]):
        for start in range(0, total, batch):
            n = min(batch, total - start)
            rows = order[epoch, start : start + n]
            _copy_rows(observation, rows, 0, n, x)
            kl = _policy_gradient(discrete, x[:n], rows, data, params, sizes, activation, settings, grads, work, sums)
            if settings[TARGET_KL] > np.float32(0.0) and kl > np.float32(1.5) * settings[TARGET_KL]:
                sums[STOPPED_AT] = num_steps + 1
                return num_steps
            norm = np.sqrt(_square_sum(grads))
            if not np.isfinite(norm):
                sums[NON_FINITE_AT] = num_steps + 1
                return num_steps
            sums[ACTOR_NORM] += norm
            num_steps += 1
            scale = _clip_factor(norm, settings[MAX_NORM])
            adam_step(params, grads, first, second, settings[RATE], scale, settings[ADAM_EPS], step + num_steps)
    return num_steps


@compile_kernel
def train_value(observation, data, order, batch, net, sizes, activation, settings, work, x, step, sums):
    """All epochs and minibatches for the critic; returns the number of optimiser steps."""
    params, grads, first, second = net
    total = order.shape[1]
    num_steps = 0
    for epoch in range(order.shape[0]):
        for start in range(0, total, batch):
            n = min(batch, total - start)
            rows = order[epoch, start : start + n]
            _copy_rows(observation, rows, 0, n, x)
            _value_gradient(x[:n], rows, data, params, sizes, activation, settings, grads, work, sums)
            norm = np.sqrt(_square_sum(grads))
            if not np.isfinite(norm):
                sums[NON_FINITE_AT] = num_steps + 1
                return num_steps
            sums[CRITIC_NORM] += norm
            num_steps += 1
            scale = _clip_factor(norm, settings[MAX_NORM])
            adam_step(params, grads, first, second, settings[RATE], scale, settings[ADAM_EPS], step + num_steps)
    return num_steps


@compile_kernel
def train_joint(
    discrete,
    observation,
    policy_data,
    value_data,
    order,
    batch,
    actor,
    critic,
    actor_sizes,
    critic_sizes,
    activation,
    settings,
    actor_work,
    critic_work,
    x,
    actor_step,
    critic_step,
    sums,
):
    """Both networks minibatch by minibatch, clipped by their common gradient norm."""
    total = order.shape[1]
    policy_steps, value_steps = 0, 0
    policy_active = True
    for epoch in range(order.shape[0]):
        for start in range(0, total, batch):
            n = min(batch, total - start)
            rows = order[epoch, start : start + n]
            _copy_rows(observation, rows, 0, n, x)
            actor_squares = np.float32(0.0)
            if policy_active:
                kl = _policy_gradient(
                    discrete,
                    x[:n],
                    rows,
                    policy_data,
                    actor[0],
                    actor_sizes,
                    activation,
                    settings,
                    actor[1],
                    actor_work,
                    sums,
                )
                if settings[TARGET_KL] > np.float32(0.0) and kl > np.float32(1.5) * settings[TARGET_KL]:
                    sums[STOPPED_AT] = policy_steps + 1
                    policy_active = False
                else:
                    actor_squares = _square_sum(actor[1])
                    sums[ACTOR_NORM] += np.sqrt(actor_squares)
            _value_gradient(
                x[:n], rows, value_data, critic[0], critic_sizes, activation, settings, critic[1], critic_work, sums
            )
            critic_squares = _square_sum(critic[1])
            norm = np.sqrt(actor_squares + critic_squares)
            if not np.isfinite(norm):
                sums[NON_FINITE_AT] = value_steps + 1
                return policy_steps, value_steps
            sums[CRITIC_NORM] += np.sqrt(critic_squares)
            scale = _clip_factor(norm, settings[MAX_NORM])
            value_steps += 1
            rate, eps = settings[RATE], settings[ADAM_EPS]
            adam_step(critic[0], critic[1], critic[2], critic[3], rate, scale, eps, critic_step + value_steps)
            if policy_active:
                policy_steps += 1
                adam_step(actor[0], actor[1], actor[2], actor[3], rate, scale, eps, actor_step + policy_steps)
    return policy_steps, value_steps
