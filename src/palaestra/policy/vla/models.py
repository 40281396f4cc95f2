"""A normal distribution around a model's action: what turns a model that says one action into one that can explore.

Works on single actions `[B, d]` and on chunks `[B, k, d]`; log-probabilities and entropies lose the last axis.
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

__all__ = ["GaussianHead", "LinearVLA", "SmallVLA"]


_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class GaussianHead(nn.Module):
    """Independent normals with one learned standard deviation per number of the action."""

    def __init__(self, action_dim: int, log_std_init: float = -1.0) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((action_dim,), float(log_std_init)))

    def sample(self, mean: Tensor, *, deterministic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """The mean, or a draw around it."""
        if deterministic:
            return mean
        noise = torch.empty_like(mean).normal_(generator=generator)
        return mean + self.log_std.exp() * noise

    def evaluate(self, mean: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density and entropy, one per action."""
        z = (actions - mean) * (-self.log_std).exp()
        log_prob = (-0.5 * z * z - self.log_std - _LOG_SQRT_2PI).sum(-1)
        entropy = (self.log_std + (0.5 + _LOG_SQRT_2PI)).sum().expand_as(log_prob)
        return log_prob, entropy


class LinearVLA(nn.Module):
    """Every number of every observation, through one layer, into actions and a value."""

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
        """Actions drawn around the head's output."""
        return self.gaussian.sample(self._mean(observations), deterministic=deterministic, generator=generator)

    def get_value(self, observations: TensorDict) -> Tensor:
        """Values `[B, 1]`."""
        value: Tensor = self.value_head(self._features(observations))
        return value

    def evaluate_actions(self, observations: TensorDict, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density and entropy."""
        return self.gaussian.evaluate(self._mean(observations), actions)


def _numbers(space: gymnasium.Space[Any]) -> int:
    if isinstance(space, spaces.Dict):
        return sum(_numbers(part) for part in space.spaces.values())
    return math.prod(space.shape or ())


def _leaves(observations: TensorDict) -> list[Tensor]:
    parts = [observations[key] for key in sorted(observations.keys(True, True), key=str)]
    return [part.reshape(len(part), -1) for part in parts]


_PATCH = 4
"""Pixels of the picture per cell of the grid, along each axis."""


class SmallVLA(nn.Module):
    """Pictures, words and proprioception to actions `[B, action_dim]`, or chunks of them `[B, chunk, action_dim]`."""

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
        """Every size is a keyword, so that a configuration can name it.

        Args:
            action_dim: Numbers in one action.
            chunk: Actions per decision.
            image_size: Side of the square picture in pixels, a multiple of 4.
            depth: Also look at `depth`, as a fourth colour.
            proprio: Numbers in `proprio`.
            vocabulary: Word numbers are below this.
            channels: Features per cell of the grid.
            maps: Attention maps, hence places the model can keep track of at once.
            width: Of the hidden layers.
            log_std_init: Logarithm of the standard deviation of actions at the start.
            freeze_vision_encoder: Keep `vision_encoder` as it is loaded.
        """
        super().__init__()
        if image_size % _PATCH or image_size < 4 * _PATCH:
            raise ConfigError(
                "model_config.image_size", image_size, f"the grid has cells of {_PATCH} pixels",
                f"Use a multiple of {_PATCH}, at least {4 * _PATCH}",
            )  # fmt: skip
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

    def forward(
        self, observations: Observations, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Tensor:
        """Actions drawn from the policy, or its mean."""
        mean = self._mean(self._fused(observations))
        return self.gaussian.sample(mean, deterministic=deterministic, generator=generator)

    def get_value(self, observations: Observations) -> Tensor:
        """Values `[B, 1]`."""
        value: Tensor = self.value_head(self._fused(observations))
        return value

    def evaluate_actions(self, observations: Observations, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density and entropy `[B]`, or `[B, chunk]`: one per action, so that only executed ones need count."""
        return self.gaussian.evaluate(self._mean(self._fused(observations)), actions)

    def act(
        self, observations: Observations, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, their log-density and the values, in one pass."""
        fused = self._fused(observations)
        mean = self._mean(fused)
        actions = self.gaussian.sample(mean, deterministic=deterministic, generator=generator)
        return actions, self.gaussian.evaluate(mean, actions)[0], self.value_head(fused)

    def evaluate(self, observations: Observations, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-density, entropy and values, in one pass."""
        fused = self._fused(observations)
        return *self.gaussian.evaluate(self._mean(fused), actions), self.value_head(fused)

    def _mean(self, fused: Tensor) -> Tensor:
        mean: Tensor = self.action_head(fused)
        return mean.view(-1, *self._shape)

    def _fused(self, observations: Observations) -> Tensor:
        """Everything the heads see: places, what is there, the words, and the robot itself."""
        words = self.language_encoder(observations["language"])
        grid = self.vision_encoder(self._picture(observations))
        scale, shift = self.film(words).unsqueeze(1).chunk(2, -1)
        grid = torch.addcmul(grid + shift, grid, scale).relu_()
        where = self.attention(grid).transpose(1, 2).softmax(-1)
        # The centre of mass of each map, in the coordinates of the picture: finer than a cell of the grid.
        places = where @ self.get_buffer("_places")
        return torch.cat((places.flatten(1), grid.mean(1), words, observations["proprio"]), -1)

    def _picture(self, observations: Observations) -> Tensor:
        """Colours (and heights) from 0 to 255, channels first."""
        rgb: Tensor = observations["rgb"].permute(0, 3, 1, 2)
        # Rearranged while still bytes; channels-last is the order CPU convolutions like best.
        picture = rgb.contiguous(memory_format=torch.channels_last).float()
        if self._depth:
            # Heights are below a fifth of the table's side; times 255 * 4 they are as large as the colours.
            picture = torch.cat((picture, observations["depth"].unsqueeze(1) * 1020.0), 1)
        return picture


class _VisionEncoder(nn.Module):
    """Features of each cell of the grid, `[B, cells, channels]`."""

    def __init__(self, colours: int, channels: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(colours, channels, _PATCH, _PATCH)
        self.mix = nn.Linear(channels, channels)

    def forward(self, picture: Tensor) -> Tensor:
        # 1/255 goes into the weights: they are smaller than the batch.
        weight = self.patches.weight * (1.0 / 255.0)
        patches = nn.functional.conv2d(picture, weight, self.patches.bias, self.patches.stride)
        mixed: Tensor = self.mix(patches.permute(0, 2, 3, 1).flatten(1, 2).relu())
        return mixed


class _WordBag(nn.Module):
    """The mean of the words' vectors, then a layer: instructions differ in their words, never in the order alone."""

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
        last.weight.mul_(0.1)  # nothing is preferred at the start
        last.bias.zero_()
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), last)
