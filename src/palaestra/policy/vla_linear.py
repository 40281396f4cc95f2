"""The smallest model that follows `VLAModelInterface`: three matrices. A reference to read, and a fake to test with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from palaestra.policy.vla_gaussian import GaussianHead

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["LinearVLA"]


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
