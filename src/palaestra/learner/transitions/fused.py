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
    next_observation: Tensor
    action: NDArray[Any]
    reward: Floats
    terminated: NDArray[np.bool_]
    noise: Floats | None


class _TwinCritics:
    """Two critics of pairs of observation and action."""

    def __init__(self, first: FusedMLP, second: FusedMLP) -> None:
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> tuple[Floats, Floats]:
        return self.first.forward(x), self.second.forward(x)

    def backward(self, x: Tensor) -> None:
        self.first.backward(x)
        self.second.backward(x)


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
        self.means = RunningMeans()
        self._rates: Mapping[str, float] = {}
        self._moves_target, self._moved = False, set[str]()
        self._position = 0

    def is_current(self) -> bool:
        """Whether policy, target and optimiser are still in the memory that the networks read."""
        flat, target = FlatParameters.of(self.policy), FlatParameters.of(self.target)
        return flat is self._flat and target is self._target_flat and self.adam.flat is self._flat

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
        next_observation = normalize(columns["next_observation"].reshape(steps, size, -1))
        noise = columns.get("noise")
        with torch.no_grad():
            for g in range(steps):
                rows = Rows(
                    observation[g],
                    next_observation[g],
                    columns["action"][g],
                    columns["reward"][g],
                    columns["terminated"][g],
                    None if noise is None else noise[g],
                )
                self._begin(first + g, g)
                self.step(rows, first + g)
                self._finish()
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

    def _twin_critics(self, policy: Any, group: str) -> _TwinCritics:
        first, second = policy.critic
        return _TwinCritics(self.network(first, group), self.network(second, group))

    def _step_critics(self, critics: _TwinCritics, pairs: Tensor, td_target: Floats, loss_scale: float) -> None:
        """Minimise `loss_scale` times the sum of both mean squared errors."""
        q1, q2 = critics.forward(pairs)
        factor = F32(2.0 * loss_scale / self.batch_size)
        loss1, mean1 = k.squared_head(q1, td_target, factor, critics.first.d_values)
        loss2, mean2 = k.squared_head(q2, td_target, factor, critics.second.d_values)
        critics.backward(pairs)
        self.minimize("critic")
        self.means.add("value_loss", loss_scale * (loss1 + loss2))
        self.means.add("q_mean", 0.5 * (mean1 + mean2))

    def step(self, rows: Rows, number: int) -> None:
        """One gradient step."""
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
        self._critics, self._targets = (
            self._twin_critics(self.policy, "critic"),
            self._twin_critics(self.target, "target_critic"),
        )
        self._now, self._next = _Pairs(self.policy, size), _Pairs(self.policy, size)
        self._log_prob, self._next_log_prob, self._td_target = (np.zeros(size, F32) for _ in range(3))
        self._d_action = torch.zeros(size, self.policy.distribution.size)
        self._target_entropy = self.config.resolve_target_entropy(self.policy.distribution.size)

    def step(self, rows: Rows, number: int) -> None:
        """Temperature, critics and actor, in this order."""
        c, now = self.config, self._now
        assert rows.noise is not None
        noise, next_noise = np.ascontiguousarray(rows.noise[:, 0]), np.ascontiguousarray(rows.noise[:, 1])
        # The next actions first, so that the activations of the present ones remain for the actor's step.
        next_pairs = self._next
        next_pairs.write(rows.next_observation)
        next_parameters = self._actor.forward(rows.next_observation)
        k.sample_tanh_gaussian(next_parameters, next_noise, next_pairs.array, next_pairs.offset, self._next_log_prob)
        q1, q2 = self._targets.forward(next_pairs.tensor)
        log_alpha = float(self.policy.temperature.detach())
        alpha = math.exp(log_alpha) if c.temperature is None else c.temperature
        k.td_targets(
            q1, q2, self._next_log_prob, F32(alpha), rows.reward, rows.terminated, F32(c.gamma), self._td_target
        )
        self._step_critics(self._critics, now.write(rows.observation, rows.action), self._td_target, 0.5)
        parameters = self._actor.forward(rows.observation)
        mean_log_prob = k.sample_tanh_gaussian(parameters, noise, now.array, now.offset, self._log_prob)
        self._step_actor(rows.observation, parameters, noise, alpha, mean_log_prob)
        if c.temperature is None:
            self._gradients["temperature"].fill_(-(mean_log_prob + self._target_entropy))
            self.minimize("temperature")
            self.means.add("temperature", alpha)

    def _step_actor(
        self, observation: Tensor, parameters: Floats, noise: Floats, alpha: float, mean_log_prob: float
    ) -> None:
        critics, now, share = self._critics, self._now, 1.0 / self.batch_size
        q1, q2 = critics.forward(now.tensor)
        min_q = k.min_q_head(q1, q2, F32(-share), critics.first.d_values, critics.second.d_values)
        # Each row has the gradient of one critic only, so each critic goes back with its own rows.
        is_first = critics.first.d_out[:, 0] != 0
        for critic, rows in ((critics.first, is_first), (critics.second, ~is_first)):
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
        self.means.add("policy_loss", alpha * mean_log_prob - min_q)
        self.means.add("entropy", -mean_log_prob)


