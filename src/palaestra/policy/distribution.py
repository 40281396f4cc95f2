"""Action distributions as functions of the output of a policy's last layer.

Randomness is an argument, `noise` (uniform or standard normal), so that acting is a pure function and the compiled and
the torch path sample the same actions. Actions are stored as sampled: Gaussian actions unclipped, squashed actions
before squashing; `to_env` converts them for the environment. `torch.distributions` is not used: constructing its
objects costs more than the arithmetic.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from palaestra.errors import ConfigError

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_FORBIDDEN = -1e8
"""Logit of a masked action: probability exactly 0 in float32, and still finite, so that 0 * log 0 is 0."""


class Distribution(nn.Module):
    """An action distribution. `parameters` is the output of the policy's last layer, `[B, num_parameters]`."""

    num_parameters: int
    noise_size: int
    noise_kind: Literal["uniform", "normal"]
    action_shape: tuple[int, ...]
    action_dtype: type[np.generic]
    choices: tuple[int, ...] | None = None
    """Number of values of each number of a stored action, from 0; None: any finite number."""

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Sample actions `[B, *action_shape]` with `noise[B, noise_size]`."""
        raise NotImplementedError

    def mode(self, parameters: Tensor) -> Tensor:
        """The most likely action."""
        raise NotImplementedError

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Log-probability (density) `[B]` of actions as returned by `sample`."""
        raise NotImplementedError

    def entropy(self, parameters: Tensor) -> Tensor:
        """Entropy `[B]` in nats."""
        raise NotImplementedError

    def apply_mask(self, parameters: Tensor, mask: Tensor | None) -> Tensor:
        """Change the parameters so that forbidden actions have probability 0."""
        if mask is None:
            return parameters
        return parameters.masked_fill(~mask, _FORBIDDEN)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Convert a stored action for the environment."""
        return action

    def from_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Convert an action of the environment to its stored form; the inverse of `to_env`."""
        return action


