"""The plain learning phase: epochs, minibatches, gradients, Adam, on any policy, through autograd.

`run_epochs` is the reference: `learner.compiled` must give the same numbers. Shuffles come in as `order`, so both
visit the samples alike. Diagnostics stay tensors until the end: reading one number costs as much as a small layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from palaestra.errors import ConfigError, NonFiniteError
from palaestra.learner.adam import Adam
from palaestra.learner.algorithm import RolloutAlgorithm, RolloutConfig
from palaestra.learner.batch import TrainBatch, evaluate_actions, minibatch
from palaestra.policy.flat import FlatParameters

__all__ = ["locate_failure", "run_epochs"]


class _Tally:
    """Sums of the metrics of each minibatch; the policy may have seen fewer of them than the critic."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self.policy_minibatches = 0
        self.minibatches = 0
        self.stopped_at: int | None = None

    def _add(self, name: str, number: Tensor | float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + number

    def policy(self, metrics: Mapping[str, Tensor]) -> None:
        self.policy_minibatches += 1
        for name, number in metrics.items():
            if name != "value_loss":
                self._add(name, number)

    def value(self, metrics: Mapping[str, Tensor]) -> None:
        self.minibatches += 1
        if "value_loss" in metrics:
            self._add("value_loss", metrics["value_loss"])

    def norm(self, group: str, number: float) -> None:
        self._add("grad_norm" if group == "policy" else f"{group}_grad_norm", number)

    def metrics(self) -> dict[str, float]:
        policy_steps = self.policy_minibatches - (self.stopped_at is not None)
        over = {"value_loss": self.minibatches, "critic_grad_norm": self.minibatches, "grad_norm": self.minibatches}
        over |= {"actor_grad_norm": policy_steps}
        result = {
            name: float(total) / max(1, over.get(name, self.policy_minibatches)) for name, total in self._sums.items()
        }
        result["minibatches"] = float(self.minibatches)
        if self.stopped_at is not None:
            result["policy_stopped_at"] = float(self.stopped_at)
        return result


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
    config = algorithm.config
    flat = FlatParameters.of(policy)
    # Only parts that share nothing can go on without each other.
    separable = "actor" in flat.groups
    scales: dict[str, float] = getattr(policy, "learning_rate_scales", {})
    parts = {group: flat.trainable(group) for group in flat.groups}
    live = [group for group in flat.groups if parts[group]]
    if not live:
        raise ConfigError(
            "policy", "no trainable parameter", "every weight is frozen, so there is nothing to learn",
            "Set requires_grad=True on what should learn",
        )  # fmt: skip
    improving = True
    tally = _Tally()
    for epoch in order:
        for rows in epoch.split(config.batch_size):
            if poll is not None:
                poll()
            losses = algorithm.losses(policy, minibatch(batch, rows), clip_range=clip_range)
            if improving:
                tally.policy(losses.metrics)
                if algorithm.has_moved_enough(losses.metrics):
                    tally.stopped_at = tally.policy_minibatches
                    improving = False
                    live = ["critic"] if separable and parts["critic"] else []
            if not live:
                return tally.metrics()
            flat.gradient.zero_()
            (losses.policy + losses.value if improving else losses.value).backward()
            tally.value(losses.metrics)
            rates = {group: rate * scales.get(group, 1.0) for group in live}
            _step(flat, adam, {group: parts[group] for group in live}, config, rates, tally)
    return tally.metrics()


def _step(
    flat: FlatParameters,
    adam: Adam,
    parts: dict[str, list[slice]],
    config: RolloutConfig,
    rates: dict[str, float],
    tally: _Tally,
) -> None:
    """One optimiser step of the groups in `parts`, which says what of each is not frozen."""
    gradients = {group: flat.gradient[flat.groups[group]] for group in parts}
    squares = {group: float(torch.dot(gradient, gradient)) for group, gradient in gradients.items()}
    whole = sum(squares.values())
    if not math.isfinite(whole):
        raise NonFiniteError(f"gradient is not finite at minibatch {tally.minibatches} of this update")
    apart = config.grad_clip == "separate" and "actor" in flat.groups
    if "actor" not in flat.groups:
        tally.norm("policy", math.sqrt(whole))
    for group, square in squares.items():
        if "actor" in flat.groups:
            tally.norm(group, math.sqrt(square))
        norm = math.sqrt(square if apart else whole)
        limit = config.max_grad_norm
        adam.step(group, parts[group], rates[group], 1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))


def locate_failure(policy: Any, batch: TrainBatch, found: str) -> NonFiniteError:
    """Say which boundary a non-finite number came from: experience, network or optimiser."""
    for key in (key for key in ("observation", "target", "advantage", "log_prob") if key in batch):
        entry = batch[key]
        parts = entry.items() if isinstance(entry, dict) else [(key, entry)]
        for name, part in parts:
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
