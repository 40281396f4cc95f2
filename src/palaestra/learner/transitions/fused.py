"""The updates of the built-in algorithms on transitions without autograd: the same numbers as their `losses`, faster.

`FusedUpdate` holds what all of them share: columns of one gradient step, and the optimiser that also moves the target
network. A subclass writes one gradient step with `FusedMLP` for the networks and `kernels.off_policy` in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from palaestra.experience.replay import TransitionBatch
from palaestra.kernels import off_policy as k
from palaestra.learner.adam import Adam
from palaestra.learner.transitions.algorithm import non_finite_gradient
from palaestra.learner.update import RunningMeans
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.off_policy.fused import FusedMLP, FusedNormalizer

F32 = np.float32
Floats = NDArray[np.float32]


class Rows(NamedTuple):
    """The transitions of one gradient step."""

    observation: Tensor
    following: Tensor
    action: NDArray[Any]
    reward: Floats
    terminated: NDArray[np.bool_]
    noise: Floats | None
    weight: Floats | None


class _Twins:
    """Two critics of pairs of observation and action."""

    def __init__(self, one: FusedMLP, other: FusedMLP) -> None:
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> tuple[Floats, Floats]:
        return self.one.forward(x), self.other.forward(x)

    def backward(self, x: Tensor) -> None:
        self.one.backward(x)
        self.other.backward(x)

    def mean_error(self, factor: np.float32) -> Floats:
        """Mean absolute error `[B]`, from the gradients `factor * error` at the outputs."""
        both = np.abs(self.one.d_values) + np.abs(self.other.d_values)
        return np.asarray(both.sum(1) / (2.0 * factor), F32)


class _Pairs:
    """Observations and actions side by side, the input of critics."""

    def __init__(self, policy: Any, size: int) -> None:
        self.offset = int(policy.encoder.size)
        self.tensor = torch.zeros(size, self.offset + policy.distribution.size)
        self.array: Floats = self.tensor.numpy()

    def write(self, observation: Tensor, action: NDArray[Any] | None = None) -> Tensor:
        self.tensor[:, : self.offset].copy_(observation)
        if action is not None:
            self.array[:, self.offset :] = action.reshape(len(action), -1)
        return self.tensor


class FusedUpdate:
    """Takes the gradient steps of one algorithm on one policy."""

    def __init__(self, config: Any, target_groups: tuple[str, ...], policy: Any, target: Any, adam: Adam) -> None:
        self.config, self.policy, self.target, self.adam = config, policy, target, adam
        self._target_groups = target_groups
        self._flat, self._target_flat = FlatParameters.of(policy), FlatParameters.of(target)
        vectors = (self._flat.vector, self._flat.gradient, adam.first, adam.second, self._target_flat.vector)
        self._arrays = {
            group: tuple(vector[part].numpy() for vector in vectors) for group, part in self._flat.groups.items()
        }
        self._gradients = {group: self._flat.gradient[part] for group, part in self._flat.groups.items()}
        self._networks: dict[str, list[FusedMLP]] = {}
        self.batch_size = 0
        self.wants_errors = False
        """Whether a prioritised buffer needs the errors of this batch."""
        self.means = RunningMeans()
        self._rates: Mapping[str, float] = {}
        self._moves_target, self._moved = False, set[str]()
        self._position = 0

    def is_current(self) -> bool:
        """Whether policy and target are still in the memory that the networks read."""
        return FlatParameters.of(self.policy) is self._flat and self.adam.flat is self._flat

    def learn(self, batch: TransitionBatch, rates: Mapping[str, float], first: int) -> dict[str, float]:
        """Take every gradient step of the batch and return means of the metrics."""
        steps, size = batch.shape
        if size != self.batch_size:
            self.batch_size = size
            self._networks.clear()
            self.allocate(size)
        for network in (one for group in self._networks.values() for one in group):
            network.refresh()
        self.means, self._rates = RunningMeans(), rates
        normalize, columns = FusedNormalizer(self.policy), batch.columns
        observation = normalize(columns["observation"].reshape(steps, size, -1))
        following = normalize(columns["next_observation"].reshape(steps, size, -1))
        noise, weight = columns.get("noise"), columns.get("weight")
        self.wants_errors = batch.index is not None
        batch.td_error = np.zeros((steps, size), F32) if self.wants_errors else None
        with torch.no_grad():
            for g in range(steps):
                rows = Rows(
                    observation[g],
                    following[g],
                    columns["action"][g],
                    columns["reward"][g],
                    columns["terminated"][g],
                    None if noise is None else noise[g],
                    None if weight is None else weight[g],
                )
                self._begin(first + g, g)
                error = self.step(rows, first + g)
                self._finish()
                if batch.td_error is not None and error is not None:
                    batch.td_error[g] = error
        return self.means.compute()

    def allocate(self, size: int) -> None:
        """Create the networks for a batch size."""
        raise NotImplementedError

    def network(self, module: nn.Module, group: str) -> FusedMLP:
        """A network whose weights change with those of `group`, or `target_…` for one of the target."""
        assert isinstance(module, nn.Sequential)
        low = self.config.precision == "bfloat16"
        fused = FusedMLP(module, self.batch_size, low_precision=low)
        self._networks.setdefault(group, []).append(fused)
        return fused

    def _twins(self, policy: Any, group: str) -> _Twins:
        one, other = policy.critic
        return _Twins(self.network(one, group), self.network(other, group))

    def step(self, rows: Rows, number: int) -> Floats | None:
        """One gradient step; returns absolute errors `[B]` if a replay buffer may use them as priorities."""
        raise NotImplementedError

    def minimize(self, group: str) -> None:
        """A step of Adam on the gradient of one group, and the move of its target network if that is due."""
        config, gradient = self.config, self._gradients[group]
        norm = math.sqrt(float(torch.dot(gradient, gradient)))
        if not math.isfinite(norm):
            raise non_finite_gradient(group, self._position)
        limit = config.max_grad_norm
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        self.adam.steps[group] += 1
        numbers = (F32(self._rates[group]), F32(scale), F32(self.adam.eps), self.adam.steps[group])
        moves = self._moves_target and group in self._target_groups
        if moves:
            self._moved.add(group)
        k.adam_polyak(*self._arrays[group], *numbers, F32(config.target_tau if moves else 0.0))
        self._refresh(group)
        if moves:
            self._refresh(f"target_{group}")
        self.means.add(f"{group}_grad_norm", norm)

    def _begin(self, number: int, position: int) -> None:
        self._moves_target = (number + 1) % self.config.target_interval == 0
        self._moved.clear()
        self._position = position

    def _finish(self) -> None:
        if not self._moves_target:
            return
        for group in self._target_groups:
            if group not in self._moved:
                part = self._flat.groups[group]
                self._target_flat.vector[part].lerp_(self._flat.vector[part], self.config.target_tau)
                self._refresh(f"target_{group}")

    def _refresh(self, group: str) -> None:
        for network in self._networks.get(group, ()):
            network.refresh()


class FusedSAC(FusedUpdate):
    """SAC."""

    def allocate(self, size: int) -> None:
        """Actor, critics, target critics and the inputs of the critics."""
        self._actor = self.network(self.policy.actor, "actor")
        self._critics, self._targets = self._twins(self.policy, "critic"), self._twins(self.target, "target_critic")
        self._now, self._next = _Pairs(self.policy, size), _Pairs(self.policy, size)
        self._log_prob, self._next_log_prob, self._wanted = (np.zeros(size, F32) for _ in range(3))
        self._d_action = torch.zeros(size, self.policy.distribution.size)
        given = self.config.target_entropy
        self._aim = -float(self.policy.distribution.size) if given is None else given

    def step(self, rows: Rows, number: int) -> Floats | None:
        """Temperature, critics and actor, in this order."""
        c, now = self.config, self._now
        assert rows.noise is not None
        noise, next_noise = np.ascontiguousarray(rows.noise[:, 0]), np.ascontiguousarray(rows.noise[:, 1])
        # The next actions first, so that the activations of the present ones remain for the actor's step.
        self._next.write(rows.following)
        k.sample_tanh_gaussian(
            self._actor.forward(rows.following), next_noise, self._next.array, self._next.offset, self._next_log_prob
        )
        one, other = self._targets.forward(self._next.tensor)
        log_alpha = float(self.policy.temperature.detach())
        alpha = math.exp(log_alpha) if c.temperature is None else c.temperature
        k.soft_targets(
            one, other, self._next_log_prob, F32(alpha), rows.reward, rows.terminated, F32(c.gamma), self._wanted
        )
        error = self._step_critics(now.write(rows.observation, rows.action))
        parameters = self._actor.forward(rows.observation)
        mean_log_prob = k.sample_tanh_gaussian(parameters, noise, now.array, now.offset, self._log_prob)
        self._step_actor(rows.observation, parameters, noise, alpha, mean_log_prob)
        if c.temperature is None:
            self._gradients["temperature"].fill_(-(mean_log_prob + self._aim))
            self.minimize("temperature")
            self.means.add("temperature", alpha)
        return error

    def _step_critics(self, pairs: Tensor) -> Floats | None:
        critics, factor = self._critics, F32(1.0 / self.batch_size)
        one, other = critics.forward(pairs)
        loss, mean = k.squared_head(one, self._wanted, factor, critics.one.d_values)
        other_loss, other_mean = k.squared_head(other, self._wanted, factor, critics.other.d_values)
        error = critics.mean_error(factor) if self.wants_errors else None
        critics.backward(pairs)
        self.minimize("critic")
        self.means.add("value_loss", 0.5 * (loss + other_loss))
        self.means.add("q_mean", 0.5 * (mean + other_mean))
        return error

    def _step_actor(
        self, observation: Tensor, parameters: Floats, noise: Floats, alpha: float, mean_log_prob: float
    ) -> None:
        critics, now, share = self._critics, self._now, 1.0 / self.batch_size
        one, other = critics.forward(now.tensor)
        smaller = k.smaller_head(one, other, F32(-share), critics.one.d_values, critics.other.d_values)
        # Each row has the gradient of one critic only, so each critic goes back with its own rows.
        is_first = critics.one.d_out[:, 0] != 0
        for critic, rows in ((critics.one, is_first), (critics.other, ~is_first)):
            critic.backward_inputs(now.offset, self._d_action, rows.nonzero().squeeze(1))
        k.tanh_gaussian_gradient(
            parameters,
            noise,
            now.array,
            now.offset,
            self._d_action.numpy(),
            F32(alpha * share),
            self._actor.d_values,
        )
        self._actor.backward(observation)
        self.minimize("actor")
        self.means.add("policy_loss", alpha * mean_log_prob - smaller)
        self.means.add("entropy", -mean_log_prob)


class FusedTD3BC(FusedUpdate):
    """TD3+BC."""

    def allocate(self, size: int) -> None:
        """Actor and critics, their targets, and the inputs of the critics."""
        self._actor, self._target_actor = (
            self.network(self.policy.actor, "actor"),
            self.network(self.target.actor, "target_actor"),
        )
        self._critics, self._targets = self._twins(self.policy, "critic"), self._twins(self.target, "target_critic")
        self._now, self._next = _Pairs(self.policy, size), _Pairs(self.policy, size)
        self._wanted, self._nothing = np.zeros(size, F32), np.zeros(size, F32)
        self._d_action = torch.zeros(size, self.policy.distribution.size)

    def step(self, rows: Rows, number: int) -> Floats | None:
        """Critics, and the actor every `policy_delay` steps."""
        c, critics, next_pairs = self.config, self._critics, self._next
        assert rows.noise is not None
        next_pairs.write(rows.following)
        k.smooth_target_action(
            self._target_actor.forward(rows.following),
            rows.noise[:, 0],
            F32(c.target_noise),
            F32(c.target_noise_clip),
            next_pairs.array,
            next_pairs.offset,
        )
        one, other = self._targets.forward(next_pairs.tensor)
        k.soft_targets(one, other, self._nothing, F32(0.0), rows.reward, rows.terminated, F32(c.gamma), self._wanted)
        pairs, factor = self._now.write(rows.observation, rows.action), F32(2.0 / self.batch_size)
        one, other = critics.forward(pairs)
        loss, mean = k.squared_head(one, self._wanted, factor, critics.one.d_values)
        other_loss, other_mean = k.squared_head(other, self._wanted, factor, critics.other.d_values)
        error = critics.mean_error(factor) if self.wants_errors else None
        critics.backward(pairs)
        self.minimize("critic")
        self.means.add("value_loss", loss + other_loss)
        self.means.add("q_mean", 0.5 * (mean + other_mean))
        if (number + 1) % c.policy_delay == 0:
            self._step_actor(rows)
        return error

    def _step_actor(self, rows: Rows) -> None:
        c, now, critic = self.config, self._now, self._critics.one
        k.write_tanh(self._actor.forward(rows.observation), now.array, now.offset)
        mean, size = k.mean_sizes(critic.forward(now.tensor))
        scale = c.alpha / size
        critic.d_out.fill_(-scale / self.batch_size)
        critic.backward_inputs(now.offset, self._d_action)
        distance = k.imitation_gradient(
            now.array,
            now.offset,
            rows.action.reshape(self.batch_size, -1),
            self._d_action.numpy(),
            F32(c.imitation),
            self._actor.d_values,
        )
        self._actor.backward(rows.observation)
        self.minimize("actor")
        self.means.add("policy_loss", -scale * mean + c.imitation * distance)
        self.means.add("imitation_loss", distance)


class FusedIQL(FusedUpdate):
    """IQL."""

    def allocate(self, size: int) -> None:
        """Actor, critics, value network and target critics."""
        policy = self.policy
        self._actor, self._value = (
            self.network(policy.actor, "actor"),
            self.network(policy.value_network, "value_network"),
        )
        self._critics, self._targets = self._twins(policy, "critic"), self._twins(self.target, "target_critic")
        self._pairs = None if policy.is_discrete else _Pairs(policy, size)
        self._wanted_value, self._wanted, self._advantage, self._weight = (np.zeros(size, F32) for _ in range(4))
        if not policy.is_discrete:
            self._log_std = policy.distribution.log_std.detach().numpy()
            self._d_log_std = policy.distribution.log_std.grad.numpy()

    def step(self, rows: Rows, number: int) -> Floats | None:
        """Value network, critics and actor; all three see the weights from before the step."""
        c, critics = self.config, self._critics
        inputs = rows.observation if self._pairs is None else self._pairs.write(rows.observation, rows.action)
        one, other = self._targets.forward(inputs)
        if self._pairs is None:
            everyone = np.arange(self.batch_size)
            np.minimum(one[everyone, rows.action], other[everyone, rows.action], out=self._wanted_value)
        else:
            np.minimum(one[:, 0], other[:, 0], out=self._wanted_value)
        future = self._value.forward(rows.following)
        k.soft_targets(future, future, self._wanted, F32(0.0), rows.reward, rows.terminated, F32(c.gamma), self._wanted)
        values = self._value.forward(rows.observation)
        loss, mean = k.expectile_head(
            values, self._wanted_value, F32(c.expectile), self._value.d_values, self._advantage
        )
        self._value.backward(rows.observation)
        self.minimize("value_network")
        self.means.add("expectile_loss", loss)
        self.means.add("advantage_mean", mean)
        # The mean of both squared errors.
        factor = F32(1.0 / self.batch_size)
        critics.forward(inputs)
        sums = [self._head(critic, rows.action, factor) for critic in (critics.one, critics.other)]
        error = critics.mean_error(factor) if self.wants_errors else None
        critics.backward(inputs)
        self.minimize("critic")
        self.means.add("value_loss", 0.5 * (sums[0][0] + sums[1][0]))
        self.means.add("q_mean", 0.5 * (sums[0][1] + sums[1][1]))
        self._step_actor(rows)
        return error

    def _head(self, critic: FusedMLP, action: NDArray[Any], factor: np.float32) -> tuple[float, float]:
        if self._pairs is None:
            result: tuple[float, float] = k.chosen_squared_head(
                critic.values, action, self._wanted, factor, critic.d_values
            )
        else:
            result = k.squared_head(critic.values, self._wanted, factor, critic.d_values)
        return result

    def _step_actor(self, rows: Rows) -> None:
        k.regression_weights(self._advantage, F32(self.config.beta), F32(100.0), self._weight)
        out = self._actor.forward(rows.observation)
        if self._pairs is None:
            loss = k.categorical_regression(out, rows.action, self._weight, self._actor.d_values)
        else:
            action = rows.action.reshape(self.batch_size, -1)
            loss = k.gaussian_regression(
                out, self._log_std, action, self._weight, self._actor.d_values, self._d_log_std
            )
        self._actor.backward(rows.observation)
        self.minimize("actor")
        self.means.add("policy_loss", loss)


class FusedBC(FusedUpdate):
    """Behaviour cloning."""

    def allocate(self, size: int) -> None:
        """The actor."""
        self._actor, self._ones = self.network(self.policy.actor, "actor"), np.ones(size, F32)
        width = self._actor.values.shape[1]
        self._action, self._nothing = np.zeros((size, width), F32), np.zeros((size, width), F32)

    def step(self, rows: Rows, number: int) -> None:
        """The distance from the actions of the data."""
        out = self._actor.forward(rows.observation)
        if self.policy.is_discrete:
            loss = k.categorical_regression(out, rows.action, self._ones, self._actor.d_values)
        else:
            k.write_tanh(out, self._action, 0)
            action = rows.action.reshape(self.batch_size, -1)
            loss = k.imitation_gradient(self._action, 0, action, self._nothing, F32(1.0), self._actor.d_values)
        self._actor.backward(rows.observation)
        self.minimize("actor")
        self.means.add("policy_loss", loss)
