"""The update of any policy through autograd: epochs, minibatches, gradients and Adam.

`run_epochs` is the reference: `learner.compiled` must compute the same numbers. The shuffles are an argument, so both
visit the samples in the same order. Metrics stay tensors until the end: reading one costs as much as a small layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from palaestra.errors import CollectorFailed, ConfigError, NonFiniteError
from palaestra.learner.adam import Adam
from palaestra.learner.algorithm import Losses, RolloutAlgorithm, RolloutConfig
from palaestra.learner.batch import TrainBatch, evaluate_actions, minibatch
from palaestra.learner.divided_batch import DividedBatch


class RunningMeans:
    """Running means by name. The policy may see fewer minibatches than the critic."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: Tensor | float) -> None:
        """Count one number."""
        self._sums[name] = self._sums.get(name, 0.0) + number
        self._counts[name] += 1

    def compute(self) -> dict[str, float]:
        """The means so far."""
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
    divided: DividedBatch | None = None,
) -> dict[str, float]:
    """Run every epoch (`order[E, B]` holds the shuffles) and return the means of the metrics.

    `poll` is called before each minibatch and may raise, so that a failure does not wait for the end of a long update.
    `divided`: the places of the samples among those of all processes, which learn together.
    """
    config, flat = algorithm.config, adam.flat
    scales: dict[str, float] = getattr(policy, "learning_rate_scales", {})
    parts = {group: trainable for group in flat.groups if (trainable := flat.trainable(group))}
    if not parts:
        reason = "every weight is frozen, so there is nothing to learn"
        raise ConfigError("policy", "no trainable parameter", reason, "Set requires_grad=True on some parameters")
    means, minibatches, stopped_at = RunningMeans(), 0, 0
    for rows in (rows for epoch in order for rows in epoch.split(config.batch_size)):
        losses, metrics, share = _evaluate(policy, algorithm, batch, rows, clip_range, poll, divided)
        if not stopped_at:
            for name, number in metrics.items():
                if name != "value_loss":
                    means.add(name, number)
            if algorithm.should_stop_policy(metrics):
                stopped_at = minibatches + 1
                # Only a critic that shares no weights with the actor can continue alone.
                parts = {group: own for group, own in parts.items() if group == "critic" and "actor" in flat.groups}
        if not parts:
            break
        flat.gradient.zero_()
        if losses is not None:
            loss = losses.value if stopped_at else losses.policy + losses.value
            (loss if divided is None else loss * share).backward()
        if divided is not None:
            divided.ranks.sum(flat.gradient)
        minibatches += 1
        if "value_loss" in metrics:
            means.add("value_loss", metrics["value_loss"])
        rates = {group: rate * scales.get(group, 1.0) for group in parts}
        for name, norm in _step(adam, parts, rates, config, minibatches).items():
            means.add(name, norm)
    stop = {"policy_stopped_at": float(stopped_at)} if stopped_at else {}
    return {**means.compute(), "minibatches": float(minibatches), **stop}


def _evaluate(
    policy: Any,
    algorithm: RolloutAlgorithm,
    batch: TrainBatch,
    rows: Tensor,
    clip_range: float,
    poll: Callable[[], None] | None,
    divided: DividedBatch | None,
) -> tuple[Losses | None, Mapping[str, Tensor], float]:
    """The losses of this process's samples of a minibatch, the metrics of all, and the share of its samples."""
    if divided is None:
        if poll is not None:
            poll()
        losses = algorithm.losses(policy, minibatch(batch, rows), clip_range=clip_range)
        return losses, losses.metrics, 1.0
    failure: CollectorFailed | None = None
    try:
        if poll is not None:
            poll()
    except CollectorFailed as error:
        # Raised in all processes together, below: the others wait for this one.
        failure = error
    own, share = divided.own_part(rows, algorithm.scale_minibatch(divided.whole_part(rows)))
    part = algorithm.losses(policy, own, clip_range=clip_range) if share else None
    return part, divided.mean_metrics({} if part is None else part.metrics, share, failure), share


def _step(
    adam: Adam, parts: dict[str, list[slice]], rates: dict[str, float], config: RolloutConfig, number: int
) -> dict[str, float]:
    """Take the `number`th step of the trainable `parts` of each group; returns the norms of the gradients."""
    flat, limit = adam.flat, config.max_grad_norm
    gradients = {group: flat.gradient[flat.groups[group]] for group in parts}
    squares = {group: float(torch.dot(gradient, gradient)) for group, gradient in gradients.items()}
    total = sum(squares.values())
    if not math.isfinite(total):
        raise NonFiniteError(f"gradient is not finite at minibatch {number} of this update")
    separable = "actor" in flat.groups
    for group, square in squares.items():
        norm = math.sqrt(square if separable and config.grad_clip == "separate" else total)
        adam.step(group, parts[group], rates[group], 1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
    if not separable:
        return {"grad_norm": math.sqrt(total)}
    return {f"{group}_grad_norm": math.sqrt(square) for group, square in squares.items()}


def locate_failure(policy: Any, batch: TrainBatch, symptom: str) -> NonFiniteError:
    """The error that names the source of a non-finite number: experience, network or optimiser."""
    for key in (key for key in ("observation", "target", "advantage", "log_prob") if key in batch):
        parts = batch[key] if isinstance(batch[key], dict) else {key: batch[key]}
        for name, part in parts.items():
            if part.is_floating_point() and not bool(torch.isfinite(part).all()):
                row = int((~torch.isfinite(part.reshape(len(part), -1)).all(-1)).nonzero()[0])
                return NonFiniteError(
                    f"{symptom}; it came from the environment's side: sample {row} of the rollout has a {name} that is "
                    "not finite. Check what the environment (or the saved rollout) returns."
                )
    for name, parameter in policy.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return NonFiniteError(
                f"{symptom}; it came from the optimiser: parameter {name} stopped being finite in an earlier step. "
                "Lower algorithm.learning_rate, or set algorithm.max_grad_norm."
            )
    with torch.no_grad():
        _, _, value = evaluate_actions(policy, batch)
    side = "value" if not bool(torch.isfinite(value).all()) else "policy"
    return NonFiniteError(
        f"{symptom}; it came from the network: finite weights and samples gave a {side} loss that is not finite. "
        "Lower algorithm.learning_rate, or normalise observations (env.normalize_observation=true)."
    )
