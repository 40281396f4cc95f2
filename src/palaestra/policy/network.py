"""Networks: multilayer perceptrons, a convolutional image encoder, and the encoder of arbitrary observations.

Orthogonal initialisation throughout (sqrt 2 in hidden layers, 0.01 for the policy head, 1 for the value head), drawn
from the given generator.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from palaestra.errors import ConfigError
from palaestra.processes.memory import check_fits_in_memory

SLOW_TO_DRAW = 2e12
"""Number of operations for orthogonal initialisation that causes a warning: half a minute or more."""
SMALLEST_GREY = 8
"""Minimum side in pixels at which bytes with two axes are a greyscale image."""

Gather: TypeAlias = Callable[[Any], Sequence[Any]] | None
"""Returns the values of all processes for the value of this one; None: there is only one."""
Precision: TypeAlias = Literal["float32", "bfloat16"]

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def orthogonal_(layer: nn.Linear | nn.Conv2d, gain: float, generator: torch.Generator) -> None:
    """Orthogonal weights, zero bias, in place."""
    with torch.no_grad():
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        if layer.bias is not None:
            layer.bias.zero_()


def mlp(sizes: Sequence[int], activation: str, output_gain: float, generator: torch.Generator) -> nn.Sequential:
    """Linear layers of the given sizes with the activation between them."""
    layers: list[nn.Module] = []
    last = len(sizes) - 2
    for index, (i, o) in enumerate(pairwise(sizes)):
        linear = nn.Linear(i, o)
        orthogonal_(linear, output_gain if index == last else math.sqrt(2.0), generator)
        layers.append(linear)
        if index != last:
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


def check_network(hidden: Sequence[int], networks: Sequence[Sequence[int]]) -> None:
    """Refuse networks (each given by its `sizes`) that do not fit into memory, before they are built.

    Warns if initialisation is slow: a large orthogonal matrix costs as much as thousands of updates.
    """
    layers = [layer for sizes in networks for layer in pairwise(sizes)]
    weights = 4 * sum(i * o + o for i, o in layers)
    parts = {"weights": weights, "gradients": weights, "Adam's moments": 2 * weights}
    check_fits_in_memory("policy.hidden", list(hidden), parts, "Use fewer or narrower layers")
    if sum(2 * max(layer) * min(layer) ** 2 for layer in layers) > SLOW_TO_DRAW:
        warnings.warn(
            f"policy.hidden = {list(hidden)}: drawing {weights // 4:,} first weights takes minutes.", stacklevel=2
        )


def is_image(space: gymnasium.Space[Any]) -> bool:
    """Whether observations are images: bytes with three axes, or pixels (0 to 255) with two or four.

    Two axes are a greyscale image, four a stack of images. Two axes with a side below 8 are a table of numbers.
    """
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8:
        return False
    if len(space.shape) == 3:
        return True
    pixels = bool((space.low == 0).all() and (space.high == 255).all())
    if pixels and len(space.shape) > 4:
        reason = "pixels with more than four axes are not understood"
        remedy = "Wrap the environment so that it gives [height, width, channels] or a stack of those"
        raise ConfigError("env observation", f"bytes of shape {space.shape}", reason, remedy)
    return pixels and (len(space.shape) == 4 or (len(space.shape) == 2 and min(space.shape) >= SMALLEST_GREY))


def image_layout(shape: tuple[int, ...]) -> tuple[int, int, int, bool]:
    """Channels (of all images of a stack together), height, width, and whether channels are the last axis."""
    if len(shape) == 2:
        return 1, *shape, False
    stack, picture = (shape[0], shape[1:]) if len(shape) == 4 else (1, shape)
    last = picture[-1] < picture[0]
    channels, height, width = (picture[2], *picture[:2]) if last else picture
    if len(shape) == 4 and (channels > 4 or min(height, width) < SMALLEST_GREY):
        reason = f"a stack of {stack} pictures of {height} x {width} pixels with {channels} channels is unlikely"
        remedy = "Wrap the environment so that it gives [stack, height, width, channels] with up to four channels"
        raise ConfigError("env observation", f"bytes of shape {shape}", reason, remedy)
    return stack * channels, height, width, last


class ImageEncoder(nn.Module):
    """Convolutional encoder of images (bytes, channels first or last); kernel sizes depend on the image size."""

    def __init__(
        self, shape: tuple[int, ...], features: int, generator: torch.Generator, precision: Precision = "float32"
    ) -> None:
        """`precision`: type of the activations; weights are float32 in any case."""
        super().__init__()
        self._axes, self._dtype = len(shape), getattr(torch, precision)
        channels, height, width, self._channels_last = image_layout(shape)
        self.convolutions = nn.Sequential(*_convolutions(channels, min(height, width)))
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, channels, height, width)).numel()
        self.project = nn.Linear(flat, features)
        for layer in (*self.convolutions, self.project):
            if isinstance(layer, nn.Conv2d | nn.Linear):
                orthogonal_(layer, math.sqrt(2.0), generator)

    def forward(self, pixels: Tensor) -> Tensor:
        """`[B, features]`."""
        if self._axes == 2:
            pixels = pixels.unsqueeze(1)
        elif self._axes == 4:
            pixels = (pixels.permute(0, 1, 4, 2, 3) if self._channels_last else pixels).flatten(1, 2)
        elif self._channels_last:
            pixels = pixels.permute(0, 3, 1, 2)
        # Rearranged while still bytes; channels-last is the fastest layout for CPU convolutions.
        x = pixels.contiguous(memory_format=torch.channels_last).to(self._dtype)
        for index, layer in enumerate(self.convolutions):
            if isinstance(layer, nn.Conv2d):
                # Scale the first weights by 1/255 instead of the pixels: they are smaller than the batch.
                weight = layer.weight * (1.0 / 255.0) if index == 0 else layer.weight
                x = _convolve(x, weight, layer)
            else:
                x = layer(x)
        flat: Tensor = _FlattenImages.apply(x)  # type: ignore[no-untyped-call]
        project = self.project
        if self._dtype is not torch.float32:
            features = nn.functional.linear(flat, project.weight.to(flat.dtype), _cast(project.bias, flat.dtype))
            return nn.functional.relu(features.float())
        return nn.functional.relu(project(flat))


class _FlattenImages(torch.autograd.Function):
    """`x.flatten(1)` whose gradient is channels-last like `x`: mixed layouts slow down the layers before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].view(ctx.shape).contiguous(memory_format=torch.channels_last)


