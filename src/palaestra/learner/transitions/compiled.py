"""`CompiledDQN`: the update of DQN in one compiled kernel, for plain networks on vectors of numbers on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from palaestra.experience.replay import TransitionBatch
from palaestra.kernels import network
from palaestra.kernels.dqn import train_dqn
from palaestra.learner.adam import Adam
from palaestra.learner.transitions.algorithm import non_finite_gradient
from palaestra.policy.flat_parameters import FlatParameters

F32 = np.float32


class CompiledDQN:
    """Working memory and settings of one policy under one `DQNConfig`."""

    def __init__(self, config: Any, target_groups: tuple[str, ...], policy: Any, target: Any, adam: Adam) -> None:
        self._policy, self._target, self._adam, self._config = policy, target, adam, config
        self._flat, self._target_flat = adam.flat, FlatParameters.of(target)
        flat = (adam.flat.vector, adam.first, adam.second, adam.flat.gradient)
        self._net = tuple(vector.numpy() for vector in flat)
        self._target_vector = self._target_flat.vector.numpy()
        outputs = int(policy.action_space.n) + int(policy.dueling)
        self._sizes = np.array([policy.encoder.size, *policy.config.hidden, outputs], np.int64)
        self._activation = network.TANH if policy.config.activation == "tanh" else network.RELU
        self._work: tuple[NDArray[np.float32], ...] = ()
        self._rows = 0

    def is_current(self) -> bool:
        """Whether policy, target and optimiser are still in the memory that the kernel works on."""
        return FlatParameters.of(self._policy) is self._flat and FlatParameters.of(self._target) is self._target_flat

    def learn(self, batch: TransitionBatch, rates: Mapping[str, float], first: int) -> dict[str, float]:
        """Take every gradient step of the batch and return means of the metrics."""
        c, (steps, rows) = self._config, batch.shape
        if rows != self._rows:
            self._rows, self._work = rows, self._allocate(rows)
        sums, errors = np.zeros(3), np.zeros((steps, rows), F32)
        numbers = (c.gamma, rates["critic"], c.adam_eps, c.max_grad_norm or 0.0, c.target_tau)
        settings = (*(F32(number) for number in numbers), c.target_interval)
        failed_at = train_dqn(
            self._read(batch),
            self._net,
            self._target_vector,
            self._sizes,
            self._activation,
            c.double,
            self._policy.dueling,
            settings,
            self._work,
            first,
            self._adam.steps["critic"],
            sums,
            errors,
        )
        if failed_at >= 0:
            raise non_finite_gradient("critic", failed_at)
        self._adam.steps["critic"] += steps
        batch.td_error = None if batch.index is None else np.abs(errors)
        names = ("value_loss", "q_mean", "critic_grad_norm")
        return {name: float(total) / steps for name, total in zip(names, sums, strict=True)}

    def _allocate(self, rows: int) -> tuple[NDArray[np.float32], ...]:
        sizes, hidden = self._sizes, self._sizes[1:-1]
        out = [np.zeros((rows, int(sizes[-1])), F32) for _ in range(4)]
        return (
            np.zeros(max(1, rows * int(hidden.sum())), F32),
            np.zeros((2, max(1, rows * int(hidden.max(initial=1)))), F32),
            *out,
            np.zeros(int((sizes[:-1] * sizes[1:]).max()), F32),
        )

    @torch.no_grad()
    def _read(self, batch: TransitionBatch) -> tuple[NDArray[Any], ...]:
        """The columns in the kernel's order."""
        columns, shape = batch.columns, batch.shape

        def encode(name: str) -> NDArray[np.float32]:
            flat = torch.from_numpy(columns[name]).flatten(0, 1)
            features: NDArray[np.float32] = self._policy.encoder(flat).numpy()
            return np.ascontiguousarray(features, F32).reshape(*shape, -1)

        weight = columns.get("weight")
        return (
            encode("observation"),
            np.ascontiguousarray(columns["action"], np.int64),
            np.ascontiguousarray(columns["reward"], F32),
            encode("next_observation"),
            (~columns["terminated"]).astype(F32),
            np.ones(shape, F32) if weight is None else np.ascontiguousarray(weight, F32),
        )
