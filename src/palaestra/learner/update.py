"""The plain learning phase: epochs, minibatches, gradients, Adam, on any policy, through autograd.

`run_epochs` is the reference: `learner.compiled` must give the same numbers. Shuffles come in as `order`, so both
visit the samples alike. Diagnostics stay tensors until the end: reading one number costs as much as a small layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from palaestra.errors import ConfigError, NonFiniteError
from palaestra.learner.adam import Adam
from palaestra.learner.algorithm import RolloutAlgorithm, RolloutConfig
from palaestra.learner.batch import TrainBatch, evaluate_actions, minibatch

__all__ = ["locate_failure", "run_epochs"]


class _Means:
    """Means by name of what minibatches report: the policy may see fewer of them than the critic."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: Tensor | float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + number
        self._counts[name] += 1

    def compute(self) -> dict[str, float]:
        return {name: float(total) / self._counts[name] for name, total in self._sums.items()}


def run_epochs(
    policy: Any,
    algorithm: RolloutAlgorithm,
    adam: Adam,
    batch: TrainBatch,
    order: Tensor,
    *,
    rate: float,
    clip_range: float,
    poll: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Run every epoch (`order[E, B]` holds the shuffles) and return the means of the diagnostics.

    `poll` is called before each minibatch and may raise: a failure need not wait for the end of a long update.
    """
    config, flat = algorithm.config, adam.flat
    scales: dict[str, float] = getattr(policy, "learning_rate_scales", {})
    parts = {group: trainable for group in flat.groups if (trainable := flat.trainable(group))}
    if not parts:
        reason = "every weight is frozen, so there is nothing to learn"
        raise ConfigError("policy", "no trainable parameter", reason, "Set requires_grad=True on what should learn")
    means, minibatches, stopped_at = _Means(), 0, 0
    for rows in (rows for epoch in order for rows in epoch.split(config.batch_size)):
        if poll is not None:
            poll()
        losses = algorithm.losses(policy, minibatch(batch, rows), clip_range=clip_range)
        if not stopped_at:
            for name, number in losses.metrics.items():
                if name != "value_loss":
                    means.add(name, number)
            if algorithm.has_moved_enough(losses.metrics):
                stopped_at = minibatches + 1
                # Only parts that share nothing can go on without each other.
                parts = {group: own for group, own in parts.items() if group == "critic" and "actor" in flat.groups}
        if not parts:
            break
        flat.gradient.zero_()
        (losses.value if stopped_at else losses.policy + losses.value).backward()
        minibatches += 1
        if "value_loss" in losses.metrics:
            means.add("value_loss", losses.metrics["value_loss"])
        rates = {group: rate * scales.get(group, 1.0) for group in parts}
        for name, norm in _step(adam, parts, rates, config, minibatches).items():
            means.add(name, norm)
    stop = {"policy_stopped_at": float(stopped_at)} if stopped_at else {}
    return {**means.compute(), "minibatches": float(minibatches), **stop}


def _step(
    adam: Adam, parts: dict[str, list[slice]], rates: dict[str, float], config: RolloutConfig, number: int
) -> dict[str, float]:
    """The `number`th step, of what is not frozen of each group in `parts`; the norms of their gradients."""
    flat, limit = adam.flat, config.max_grad_norm
    gradients = {group: flat.gradient[flat.groups[group]] for group in parts}
    squares = {group: float(torch.dot(gradient, gradient)) for group, gradient in gradients.items()}
    whole = sum(squares.values())
    if not math.isfinite(whole):
        raise NonFiniteError(f"gradient is not finite at minibatch {number} of this update")
    separable = "actor" in flat.groups
    for group, square in squares.items():
        norm = math.sqrt(square if separable and config.grad_clip == "separate" else whole)
        adam.step(group, parts[group], rates[group], 1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
    if not separable:
        return {"grad_norm": math.sqrt(whole)}
    return {f"{group}_grad_norm": math.sqrt(square) for group, square in squares.items()}


def locate_failure(policy: Any, batch: TrainBatch, found: str) -> NonFiniteError:
    """Say which boundary a non-finite number came from: experience, network or optimiser."""
    for key in (key for key in ("observation", "target", "advantage", "log_prob") if key in batch):
        parts = batch[key] if isinstance(batch[key], dict) else {key: batch[key]}
        for name, part in parts.items():
            if part.is_floating_point() and not bool(torch.isfinite(part).all()):
                row = int((~torch.isfinite(part.reshape(len(part), -1)).all(-1)).nonzero()[0])
                return NonFiniteError(
                    f"{found}; it came from the environment's side: sample {row} of the rollout has a {name} that is "
                    "not finite. Check what the environment (or the saved rollout) returns."
                )
    for name, parameter in policy.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return NonFiniteError(
                f"{found}; it came from the optimiser: parameter {name} stopped being finite in an earlier step. "
                "Lower algorithm.learning_rate, or set algorithm.max_grad_norm."
            )
    with torch.no_grad():
        _, _, value = evaluate_actions(policy, batch)
    side = "value" if not bool(torch.isfinite(value).all()) else "policy"
    return NonFiniteError(
        f"{found}; it came from the network: finite weights and finite samples gave a {side} loss that is not finite. "
        "Lower algorithm.learning_rate, or normalise observations (env.normalize_observation=true)."
    )
