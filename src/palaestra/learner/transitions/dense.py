"""Multilayer perceptrons with hand-written gradients, for updates without autograd on the CPU.

`DenseWeights` reads and writes the memory of a torch module; `DensePass` has the activations of one pass through it.
All memory is allocated once. With `low_precision`, products of two large matrices are taken in bfloat16, which is twice
as fast on processors that support it; weights, gradients, biases, first and last layers stay float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

_MIN_LOW_WIDTH = 64
"""Narrower layers gain nothing from bfloat16."""
_mask_gradient = torch.ops.aten.threshold_backward.grad_input


class DenseLayer:
    """One linear layer: views of its weights and gradients, and a copy of the weights in low precision.

    A target network has no gradients.
    """

    def __init__(self, linear: nn.Linear, *, low_precision: bool) -> None:
        self.weight, self.bias = linear.weight.detach(), linear.bias.detach()
        self.weight_gradient = torch.empty(0) if linear.weight.grad is None else linear.weight.grad
        self.bias_gradient = torch.empty(0) if linear.bias.grad is None else linear.bias.grad
        self.inputs, self.outputs = linear.in_features, linear.out_features
        wide = min(self.inputs, self.outputs) >= _MIN_LOW_WIDTH
        self.low = self.weight.bfloat16() if low_precision and wide else None


class DenseWeights:
    """The layers of a sequence of linear layers with ReLU between them."""

    def __init__(self, module: nn.Module, *, low_precision: bool = False) -> None:
        linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        self.layers = [DenseLayer(linear, low_precision=low_precision) for linear in linears]

    def refresh(self) -> None:
        """Copy changed weights to low precision."""
        for layer in self.layers:
            if layer.low is not None:
                layer.low.copy_(layer.weight)


class _LowMemory(NamedTuple):
    """Memory of one layer in low precision."""

    inputs: Tensor
    outputs: Tensor
    weight_gradient: Tensor


class DensePass:
    """Forward and backward for a fixed number of rows. A second pass overwrites the memory of the first."""

    def __init__(self, weights: DenseWeights, rows: int) -> None:
        self._layers, self._ones = weights.layers, torch.ones(rows)
        self._x = torch.empty(0)
        self._outputs = [torch.empty(rows, layer.outputs) for layer in self._layers]
        self._gradients = [torch.empty(rows, layer.inputs) for layer in self._layers]
        self._low = [None if layer.low is None else self._low_memory(layer, rows) for layer in self._layers]

    @staticmethod
    def _low_memory(layer: DenseLayer, rows: int) -> _LowMemory:
        shapes = ((rows, layer.inputs), (rows, layer.outputs), (layer.outputs, layer.inputs))
        return _LowMemory(*(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes))

    def forward(self, x: Tensor) -> Tensor:
        """The output `[rows, k]`, valid until the next pass; `x` must not change before `backward`."""
        self._x, last = x, len(self._layers) - 1
        for index, (layer, out, low) in enumerate(zip(self._layers, self._outputs, self._low, strict=True)):
            if low is None or layer.low is None:
                torch.addmm(layer.bias, x, layer.weight.t(), out=out)
            else:
                low.inputs.copy_(x)
                torch.mm(low.inputs, layer.low.t(), out=low.outputs)
                torch.add(low.outputs, layer.bias, out=out)
            x = out if index == last else out.relu_()
        return x

    def backward(self, gradient: Tensor) -> None:
        """Write the gradients of the weights for a loss with `gradient` at the output."""
        for index in range(len(self._layers) - 1, -1, -1):
            layer, low = self._layers[index], self._low[index]
            torch.mv(gradient.t(), self._ones, out=layer.bias_gradient)
            if low is None:
                x = self._outputs[index - 1] if index else self._x
                torch.mm(gradient.t(), x, out=layer.weight_gradient)
            else:
                low.outputs.copy_(gradient)
                torch.mm(low.outputs.t(), low.inputs, out=low.weight_gradient)
                layer.weight_gradient.copy_(low.weight_gradient)
            if index:
                gradient = self._through(index, gradient)

    def input_gradient(self, gradient: Tensor, columns: slice) -> Tensor:
        """Gradient at some columns of the input; writes no gradient of the weights."""
        for index in range(len(self._layers) - 1, 0, -1):
            low = self._low[index]
            if low is not None:
                low.outputs.copy_(gradient)
            gradient = self._through(index, gradient)
        return torch.mm(gradient, self._layers[0].weight[:, columns])

    def _through(self, index: int, gradient: Tensor) -> Tensor:
        """The gradient before a layer and the ReLU before that; in low precision, of `low.outputs`."""
        layer, low, before = self._layers[index], self._low[index], self._gradients[index]
        if low is None or layer.low is None:
            torch.mm(gradient, layer.weight, out=before)
        else:
            # The copy of the input is not needed any more, and has the shape of the result.
            torch.mm(low.outputs, layer.low, out=low.inputs)
            before.copy_(low.inputs)
        _mask_gradient(before, self._outputs[index - 1], 0, grad_input=before)
        return before
