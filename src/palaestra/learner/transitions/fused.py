"""Updates of SAC, TD3+BC, IQL and behaviour cloning without autograd: the same steps as their `losses`, faster.

The gradients are written by hand on the memory of `learner.transitions.dense`. Nothing is computed that the step does
not use: autograd also computes gradients of the critics' weights in the actor's step. `tests/learner` compares every
update with its reference. Policies with other networks (images, tanh, discrete actions) use the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palaestra.experience.replay import TransitionBatch
from palaestra.learner.adam import Adam
from palaestra.learner.transitions.algorithm import non_finite_gradient
from palaestra.learner.transitions.dense import DensePass, DenseWeights
from palaestra.learner.update import RunningMeans
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.off_policy import TransitionPolicy
from palaestra.policy.unit_actions import LOG_STD_MAX, LOG_STD_MIN

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def can_fuse(policy: Any, family: type[TransitionPolicy]) -> bool:
    """Whether a policy is exactly of `family`, with ReLU networks on numbers, continuous actions and nothing frozen."""
    return (
        type(policy) is family
        and policy.config.activation == "relu"
        and not len(policy.encoder.images)
        and not getattr(policy, "is_discrete", False)
        and all(parameter.requires_grad for parameter in policy.parameters())
    )


class FusedUpdate:
    """The frame of an update: minibatches, steps of Adam, moving targets and metrics. A subclass computes gradients."""

    target_groups: tuple[str, ...] = ("critic",)

    def __init__(self, policy: Any, target: Any, adam: Adam, config: Any) -> None:
        self.policy, self.target, self.adam, self.config = policy, target, adam, config
        self._flat, self._target_flat = adam.flat, FlatParameters.of(target)
        self._memory = [parameter.data_ptr() for parameter in (*policy.parameters(), *target.parameters())]
        self._weights: dict[str, list[DenseWeights]] = {}
        self._rows, self._step_number = 0, 0
        self._actions = slice(policy.encoder.size, policy.encoder.size + policy.distribution.size)
        self._means = RunningMeans()
        self._rates: Mapping[str, float] = {}

    def is_current(self) -> bool:
        """Whether policy, target and optimiser are still in the memory that it works on."""
        here = [parameter.data_ptr() for parameter in (*self.policy.parameters(), *self.target.parameters())]
        return here == self._memory and FlatParameters.of(self.policy) is self._flat

    @torch.no_grad()
    def learn(self, batch: TransitionBatch, rates: Mapping[str, float], first: int) -> dict[str, float]:
        """Take every gradient step of the batch and return means of the metrics."""
        steps, rows = batch.shape
        if rows != self._rows:
            self._rows = rows
            self._allocate(rows)
        for weights in (one for group in self._weights.values() for one in group):
            weights.refresh()
        columns, self._rates, self._means = self._read(batch), rates, RunningMeans()
        errors = np.zeros((steps, rows), np.float32) if batch.index is not None else None
        for g in range(steps):
            self._step_number = g
            minibatch = {name: column[g] for name, column in columns.items()}
            error = self._step(minibatch, first + g)
            if errors is not None and error is not None:
                errors[g] = error.numpy()
            if (first + g + 1) % self.config.target_interval == 0:
                self._move_target()
        batch.td_error = errors
        return self._means.compute()

    def _allocate(self, rows: int) -> None:
        """Create networks and memory for minibatches of `rows` transitions."""
        raise NotImplementedError

    def _step(self, batch: dict[str, Tensor], step: int) -> Tensor | None:
        """One gradient step; returns absolute errors `[B]` if the algorithm has any."""
        raise NotImplementedError

    def _read(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """The columns as tensors, with encoded observations and `pairs` of observation and action."""
        encode, shape = self.policy.encoder, batch.shape

        def encode_column(name: str) -> Tensor:
            column = batch.columns[name]
            parts = column if isinstance(column, dict) else {"": column}
            flat = {key: torch.from_numpy(part).flatten(0, 1) for key, part in parts.items()}
            features: Tensor = encode(flat if isinstance(column, dict) else flat[""])
            return features.view(*shape, -1)

        observation = encode_column("observation")
        action = torch.from_numpy(batch.columns["action"]).reshape(*shape, -1)
        columns = {
            "observation": observation,
            "action": action,
            "pairs": torch.cat([observation, action], -1),
            "next_observation": encode_column("next_observation"),
            "reward": torch.from_numpy(batch.columns["reward"]),
            "continues": (~torch.from_numpy(batch.columns["terminated"])).float(),
        }
        if "noise" in batch.columns:
            columns["noise"] = torch.from_numpy(batch.columns["noise"])
        return columns

    def _networks(self, module: nn.Module, group: str) -> list[DenseWeights]:
        """The networks of a group: one, or twins."""
        low = self.config.precision == "bfloat16"
        networks = module if isinstance(module, nn.ModuleList) else [module]
        weights = [DenseWeights(network, low_precision=low) for network in networks]
        self._weights[group] = weights
        return weights

    def _minimize(self, group: str, metrics: Mapping[str, Tensor]) -> None:
        """One step of Adam with the gradients that were written."""
        part, limit = self._flat.groups[group], self.config.max_grad_norm
        gradient = self._flat.gradient[part]
        norm = math.sqrt(float(torch.dot(gradient, gradient)))
        if not math.isfinite(norm):
            raise non_finite_gradient(group, self._step_number)
        self.adam.step(group, [part], self._rates[group], 1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
        for weights in self._weights.get(group, ()):
            weights.refresh()
        self._means.add(f"{group}_grad_norm", norm)
        for name, number in metrics.items():
            self._means.add(name, number)

    def _move_target(self) -> None:
        for group in self.target_groups:
            part = self._flat.groups[group]
            self._target_flat.vector[part].lerp_(self._flat.vector[part], self.config.target_tau)
            for weights in self._weights.get(f"target_{group}", ()):
                weights.refresh()

    def _fit_critics(
        self, critics: list[DensePass], pairs: Tensor, wanted: Tensor, scale: float, metric_scale: float
    ) -> Tensor:
        """A step of the critics towards `wanted[B, 1]` with the gradient `scale * error`; returns absolute errors."""
        values = [critic.forward(pairs) for critic in critics]
        errors = [value - wanted for value in values]
        for critic, error in zip(critics, errors, strict=True):
            critic.backward(error * scale)
        both = torch.cat(errors, 1)
        loss = both.square().sum() * metric_scale
        self._minimize("critic", {"value_loss": loss, "q_mean": torch.cat(values, 1).mean()})
        return both.abs().mean(1)


class FusedSAC(FusedUpdate):
    """The update of `SAC`."""

    def __init__(self, policy: Any, target: Any, adam: Adam, config: Any, aimed_entropy: float) -> None:
        super().__init__(policy, target, adam, config)
        self._aim = aimed_entropy

    def _allocate(self, rows: int) -> None:
        actor = self._networks(self.policy.actor, "actor")[0]
        self._actor, self._next_actor = DensePass(actor, rows), DensePass(actor, rows)
        self._critics = [DensePass(one, rows) for one in self._networks(self.policy.critic, "critic")]
        self._targets = [DensePass(one, rows) for one in self._networks(self.target.critic, "target_critic")]

    def _step(self, batch: dict[str, Tensor], step: int) -> Tensor | None:
        c, rows = self.config, self._rows
        observation, following = batch["observation"], batch["next_observation"]
        sample = _TanhSample(self._actor.forward(observation), batch["noise"][:, 0])
        temperature = self.policy.temperature
        alpha = float(temperature.detach().exp()) if c.temperature is None else c.temperature
        if c.temperature is None:
            temperature.grad.fill_(-(float(sample.log_prob.mean()) + self._aim))
            self._minimize("temperature", {"temperature": torch.tensor(alpha)})
        ahead = _TanhSample(self._next_actor.forward(following), batch["noise"][:, 1])
        pairs = torch.cat([following, ahead.action], 1)
        future = torch.minimum(*(target.forward(pairs) for target in self._targets))
        future -= alpha * ahead.log_prob.unsqueeze(1)
        wanted = batch["reward"].unsqueeze(1) + c.gamma * future * batch["continues"].unsqueeze(1)
        error = self._fit_critics(self._critics, batch["pairs"], wanted, 1.0 / rows, 0.5 / rows)
        pairs = torch.cat([observation, sample.action], 1)
        first, second = (critic.forward(pairs) for critic in self._critics)
        gradient = self._smaller_value_gradient(first, second)
        loss = (alpha * sample.log_prob).mean() - torch.minimum(first, second).mean()
        self._actor.backward(sample.gradient(gradient, alpha / rows))
        self._minimize("actor", {"policy_loss": loss, "entropy": -sample.log_prob.mean()})
        return error

    def _smaller_value_gradient(self, first: Tensor, second: Tensor) -> Tensor:
        """Gradient of minus the mean of the smaller values, at the actions."""
        share = -1.0 / self._rows
        is_first = (first <= second).float() * share
        by_first = self._critics[0].input_gradient(is_first, self._actions)
        return by_first + self._critics[1].input_gradient(share - is_first, self._actions)


class _TanhSample:
    """Actions `tanh(mean + std * noise)` with their log-densities and the gradient back to the network."""

    def __init__(self, parameters: Tensor, noise: Tensor) -> None:
        mean, raw = parameters.chunk(2, 1)
        log_std = raw.clamp(LOG_STD_MIN, LOG_STD_MAX)
        self._inside = (raw == log_std).float()
        self._spread = log_std.exp() * noise
        u = mean + self._spread
        self.action = u.tanh()
        slope = 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))
        self.log_prob = (-0.5 * noise * noise - log_std - _LOG_SQRT_2PI - slope).sum(1)

    def gradient(self, at_action: Tensor, log_prob_weight: float) -> Tensor:
        """Gradient at the parameters, given that at the action and the weight of each log-density in the loss."""
        action = self.action
        at_mean = at_action * (1.0 - action * action) + 2.0 * log_prob_weight * action
        at_log_std = (at_mean * self._spread - log_prob_weight) * self._inside
        return torch.cat([at_mean, at_log_std], 1)


class FusedTD3BC(FusedUpdate):
    """The update of `TD3BC`."""

    target_groups = ("actor", "critic")

    def _allocate(self, rows: int) -> None:
        self._actor = DensePass(self._networks(self.policy.actor, "actor")[0], rows)
        self._critics = [DensePass(one, rows) for one in self._networks(self.policy.critic, "critic")]
        self._target_actor = DensePass(self._networks(self.target.actor, "target_actor")[0], rows)
        self._targets = [DensePass(one, rows) for one in self._networks(self.target.critic, "target_critic")]

    def _step(self, batch: dict[str, Tensor], step: int) -> Tensor | None:
        c, rows, observation = self.config, self._rows, batch["observation"]
        noise = (c.target_noise * batch["noise"][:, 0]).clamp_(-c.target_noise_clip, c.target_noise_clip)
        following = batch["next_observation"]
        next_action = self._target_actor.forward(following).tanh().add_(noise).clamp_(-1.0, 1.0)
        pairs = torch.cat([following, next_action], 1)
        future = torch.minimum(*(target.forward(pairs) for target in self._targets))
        wanted = batch["reward"].unsqueeze(1) + c.gamma * future * batch["continues"].unsqueeze(1)
        error = self._fit_critics(self._critics, batch["pairs"], wanted, 2.0 / rows, 1.0 / rows)
        if (step + 1) % c.policy_delay == 0:
            self._improve_actor(observation, batch["action"])
        return error

    def _improve_actor(self, observation: Tensor, wanted: Tensor) -> None:
        c, rows = self.config, self._rows
        action = self._actor.forward(observation).tanh()
        value = self._critics[0].forward(torch.cat([observation, action], 1))
        scale = c.alpha / float(value.abs().mean())
        difference = action - wanted
        at_action = self._critics[0].input_gradient(torch.full_like(value, -scale / rows), self._actions)
        at_action += (2.0 * c.imitation / difference.numel()) * difference
        distance = difference.square().mean()
        self._actor.backward(at_action * (1.0 - action * action))
        loss = c.imitation * distance - scale * value.mean()
        self._minimize("actor", {"policy_loss": loss, "imitation_loss": distance})


class FusedIQL(FusedUpdate):
    """The update of `IQL` for continuous actions."""

    def __init__(self, policy: Any, target: Any, adam: Adam, config: Any, max_weight: float) -> None:
        super().__init__(policy, target, adam, config)
        self._max_weight = max_weight

    def _allocate(self, rows: int) -> None:
        self._actor = DensePass(self._networks(self.policy.actor, "actor")[0], rows)
        value = self._networks(self.policy.value_network, "value_network")[0]
        self._value, self._next_value = DensePass(value, rows), DensePass(value, rows)
        self._critics = [DensePass(one, rows) for one in self._networks(self.policy.critic, "critic")]
        self._targets = [DensePass(one, rows) for one in self._networks(self.target.critic, "target_critic")]

    def _step(self, batch: dict[str, Tensor], step: int) -> Tensor | None:
        c, rows, observation = self.config, self._rows, batch["observation"]
        wanted_value = torch.minimum(*(target.forward(batch["pairs"]) for target in self._targets))
        future = self._next_value.forward(batch["next_observation"])
        wanted = batch["reward"].unsqueeze(1) + c.gamma * future * batch["continues"].unsqueeze(1)
        advantage = wanted_value - self._value.forward(observation)
        side = torch.where(advantage < 0, 1.0 - c.expectile, c.expectile)
        expectile_loss = (side * advantage.square()).mean()
        self._value.backward((-2.0 / rows) * side * advantage)
        self._minimize("value_network", {"expectile_loss": expectile_loss, "advantage_mean": advantage.mean()})
        error = self._fit_critics(self._critics, batch["pairs"], wanted, 1.0 / rows, 0.5 / rows)
        weight = (c.beta * advantage).exp_().clamp_(max=self._max_weight)
        self._regress_actor(observation, batch["action"], weight)
        return error

    def _regress_actor(self, observation: Tensor, action: Tensor, weight: Tensor) -> None:
        rows, raw = self._rows, self.policy.distribution.log_std
        log_std = raw.detach().clamp(LOG_STD_MIN, LOG_STD_MAX)
        inverse = (-log_std).exp()
        mean = self._actor.forward(observation).tanh()
        z = (action - mean) * inverse
        log_prob = (-0.5 * z * z - log_std - _LOG_SQRT_2PI).sum(1, keepdim=True)
        at_mean = (-1.0 / rows) * weight * z * inverse
        self._actor.backward(at_mean * (1.0 - mean * mean))
        inside = (raw.detach() == log_std).float()
        raw.grad.copy_((weight * (z * z - 1.0)).sum(0) * (-1.0 / rows) * inside)
        self._minimize("actor", {"policy_loss": -(weight * log_prob).mean()})


class FusedBC(FusedUpdate):
    """The update of `BC` for continuous actions."""

    target_groups = ()

    def _allocate(self, rows: int) -> None:
        self._actor = DensePass(self._networks(self.policy.actor, "actor")[0], rows)

    def _step(self, batch: dict[str, Tensor], step: int) -> Tensor | None:
        action = self._actor.forward(batch["observation"]).tanh()
        difference = action - batch["action"]
        self._actor.backward((2.0 / difference.numel()) * difference * (1.0 - action * action))
        self._minimize("actor", {"policy_loss": difference.square().mean()})
        return None
