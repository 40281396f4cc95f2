"""PPO updates of small actor-critics in compiled kernels: the same numbers as `learner.update`, many times faster.

Actor and critic share no weights, so with separate gradient clipping they are trained in two threads (the kernels
release the GIL); the result does not depend on timing. Used if `policy.compiled.why_not_compiled` returns None.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaestra.errors import ExperienceError, NonFiniteError
from palaestra.experience.columns import Columns
from palaestra.kernels import ppo as k
from palaestra.learner.adam import Adam
from palaestra.learner.batch import TrainBatch
from palaestra.policy.compiled import CompiledActorCritic

F32 = np.float32


def compiled_gae(rollout: Columns, reward: Tensor, *, discount: float, lam: float) -> Tensor:
    """`learner.returns.gae` for tensors on the CPU."""
    columns, advantage = _read_arrays(rollout, reward), np.empty(tuple(reward.shape), F32)
    k.gae_columns(*columns, F32(discount), F32(lam), advantage)
    return torch.from_numpy(advantage)


def compiled_vtrace(
    rollout: Columns, reward: Tensor, log_ratio: Tensor, *, discount: float, lam: float, rho_bar: float, c_bar: float
) -> tuple[Tensor, Tensor]:
    """`learner.returns.vtrace` for tensors on the CPU."""
    columns = _read_arrays(rollout, reward, log_ratio)
    advantage, target = np.empty(tuple(reward.shape), F32), np.empty(tuple(reward.shape), F32)
    k.vtrace_columns(*columns, F32(discount), F32(lam), F32(rho_bar), F32(c_bar), advantage, target)
    return torch.from_numpy(advantage), torch.from_numpy(target)


def _read_arrays(rollout: Columns, reward: Tensor, *others: Tensor) -> list[NDArray[Any]]:
    """The columns in the kernels' order. All must have one shape: the kernels do not check bounds."""
    ends = rollout["terminated"], rollout["truncated"]
    columns = (reward, rollout["value"], rollout["next_value"], *others, *ends)
    if reward.ndim != 2 or any(column.shape != reward.shape for column in columns):
        shapes = [list(column.shape) for column in columns]
        raise ExperienceError(f"advantages: the columns have shapes {shapes}, expected one shape [T, N].")
    return [np.ascontiguousarray(column.numpy()) for column in columns]