class FusedTD3BC(FusedUpdate):
    """TD3+BC."""

    def allocate(self, size: int) -> None:
        """Actor and critics, their targets, and the inputs of the critics."""
        self._actor, self._target_actor = (
            self.network(self.policy.actor, "actor"),
            self.network(self.target.actor, "target_actor"),
        )
        self._critics, self._targets = (
            self._twin_critics(self.policy, "critic"),
            self._twin_critics(self.target, "target_critic"),
        )
        self._now, self._next = _Pairs(self.policy, size), _Pairs(self.policy, size)
        self._td_target, self._zeros = np.zeros(size, F32), np.zeros(size, F32)
        self._d_action = torch.zeros(size, self.policy.distribution.size)

    def step(self, rows: Rows, number: int) -> None:
        """Critics, and the actor every `policy_delay` steps."""
        c, next_pairs = self.config, self._next
        assert rows.noise is not None
        next_pairs.write(rows.next_observation)
        k.smooth_target_action(
            self._target_actor.forward(rows.next_observation),
            rows.noise[:, 0],
            F32(c.target_noise),
            F32(c.target_noise_clip),
            next_pairs.array,
            next_pairs.offset,
        )
        q1, q2 = self._targets.forward(next_pairs.tensor)
        k.td_targets(q1, q2, self._zeros, F32(0.0), rows.reward, rows.terminated, F32(c.gamma), self._td_target)
        self._step_critics(self._critics, self._now.write(rows.observation, rows.action), self._td_target, 1.0)
        if (number + 1) % c.policy_delay == 0:
            self._step_actor(rows)

    def _step_actor(self, rows: Rows) -> None:
        c, now, critic = self.config, self._now, self._critics.first
        k.write_tanh(self._actor.forward(rows.observation), now.array, now.offset)
        mean, magnitude = k.mean_sizes(critic.forward(now.tensor))
        scale = c.alpha / magnitude
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
        self._critics, self._targets = (
            self._twin_critics(policy, "critic"),
            self._twin_critics(self.target, "target_critic"),
        )
        self._pairs = None if policy.is_discrete else _Pairs(policy, size)
        self._target_q, self._td_target, self._advantage, self._weight = (np.zeros(size, F32) for _ in range(4))
        if not policy.is_discrete:
            self._log_std = policy.distribution.log_std.detach().numpy()
            self._d_log_std = policy.distribution.log_std.grad.numpy()

    def step(self, rows: Rows, number: int) -> None:
        """Value network, critics and actor; all three see the weights from before the step."""
        c, critics = self.config, self._critics
        inputs = rows.observation if self._pairs is None else self._pairs.write(rows.observation, rows.action)
        q1, q2 = self._targets.forward(inputs)
        if self._pairs is None:
            row_index = np.arange(self.batch_size)
            np.minimum(q1[row_index, rows.action], q2[row_index, rows.action], out=self._target_q)
        else:
            np.minimum(q1[:, 0], q2[:, 0], out=self._target_q)
        future, target = self._value.forward(rows.next_observation), self._td_target
        k.td_targets(future, future, target, F32(0.0), rows.reward, rows.terminated, F32(c.gamma), target)
        values = self._value.forward(rows.observation)
        loss, mean = k.expectile_head(values, self._target_q, F32(c.expectile), self._value.d_values, self._advantage)
        self._value.backward(rows.observation)
        self.minimize("value_network")
        self.means.add("expectile_loss", loss)
        self.means.add("advantage_mean", mean)
        # The mean of both squared errors.
        factor = F32(1.0 / self.batch_size)
        critics.forward(inputs)
        sums = [self._head(critic, rows.action, factor) for critic in (critics.first, critics.second)]
        critics.backward(inputs)
        self.minimize("critic")
        self.means.add("value_loss", 0.5 * (sums[0][0] + sums[1][0]))
        self.means.add("q_mean", 0.5 * (sums[0][1] + sums[1][1]))
        self._step_actor(rows)

    def _head(self, critic: FusedMLP, action: NDArray[Any], factor: np.float32) -> tuple[float, float]:
        if self._pairs is None:
            result: tuple[float, float] = k.taken_squared_head(
                critic.values, action, self._td_target, factor, critic.d_values
            )
        else:
            result = k.squared_head(critic.values, self._td_target, factor, critic.d_values)
        return result

    def _step_actor(self, rows: Rows) -> None:
        k.regression_weights(self._advantage, F32(self.config.beta), F32(k.MAX_ADVANTAGE_WEIGHT), self._weight)
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
        self._action, self._zeros = np.zeros((size, width), F32), np.zeros((size, width), F32)

    def step(self, rows: Rows, number: int) -> None:
        """The distance from the actions of the data."""
        out = self._actor.forward(rows.observation)
        if self.policy.is_discrete:
            loss = k.categorical_regression(out, rows.action, self._ones, self._actor.d_values)
        else:
            k.write_tanh(out, self._action, 0)
            action = rows.action.reshape(self.batch_size, -1)
            loss = k.imitation_gradient(self._action, 0, action, self._zeros, F32(1.0), self._actor.d_values)
        self._actor.backward(rows.observation)
        self.minimize("actor")
        self.means.add("policy_loss", loss)
