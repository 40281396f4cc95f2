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
from palaestra.policy.distribution import Categorical, Distribution, EpsilonGreedy
from palaestra.policy.network import ACTIVATIONS, ObservationEncoder, ObservationNormalizer, check_network
from palaestra.policy.off_policy.unit_actions import ClippedGaussian, NoisyAction, TanhGaussian


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
                image_precision=self.config.image_precision,
                generator=generator,
            )
            for normalizer in self.encoder.normalizers.values():
                assert isinstance(normalizer, ObservationNormalizer)
                normalizer.clip = math.inf  # the statistics are those of the data and do not change
            if len(self.groups) > 1 and len(self.encoder.images):
                reason = f"{self.name} has several networks, which cannot share an image encoder"
                raise ConfigError("env observation", str(observation_space), reason, "Use dqn, bc or ppo")
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

    def explore(self, observation: TensorObservation, noise: Tensor) -> Tensor:
        """The actions of `act` alone, which may need fewer networks."""
        return self.distribution.sample(self(observation)[0], noise)

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
        groups[self.groups[0]] += [*self.distribution.parameters(), *self.encoder.parameters()]
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


class _ActorPolicy(TransitionPolicy):
    """A policy with an actor of its own. `actor` is the first group, and owns the parameters of the distribution."""

    actor: nn.Sequential

    def parameters_of(self, observation: TensorObservation) -> Tensor:
        """Parameters of the distribution `[B, k]`."""
        parameters: Tensor = self.actor(self.encoder(observation))
        return parameters

    def explore(self, observation: TensorObservation, noise: Tensor) -> Tensor:
        """Actions with exploration."""
        return self.distribution.sample(self.parameters_of(observation), noise)

    def value_of(self, observation: TensorObservation, parameters: Tensor) -> Tensor:
        """Values `[B]` of the policy's own actions."""
        return parameters.new_zeros(len(parameters))

    def forward(self, observation: TensorObservation) -> tuple[Tensor, Tensor]:
        """Parameters of the distribution, and values."""
        parameters = self.parameters_of(observation)
        return parameters, self.value_of(observation, parameters)

    def _twins(self, inputs: int, outputs: int, generator: torch.Generator) -> nn.ModuleList:
        return nn.ModuleList(self._mlp(inputs, outputs, generator) for _ in range(2))


class SoftActorCritic(_ActorPolicy):
    """A stochastic actor squashed by tanh, two critics and a learned temperature, for SAC."""

    name = "soft_actor_critic"
    groups = ("actor", "critic", "temperature")
    distribution: TanhGaussian

    def _build(self, generator: torch.Generator) -> None:
        self.distribution = TanhGaussian(self.action_space)
        size = self.distribution.size
        self.actor = self._mlp(self.encoder.size, 2 * size, generator)
        self.critic = self._twins(self.encoder.size + size, 1, generator)
        self.temperature = nn.Parameter(torch.zeros(1))
        """Logarithm of the weight of the entropy."""

    def q_values(self, observation: TensorObservation, action: Tensor) -> Tensor:
        """Values `[2, B]` of actions by both critics."""
        return _twin_values(self.critic, self.encoder(observation), action)

    def value_of(self, observation: TensorObservation, parameters: Tensor) -> Tensor:
        """The smaller value of the most likely action."""
        return self.q_values(observation, self.distribution.mode(parameters)).min(0).values


class DeterministicActorCritic(_ActorPolicy):
    """A deterministic actor and two critics, for TD3+BC."""

    name = "deterministic_actor_critic"
    groups = ("actor", "critic")
    distribution: NoisyAction

    def _build(self, generator: torch.Generator) -> None:
        self.distribution = NoisyAction(self.action_space)
        size = self.distribution.size
        self.actor = self._mlp(self.encoder.size, size, generator)
        self.critic = self._twins(self.encoder.size + size, 1, generator)

    def parameters_of(self, observation: TensorObservation) -> Tensor:
        """Actions."""
        return super().parameters_of(observation).tanh()

    def q_values(self, observation: TensorObservation, action: Tensor) -> Tensor:
        """Values `[2, B]` of actions by both critics."""
        return _twin_values(self.critic, self.encoder(observation), action)

    def first_q_values(self, observation: TensorObservation, action: Tensor) -> Tensor:
        """Values `[B]` of actions by the first critic."""
        return _twin_values(self.critic[:1], self.encoder(observation), action)[0]

    def value_of(self, observation: TensorObservation, parameters: Tensor) -> Tensor:
        """The smaller value of the action."""
        return self.q_values(observation, parameters).min(0).values


class ImplicitQ(_ActorPolicy):
    """An actor, two critics and a value network, for IQL; discrete or continuous actions."""

    name = "implicit_q"
    groups = ("actor", "critic", "value_network")

    def _build(self, generator: torch.Generator) -> None:
        self.is_discrete, size = isinstance(self.action_space, spaces.Discrete), self.encoder.size
        self.distribution = _imitating_distribution(self.action_space)
        outputs = self.distribution.num_parameters
        self.actor = self._mlp(size, outputs, generator)
        self.critic = (
            self._twins(size, outputs, generator) if self.is_discrete else self._twins(size + outputs, 1, generator)
        )
        self.value_network = self._mlp(size, 1, generator)

    def parameters_of(self, observation: TensorObservation) -> Tensor:
        """Logits, or means within [-1, 1]."""
        out = super().parameters_of(observation)
        return out if self.is_discrete else out.tanh()

    def q_values(self, observation: TensorObservation, action: Tensor) -> Tensor:
        """Values `[2, B]` of actions by both critics."""
        features = self.encoder(observation)
        if not self.is_discrete:
            return _twin_values(self.critic, features, action)
        return torch.stack([critic(features).gather(-1, action.unsqueeze(-1)).squeeze(-1) for critic in self.critic])

    def value(self, observation: TensorObservation) -> Tensor:
        """Values `[B]` of the value network."""
        value: Tensor = self.value_network(self.encoder(observation))
        return value.squeeze(-1)

    def value_of(self, observation: TensorObservation, parameters: Tensor) -> Tensor:
        """Values of the value network."""
        return self.value(observation)


class ClonedActor(_ActorPolicy):
    """An actor alone, for behaviour cloning: deterministic for continuous actions, categorical for discrete ones."""

    name = "cloned_actor"
    groups = ("actor",)

    def _build(self, generator: torch.Generator) -> None:
        self.is_discrete = isinstance(self.action_space, spaces.Discrete)
        self.distribution = (
            _imitating_distribution(self.action_space) if self.is_discrete else NoisyAction(self.action_space)
        )
        self.actor = self._mlp(self.encoder.size, self.distribution.num_parameters, generator)

    def parameters_of(self, observation: TensorObservation) -> Tensor:
        """Logits, or actions."""
        out = super().parameters_of(observation)
        return out if self.is_discrete else out.tanh()


def _imitating_distribution(space: gymnasium.Space[Any]) -> Distribution:
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), int(space.start))
    return ClippedGaussian(space)


def _twin_values(critics: nn.ModuleList, features: Tensor, action: Tensor) -> Tensor:
    pairs = torch.cat([features, action.reshape(len(action), -1)], -1)
    return torch.stack([critic(pairs).squeeze(-1) for critic in critics])


TRANSITION_POLICIES: dict[str, type[TransitionPolicy]] = {
    cls.name: cls for cls in (QNetwork, SoftActorCritic, DeterministicActorCritic, ImplicitQ, ClonedActor)
}
"""The policies of this module by `policy.name`."""
