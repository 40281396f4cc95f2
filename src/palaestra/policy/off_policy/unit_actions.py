"""Distributions of continuous actions that are stored as numbers from -1 to 1, whatever the bounds of the space.

Critics and replay buffers see actions of one scale; `to_env` maps -1 and 1 exactly to the bounds of the space.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from palaestra.errors import ConfigError
from palaestra.policy.distribution import Distribution

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class UnitDistribution(Distribution):
    """Actions in [-1, 1], for a Box with finite bounds."""

    noise_kind: Literal["uniform", "normal"] = "normal"
    action_dtype = np.float32

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__()
        if not isinstance(space, spaces.Box):
            raise ConfigError("env action space", str(space), "this policy needs a Box", "Use dqn, iql, bc or ppo")
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            reason = "actions are scaled to the bounds of the space, and these are not finite"
            raise ConfigError("env action space", str(space), reason, "Wrap the environment with RescaleAction")
        self.action_shape = tuple(space.shape)
        self.size = self.num_parameters = self.noise_size = math.prod(space.shape)
        self._low, self._high = np.asarray(space.low, np.float32), np.asarray(space.high, np.float32)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Scale from [-1, 1] to the bounds, which are reached exactly."""
        scaled: NDArray[Any] = (self._low * (1.0 - action) + self._high * (1.0 + action)) * np.float32(0.5)
        np.clip(scaled, self._low, self._high, out=scaled)
        return scaled

    def from_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Scale from the bounds to [-1, 1]; what lies outside is clipped, as the environment does."""
        width = np.where(self._high > self._low, self._high - self._low, 1.0)
        unit = (2.0 * np.asarray(action, np.float64) - self._low - self._high) / width
        clipped: NDArray[Any] = np.clip(unit, -1.0, 1.0).astype(np.float32)
        return clipped

    def apply_mask(self, parameters: Tensor, mask: Tensor | None) -> Tensor:
        """Not supported: continuous actions cannot be masked."""
        if mask is not None:
            raise ConfigError("info['action_mask']", tuple(mask.shape), "continuous actions cannot be masked")
        return parameters


class TanhGaussian(UnitDistribution):
    """tanh of a Gaussian whose means and log standard deviations are both outputs of the network, for SAC."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__(space)
        self.num_parameters = 2 * self.size

    def split(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations, each `[B, size]`."""
        mean, log_std = parameters.chunk(2, -1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def sample_with_log_prob(self, parameters: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions `[B, size]` and their log-densities `[B]`, computed before squashing: exact at the bounds."""
        mean, log_std = self.split(parameters)
        u = mean + log_std.exp() * noise
        gaussian = (-0.5 * noise * noise - log_std - _LOG_SQRT_2PI).sum(-1)
        return u.tanh(), gaussian - _log_slope(u).sum(-1)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Squashed samples."""
        mean, log_std = self.split(parameters)
        return (mean + log_std.exp() * noise).tanh().view(-1, *self.action_shape)

    def mode(self, parameters: Tensor) -> Tensor:
        """The squashed mean."""
        return self.split(parameters)[0].tanh().view(-1, *self.action_shape)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Density of squashed actions; those within 1e-6 of a bound count as that far from it."""
        mean, log_std = self.split(parameters)
        u = action.reshape(mean.shape).clamp(-1.0 + 1e-6, 1.0 - 1e-6).atanh()
        z = (u - mean) * (-log_std).exp()
        return (-0.5 * z * z - log_std - _LOG_SQRT_2PI - _log_slope(u)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Approximation: entropy of the Gaussian plus the log-slope of tanh at the mean."""
        mean, log_std = self.split(parameters)
        return (log_std + 0.5 + _LOG_SQRT_2PI + _log_slope(mean)).sum(-1)


def _log_slope(u: Tensor) -> Tensor:
    # log(1 - tanh(u)^2) in a numerically stable form.
    return 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))


class NoisyAction(UnitDistribution):
    """A deterministic action (`parameters`, within [-1, 1]); exploration adds noise of deviation `exploration`."""

    exploration: Tensor

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__(space)
        self.register_buffer("exploration", torch.zeros(()))

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """The action plus noise, clipped."""
        return (parameters + self.exploration * noise).clamp(-1.0, 1.0).view(-1, *self.action_shape)

    def mode(self, parameters: Tensor) -> Tensor:
        """The action."""
        return parameters.view(-1, *self.action_shape)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Zero: the action is certain."""
        return parameters.new_zeros(len(parameters))

    def entropy(self, parameters: Tensor) -> Tensor:
        """Zero."""
        return parameters.new_zeros(len(parameters))


class ClippedGaussian(UnitDistribution):
    """A Gaussian around a mean within [-1, 1] with learned deviations that do not depend on the observation.

    Samples are clipped; densities are those of the Gaussian, as in advantage-weighted regression.
    """

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__(space)
        self.log_std = nn.Parameter(torch.zeros(self.size))

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """The mean plus noise, clipped."""
        deviation = self.log_std.clamp(LOG_STD_MIN, LOG_STD_MAX).exp()
        return (parameters + deviation * noise).clamp(-1.0, 1.0).view(-1, *self.action_shape)

    def mode(self, parameters: Tensor) -> Tensor:
        """The mean."""
        return parameters.view(-1, *self.action_shape)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Sum of normal log-densities."""
        log_std = self.log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)
        z = (action.reshape(parameters.shape) - parameters) * (-log_std).exp()
        return (-0.5 * z * z - log_std - _LOG_SQRT_2PI).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Depends only on the standard deviations."""
        return (self.log_std + (0.5 + _LOG_SQRT_2PI)).sum().expand(parameters.shape[0])
