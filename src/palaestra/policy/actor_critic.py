"""The policy: an observation goes in; an action with its log-probability, and a value, come out.

`ActorCritic` covers every supported space with separate actor and critic networks, or wraps the user's own
`nn.Module`. It knows nothing of environments, rollouts or learning. Its observation normaliser is part of it, so that
whoever loads the policy sees observations as the policy saw them in training.
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
from palaestra.policy.network import ObservationEncoder, check_network, mlp

__all__ = ["ActResult", "ActorCritic", "TensorObservation"]

TensorObservation: TypeAlias = Tensor | Mapping[str, Tensor]
"""A batch of observations as tensors, `[B, ...]`; a mapping (dict or TensorDict) for `Dict` spaces."""


class ActResult(NamedTuple):
    """What acting gives: the action as drawn, its log-probability and the value of the observation."""

    action: Tensor
    log_prob: Tensor
    value: Tensor


def distribution_for(space: gymnasium.Space[Any], kind: str = "auto", log_std_init: float = 0.0) -> Distribution:
    """The distribution that fits an action space."""
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(tuple(int(n) for n in space.nvec.reshape(-1)), space.start.astype(np.int64))
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli(tuple(space.shape))
    if isinstance(space, spaces.Box):
        gaussian = SquashedGaussian if kind == "squashed_gaussian" else Gaussian
        return gaussian(space, log_std_init)
    raise ConfigError(
        "env action space", str(space), "no distribution for it",
        "Supported: Discrete, MultiDiscrete, MultiBinary, Box",
    )  # fmt: skip


class ActorCritic(nn.Module):
    """Actor and critic for any supported pair of spaces.

    `network`, when given, replaces both: a module whose `forward(observation)` returns
    `(parameters [B, distribution.num_parameters], value [B])`. First weights are drawn on the CPU whatever `device`
    says (`auto`, `cpu`, `cuda:1`, …; None: the CPU), so the same seed gives the same policy everywhere.
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
        # torch's layers draw first weights of their own before ours replace them; its generator stays as it was found.
        with torch.random.fork_rng(devices=[]):
            self._make_networks(network is None, normalize_observation, torch.Generator().manual_seed(seed))
        if network is not None and normalize_observation and not self.encoder.is_plain_vector:
            raise ConfigError(
                "env.normalize_observation", True, "your own network receives these observations as they are",
                "Normalise inside your network, or set env.normalize_observation=false",
            )  # fmt: skip
        if device is not None:
            self.to(choose_device(device))

    def _make_networks(self, ours: bool, normalize: bool, generator: torch.Generator) -> None:
        config = self.config
        self.encoder = ObservationEncoder(
            self.observation_space,
            normalize=normalize,
            image_features=config.image_features if ours else 1,
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
        """Where the weights are."""
        return device_of(self)

    @property
    def notices(self) -> list[str]:
        """Sentences a person should see before training starts."""
        return [] if self.network is not None else self.encoder.notices

    def forward(self, observation: TensorObservation) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[B, k]` and values `[B]`."""
        if self.network is not None:
            seen = self.encoder(observation) if len(self.encoder.normalizers) else observation
            return self._check_output(self.network(seen), observation)
        features = self.encoder(observation)
        return self.actor(features), self.critic(features).squeeze(-1)

    def _check_output(self, given: Any, observation: TensorObservation) -> tuple[Tensor, Tensor]:
        """What the user's own network gave; other shapes would fail, or be spread over the batch, further on."""
        seen = observation if isinstance(observation, Tensor) else next(iter(observation.values()))
        size, wanted = len(seen), self.distribution.num_parameters
        pair = given if isinstance(given, tuple | list) and len(given) == 2 else ()
        if len(pair) == 2 and all(isinstance(part, Tensor) for part in pair):
            parameters, value = pair
            if parameters.shape == (size, wanted) and value.numel() == size:
                return parameters, value.reshape(-1)
            got = f"parameters {tuple(parameters.shape)} and value {tuple(value.shape)}"
        else:
            got = f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, tuple | list) else "")
        raise ConfigError(
            "policy.network", type(self.network).__name__, f"its forward gave {got} for {size} observations",
            f"For this action space it must return (parameters [B, {wanted}], value [B])",
        )  # fmt: skip

    def act(
        self,
        observation: TensorObservation,
        noise: Tensor | None,
        *,
        mask: Tensor | None = None,
    ) -> ActResult:
        """Draw actions from `noise[B, distribution.noise_size]`; without noise, the most likely ones."""
        parameters, value = self(observation)
        parameters = self.distribution.apply_mask(parameters, mask)
        draws = self.distribution
        action = draws.mode(parameters) if noise is None else draws.sample(parameters, noise)
        return ActResult(action, self.distribution.log_prob(parameters, action), value)

    def value(self, observation: TensorObservation) -> Tensor:
        """Values `[B]` alone."""
        if self.network is not None:
            value: Tensor = self(observation)[1]
            return value
        critic: Tensor = self.critic(self.encoder(observation))
        return critic.squeeze(-1)

    def evaluate_actions(
        self, observation: TensorObservation, action: Tensor, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value, each `[B]`, of actions that were taken."""
        parameters, value = self(observation)
        parameters = self.distribution.apply_mask(parameters, mask)
        return self.distribution.log_prob(parameters, action), self.distribution.entropy(parameters), value

    def update_statistics(self, observation: TensorObservation) -> None:
        """Let the observation normaliser, if there is one, learn from `[B, ...]`."""
        self.encoder.update_statistics(observation)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by part. Parts that share nothing can be clipped apart (see docs/algorithms.md)."""
        if self.network is not None or len(self.encoder.images):
            return {"policy": [p for p in self.parameters() if p.requires_grad]}
        actor = [*self.actor.parameters(), *self.distribution.parameters()]
        return {"actor": actor, "critic": list(self.critic.parameters())}
