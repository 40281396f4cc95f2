"""`TransitionLearner`: improves a policy from transitions with any `TransitionAlgorithm`.

One `update` consumes `[G, B]` transitions: G gradient steps on minibatches of B. The learner owns the optimiser, the
target network, the noise of the losses and the version. An update that fails with a non-finite number, or because the
collector failed, restores all of them. `_run_steps` is the reference; an algorithm may provide the same arithmetic
without autograd (`compiled_update`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palaestra.errors import CheckpointError, CollectorFailed, ExperienceError, NonFiniteError
from palaestra.experience.columns import column_parts, map_column
from palaestra.experience.replay import COLUMNS, TransitionBatch
from palaestra.learner.adam import Adam
from palaestra.learner.transitions.algorithm import StepLoss, TransitionAlgorithm, TransitionUpdate, non_finite_gradient
from palaestra.learner.update import RunningMeans
from palaestra.policy.device import device_of
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.weight_sync import LiveWeights
from palaestra.transport.source import SavedState


class TransitionLearner:
    """Trains one policy with one algorithm on transitions."""

    def __init__(
        self,
        policy: nn.Module,
        algorithm: TransitionAlgorithm,
        *,
        seed: int = 0,
        compiled: bool = True,
        progress: Callable[[int], float] = lambda gradient_steps: 0.0,
    ) -> None:
        """`progress` returns the share of the training before an update of so many gradient steps, for schedules."""
        self.policy, self.algorithm = policy, algorithm
        self.version = 0
        self.gradient_steps = 0
        """Gradient steps so far, over all updates."""
        self.flat = FlatParameters.refresh(policy)
        self.target = copy.deepcopy(policy).requires_grad_(True)
        self._target_flat = FlatParameters.of(self.target)
        self.target.requires_grad_(False)
        self.optimizer = Adam(self.flat, algorithm.config.adam_eps, compiled=compiled)
        self._noise = np.random.default_rng(np.random.SeedSequence([seed, 7]))
        self._progress, self._allows_compiled = progress, compiled
        self._compiled: TransitionUpdate | None = None
        self._weights: LiveWeights | None = None
        self._copies: list[Tensor] = []

    def update(self, experience: TransitionBatch, *, poll: Callable[[], None] | None = None) -> dict[str, float]:
        """Take one gradient step per minibatch of `experience`."""
        _check_batch(experience)
        if FlatParameters.of(self.policy) is not self.flat:
            raise ExperienceError("update: the policy's parameters were replaced. Build a new learner for it.")
        noise_state, undo = self._noise.bit_generator.state, self._undo_point()
        batch = self._add_noise(experience)
        progress = self._progress(batch.shape[0])
        rates = dict.fromkeys(self.flat.groups, self.algorithm.learning_rate(progress))
        rates |= self.algorithm.learning_rates(progress)
        try:
            fast = self._compiled_update()
            if fast is not None:
                metrics = fast.learn(batch, rates, self.gradient_steps)
                self.gradient_steps += batch.shape[0]
            else:
                metrics = self._run_steps(batch, rates, poll)
        except (CollectorFailed, NonFiniteError):
            undo()
            self._noise.bit_generator.state = noise_state
            raise
        experience.td_error = batch.td_error
        self.version += 1
        metrics |= {"learning_rate": max(rates.values()), "gradient_steps": float(self.gradient_steps)}
        return metrics | self.algorithm.extra_metrics(self.policy)

    def _run_steps(
        self, batch: TransitionBatch, rates: Mapping[str, float], poll: Callable[[], None] | None
    ) -> dict[str, float]:
        """Every gradient step through autograd."""
        device, means = device_of(self.policy), RunningMeans()
        columns = {
            name: map_column(column, lambda part: _tensor(part, device)) for name, column in batch.columns.items()
        }
        steps, size = batch.shape
        errors = np.zeros((steps, size), np.float32) if batch.index is not None else None
        for g in range(steps):
            if poll is not None:
                poll()
            rows = {name: map_column(column, itemgetter(g)) for name, column in columns.items()}
            for step in self.algorithm.losses(self.policy, self.target, rows, self.gradient_steps):
                means.add(f"{step.group}_grad_norm", self._minimize(step, rates[step.group], g))
                for name, number in step.metrics.items():
                    means.add(name, number)
                if errors is not None and step.td_error is not None:
                    errors[g] = step.td_error.abs().cpu().numpy()
            self.gradient_steps += 1
            if self.gradient_steps % self.algorithm.config.target_interval == 0:
                self._move_target()
        batch.td_error = errors
        return means.compute()

    def _minimize(self, step: StepLoss, rate: float, g: int) -> float:
        """One step of Adam on one group; returns the norm of the gradient."""
        flat, limit = self.flat, self.algorithm.config.max_grad_norm
        members = flat.members(step.group)
        gradients = torch.autograd.grad(step.loss, members, allow_unused=True)
        for parameter, gradient in zip(members, gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient) if gradient is not None else parameter.grad.zero_()
        whole = flat.gradient[flat.groups[step.group]]
        norm = math.sqrt(float(torch.dot(whole, whole)))
        if not math.isfinite(norm):
            raise non_finite_gradient(step.group, g)
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        self.optimizer.step(step.group, [flat.groups[step.group]], rate, scale)
        return norm

    @torch.no_grad()
    def _move_target(self) -> None:
        tau = self.algorithm.config.target_tau
        for group in self.algorithm.target_groups:
            part = self.flat.groups[group]
            self._target_flat.vector[part].lerp_(self.flat.vector[part], tau)

    def _add_noise(self, batch: TransitionBatch) -> TransitionBatch:
        count = self.algorithm.noise_per_sample
        if not count:
            return batch
        size = math.prod(self.policy.distribution.action_shape)  # type: ignore[union-attr,arg-type]
        noise = self._noise.standard_normal((*batch.shape, count, size), dtype=np.float32)
        return TransitionBatch({**batch.columns, "noise": noise}, batch.index)

    def _compiled_update(self) -> TransitionUpdate | None:
        if not self._allows_compiled or self.flat.vector.device.type != "cpu":
            return None
        if self._compiled is None or not self._compiled.is_current():
            self._compiled = self.algorithm.compiled_update(self.policy, self.target, self.optimizer)
        return self._compiled

    def weights(self) -> LiveWeights:
        """The weights of the policy, not copied."""
        if self._weights is None:
            self._weights = LiveWeights(self.policy)
        return self._weights

    def state(self) -> SavedState:
        """Optimiser, target network, noise and counters."""
        adam = self.optimizer
        tensors = {"adam.first": adam.first, "adam.second": adam.second, "target": self._target_flat.vector}
        facts = {
            "n_updates": self.version,
            "gradient_steps": self.gradient_steps,
            "adam_steps": dict(adam.steps),
            "noise": self._noise.bit_generator.state,
            "algorithm": type(self.algorithm).__name__,
        }
        return SavedState({name: tensor.cpu().clone() for name, tensor in tensors.items()}, facts)

    def load_state(self, state: SavedState) -> None:
        """Continue from `state`."""
        adam, facts = self.optimizer, state.facts
        adam.first.copy_(state.tensors["adam.first"])
        adam.second.copy_(state.tensors["adam.second"])
        adam.steps = {name: int(steps) for name, steps in facts["adam_steps"].items()}
        self.version, self.gradient_steps = int(facts["n_updates"]), int(facts["gradient_steps"])
        self._noise.bit_generator.state = facts["noise"]
        self.load_target(state)

    def load_target(self, state: SavedState) -> None:
        """Load the target network of `state`, and the statistics of the policy into it."""
        self._target_flat.vector.copy_(state.tensors["target"])
        self.sync_buffers()

    def sync_buffers(self) -> None:
        """Copy what is not trained, such as the statistics of the normaliser, to the target network."""
        with torch.no_grad():
            for mine, copied in zip(self.policy.buffers(), self.target.buffers(), strict=True):
                copied.copy_(mine)

    def check_state(self, state: SavedState, *, place: str) -> None:
        """Raise `CheckpointError` if the state belongs to another algorithm or policy."""
        mine, theirs = type(self.algorithm).__name__, state.facts.get("algorithm", "PPO")
        if mine != theirs:
            remedy = "Use the algorithm it was trained with"
            raise CheckpointError("checkpoint", place, f"was trained by {theirs}, this run trains by {mine}", remedy)
        first = state.tensors["adam.first"]
        if first.shape != self.optimizer.first.shape:
            reason = f"has {first.numel()} trained numbers, this policy has {self.optimizer.first.numel()}"
            raise CheckpointError("checkpoint", place, reason, "Use the configuration it was trained with")

    @torch.no_grad()
    def _undo_point(self) -> Callable[[], None]:
        adam = self.optimizer
        vectors = (self.flat.vector, self._target_flat.vector, adam.first, adam.second)
        if not self._copies:
            self._copies = [torch.empty_like(vector) for vector in vectors]
        for saved, vector in zip(self._copies, vectors, strict=True):
            saved.copy_(vector)
        steps, taken = dict(adam.steps), self.gradient_steps

        def undo() -> None:
            for vector, saved in zip(vectors, self._copies, strict=True):
                vector.copy_(saved)
            adam.steps, self.gradient_steps = steps, taken

        return undo


def _tensor(part: Any, device: torch.device) -> Tensor:
    tensor = part if isinstance(part, Tensor) else torch.from_numpy(part)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _check_batch(batch: TransitionBatch) -> None:
    """Raise if a column is missing or does not have one row per transition."""
    missing = [name for name in COLUMNS if name not in batch.columns]
    if missing:
        raise ExperienceError(f"update: the transitions have no column {missing[0]!r}.")
    shape = batch.shape
    for name, column in batch.columns.items():
        for part in column_parts(column):
            if tuple(part.shape[:2]) != shape:
                raise ExperienceError(f"update: {name} has shape {list(part.shape)}, expected {list(shape)} + …")