class CompiledPPO:
    """Working memory and threads for one policy under one `PPOConfig`."""

    def __init__(self, net: CompiledActorCritic, config: Any, adam: Adam, *, threads: int | None = None) -> None:
        self.net, self._config, self._adam = net, config, adam
        self.parallel = True
        # On a single core a second thread gains nothing.
        count = threads if threads is not None else min(2, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="palaestra-critic") if count > 1 else None
        self._groups = {name: self._group_arrays(name) for name in ("actor", "critic")}
        self._work = {"actor": self._allocate_work(int(net.actor_sizes[-1])), "critic": self._allocate_work(1)}

    def _group_arrays(self, name: str) -> tuple[NDArray[np.float32], ...]:
        flat, part = self.net.flat, self.net.flat.groups[name]
        vectors = (flat.vector, flat.gradient, self._adam.first, self._adam.second)
        return tuple(vector[part].numpy() for vector in vectors)

    def _allocate_work(self, outputs: int) -> tuple[tuple[NDArray[np.float32], ...], NDArray[np.float32]]:
        batch, sizes = self._config.batch_size, self.net.actor_sizes
        hidden = sizes[1:-1]
        widest = int((sizes[:-1] * sizes[1:]).max())
        work = (
            np.zeros(max(1, batch * int(hidden.sum())), F32),
            np.zeros((2, max(1, batch * int(hidden.max(initial=1)))), F32),
            np.zeros((batch, outputs), F32),
            np.zeros(widest, F32),
        )
        return work, np.zeros((batch, int(sizes[0])), F32)

    def learn(self, batch: TrainBatch, order: Tensor, *, rate: float, clip_range: float) -> dict[str, float]:
        """Run every epoch and return the means of the metrics."""
        observation = self.net.normalize(batch["observation"].numpy())
        action = batch["action"].numpy().reshape(len(observation), -1).astype(F32)
        weight = _column(batch["weight"]) if "weight" in batch else np.ones(len(action), F32)
        policy_data = (action, _column(batch["log_prob"]), _column(batch["advantage"]), weight)
        value_data = (_column(batch["target"]), _column(batch["value"]))
        shuffles = np.ascontiguousarray(order.numpy())
        run = self._train_separately if self._config.grad_clip == "separate" else self._train_jointly
        sums, taken = run(observation, policy_data, value_data, shuffles, self._settings(rate, clip_range))
        self._adam.steps["actor"] += taken[0]
        self._adam.steps["critic"] += taken[1]
        if sums[k.NON_FINITE_AT]:
            raise NonFiniteError(f"gradient is not finite at minibatch {int(sums[k.NON_FINITE_AT])} of this update")
        return _metrics(sums, taken[0])

    def _settings(self, rate: float, clip_range: float) -> NDArray[np.float32]:
        c = self._config
        settings = np.zeros(9, F32)
        settings[k.RATE], settings[k.CLIP], settings[k.ENTROPY_COEF] = rate, clip_range, c.entropy_coef
        # The kernels read 0 as "never"; the config does not allow 0 as a value.
        settings[k.TARGET_KL], settings[k.MAX_NORM] = c.target_kl or 0.0, c.max_grad_norm or 0.0
        settings[k.ADAM_EPS], settings[k.VALUE_COEF] = c.adam_eps, c.value_coef
        settings[k.VALUE_CLIP], settings[k.NORMALIZE] = c.value_clip or 0.0, float(c.normalize_advantage)
        return settings

    def _train_separately(
        self, observation: Any, policy_data: Any, value_data: Any, order: Any, settings: Any
    ) -> tuple[NDArray[np.float64], tuple[int, int]]:
        net, size = self.net, self._config.batch_size
        sums, value_sums = np.zeros(k.NUM_SUMS), np.zeros(k.NUM_SUMS)
        work, x = self._work["critic"]
        critic = (self._groups["critic"], net.critic_sizes, net.activation, settings, work, x)
        value_arguments = (observation, value_data, order, size, *critic, self._adam.steps["critic"], value_sums)
        waiting = self._pool.submit(k.train_value, *value_arguments) if self._pool and self.parallel else None
        work, x = self._work["actor"]
        actor = (self._groups["actor"], net.actor_sizes, net.activation, settings, work, x)
        policy_taken = k.train_policy(
            net.discrete, observation, policy_data, order, size, *actor, self._adam.steps["actor"], sums
        )
        value_taken = waiting.result() if waiting is not None else k.train_value(*value_arguments)
        broken = [at for at in (sums[k.NON_FINITE_AT], value_sums[k.NON_FINITE_AT]) if at]
        sums += value_sums
        sums[k.NON_FINITE_AT] = min(broken, default=0.0)
        return sums, (policy_taken, value_taken)

    def _train_jointly(
        self, observation: Any, policy_data: Any, value_data: Any, order: Any, settings: Any
    ) -> tuple[NDArray[np.float64], tuple[int, int]]:
        net = self.net
        sums = np.zeros(k.NUM_SUMS)
        (actor_work, x), (critic_work, _) = self._work["actor"], self._work["critic"]
        data = (observation, policy_data, value_data, order, self._config.batch_size)
        networks = (self._groups["actor"], self._groups["critic"], net.actor_sizes, net.critic_sizes, net.activation)
        steps = (self._adam.steps["actor"], self._adam.steps["critic"])
        taken = k.train_joint(net.discrete, *data, *networks, settings, actor_work, critic_work, x, *steps, sums)
        return sums, taken


def _column(tensor: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(tensor.numpy(), F32)


def _metrics(sums: NDArray[np.float64], policy_taken: int) -> dict[str, float]:
    policy, value = max(1.0, sums[k.POLICY_STEPS]), max(1.0, sums[k.VALUE_STEPS])
    result = {
        "policy_loss": sums[k.POLICY_LOSS] / policy,
        "value_loss": sums[k.VALUE_LOSS] / value,
        "entropy": sums[k.ENTROPY] / policy,
        "approx_kl": sums[k.KL] / policy,
        "clip_fraction": sums[k.CLIPPED] / policy,
        "critic_grad_norm": sums[k.CRITIC_NORM] / value,
        "minibatches": sums[k.VALUE_STEPS],
    }
    if policy_taken:
        result["actor_grad_norm"] = sums[k.ACTOR_NORM] / policy_taken
    if sums[k.STOPPED_AT]:
        result["policy_stopped_at"] = sums[k.STOPPED_AT]
    return {key: float(number) for key, number in result.items()}