def _sample_index(probabilities: Tensor, noise: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds the uniform noise `[..., 1]`."""
    passed = (noise >= probabilities.cumsum(-1)).sum(-1)
    # Rounding can leave the last sum below the noise, and the last index may be a forbidden action.
    return torch.where(passed < probabilities.shape[-1], passed, probabilities.argmax(-1))


class Categorical(Distribution):
    """One of n actions."""

    noise_kind: Literal["uniform", "normal"] = "uniform"
    noise_size = 1
    action_shape = ()
    action_dtype = np.int64

    def __init__(self, n: int, start: int = 0) -> None:
        super().__init__()
        self.num_parameters = n
        self.choices = (n,)
        self._start = start

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """The first action whose cumulative probability exceeds the noise."""
        return _sample_index(parameters.softmax(-1), noise)

    def mode(self, parameters: Tensor) -> Tensor:
        """The action with the largest logit."""
        return parameters.argmax(-1)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Log-softmax at the action."""
        return parameters.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """- sum p log p."""
        logs = parameters.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Shift by the start of the space."""
        return action + self._start if self._start else action

    def from_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Shift by the start of the space."""
        return action - self._start if self._start else action


class MultiCategorical(Distribution):
    """Several independent choices at once."""

    noise_kind: Literal["uniform", "normal"] = "uniform"
    action_dtype = np.int64

    def __init__(self, nvec: tuple[int, ...], start: NDArray[np.int64] | None = None) -> None:
        """`start` holds the lowest value of each choice, in the shape of the environment's actions."""
        super().__init__()
        self.nvec = list(nvec)
        self.choices = tuple(nvec)
        self.num_parameters = sum(nvec)
        self.noise_size = len(nvec)
        self.action_shape = (len(nvec),)
        self._start = np.zeros(len(nvec), np.int64) if start is None else start

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Sample each choice with its own uniform number."""
        parts = torch.split(parameters, self.nvec, dim=-1)
        drawn = [_sample_index(part.softmax(-1), noise[:, i : i + 1]) for i, part in enumerate(parts)]
        return torch.stack(drawn, -1)

    def mode(self, parameters: Tensor) -> Tensor:
        """The largest logit of each choice."""
        return torch.stack([part.argmax(-1) for part in torch.split(parameters, self.nvec, dim=-1)], -1)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Sum over the choices."""
        parts = torch.split(parameters, self.nvec, dim=-1)
        logs = [part.log_softmax(-1).gather(-1, action[:, i : i + 1]) for i, part in enumerate(parts)]
        return torch.cat(logs, -1).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Sum over the choices."""
        total = parameters.new_zeros(parameters.shape[0])
        for part in torch.split(parameters, self.nvec, dim=-1):
            logs = part.log_softmax(-1)
            total = total - (logs.exp() * logs).sum(-1)
        return total

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Shift by the start of each choice, and reshape to the space."""
        return action.reshape(-1, *self._start.shape) + self._start

    def from_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Shift by the start of each choice, and flatten."""
        return (action - self._start).reshape(len(action), -1)


class Bernoulli(Distribution):
    """n independent binary choices."""

    noise_kind: Literal["uniform", "normal"] = "uniform"
    action_dtype = np.int64

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.num_parameters = self.noise_size = math.prod(shape)
        self.choices = (2,) * self.num_parameters
        self.action_shape = shape

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """1 where the noise is below the probability."""
        return (noise < parameters.sigmoid()).long().view(-1, *self.action_shape)

    def mode(self, parameters: Tensor) -> Tensor:
        """1 where its probability exceeds one half."""
        return (parameters > 0).long().view(-1, *self.action_shape)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Sum over the choices."""
        on = action.flatten(1).to(parameters.dtype)
        return -nn.functional.binary_cross_entropy_with_logits(parameters, on, reduction="none").sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Sum over the choices."""
        p = parameters.sigmoid()
        return nn.functional.binary_cross_entropy_with_logits(parameters, p, reduction="none").sum(-1)


class Gaussian(Distribution):
    """Independent normal distributions with a learned standard deviation that does not depend on the observation.

    The action is stored unclipped, so that its log-probability is exact; the environment receives it clipped.
    """

    noise_kind: Literal["uniform", "normal"] = "normal"
    action_dtype = np.float32

    def __init__(self, space: gymnasium.spaces.Box, log_std_init: float = 0.0) -> None:
        super().__init__()
        self.action_shape = tuple(space.shape)
        self.num_parameters = self.noise_size = math.prod(space.shape)
        self.log_std = nn.Parameter(torch.full((self.num_parameters,), float(log_std_init)))
        self._low = np.asarray(space.low, np.float32)
        self._high = np.asarray(space.high, np.float32)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """The mean plus noise, scaled by the standard deviation."""
        return (parameters + self.log_std.exp() * noise).view(-1, *self.action_shape)

    def mode(self, parameters: Tensor) -> Tensor:
        """The mean."""
        return parameters.view(-1, *self.action_shape)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Sum of normal log-densities."""
        z = (action.reshape(parameters.shape) - parameters) * (-self.log_std).exp()
        return (-0.5 * z * z - self.log_std - _LOG_SQRT_2PI).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Depends only on the standard deviations."""
        return (self.log_std + (0.5 + _LOG_SQRT_2PI)).sum().expand(parameters.shape[0])

    def apply_mask(self, parameters: Tensor, mask: Tensor | None) -> Tensor:
        """Not supported: continuous actions cannot be masked."""
        if mask is not None:
            raise ConfigError("info['action_mask']", tuple(mask.shape), "continuous actions cannot be masked")
        return parameters

    @property
    def bounds(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Lower and upper bounds of the space."""
        return self._low, self._high

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Clip to the bounds of the space."""
        clipped: NDArray[Any] = np.clip(action, self._low, self._high)
        return clipped


class SquashedGaussian(Gaussian):
    """A Gaussian mapped to the bounds of the space by tanh.

    The action is stored before squashing, because the inverse of tanh is inexact near the bounds.
    """

    def __init__(self, space: gymnasium.spaces.Box, log_std_init: float = 0.0) -> None:
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            reason = f"needs finite bounds, and the action space is {space}"
            remedy = "Use 'gaussian', or give the environment a bounded action space"
            raise ConfigError("policy.distribution", "squashed_gaussian", reason, remedy)
        super().__init__(space, log_std_init)
        half = torch.as_tensor((self._high - self._low).reshape(-1) / 2)
        self._log_half_sum = float(half.log().sum())
        nodes, weights = np.polynomial.hermite_e.hermegauss(16)
        self.register_buffer("_nodes", torch.as_tensor(nodes, dtype=torch.float32), persistent=False)
        self.register_buffer(
            "_weights", torch.as_tensor(weights / weights.sum(), dtype=torch.float32), persistent=False
        )

    @staticmethod
    def _log_slope(u: Tensor) -> Tensor:
        # log(1 - tanh(u)^2) in a numerically stable form.
        return 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Density of the squashed action, by the change of variables."""
        slope = self._log_slope(action.reshape(parameters.shape)).sum(-1)
        return super().log_prob(parameters, action) - slope - self._log_half_sum

    def entropy(self, parameters: Tensor) -> Tensor:
        """Gaussian entropy plus the expected log-slope, by 16-point Gauss-Hermite quadrature.

        The negative log-probability of stored actions has the right mean, but a zero gradient.
        """
        nodes, weights = self.get_buffer("_nodes"), self.get_buffer("_weights")
        u = parameters.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * nodes
        slope = (self._log_slope(u) * weights).sum(-1).sum(-1)
        return super().entropy(parameters) + slope + self._log_half_sum

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Squash to [low, high]."""
        unit = (np.tanh(action) + np.float32(1.0)) * np.float32(0.5)
        squashed: NDArray[Any] = self._low + unit * (self._high - self._low)
        return squashed


class EpsilonGreedy(Distribution):
    """The action with the largest value, and with probability `exploration` any action. `parameters` are values."""

    noise_kind: Literal["uniform", "normal"] = "uniform"
    noise_size = 2
    action_shape = ()
    action_dtype = np.int64
    exploration: Tensor

    def __init__(self, n: int, start: int = 0) -> None:
        super().__init__()
        self.num_parameters = n
        self.choices = (n,)
        self._start = start
        self.register_buffer("exploration", torch.zeros(()))

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """A random action where the first number of the noise is below `exploration`."""
        explores = (noise[:, 0] < self.exploration) & (parameters.max(-1).values > _FORBIDDEN)
        allowed = parameters > _FORBIDDEN
        # The k-th of the allowed actions, with k drawn by the second number.
        place = (noise[:, 1:] * allowed.sum(-1, keepdim=True)).long() + 1
        drawn = (allowed.cumsum(-1) >= place).float().argmax(-1)
        return torch.where(explores, drawn, parameters.argmax(-1))

    def mode(self, parameters: Tensor) -> Tensor:
        """The action with the largest value."""
        return parameters.argmax(-1)

    def _probabilities(self, parameters: Tensor) -> Tensor:
        allowed = (parameters > _FORBIDDEN).float()
        greedy = nn.functional.one_hot(parameters.argmax(-1), parameters.shape[-1]).float()
        return (1.0 - self.exploration) * greedy + self.exploration * allowed / allowed.sum(-1, keepdim=True)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Logarithm of the probability; of actions that are never taken, the smallest float."""
        tiny = torch.finfo(parameters.dtype).tiny
        return self._probabilities(parameters).gather(-1, action.unsqueeze(-1)).squeeze(-1).clamp(min=tiny).log()

    def entropy(self, parameters: Tensor) -> Tensor:
        """- sum p log p."""
        p = self._probabilities(parameters)
        return -torch.xlogy(p, p).sum(-1)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Shift by the start of the space."""
        return action + self._start if self._start else action

    def from_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Shift by the start of the space."""
        return action - self._start if self._start else action
