"""One update: epochs, minibatches, microbatches, gradient clipping and AdamW.

Each minibatch is one step; the gradients of its microbatches are added. Token weights are computed over the whole
update, so the mean gradient of an epoch's minibatches is the gradient of the whole update. An update that fails
restores weights and optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palaestra.config import Section
from palaestra.errors import CheckpointError, ConfigError, NonFiniteError
from palaestra.experience.turn_scoring import TokenLogProbs, TurnInput
from palaestra.learner.trajectories.algorithm import TrainingSample, TrajectoryAlgorithm
from palaestra.learner.trajectories.parallel import assign_microbatches, average_gradients, clip_gradients
from palaestra.learner.trajectories.policy import SeparateValueHead, TrajectoryPolicy, trainable_weights
from palaestra.learner.trajectories.scoring import ScoredBatch, build_token_batch, prompt_key, split_microbatches
from palaestra.policy.weight_sync import distribute_like, is_sharded, own_part, whole_tensor
from palaestra.transport.ranks import ALONE, Ranks

Poll: TypeAlias = Callable[[], None] | None
"""Called before each minibatch; when it raises, the update is undone."""

MIN_FACTOR = 0.1
"""Share of the learning rate after its decay; above 0 for runs that are extended."""


class UpdateConfig(Section):
    """Settings of an update."""

    learning_rate: float | None = Field(default=None, gt=0, le=1e3)
    """Step size of AdamW. null: chosen by LoRA or full training and by algorithm; the choice is printed."""
    value_learning_rate: float = Field(default=1e-4, gt=0, le=1e3)
    """Step size of a separate value head. It is trained from scratch and tolerates a higher rate."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each batch. A high `clip_fraction` means that there are too many."""
    minibatches: int = Field(default=1, ge=1)
    """Steps per pass. More steps learn faster, from noisier gradients."""
    microbatch_turns: int = Field(default=8, ge=1)
    """Turns per forward pass. Affects memory and speed, not the gradient."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm. null: no clipping."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the step size grows from nearly 0."""
    decay_updates: int | None = Field(default=None, ge=1)
    """Updates over which the step size decays linearly to a tenth. null: no decay. About `num_training_steps` for a
    short run."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Weight decay of AdamW. It pulls a LoRA adapter towards the original model."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment."""
    adam_beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay rate of Adam's second moment. Below the usual 0.999 because there are few updates."""
    adam_eps: float = Field(default=1e-8, gt=0, le=1)
    """Epsilon of Adam."""


class Imitation(NamedTuple):
    """Demonstrated turns that are imitated beside the samples of a policy gradient."""

    turns: Sequence[TurnInput]
    weight: float
    """Weight of their mean cross entropy in the loss."""

    @property
    def tokens(self) -> int:
        """Number of demonstrated tokens."""
        return sum(len(each.turn.token_ids) for each in self.turns)


class LearningRate(NamedTuple):
    """A learning rate and the reason for it."""

    rate: float
    reason: str


_RATES = {(True, True): 2e-4, (False, True): 1e-5, (True, False): 1e-5, (False, False): 1e-6}
"""By (LoRA, supervised). LoRA needs about ten times the rate of full training; a policy gradient, which is noisier,
about a tenth of the rate of imitation."""


def choose_learning_rate(*, lora: bool | None, supervised: bool, given: float | None = None) -> LearningRate:
    """The `given` rate, or the default for LoRA or full training and for imitation or policy gradients."""
    if given is not None:
        return LearningRate(given, f"learning rate {given:g}, as configured")
    if lora is None:
        reason = "cannot be chosen without knowing what is trained"
        remedy = "Say lora=True or lora=False, or give a learning rate"
        raise ConfigError("trainer.learning_rate", None, reason, remedy)
    rate = _RATES[lora, supervised]
    what = "a LoRA adapter" if lora else "the full weights"
    how = "imitation" if supervised else "a policy gradient"
    text = f"learning rate {rate:g}, the usual start for {how} on {what}; set trainer.learning_rate to change it"
    return LearningRate(rate, text)


