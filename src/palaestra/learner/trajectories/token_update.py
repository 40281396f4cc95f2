"""One update: epochs, minibatches, microbatches, clipping, AdamW. Takes a step only on a gradient that is finite.

A minibatch ends in a step; its microbatches are as many turns as fit into memory and add up to its gradient. Weights
within the objective were decided over the whole update, so the gradients of an epoch's minibatches have the gradient of
the whole update as their mean. If a number breaks half way, weights and optimiser are as they were before the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palaestra.config import Section
from palaestra.errors import CheckpointError, ConfigError, NonFiniteError
from palaestra.learner.trajectories.algorithm import TrajectoryAlgorithm
from palaestra.learner.trajectories.batch import Row, Sample, token_batch
from palaestra.learner.trajectories.policy import SeparateValueHead, TrajectoryPolicy
from palaestra.learner.trajectories.turn_order import by_prompt, minibatches

__all__ = ["FirstPass", "TokenOptimiser", "UpdateConfig", "update"]


class UpdateConfig(Section):
    """How an update is made."""

    learning_rate: float | None = Field(default=None, gt=0, le=1e3)
    """Step size of AdamW. null: chosen by what is trained (LoRA or everything) and how; the choice is printed."""

    value_learning_rate: float = Field(default=1e-4, gt=0, le=1e3)
    """Step size of a value head that the policy names as separate. It starts from nothing and bears more."""

    epochs: int = Field(default=1, ge=1)
    """Passes over each batch. More squeezes out more until `clip_fraction` says the data is used up."""

    minibatches: int = Field(default=1, ge=1)
    """Steps per pass. More learn faster from the same episodes, from noisier gradients."""

    microbatch_turns: int = Field(default=8, ge=1)
    """Turns per forward pass. Changes memory and speed, never the gradient."""

    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients longer than this are shortened to it. null: never."""

    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the step size grows from nearly 0: while Adam does not know the gradient's size yet."""

    decay_updates: int | None = Field(default=None, ge=1)
    """Updates over which the step size falls evenly to a tenth: large steps find the way, small ones settle. null:
    never. About `num_training_steps` for a short run."""

    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Pull of every trained weight towards 0. A LoRA adapter of 0 is the model as it was."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """How long Adam remembers the direction."""

    adam_beta2: float = Field(default=0.99, ge=0, lt=1)
    """How long it remembers the size. Below the usual 0.999, because few updates have to do."""

    adam_eps: float = Field(default=1e-8, gt=0, le=1)
    """Gradients far below this are ignored."""


class FirstPass(Protocol):
    """Looks on before the first step of an update."""

    def see(self, samples: Sequence[Sample], log_probs: Tensor) -> None:
        """Log-probabilities `[B, G]` of a microbatch."""
        ...

    def check(self) -> None:
        """Every microbatch has been seen; raise to have no step taken."""
        ...


class TokenOptimiser:
    """AdamW over what the policy trains, with a state that is tensors by name."""

    def __init__(self, policy: TrajectoryPolicy, config: UpdateConfig, *, rate: float) -> None:
        self.parameters: list[nn.Parameter] = list(policy.trainable_parameters())
        if not self.parameters:
            raise ConfigError("policy", type(policy).__name__, "has nothing to train", "Unfreeze a part, or use LoRA")
        named = policy.value_parameters() if isinstance(policy, SeparateValueHead) else []
        apart = {id(parameter) for parameter in named}
        body = [parameter for parameter in self.parameters if id(parameter) not in apart]
        head = [parameter for parameter in self.parameters if id(parameter) in apart]
        groups = [(group, own) for group, own in ((body, rate), (head, config.value_learning_rate)) if group]
        self._rates = [own for _, own in groups]
        self._config = config
        self._adamw = torch.optim.AdamW(
            [{"params": group, "lr": own} for group, own in groups],
            betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, weight_decay=config.weight_decay,
        )  # fmt: skip

    def set_pace(self, factor: float) -> None:
        """Multiply every rate; 1 is full pace."""
        for group, rate in zip(self._adamw.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def zero(self) -> None:
        """Forget gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> float:
        """Clip and step; the norm before clipping. A gradient that is not finite raises and changes nothing."""
        limit = self._config.max_grad_norm
        norm = float(nn.utils.clip_grad_norm_(self.parameters, math.inf if limit is None else limit))
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient has norm {norm}")
        self._adamw.step()
        return norm

    def undo_point(self) -> Callable[[], None]:
        """Remember weights and state; the returned function puts them back."""
        weights = [parameter.detach().cpu().clone() for parameter in self.parameters]
        state = {name: tensor.clone() for name, tensor in self.tensors().items()}

        def undo() -> None:
            with torch.no_grad():
                for parameter, weight in zip(self.parameters, weights, strict=True):
                    parameter.copy_(weight)
            self.restore(state)

        return undo

    def tensors(self) -> dict[str, Tensor]:
        """Adam's moments and step counts; parameters that never had a gradient have none."""
        return {
            f"adamw.{index}.{name}": tensor.detach().cpu().contiguous()
            for index, parameter in enumerate(self.parameters)
            for name, tensor in self._adamw.state.get(parameter, {}).items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with these moments; `CheckpointError` when they are of other parameters."""
        found: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adamw."):
                _, number, part = name.split(".")
                found.setdefault(int(number), {})[part] = tensor
        for index, parts in found.items():
            wanted = self.parameters[index].shape if index < len(self.parameters) else None
            if any(tensor.shape != wanted for part, tensor in parts.items() if part != "step"):
                raise CheckpointError(
                    f"checkpoint.adamw.{index}", {part: tuple(tensor.shape) for part, tensor in parts.items()},
                    f"does not fit this policy, whose parameter has {'none' if wanted is None else tuple(wanted)}",
                    "Use the configuration it was trained with",
                )  # fmt: skip
        self._adamw.state.clear()
        for index, parts in found.items():
            own = self.parameters[index]
            self._adamw.state[own] = {
                part: tensor.clone() if part == "step" else tensor.to(own.device, own.dtype, copy=True)
                for part, tensor in parts.items()
            }


def update(
    policy: TrajectoryPolicy,
    algorithm: TrajectoryAlgorithm,
    optimiser: TokenOptimiser,
    samples: Sequence[Sample],
    rows: Mapping[int, Row],
    config: UpdateConfig,
    rng: np.random.Generator,
    watch: FirstPass | None = None,
) -> dict[str, float]:
    """Learn from the samples; means over the epochs of what the loss said.

    `watch` sees the log-probabilities of the first minibatch, which are those of the policy before it has learned
    anything. It may fill in `rows` for them, and may raise before the first step is taken; then nothing has changed.
    """
    steps_per_epoch = min(config.minibatches, len(samples))
    steps = config.epochs * steps_per_epoch
    # A single step is taken after everything was found finite, and needs no copy of the weights to go back to.
    undo = optimiser.undo_point() if steps > 1 else None
    sums: dict[str, float] = {}
    norms: list[float] = []
    try:
        for _ in range(config.epochs):
            for chosen in minibatches(samples, steps_per_epoch, rng):
                optimiser.zero()
                first = watch if not norms else None
                for said in _gradients(policy, algorithm, chosen, rows, config, samples, steps_per_epoch, first):
                    for name, number in said.items():
                        sums[name] = sums.get(name, 0.0) + number
                if first is not None:
                    first.check()
                norms.append(optimiser.step())
    except NonFiniteError as error:
        if undo is not None:
            undo()
        raise NonFiniteError(
            f"version {policy.version}: {error}, from finite weights and a proven batch of {len(samples)} turns. "
            "Weights and optimiser are as they were before this batch. Lower trainer.learning_rate or "
            "trainer.max_grad_norm."
        ) from None
    finally:
        optimiser.zero()
    found = {name: total / config.epochs for name, total in sums.items()}
    return {**found, "grad_norm": float(np.mean(norms)), "minibatches": float(steps)}


def _gradients(
    policy: TrajectoryPolicy,
    algorithm: TrajectoryAlgorithm,
    chosen: list[Sample],
    rows: Mapping[int, Row],
    config: UpdateConfig,
    every: Sequence[Sample],
    scale: int,
    watch: FirstPass | None,
) -> list[dict[str, float]]:
    """Add the gradient of a minibatch, microbatch by microbatch, and return what each said."""
    tokens = sum(len(sample.input.turn.token_ids) for sample in every)
    order = by_prompt([sample.input for sample in chosen])
    said = []
    for start in range(0, len(order), config.microbatch_turns):
        some = [chosen[index] for index in order[start : start + config.microbatch_turns]]
        now = policy.log_probs(
            [sample.input for sample in some], with_values=algorithm.needs_values,
            with_entropy=algorithm.needs_entropy, grad=True,
        )  # fmt: skip
        if watch is not None:
            watch.see(some, now.log_probs)
        batch = token_batch(
            some, rows, token_share=1.0 / tokens, turn_share=1.0 / len(every), device=now.log_probs.device
        )
        loss = algorithm.loss(batch, now)
        total = float(loss.total.detach())
        if not math.isfinite(total):
            raise NonFiniteError(f"the loss of a microbatch of {len(some)} turns is {total}")
        (loss.total * scale).backward()
        said.append({"loss": total, **{name: float(number) for name, number in loss.said.items()}})
    return said
