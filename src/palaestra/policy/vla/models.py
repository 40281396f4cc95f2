"""Reference models that implement `VLAModelInterface`, and the Gaussian head that makes a regression model explore.

`LinearVLA` is the smallest possible model, for tests. `SmallVLA` has the parts of large models under their usual names
and trains on a laptop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from palaestra.errors import ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict

    Observations = TensorDict | Mapping[str, Tensor]

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class GaussianHead(nn.Module):
    """Independent normal distributions around a model's action, with one learned standard deviation per dimension.

    Works on single actions `[B, d]` and on chunks `[B, k, d]`; log-probabilities and entropies lose the last axis.
    """

    def __init__(self, action_dim: int, log_std_init: float = -1.0) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((action_dim,), float(log_std_init)))

    def sample(self, mean: Tensor, *, deterministic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Sample around the mean; `deterministic` returns the mean."""
        if deterministic:
            return mean
        noise = torch.empty_like(mean).normal_(generator=generator)
        return mean + self.log_std.exp() * noise

    def evaluate(self, mean: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density and entropy of each action."""
        z = (actions - mean) * (-self.log_std).exp()
        log_prob = (-0.5 * z * z - self.log_std - _LOG_SQRT_2PI).sum(-1)
        entropy = (self.log_std + (0.5 + _LOG_SQRT_2PI)).sum().expand_as(log_prob)
        return log_prob, entropy


class GaussianVLA(nn.Module):
    """Base class of models that predict a mean action and a value; samples are drawn from `self.gaussian`."""

    gaussian: GaussianHead

    def predict(self, observations: Observations) -> tuple[Tensor, Tensor]:
        """Mean actions `[B, d]` or `[B, k, d]`, and values `[B, 1]`."""
        raise NotImplementedError

    def forward(
        self, observations: Observations, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Tensor:
        """Sample actions; `deterministic` returns their mean."""
        mean, _ = self.predict(observations)
        return self.gaussian.sample(mean, deterministic=deterministic, generator=generator)

    def get_value(self, observations: Observations) -> Tensor:
        """Values `[B, 1]`."""
        return self.predict(observations)[1]

    def evaluate_actions(self, observations: Observations, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density and entropy `[B]`, or `[B, k]`, one per action."""
        return self.gaussian.evaluate(self.predict(observations)[0], actions)

    def act(
        self, observations: Observations, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, their log-density and values, in one pass."""
        mean, value = self.predict(observations)
        actions = self.gaussian.sample(mean, deterministic=deterministic, generator=generator)
        return actions, self.gaussian.evaluate(mean, actions)[0], value

    def evaluate(self, observations: Observations, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-density, entropy and values, in one pass."""
        mean, value = self.predict(observations)
        return *self.gaussian.evaluate(mean, actions), value


class LinearVLA(nn.Module):
    """One hidden layer over all numbers of an observation, with linear heads for action and value."""

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_dim: int, chunk: int = 1, hidden: int = 8
    ) -> None:
        super().__init__()
        self._shape = (action_dim,) if chunk == 1 else (chunk, action_dim)
        self.vision_encoder = nn.Linear(_numbers(observation_space), hidden)
        self.action_head = nn.Linear(hidden, chunk * action_dim)
        self.value_head = nn.Linear(hidden, 1)
        self.gaussian = GaussianHead(action_dim)

    def _features(self, observations: TensorDict) -> Tensor:
        parts = [part.float() / (255 if part.dtype == torch.uint8 else 1) for part in _leaves(observations)]
        return torch.tanh(self.vision_encoder(torch.cat(parts, -1)))

    def _mean(self, observations: TensorDict) -> Tensor:
        mean: Tensor = self.action_head(self._features(observations))
        return mean.view(-1, *self._shape)

    def forward(
        self, observations: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Tensor:
        """Sample actions around the head's output."""
        return self.gaussian.sample(self._mean(observations), deterministic=deterministic, generator=generator)

    def get_value(self, observations: TensorDict) -> Tensor:
        """Values `[B, 1]`."""
        value: Tensor = self.value_head(self._features(observations))
        return value

    def evaluate_actions(self, observations: TensorDict, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density and entropy of actions."""
        return self.gaussian.evaluate(self._mean(observations), actions)


def _numbers(space: gymnasium.Space[Any]) -> int:
    if isinstance(space, spaces.Dict):
        return sum(_numbers(part) for part in space.spaces.values())
    return math.prod(space.shape or ())


def _leaves(observations: TensorDict) -> list[Tensor]:
    parts = [observations[key] for key in sorted(observations.keys(True, True), key=str)]
    return [part.reshape(len(part), -1) for part in parts]


_PATCH = 4
"""Side of a grid cell in pixels."""


class SmallVLA(GaussianVLA):
    """Images, words and proprioception to actions `[B, action_dim]`, or chunks of them `[B, chunk, action_dim]`.

    `vision_encoder` turns the image into a grid of features, `language_encoder` the instruction into a vector, which
    scales and shifts the features (FiLM). Attention maps over the result locate the objects. Positions, words and
    proprioception are the input of `action_head` (the mean of a normal distribution) and `value_head`.
    """

    def __init__(
        self,
        *,
        action_dim: int = 2,
        chunk: int = 1,
        image_size: int = 48,
        depth: bool = False,
        proprio: int = 4,
        vocabulary: int = 16,
        channels: int = 16,
        maps: int = 8,
        width: int = 192,
        log_std_init: float = -1.0,
        freeze_vision_encoder: bool = False,
    ) -> None:
        """All sizes are keywords, so that a configuration can set them.

        Args:
            action_dim: Size of one action.
            chunk: Actions per decision.
            image_size: Side of the square image in pixels, a multiple of 4.
            depth: Use `depth` as a fourth channel.
            proprio: Size of `proprio`.
            vocabulary: Number of word ids.
            channels: Features per grid cell.
            maps: Number of attention maps, and so of positions the model can track.
            width: Width of the hidden layers.
            log_std_init: Initial logarithm of the standard deviation.
            freeze_vision_encoder: Do not train `vision_encoder`.
        """
        super().__init__()
        if image_size % _PATCH or image_size < 4 * _PATCH:
            remedy = f"Use a multiple of {_PATCH}, at least {4 * _PATCH}"
            reason = f"the grid has cells of {_PATCH} pixels"
            raise ConfigError("model_config.image_size", image_size, reason, remedy)
        self._depth, self._image_size = depth, image_size
        self._shape = (action_dim,) if chunk == 1 else (chunk, action_dim)
        self.vision_encoder = _VisionEncoder(4 if depth else 3, channels)
        self.language_encoder = _WordBag(vocabulary, width // 2)
        self.film = nn.Linear(width // 2, 2 * channels)
        self.attention = nn.Linear(channels, maps)
        fused = 2 * maps + channels + width // 2 + proprio
        self.action_head = _head(fused, width, chunk * action_dim)
        self.value_head = _head(fused, width, 1)
        self.gaussian = GaussianHead(action_dim, log_std_init)
        cells = (torch.arange(image_size // _PATCH) + 0.5) * (2.0 * _PATCH / image_size) - 1.0
        self.register_buffer("_places", torch.cartesian_prod(cells, cells).flip(-1).contiguous(), persistent=False)
        if freeze_vision_encoder:
            self.vision_encoder.requires_grad_(False)

    def predict(self, observations: Observations) -> tuple[Tensor, Tensor]:
        """Mean actions and values."""
        fused = self._fuse(observations)
        mean: Tensor = self.action_head(fused)
        return mean.view(-1, *self._shape), self.value_head(fused)

    def _fuse(self, observations: Observations) -> Tensor:
        """The input of the heads: positions, image features, words and proprioception."""
        words = self.language_encoder(observations["language"])
        grid = self.vision_encoder(self._picture(observations))
        scale, shift = self.film(words).unsqueeze(1).chunk(2, -1)
        grid = torch.addcmul(grid + shift, grid, scale).relu_()
        where = self.attention(grid).transpose(1, 2).softmax(-1)
        # The centre of mass of each map in image coordinates, which is finer than a grid cell.
        positions = where @ self.get_buffer("_places")
        return torch.cat((positions.flatten(1), grid.mean(1), words, observations["proprio"]), -1)

    def _picture(self, observations: Observations) -> Tensor:
        """Colours (and depth) from 0 to 255, channels first."""
        rgb: Tensor = observations["rgb"].permute(0, 3, 1, 2)
        # Rearranged while still bytes; channels-last is the fastest layout for CPU convolutions.
        picture = rgb.contiguous(memory_format=torch.channels_last).float()
        if self._depth:
            # Depths are below a fifth of the table's side; times 255 * 4 they are as large as the colours.
            picture = torch.cat((picture, observations["depth"].unsqueeze(1) * 1020.0), 1)
        return picture


class _VisionEncoder(nn.Module):
    """Features of each grid cell, `[B, cells, channels]`."""

    def __init__(self, colours: int, channels: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(colours, channels, _PATCH, _PATCH)
        self.mix = nn.Linear(channels, channels)

    def forward(self, picture: Tensor) -> Tensor:
        # Scale the weights by 1/255 instead of the pixels: they are smaller than the batch.
        weight = self.patches.weight * (1.0 / 255.0)
        patches = nn.functional.conv2d(picture, weight, self.patches.bias, self.patches.stride)
        mixed: Tensor = self.mix(patches.permute(0, 2, 3, 1).flatten(1, 2).relu())
        return mixed


class _WordBag(nn.Module):
    """Mean of the word embeddings, then a layer; the order of the words does not matter."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.layer = nn.Linear(size, size)

    def forward(self, words: Tensor) -> Tensor:
        present = (words != 0).unsqueeze(-1).float()
        bag = (self.embedding(words) * present).sum(1) / present.sum(1).clamp(min=1.0)
        return torch.tanh(self.layer(bag))


def _head(inputs: int, width: int, outputs: int) -> nn.Sequential:
    last = nn.Linear(width, outputs)
    with torch.no_grad():
        last.weight.mul_(0.1)  # start near zero
        last.bias.zero_()
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), last)
