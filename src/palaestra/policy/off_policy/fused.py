"""Multilayer perceptrons without autograd: forward and backward in preallocated memory, as calls of the BLAS of torch.

At the batch sizes of off-policy learning nearly all time is spent in matrix products, so the gain is in what is left
out: gradients that no optimiser reads, copies, and the bookkeeping of autograd. The networks work on the memory of the
torch modules, so that both see each other's changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from palaestra.policy.device import device_of
from palaestra.policy.distribution import Categorical, Distribution, EpsilonGreedy
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.network import ObservationNormalizer
from palaestra.policy.off_policy.networks import TRANSITION_POLICIES, TransitionPolicy
from palaestra.policy.off_policy.unit_actions import (
    LOG_STD_MAX,
    LOG_STD_MIN,
    ClippedGaussian,
    NoisyAction,
    TanhGaussian,
)

_ROW_STEP = 32
"""Products of some rows of a batch have a multiple of this many rows."""
_MIN_LOW_WIDTH = 64
"""Narrower layers gain nothing from bfloat16."""


def why_not_fused(policy: nn.Module) -> str | None:
    """Why the policy cannot learn without autograd; None if it can."""
    if type(policy) not in TRANSITION_POLICIES.values():
        return "the policy is your own"
    assert isinstance(policy, TransitionPolicy)
    if device_of(policy).type != "cpu":
        return f"it runs on the CPU only, and the weights are on {device_of(policy)}"
    if not policy.encoder.is_plain_vector:
        return "observations are not a vector of numbers"
    for parameter in policy.parameters():
        if parameter.dtype is not torch.float32:
            return "weights are not float32"
        if not parameter.requires_grad:
            return "some weights are frozen"
    return None


class _LowPrecision:
    """A layer in bfloat16: a copy of its weights, and memory for its inputs, outputs and gradient."""

    def __init__(self, layer: nn.Linear, batch: int) -> None:
        shapes = ((batch, layer.in_features), (batch, layer.out_features), tuple(layer.weight.shape))
        self.inputs, self.outputs, self.gradient = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
        self.weight = layer.weight.detach().bfloat16()


class FusedMLP:
    """One network of linear layers with ReLU or tanh between them, for batches of one size.

    With `low_precision`, products of two large matrices are taken in bfloat16, which is twice as fast on processors
    that support it; weights, gradients, biases, first and last layers stay float32.
    """

    def __init__(self, network: nn.Sequential, batch: int, *, low_precision: bool = False) -> None:
        layers = [layer for layer in network if isinstance(layer, nn.Linear)]
        self._is_relu = any(isinstance(layer, nn.ReLU) for layer in network)
        self._weights = [layer.weight.detach() for layer in layers]
        self._transposed = [weight.t() for weight in self._weights]
        self._biases = [layer.bias.detach() for layer in layers]
        self._gradients = [(layer.weight.grad, layer.bias.grad) for layer in layers]
        self._hidden = [torch.zeros(batch, layer.out_features) for layer in layers[:-1]]
        self._d_hidden = [torch.zeros(batch, layer.out_features) for layer in layers[:-1]]
        wide = [low_precision and min(layer.in_features, layer.out_features) >= _MIN_LOW_WIDTH for layer in layers]
        self._low = [_LowPrecision(layer, batch) if low else None for layer, low in zip(layers, wide, strict=True)]
        self._first_gradient = torch.zeros(layers[0].in_features, layers[0].out_features)
        self.out = torch.zeros(batch, layers[-1].out_features)
        self.d_out = torch.zeros_like(self.out)
        self.values: NDArray[np.float32] = self.out.numpy()
        """`out` as an array, for kernels."""
        self.d_values: NDArray[np.float32] = self.d_out.numpy()

    def refresh(self) -> None:
        """Copy changed weights to low precision."""
        for low, weight in zip(self._low, self._weights, strict=True):
            if low is not None:
                low.weight.copy_(weight)

    def forward(self, x: Tensor) -> NDArray[np.float32]:
        """Outputs `[B, k]`, which stay in `out`; hidden activations are kept for `backward`."""
        last = len(self._weights) - 1
        for index, (weight, bias, low) in enumerate(zip(self._transposed, self._biases, self._low, strict=True)):
            target = self.out if index == last else self._hidden[index]
            if low is None:
                # Adding the bias afterwards is faster than addmm, which first fills the output with it.
                torch.mm(x, weight, out=target)
            else:
                low.inputs.copy_(x)
                torch.mm(low.inputs, low.weight.t(), out=low.outputs)
                target.copy_(low.outputs)
            target.add_(bias)
            if index < last:
                x = target.relu_() if self._is_relu else target.tanh_()
        return self.values

    def backward(self, x: Tensor) -> None:
        """Write the gradients of weights and biases for the gradient `d_out` at the output, at the input `x`."""
        d = self.d_out
        for index in range(len(self._weights) - 1, -1, -1):
            source, low = x if index == 0 else self._hidden[index - 1], self._low[index]
            weight_gradient, bias_gradient = self._gradients[index]
            assert weight_gradient is not None
            assert bias_gradient is not None
            if low is None and index == 0:
                # A product with few rows is twice as fast as one with few columns.
                weight_gradient.copy_(torch.mm(source.t(), d, out=self._first_gradient).t())
            elif low is None:
                torch.mm(d.t(), source, out=weight_gradient)
            else:
                low.outputs.copy_(d)
                torch.mm(low.outputs.t(), low.inputs, out=low.gradient)
                weight_gradient.copy_(low.gradient)
            torch.sum(d, 0, out=bias_gradient)
            if index:
                d = self._step_back(index, d, source, self._d_hidden[index - 1])

    def backward_inputs(self, first: int, d_inputs: Tensor, rows: Tensor | None = None) -> None:
        """Write the gradient at the inputs from `first` on to `d_inputs`; weights get no gradient.

        `rows`: indices of the rows that have a gradient; only their rows of `d_inputs` are written.
        """
        if rows is not None:
            if len(rows) == 0:
                return
            # Few different sizes, because the first bfloat16 product of each size is slow: repeat the last row.
            padding = min(-len(rows) % _ROW_STEP, len(self.d_out) - len(rows))
            rows = torch.cat([rows, rows[-1:].expand(padding)]) if padding else rows
        d = self.d_out if rows is None else self.d_out[rows]
        for index in range(len(self._weights) - 1, 0, -1):
            source, low = self._hidden[index - 1], self._low[index]
            if rows is not None:
                source = source.index_select(0, rows)
            if low is not None:
                low.outputs[: len(d)].copy_(d)
            d = self._step_back(index, d, source, self._d_hidden[index - 1][: len(d)])
        weight = self._weights[0][:, first:]
        if rows is None:
            torch.mm(d, weight, out=d_inputs)
        else:
            d_inputs[rows] = torch.mm(d, weight)

    def _step_back(self, index: int, d: Tensor, source: Tensor, d_source: Tensor) -> Tensor:
        """The gradient before a layer and the activation before that; in low precision, of `low.outputs`."""
        low = self._low[index]
        if low is None:
            torch.mm(d, self._weights[index], out=d_source)
        else:
            # The copy of the input is not needed any more, and has the shape of the result.
            count = len(d)
            torch.mm(low.outputs[:count], low.weight, out=low.inputs[:count])
            d_source.copy_(low.inputs[:count])
        if self._is_relu:
            torch.ops.aten.threshold_backward.grad_input(d_source, source, 0.0, grad_input=d_source)
        else:
            torch.ops.aten.tanh_backward.grad_input(d_source, source, grad_input=d_source)
        return d_source


class FusedNormalizer:
    """The observation normaliser of a policy, on rows; without one, rows as they are."""

    def __init__(self, policy: TransitionPolicy) -> None:
        normalizers = list(policy.encoder.normalizers.values())
        self._statistics: tuple[Tensor, Tensor] | None = None
        if normalizers:
            assert isinstance(normalizers[0], ObservationNormalizer)
            self._statistics = normalizers[0].mean.float(), normalizers[0].scale()

    def __call__(self, observation: Any) -> Tensor:
        """Normalised rows `[..., n]`."""
        rows: Tensor = torch.from_numpy(observation) if isinstance(observation, np.ndarray) else observation
        if self._statistics is None:
            return rows
        mean, scale = self._statistics
        return (rows - mean).mul_(scale)


class FusedActor:
    """Explores with a policy on arrays of N observations: the numbers of `policy.explore`, with less overhead."""

    def __init__(self, policy: TransitionPolicy, num_envs: int) -> None:
        network = getattr(policy, policy.groups[0])
        self._policy, self._flat = policy, FlatParameters.of(policy)
        self._network, self._normalize = FusedMLP(network, num_envs), FusedNormalizer(policy)
        self._distribution: Any = policy.distribution
        self._sample = _SAMPLERS[type(policy.distribution)]
        self._shape = (num_envs, *policy.distribution.action_shape)

    def is_current(self) -> bool:
        """Whether the policy's weights are still in the memory that the network reads."""
        return FlatParameters.of(self._policy) is self._flat

    def explore(self, observation: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[Any]:
        """Actions `[N, ...]` with exploration, in stored form."""
        out = self._network.forward(self._normalize(observation.reshape(len(observation), -1)))
        action: NDArray[Any] = self._sample(self._distribution, out, noise)
        return action.reshape(self._shape)


def _sample_greedy(distribution: Any, values: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[Any]:
    # Of dueling heads the first are advantages, whose order is that of the values.
    count = distribution.num_parameters
    drawn, best = (noise[:, 1] * np.float32(count)).astype(np.int64), values[:, :count].argmax(-1)
    chosen: NDArray[Any] = np.where(noise[:, 0] < float(distribution.exploration), drawn, best)
    return chosen


def _sample_category(distribution: Any, logits: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[Any]:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    cumulative = (weights / weights.sum(-1, keepdims=True)).cumsum(-1)
    passed = (noise >= cumulative).sum(-1)
    chosen: NDArray[Any] = np.where(passed < logits.shape[1], passed, logits.argmax(-1))
    return chosen


def _sample_tanh_gaussian(distribution: Any, out: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[Any]:
    size = noise.shape[1]
    log_std = np.clip(out[:, size:], LOG_STD_MIN, LOG_STD_MAX)
    squashed: NDArray[Any] = np.tanh(out[:, :size] + np.exp(log_std) * noise)
    return squashed


def _sample_noisy_action(distribution: Any, out: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[Any]:
    moved: NDArray[Any] = np.clip(np.tanh(out) + np.float32(distribution.exploration) * noise, -1.0, 1.0)
    return moved


def _sample_clipped_gaussian(distribution: Any, out: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[Any]:
    deviation = np.exp(np.clip(distribution.log_std.detach().numpy(), LOG_STD_MIN, LOG_STD_MAX))
    moved: NDArray[Any] = np.clip(np.tanh(out) + deviation * noise, -1.0, 1.0)
    return moved


_SAMPLERS: dict[type[Distribution], Callable[[Any, NDArray[np.float32], NDArray[np.float32]], NDArray[Any]]] = {
    EpsilonGreedy: _sample_greedy,
    Categorical: _sample_category,
    TanhGaussian: _sample_tanh_gaussian,
    NoisyAction: _sample_noisy_action,
    ClippedGaussian: _sample_clipped_gaussian,
}