def learning_rate_factor(update: int, *, warmup: int, decay: int | None) -> float:
    """Factor of the learning rate at an update (from 0): warmup from nearly 0, then decay to a tenth."""
    growing = min(1.0, (update + 1) / max(1, warmup))
    falling = 1.0 if decay is None else max(MIN_FACTOR, 1.0 - (1.0 - MIN_FACTOR) * update / decay)
    return growing * falling


class TokenUpdater:
    """Updates one policy with one algorithm and AdamW."""

    def __init__(
        self,
        policy: TrajectoryPolicy,
        algorithm: TrajectoryAlgorithm,
        config: UpdateConfig,
        *,
        rate: float,
        ranks: Ranks = ALONE,
    ) -> None:
        """`ranks`: the processes that learn together from the same batch."""
        self._policy, self._algorithm, self._config, self._ranks = policy, algorithm, config, ranks
        self.parameters: list[nn.Parameter] = list(trainable_weights(policy).values())
        if not self.parameters:
            raise ConfigError("policy", type(policy).__name__, "has nothing to train", "Unfreeze a part, or use LoRA")
        of_values = set(policy.value_parameters()) if isinstance(policy, SeparateValueHead) else set()
        body = [parameter for parameter in self.parameters if parameter not in of_values]
        head = [parameter for parameter in self.parameters if parameter in of_values]
        # Sharded and whole tensors cannot be in one group.
        whole, parts = [p for p in body if not is_sharded(p)], [p for p in body if is_sharded(p)]
        rates = ((whole, rate), (parts, rate), (head, config.value_learning_rate))
        groups = [(group, own) for group, own in rates if group]
        self._rates = [own for _, own in groups]
        self._adamw = torch.optim.AdamW(
            [{"params": group, "lr": own} for group, own in groups],
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )

    def set_rate_factor(self, factor: float) -> None:
        """Multiply every learning rate by `factor`."""
        for group, rate in zip(self._adamw.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def run(
        self,
        samples: Sequence[TrainingSample],
        batch: ScoredBatch,
        rng: np.random.Generator,
        *,
        imitation: Imitation | None = None,
        poll: Poll = None,
    ) -> dict[str, float]:
        """Learn from the samples; returns the metrics of the loss, averaged over epochs. `poll` may raise.

        `imitation` adds a supervised loss. Its turns are divided evenly among the minibatches.
        """
        imitation = imitation or Imitation((), 0.0)
        available = max(len(samples), len(imitation.turns))
        epochs, steps_per_epoch = self._config.epochs, min(self._config.minibatches, available)
        steps = epochs * steps_per_epoch
        # A single step is taken after all checks, so it needs no copy of the weights to restore.
        undo = self._undo_point() if steps > 1 else None
        sums: dict[str, float] = {}
        norms: list[float] = []
        try:
            for _ in range(epochs):
                for number, chosen in enumerate(split_minibatches(samples, batch.turns, steps_per_epoch, rng)):
                    if poll is not None:
                        self._ranks.run(poll)
                    self._adamw.zero_grad(set_to_none=True)
                    first = batch.defer_checks and not norms
                    added = self._add_gradients(chosen, batch, samples, steps_per_epoch, first=first)
                    added += self._add_imitation(imitation, imitation.turns[number::steps_per_epoch], steps_per_epoch)
                    average_gradients(self._ranks, self.parameters)
                    for metrics in added:
                        for name, value in metrics.items():
                            sums[name] = sums.get(name, 0.0) + value
                    if first:
                        batch.merge_first_pass(samples)
                        batch.check()
                    norms.append(self._step())
        except BaseException as error:
            if undo is not None:
                undo()
            if not isinstance(error, NonFiniteError):
                raise
            raise NonFiniteError(
                f"version {batch.version}: {error}, from finite weights and a proven batch of {len(samples)} turns. "
                "Weights and optimiser are as they were before this batch. Lower trainer.learning_rate or "
                "trainer.max_grad_norm."
            ) from None
        finally:
            self._adamw.zero_grad(set_to_none=True)
        means = {name: total / epochs for name, total in self._add_metrics(sums).items()}
        return {**means, "grad_norm": float(np.mean(norms)), "minibatches": float(steps)}

    def _add_gradients(
        self,
        chosen: list[TrainingSample],
        batch: ScoredBatch,
        every: Sequence[TrainingSample],
        scale: int,
        *,
        first: bool,
    ) -> list[dict[str, float]]:
        """Add the gradient of a minibatch, microbatch by microbatch, and return the metrics of each."""
        if not every:
            return []
        algorithm, turns = self._algorithm, [batch.turns[sample.turn] for sample in chosen]
        tokens = sum(len(batch.turns[sample.turn].turn.token_ids) for sample in every)
        shares = {"token_share": 1.0 / tokens, "turn_share": 1.0 / len(every)}
        demonstrated = [batch.turns[sample.turn].turn for sample in every]
        demonstrated_tokens = sum(len(turn.token_ids) for turn in demonstrated if turn.is_demonstration)
        needs = {"with_values": algorithm.needs_values, "with_entropy": algorithm.needs_entropy}
        if algorithm.needs_imitation_scores:
            needs["with_imitation"] = True
        metrics: list[dict[str, float]] = []
        failure: NonFiniteError | None = None
        for part in assign_microbatches(self._ranks, turns, self._config.microbatch_turns, split_microbatches):
            some = [chosen[place] for place in part.places]
            now = self._policy.log_probs([turns[place] for place in part.places], **needs, grad=True)
            if first and part.counts:
                batch.add_first_pass(some, now.log_probs)
            loss = algorithm.loss(build_token_batch(some, batch.rows, **shares, device=now.log_probs.device), now)
            total = float(loss.total.detach())
            if not math.isfinite(total):
                failure = NonFiniteError(f"the loss of a microbatch of {len(some)} turns is {total}")
                if self._ranks.size == 1:
                    raise failure
            # The gradients of the processes are averaged, and their sum is needed.
            (loss.total * (scale * self._ranks.size * part.counts)).backward()
            if part.counts:
                metrics.append({"loss": total, **{name: float(number) for name, number in loss.metrics.items()}})
                if demonstrated_tokens:
                    nll = _demonstration_nll([turns[place] for place in part.places], now) / demonstrated_tokens
                    metrics.append({"demonstration_nll": nll})
        if self._ranks.size > 1:
            self._ranks.agree(failure)
        return metrics

    def _add_imitation(self, imitation: Imitation, turns: Sequence[TurnInput], scale: int) -> list[dict[str, float]]:
        """Add the gradient of the supervised loss of some demonstrated turns."""
        metrics: list[dict[str, float]] = []
        for part in assign_microbatches(self._ranks, turns, self._config.microbatch_turns, split_microbatches):
            now = self._policy.log_probs([turns[place] for place in part.places], grad=True)
            nll = -(now.log_probs * now.mask).sum() / imitation.tokens
            # A loss that is not finite gives a gradient that is not, and the step raises in all processes.
            (nll * (imitation.weight * scale * self._ranks.size * part.counts)).backward()
            if part.counts:
                own = float(nll.detach())
                metrics.append({"demonstration_nll": own, "loss": imitation.weight * own})
        return metrics

    def _add_metrics(self, own: dict[str, float]) -> dict[str, float]:
        """The sums over all processes."""
        parts = self._ranks.gather(own)
        return {name: sum(part.get(name, 0.0) for part in parts) for part in parts for name in part}

    def _step(self) -> float:
        """Clip and step; returns the norm before clipping. A non-finite gradient raises before the step."""
        limit = self._config.max_grad_norm
        norm = clip_gradients(self._ranks, self.parameters, math.inf if limit is None else limit)
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient has norm {norm}")
        self._adamw.step()
        return norm

    def _undo_point(self) -> Callable[[], None]:
        """A function that restores the present weights and optimiser state."""
        weights = [own_part(parameter.detach()).cpu().clone() for parameter in self.parameters]
        # In main memory, as the weights: on a GPU a copy of the moments of a whole model would not fit.
        moments: dict[Tensor, dict[str, Tensor]] = {
            parameter: {name: own_part(part).cpu().clone() for name, part in self._adamw.state[parameter].items()}
            for parameter in self.parameters
            if parameter in self._adamw.state
        }

        def undo() -> None:
            with torch.no_grad():
                for parameter, weight in zip(self.parameters, weights, strict=True):
                    own_part(parameter.detach()).copy_(weight)
                for key, present in list(self._adamw.state.items()):
                    if key not in moments:
                        del self._adamw.state[key]
                        continue
                    for name, part in moments[key].items():
                        own_part(present[name]).copy_(part)

        return undo

    def tensors(self) -> dict[str, Tensor]:
        """Adam's moments and step counts by name; whole tensors, so all processes call this."""
        return {
            f"adamw.{index}.{name}": whole_tensor(tensor.detach()).cpu().contiguous()
            for index, parameter in enumerate(self.parameters)
            for name, tensor in self._adamw.state.get(parameter, {}).items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with these moments; `CheckpointError` if they belong to other parameters."""
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adamw."):
                _, number, part = name.split(".")
                moments.setdefault(int(number), {})[part] = tensor
        state: dict[Tensor, dict[str, Tensor]] = {}
        for index, parts in moments.items():
            own = self.parameters[index] if index < len(self.parameters) else None
            if own is None or any(tensor.shape != own.shape for part, tensor in parts.items() if part != "step"):
                shape = "none" if own is None else tuple(own.shape)
                raise CheckpointError(
                    f"checkpoint.adamw.{index}",
                    {part: tuple(tensor.shape) for part, tensor in parts.items()},
                    f"does not fit this policy, whose parameter has {shape}",
                    "Use the configuration it was trained with",
                )
            state[own] = {
                part: tensor.clone() if part == "step" else _place(tensor, own) for part, tensor in parts.items()
            }
        self._adamw.state.clear()
        self._adamw.state.update(state)


def _place(tensor: Tensor, example: Tensor) -> Tensor:
    """A copy on the device of `example`; if that is sharded, this process's part."""
    return (
        distribute_like(tensor, example) if is_sharded(example) else tensor.to(example.device, example.dtype, copy=True)
    )


def _demonstration_nll(turns: Sequence[TurnInput], now: TokenLogProbs) -> float:
    """Sum of the negative log-probabilities of the demonstrated tokens of a microbatch."""
    rows = torch.tensor([each.turn.is_demonstration for each in turns], device=now.log_probs.device)
    return -float((now.log_probs.detach() * (now.mask & rows[:, None])).sum())


def split_minibatches(
    samples: Sequence[TrainingSample], turns: Sequence[TurnInput], count: int, rng: np.random.Generator
) -> list[list[TrainingSample]]:
    """The samples in random order and in equal parts; samples with the same prompt stay together if possible.

    They share the cost of the prompt, and the better and worse replies of a group are compared in one step.
    """
    answers: dict[bytes, list[TrainingSample]] = {}
    for sample in samples:
        answers.setdefault(prompt_key(turns[sample.turn]), []).append(sample)
    clusters = list(answers.values())
    order = [sample for place in rng.permutation(len(clusters)) for sample in clusters[place]]
    borders = np.linspace(0, len(order), count + 1).round().astype(int)
    return [order[start:end] for start, end in pairwise(borders)]