def _convolve(x: Tensor, weight: Tensor, layer: nn.Conv2d) -> Tensor:
    weight, bias = weight.to(x.dtype), _cast(layer.bias, x.dtype)
    if x.shape[-2:] == weight.shape[-2:]:
        # A kernel as large as its input is a matrix product, which is several times faster.
        return nn.functional.linear(x.flatten(1), weight.flatten(1), bias)[:, :, None, None]
    return nn.functional.conv2d(x, weight, bias, layer.stride)


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def _convolutions(channels: int, side: int) -> list[nn.Module]:
    if side >= 36:  # the network of the 2015 Atari paper
        plan = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    elif side >= 12:
        plan = [(32, 3, 2), (64, 3, 2)]
    elif side >= 3:
        plan = [(32, 3, 1)]
    else:
        reason = "too small for a convolution"
        raise ConfigError("env observation", f"image of side {side}", reason, "Use a Box of floats instead")
    layers: list[nn.Module] = []
    for out, kernel, stride in plan:
        layers += [nn.Conv2d(channels, out, kernel, stride), nn.ReLU(inplace=True)]
        channels = out
    return layers


class ObservationEncoder(nn.Module):
    """Encodes any supported observation as one float vector `[B, size]`: numbers, one-hot choices, CNN features.

    With `normalize`, numbers (but not choices and pixels) are normalised by running statistics.
    """

    def __init__(
        self,
        space: gymnasium.Space[Any],
        *,
        normalize: bool = False,
        image_features: int = 512,
        image_precision: Precision = "float32",
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self._parts: Mapping[str, gymnasium.Space[Any]] = (
            dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
        )
        self.images = nn.ModuleDict()
        self.normalizers = nn.ModuleDict()
        self.notices: list[str] = []
        """Messages for the user."""
        self.size = 0
        self.is_plain_vector = isinstance(space, spaces.Box) and not is_image(space)
        for name, part in self._parts.items():
            if is_image(part):
                assert part.shape is not None
                self.images[_module_name(name)] = ImageEncoder(part.shape, image_features, generator, image_precision)
                self.size += image_features
            else:
                self.size += spaces.flatdim(part)
                self.notices += _image_notices(name, part)
                if normalize and isinstance(part, spaces.Box):
                    self.normalizers[_module_name(name)] = ObservationNormalizer(spaces.flatdim(part))

    def forward(self, observation: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Features `[B, size]`."""
        if isinstance(observation, Tensor):
            return self._encode("", self._parts[""], observation)
        features = [self._encode(name, part, observation[name]) for name, part in self._parts.items()]
        return torch.cat(features, -1)

    def _encode(self, name: str, part: gymnasium.Space[Any], value: Tensor) -> Tensor:
        if is_image(part):
            encoded: Tensor = self.images[_module_name(name)](value)
            return encoded
        if isinstance(part, spaces.Discrete):
            return nn.functional.one_hot(value.long() - int(part.start), int(part.n)).float()
        if isinstance(part, spaces.MultiDiscrete):
            columns = value.long().flatten(1).unbind(-1)
            sizes, starts = part.nvec.reshape(-1).tolist(), part.start.reshape(-1).tolist()
            hot = [nn.functional.one_hot(c - s, n) for c, n, s in zip(columns, sizes, starts, strict=True)]
            return torch.cat(hot, -1).float()
        numbers = value.reshape(len(value), -1).float()  # a Box may have no axes
        key = _module_name(name)
        return self.normalizers[key](numbers) if key in self.normalizers else numbers

    def update_statistics(self, observation: Tensor | Mapping[str, Tensor], gather: Gather = None) -> None:
        """Update the normalisers with observations `[B, ...]`; `gather` as in `ObservationNormalizer`."""
        for name in self._parts:
            key = _module_name(name)
            if key in self.normalizers:
                value = observation if isinstance(observation, Tensor) else observation[name]
                normalizer = self.normalizers[key]
                assert isinstance(normalizer, ObservationNormalizer)
                normalizer.update_statistics(value.reshape(len(value), normalizer.mean.numel()), gather)


def _image_notices(name: str, part: gymnasium.Space[Any]) -> list[str]:
    """A notice if numbers look like an image; only bytes are treated as images."""
    if not isinstance(part, spaces.Box) or len(part.shape) < 2 or min(part.shape[:2]) < 16:
        return []
    what = f"The observation {name!r}" if name else "The observation"
    return [
        f"{what} of shape {part.shape} and type {part.dtype} is read as {spaces.flatdim(part):,} separate numbers. If "
        "it is a picture, give it as uint8 with bounds 0 and 255, and a convolutional network reads it."
    ]


def _module_name(name: str) -> str:
    # Module names may neither contain dots nor be empty.
    return name.replace(".", "_") or "observation"


class ObservationNormalizer(nn.Module):
    """Normalises observations to mean 0 and variance 1 by running statistics, clipped to ±`clip`.

    The statistics are constant while a rollout is collected and learned from, so that the probability ratio starts at
    exactly 1; `update_statistics` is called between rollouts, and never in evaluation.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def scale(self) -> Tensor:
        """1 / standard deviation, float32."""
        return (self.variance + 1e-8).rsqrt().float()

    def forward(self, observation: Tensor) -> Tensor:
        """Normalised `[B, size]`."""
        return ((observation - self.mean.float()) * self.scale()).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update_statistics(self, observation: Tensor, gather: Gather = None) -> None:
        """Merge the moments of `observation[B, size]` (Chan's parallel formula, in float64).

        `gather` returns the moments of all processes for those of this one.
        """
        batch, nothing = observation.double(), torch.zeros_like(self.mean)
        mean, variance = (batch.mean(0), batch.var(0, correction=0)) if len(batch) else (nothing, nothing)
        own = (float(len(batch)), mean.cpu(), variance.cpu())
        for n, mean, variance in [own] if gather is None else gather(own):
            if n == 0:
                continue
            mean, variance = mean.to(self.mean.device), variance.to(self.mean.device)
            total = self.count + n
            delta = mean - self.mean
            merged = self.variance * self.count + variance * n + delta * delta * (self.count * n / total)
            self.mean += delta * (n / total)
            self.variance.copy_(merged / total)
            self.count.copy_(total)


@contextmanager
def eval_mode(policy: nn.Module) -> Iterator[None]:
    """Put all modules in eval mode; their modes are restored afterwards.

    Dropout and batch norm would make acting and learning use different distributions, and modules are created in
    train mode.
    """
    training = [module for module in policy.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
