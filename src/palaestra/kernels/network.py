"""Kernels of small multilayer perceptrons: forward, backward, and sampling of actions.

Pure functions of arrays: noise and scratch memory are arguments, so there is no randomness and no allocation. The GIL
is released. Weights have torch's layout (`weight[out, in]`, then `bias[out]`, layer after layer in one flat float32
vector), so the kernels run on the memory of a torch module without copies. `policy.compiled` decides which policies
qualify; `kernels.ppo` builds on this module. One kernel covers all layers, which avoids dispatch per layer.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from palaestra.kernels.compile import compile_kernel

TANH, RELU = 0, 1

_MAX_LOOP_WIDTH = 24
"""Up to this width a loop is faster than a call of BLAS."""

_LOG_SQRT_2PI = np.float32(0.5 * math.log(2.0 * math.pi))


@numba.njit(inline="always")
def _tanh(y):
    # Rational approximation with the coefficients of Eigen: within a few float32 ulp and, unlike libm, vectorised.
    y = np.float32(9.0) if y > np.float32(9.0) else y
    y = np.float32(-9.0) if y < np.float32(-9.0) else y
    s = y * y
    p = np.float32(-2.76076847742355e-16)
    p = p * s + np.float32(2.00018790482477e-13)
    p = p * s + np.float32(-8.60467152213735e-11)
    p = p * s + np.float32(5.12229709037114e-08)
    p = p * s + np.float32(1.48572235717979e-05)
    p = p * s + np.float32(6.37261928875436e-04)
    p = p * s + np.float32(4.89352455891786e-03)
    q = np.float32(1.19825839466702e-06)
    q = q * s + np.float32(1.18534705686654e-04)
    q = q * s + np.float32(2.26843463243900e-03)
    q = q * s + np.float32(4.89352518554385e-03)
    return y * p / q


@compile_kernel
def _add_bias_and_activate(row, bias, activation, last):
    n = row.shape[0]
    if last:
        for j in range(n):
            row[j] += bias[j]
    elif activation == TANH:
        for j in range(n):
            row[j] = _tanh(row[j] + bias[j])
    else:
        for j in range(n):
            y = row[j] + bias[j]
            row[j] = y if y > np.float32(0.0) else np.float32(0.0)


@compile_kernel
def forward_mlp(x, params, sizes, activation, hidden, out, scratch):
    """`out[B, k] = mlp(x[B, i])`; hidden activations stay in `hidden` (flat, layer after layer) for `backward_mlp`."""
    batch = x.shape[0]
    layers = sizes.shape[0] - 1
    at, h_at, before = 0, 0, -1
    for layer in range(layers):
        i, o = sizes[layer], sizes[layer + 1]
        weight = params[at : at + o * i].reshape(o, i)
        bias = params[at + o * i : at + o * i + o]
        at += o * i + o
        last = layer == layers - 1
        source = x if layer == 0 else hidden[before : before + batch * i].reshape(batch, i)
        target = out if last else hidden[h_at : h_at + batch * o].reshape(batch, o)
        if not last:
            before = h_at
            h_at += batch * o
        if o <= _MAX_LOOP_WIDTH:
            for r in range(batch):
                for j in range(o):
                    total = np.float32(0.0)
                    for p in range(i):
                        total += source[r, p] * weight[j, p]
                    target[r, j] = total
                _add_bias_and_activate(target[r], bias, activation, last)
        elif i <= _MAX_LOOP_WIDTH:
            transposed = scratch[: i * o].reshape(i, o)
            for j in range(o):
                for p in range(i):
                    transposed[p, j] = weight[j, p]
            for r in range(batch):
                row = target[r]
                first = source[r, 0]
                for j in range(o):
                    row[j] = first * transposed[0, j]
                for p in range(1, i):
                    a = source[r, p]
                    for j in range(o):
                        row[j] += a * transposed[p, j]
                _add_bias_and_activate(row, bias, activation, last)
        else:
            np.dot(source, weight.T, target)
            for r in range(batch):
                _add_bias_and_activate(target[r], bias, activation, last)


@compile_kernel
def backward_mlp(x, params, sizes, activation, hidden, d_out, grads, d_hidden, scratch):
    """Write `grads` (laid out like `params`) for the loss whose gradient at the output is `d_out[B, k]`."""
    batch = x.shape[0]
    layers = sizes.shape[0] - 1
    widest = d_hidden.shape[1]
    end = grads.shape[0]
    h_end = 0
    for layer in range(1, layers):
        h_end += batch * sizes[layer]
    buffer = 0
    for layer in range(layers - 1, -1, -1):
        i, o = sizes[layer], sizes[layer + 1]
        at = end - o * i - o
        weight = params[at : at + o * i].reshape(o, i)
        d_weight = grads[at : at + o * i].reshape(o, i)
        d_bias = grads[at + o * i : end]
        end = at
        d = d_out if layer == layers - 1 else d_hidden[buffer, : batch * o].reshape(batch, o)
        source = x if layer == 0 else hidden[h_end - batch * i : h_end].reshape(batch, i)
        h_end -= batch * i
        _weight_gradient(source, d, d_weight, d_bias, scratch)
        if layer > 0:
            buffer = 1 - buffer
            d_source = d_hidden[buffer, : batch * i].reshape(batch, i)
            _input_gradient(d, weight, source, d_source, activation)
    return widest


@compile_kernel
def _weight_gradient(source, d, d_weight, d_bias, scratch):
    batch, i = source.shape
    o = d.shape[1]
    d_bias[:] = np.float32(0.0)
    for r in range(batch):
        for j in range(o):
            d_bias[j] += d[r, j]
    if o <= _MAX_LOOP_WIDTH:
        d_weight[:] = np.float32(0.0)
        for r in range(batch):
            for j in range(o):
                a = d[r, j]
                for p in range(i):
                    d_weight[j, p] += a * source[r, p]
    elif i <= _MAX_LOOP_WIDTH:
        transposed = scratch[: i * o].reshape(i, o)
        transposed[:] = np.float32(0.0)
        # Four rows at a time, for a quarter of the loads and stores of `transposed`.
        whole = batch - batch % 4
        for r in range(0, whole, 4):
            for p in range(i):
                a, b, c, e = source[r, p], source[r + 1, p], source[r + 2, p], source[r + 3, p]
                for j in range(o):
                    transposed[p, j] += a * d[r, j] + b * d[r + 1, j] + c * d[r + 2, j] + e * d[r + 3, j]
        for r in range(whole, batch):
            for p in range(i):
                a = source[r, p]
                for j in range(o):
                    transposed[p, j] += a * d[r, j]
        for j in range(o):
            for p in range(i):
                d_weight[j, p] = transposed[p, j]
    else:
        np.dot(d.T, source, d_weight)


@compile_kernel
def _input_gradient(d, weight, source, d_source, activation):
    batch, i = source.shape
    o = d.shape[1]
    if o <= _MAX_LOOP_WIDTH:
        for r in range(batch):
            a = d[r, 0]
            for p in range(i):
                d_source[r, p] = a * weight[0, p]
            for j in range(1, o):
                a = d[r, j]
                for p in range(i):
                    d_source[r, p] += a * weight[j, p]
    else:
        np.dot(d, weight, d_source)
    if activation == TANH:
        for r in range(batch):
            for p in range(i):
                d_source[r, p] *= np.float32(1.0) - source[r, p] * source[r, p]
    else:
        for r in range(batch):
            for p in range(i):
                if source[r, p] <= np.float32(0.0):
                    d_source[r, p] = np.float32(0.0)


@compile_kernel
def log_softmax_row(logits):
    """Turn a row of logits into log-probabilities in place."""
    n = logits.shape[0]
    top = logits[0]
    for j in range(1, n):
        top = max(top, logits[j])
    total = np.float32(0.0)
    for j in range(n):
        total += np.exp(logits[j] - top)
    shift = top + np.log(total)
    for j in range(n):
        logits[j] -= shift


@compile_kernel
def normalize_rows(observation, mean, scale, clip, x):
    """Write `(observation - mean) * scale`, clipped, into `x` and return it."""
    for r in range(observation.shape[0]):
        for p in range(observation.shape[1]):
            y = (observation[r, p] - mean[p]) * scale[p]
            y = clip if y > clip else y
            x[r, p] = -clip if y < -clip else y
    return x


@compile_kernel
def act_categorical(
    observation, noise, actor, critic, actor_sizes, critic_sizes, activation, scratch, action, log_prob, value
):
    """Sample one of k actions per row: the first whose cumulative probability exceeds the uniform `noise`."""
    hidden, logits, values, transposed = scratch
    forward_mlp(observation, actor, actor_sizes, activation, hidden, logits, transposed)
    forward_mlp(observation, critic, critic_sizes, activation, hidden, values, transposed)
    k = logits.shape[1]
    for r in range(observation.shape[0]):
        row = logits[r]
        log_softmax_row(row)
        chosen = -1
        cumulative = np.float32(0.0)
        for j in range(k):
            cumulative += np.exp(row[j])
            if noise[r, 0] < cumulative:
                chosen = j
                break
        if chosen < 0:
            # Rounding left the sum below the noise: take the most likely action, as the torch implementation does.
            chosen = 0
            for j in range(1, k):
                if row[j] > row[chosen]:
                    chosen = j
        action[r] = chosen
        log_prob[r] = row[chosen]
        value[r] = values[r, 0]


@compile_kernel
def act_gaussian(
    observation, noise, actor, critic, actor_sizes, critic_sizes, activation, scratch, action, log_prob, value
):
    """Sample `mean + std * noise` per row; the log standard deviations are the last k parameters of the actor."""
    hidden, means, values, transposed = scratch
    k = means.shape[1]
    weights = actor.shape[0] - k
    forward_mlp(observation, actor[:weights], actor_sizes, activation, hidden, means, transposed)
    forward_mlp(observation, critic, critic_sizes, activation, hidden, values, transposed)
    for r in range(observation.shape[0]):
        total = np.float32(0.0)
        for j in range(k):
            log_std = actor[weights + j]
            z = noise[r, j]
            action[r, j] = means[r, j] + np.exp(log_std) * z
            total += np.float32(-0.5) * z * z - log_std - _LOG_SQRT_2PI
        log_prob[r] = total
        value[r] = values[r, 0]
