"""`ActorCritic`: from observations to actions, their log-probabilities and values.

It supports all spaces with separate actor and critic networks, or wraps the user's own `nn.Module`. The observation
normaliser is part of the policy, so that a loaded policy sees observations as in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from palaestra.errors import ConfigError
from palaestra.policy.config import PolicyConfig
from palaestra.policy.device import Device, choose_device, device_of
from palaestra.policy.distribution import (
    Bernoulli,
    Categorical,
    Distribution,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
)
from palaestra.policy.network import Gather, ObservationEncoder, check_network, mlp

TensorObservation: TypeAlias = Tensor | Mapping[str, Tensor]
"""A batch of observations `[B, ...]`; a mapping (dict or TensorDict) for `Dict` spaces."""


class ActResult(NamedTuple):
    """The sampled action, its log-probability and the value of the observation."""

    action: Tensor
    log_prob: Tensor
    value: Tensor


def distribution_for(space: gymnasium.Space[Any], kind: str = "auto", log_std_init: float = 0.0) -> Distribution:
    """The distribution for an action space."""
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(tuple(int(n) for n in space.nvec.reshape(-1)), space.start.astype(np.int64))
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli(tuple(space.shape))
    if isinstance(space, spaces.Box):
        gaussian = SquashedGaussian if kind == "squashed_gaussian" else Gaussian
        return gaussian(space, log_std_init)
    supported = "Supported: Discrete, MultiDiscrete, MultiBinary, Box"
    raise ConfigError("env action space", str(space), "no distribution for it", supported)


class ActorCritic(nn.Module):
    """Actor and critic for any supported pair of spaces.

    `network` replaces both: a module whose `forward(observation)` returns
    `(parameters [B, distribution.num_parameters], value [B])`. Weights are initialised on the CPU and then moved to
    `device` (`auto`, `cpu`, `cuda:1`, …; None: the CPU), so the same seed gives the same policy on every device.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: PolicyConfig | None = None,
        *,
        network: nn.Module | None = None,
        normalize_observation: bool = False,
        seed: int = 0,
        device: Device | None = None,
    ) -> None:
        super().__init__()
        config = config or PolicyConfig()
        self.config = config
        self.observation_space = observation_space
        self.action_space = action_space
        self.distribution = distribution_for(action_space, config.distribution, config.log_std_init)
        self.network = network
        # torch's layers initialise themselves from the global generator before ours replace their weights.
        with torch.random.fork_rng(devices=[]):
            self._build_networks(network is None, normalize_observation, torch.Generator().manual_seed(seed))
        if network is not None and normalize_observation and not self.encoder.is_plain_vector:
            reason = "your own network receives these observations as they are"
            remedy = "Normalise inside your network, or set env.normalize_observation=false"
            raise ConfigError("env.normalize_observation", True, reason, remedy)
        if device is not None:
            self.to(choose_device(device))

    def _build_networks(self, ours: bool, normalize: bool, generator: torch.Generator) -> None:
        config = self.config
        self.encoder = ObservationEncoder(
            self.observation_space,
            normalize=normalize,
            image_features=config.image_features if ours else 1,
            image_precision=config.image_precision,
            generator=generator,
        )
        if not ours:
            self.encoder.images = nn.ModuleDict()
            return
        sizes = (self.encoder.size, *config.hidden)
        check_network(config.hidden, [(*sizes, self.distribution.num_parameters), (*sizes, 1)])
        self.actor = mlp((*sizes, self.distribution.num_parameters), config.activation, 0.01, generator)
        self.critic = mlp((*sizes, 1), config.activation, 1.0, generator)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return device_of(self)

    @property
    def notices(self) -> list[str]:
        """Messages for the user, shown before training starts."""
        return [] if self.network is not None else self.encoder.notices

    def forward(self, observation: TensorObservation) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[B, k]` and values `[B]`."""
        if self.network is not None:
            inputs = self.encoder(observation) if len(self.encoder.normalizers) else observation
            return self._check_output(self.network(inputs), observation)
        features = self.encoder(observation)
        return self.actor(features), self.critic(features).squeeze(-1)

    def _check_output(self, output: Any, observation: TensorObservation) -> tuple[Tensor, Tensor]:
        """Check the shapes of the user's network; wrong ones would fail or broadcast later."""
        size = len(observation if isinstance(observation, Tensor) else next(iter(observation.values())))
        width, is_sequence = self.distribution.num_parameters, isinstance(output, tuple | list)
        if is_sequence and len(output) == 2 and all(isinstance(part, Tensor) for part in output):
            parameters, value = output
            if parameters.shape == (size, width) and value.numel() == size:
                return parameters, value.reshape(-1)
            got = f"parameters {tuple(parameters.shape)} and value {tuple(value.shape)}"
        else:
            got = f"a {type(output).__name__}" + (f" of {len(output)}" if is_sequence else "")
        reason = f"its forward gave {got} for {size} observations"
        remedy = f"For this action space it must return (parameters [B, {width}], value [B])"
        raise ConfigError("policy.network", type(self.network).__name__, reason, remedy)

    def act(self, observation: TensorObservation, noise: Tensor | None, *, mask: Tensor | None = None) -> ActResult:
        """Sample actions with `noise[B, distribution.noise_size]`; without noise, the most likely actions."""
        distribution = self.distribution
        parameters, value = self(observation)
        parameters = distribution.apply_mask(parameters, mask)
        action = distribution.mode(parameters) if noise is None else distribution.sample(parameters, noise)
        return ActResult(action, distribution.log_prob(parameters, action), value)

    def value(self, observation: TensorObservation) -> Tensor:
        """Values `[B]`."""
        if self.network is not None:
            value: Tensor = self(observation)[1]
            return value
        critic: Tensor = self.critic(self.encoder(observation))
        return critic.squeeze(-1)

    def evaluate_actions(
        self, observation: TensorObservation, action: Tensor, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value of actions, each `[B]`."""
        parameters, value = self(observation)
        parameters = self.distribution.apply_mask(parameters, mask)
        return self.distribution.log_prob(parameters, action), self.distribution.entropy(parameters), value

    def update_statistics(self, observation: TensorObservation, gather: Gather = None) -> None:
        """Update the observation normaliser, if there is one, with observations `[B, ...]`.

        `gather`: merges the statistics of several processes.
        """
        self.encoder.update_statistics(observation, gather)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters by part. Gradients of each part are clipped separately (see docs/algorithms.md)."""
        if self.network is not None or len(self.encoder.images):
            return {"policy": [p for p in self.parameters() if p.requires_grad]}
        actor = [*self.actor.parameters(), *self.distribution.parameters()]
        return {"actor": actor, "critic": list(self.critic.parameters())}
