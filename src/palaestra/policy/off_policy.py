"""Policies of algorithms on transitions: an actor, critics of pairs of observation and action, or both, in one module.

Each class suits one family of algorithms. All have what every policy has (`act`, `value`, `distribution`, spaces), so
that they are evaluated, played and stored like an `ActorCritic`. `parameter_groups` names the parts that an algorithm
optimises separately. Weights are drawn as `nn.Linear` draws them, which the reference implementations use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from palaestra.errors import ConfigError
from palaestra.policy.actor_critic import ActResult, TensorObservation
from palaestra.policy.config import PolicyConfig
from palaestra.policy.device import Device, choose_device, device_of
from palaestra.policy.distribution import Distribution, EpsilonGreedy
from palaestra.policy.network import ACTIVATIONS, ObservationEncoder, ObservationNormalizer, check_network


def uniform_mlp(sizes: Sequence[int], activation: str, generator: torch.Generator) -> nn.Sequential:
    """Linear layers with weights and biases uniform within ±1/sqrt(inputs)."""
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        linear, bound = nn.Linear(inputs, outputs), 1.0 / math.sqrt(inputs)
        with torch.no_grad():
            linear.weight.uniform_(-bound, bound, generator=generator)
            linear.bias.uniform_(-bound, bound, generator=generator)
        layers.append(linear)
        if index < len(sizes) - 2:
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


class TransitionPolicy(nn.Module):
    """Base class: the observation encoder, the action distribution, and acting."""

    name: ClassVar[str]
    """Its `policy.name`."""
    groups: ClassVar[tuple[str, ...]]
    """Attributes whose parameters are optimised together, each group by its own loss."""
    distribution: Distribution

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: PolicyConfig | None = None,
        *,
        normalize_observation: bool = False,
        seed: int = 0,
        device: Device | None = None,
    ) -> None:
        super().__init__()
        self.config = config or PolicyConfig(name=self.name, hidden=(256, 256), activation="relu")
        self.observation_space, self.action_space = observation_space, action_space
        generator = torch.Generator().manual_seed(seed)
        # torch's layers initialise themselves from the global generator before ours replace their weights.
        with torch.random.fork_rng(devices=[]):
            self.encoder = ObservationEncoder(
                observation_space,
                normalize=normalize_observation,
                image_features=self.config.image_features,
                generator=generator,
            )
            for normalizer in self.encoder.normalizers.values():
                assert isinstance(normalizer, ObservationNormalizer)
                normalizer.clip = math.inf  # the statistics are those of the data and do not change
            self._build(generator)
        if device is not None:
            self.to(choose_device(device))

    def _build(self, generator: torch.Generator) -> None:
        """Create `distribution` and the networks."""
        raise NotImplementedError

    def _mlp(self, inputs: int, outputs: int, generator: torch.Generator) -> nn.Sequential:
        sizes = (inputs, *self.config.hidden, outputs)
        check_network(self.config.hidden, [sizes])
        return uniform_mlp(sizes, self.config.activation, generator)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return device_of(self)

    @property
    def notices(self) -> list[str]:
        """Messages for the user, shown before training starts."""
        return self.encoder.notices

    def forward(self, observation: TensorObservation) -> tuple[Tensor, Tensor]:
        """Parameters of the distribution `[B, k]` and values `[B]`."""
        raise NotImplementedError

    def act(self, observation: TensorObservation, noise: Tensor | None, *, mask: Tensor | None = None) -> ActResult:
        """Explore with `noise[B, distribution.noise_size]`; without noise, the best actions."""
        distribution = self.distribution
        parameters, value = self(observation)
        parameters = distribution.apply_mask(parameters, mask)
        action = distribution.mode(parameters) if noise is None else distribution.sample(parameters, noise)
        return ActResult(action, distribution.log_prob(parameters, action), value)

    def value(self, observation: TensorObservation) -> Tensor:
        """Values `[B]`."""
        value: Tensor = self(observation)[1]
        return value

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters by part."""
        groups = {}
        for name in self.groups:
            part = getattr(self, name)
            groups[name] = [part] if isinstance(part, nn.Parameter) else list(part.parameters())
        groups[self.groups[0]] += list(self.encoder.parameters())
        return groups

    @torch.no_grad()
    def fit_normalizer(self, observation: TensorObservation) -> None:
        """Set the statistics of the observation normaliser, if there is one, to those of a dataset `[n, ...]`."""
        self.encoder.update_statistics(observation)
        for normalizer in self.encoder.normalizers.values():
            assert isinstance(normalizer, ObservationNormalizer)
            # Added to the standard deviation as the reference implementations do, for numbers that hardly vary.
            normalizer.variance.copy_((normalizer.variance.sqrt() + 1e-3).square())


class QNetwork(TransitionPolicy):
    """The value of every discrete action, for DQN. `policy.kwargs.dueling`: value and advantages have own heads."""

    name = "q_network"
    groups = ("critic",)

    def _build(self, generator: torch.Generator) -> None:
        space = self.action_space
        if not isinstance(space, spaces.Discrete):
            raise ConfigError("env action space", str(space), "q_network values discrete actions", "Use sac or ppo")
        unknown = sorted(set(self.config.kwargs) - {"dueling"})
        if unknown:
            raise ConfigError("policy.kwargs", unknown[0], "q_network does not have it", "It has: dueling")
        self.dueling = bool(self.config.kwargs.get("dueling", False))
        self.distribution = EpsilonGreedy(int(space.n), int(space.start))
        # Dueling: the last output is the value of the observation, the others are advantages.
        self.critic = self._mlp(self.encoder.size, int(space.n) + int(self.dueling), generator)

    def q_values(self, observation: TensorObservation) -> Tensor:
        """`[B, n]`."""
        out: Tensor = self.critic(self.encoder(observation))
        if not self.dueling:
            return out
        advantage = out[:, :-1]
        return out[:, -1:] + advantage - advantage.mean(-1, keepdim=True)

    def forward(self, observation: TensorObservation) -> tuple[Tensor, Tensor]:
        """Values of the actions, and the largest of them."""
        values = self.q_values(observation)
        return values, values.max(-1).values


TRANSITION_POLICIES: dict[str, type[TransitionPolicy]] = {cls.name: cls for cls in (QNetwork,)}
"""The policies of this module by `policy.name`."""
