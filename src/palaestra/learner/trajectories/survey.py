"""The turns of an update as the policy sees them before it learns: one pass without gradients.

It gives the value of every turn if those are needed, the proximal log-probabilities and weights of stale tokens, the
reference's log-probabilities, and the disagreement with the sampler about fresh tokens. A fresh token keeps its
recorded log-probability untouched, so experience without staleness is learned from exactly as by plain PPO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palaestra.errors import ConfigError, ExperienceError, NonFiniteError
from palaestra.experience.turn_input import TurnInput
from palaestra.learner.trajectories.algorithm import TrajectoryAlgorithm
from palaestra.learner.trajectories.batch import Row, behaviour_of
from palaestra.learner.trajectories.policy import TrajectoryPolicy
from palaestra.learner.trajectories.proof import Disagreement
from palaestra.learner.trajectories.token_loss import importance_weights, k3
from palaestra.learner.trajectories.turn_order import by_prompt

__all__ = ["Survey", "surveyed"]


@dataclass(frozen=True, eq=False)
class Survey:
    """What one look at the turns of an update found."""

    rows: dict[int, Row]
    """By the identity of the turn."""
    disagreement: Disagreement
    entropy: float
    """Mean over the tokens looked at; NaN when there were none."""
    behaviour_kl: float
    """Distance of the policy from those that sampled, over the tokens looked at; NaN when there were none."""
    staleness: float
    staleness_max: float


@dataclass(frozen=True, eq=False)
class _Look:
    log_probs: Tensor
    entropy: Tensor | None
    value: float | None


def surveyed(
    policy: TrajectoryPolicy,
    algorithm: TrajectoryAlgorithm,
    turns: Sequence[TurnInput],
    *,
    microbatch: int,
    checked_turns: int | None,
) -> Survey:
    """Look at the turns; each is looked at once, and only if something is asked of it."""
    version = policy.version
    looks = _looks(policy, algorithm, _to_look_at(turns, algorithm, version, checked_turns), microbatch)
    references = _references(policy, turns, microbatch) if algorithm.needs_reference else {}
    rows: dict[int, Row] = {}
    apart, behind, entropies, lags = [], [], [], []
    for each in turns:
        behaviour = behaviour_of(each.turn)
        versions = torch.tensor(each.turn.versions)
        stale, look = versions != version, looks.get(id(each.turn))
        proximal, importance, capped = behaviour, torch.ones_like(behaviour), 0
        lags.append(version - versions)
        if look is not None:
            apart.append((look.log_probs - behaviour)[~stale].abs())
            behind.append(k3(behaviour, look.log_probs))
            if look.entropy is not None:
                entropies.append(look.entropy)
            if not algorithm.supervised:
                proximal = torch.where(stale, look.log_probs, behaviour)
                importance = importance_weights(proximal, behaviour, stale, limit=algorithm.weight_limit)
                capped = int((proximal - behaviour > math.log(algorithm.weight_limit)).sum())
        value = None if look is None else look.value
        rows[id(each.turn)] = Row(proximal, importance, value, references.get(id(each.turn)), capped)
    lag = torch.cat(lags).double()
    return Survey(
        rows, _disagreement(apart), _mean(entropies), _mean(behind), float(lag.mean()), float(lag.max()),
    )  # fmt: skip


def _to_look_at(
    turns: Sequence[TurnInput], algorithm: TrajectoryAlgorithm, version: int, checked_turns: int | None
) -> list[TurnInput]:
    distinct = list({id(each.turn): each for each in turns}.values())
    if algorithm.needs_values or checked_turns is None:
        return distinct
    fresh = [index for index, each in enumerate(distinct) if bool((each.turn.versions == version).any())]
    spread = np.linspace(0, len(fresh) - 1, min(checked_turns, len(fresh))).round().astype(int)
    wanted = {fresh[index] for index in spread}
    if not algorithm.supervised:
        wanted |= {index for index, each in enumerate(distinct) if bool((each.turn.versions != version).any())}
    return [distinct[index] for index in sorted(wanted)]


def _looks(
    policy: TrajectoryPolicy, algorithm: TrajectoryAlgorithm, turns: list[TurnInput], microbatch: int
) -> dict[int, _Look]:
    found: dict[int, _Look] = {}
    for some in _microbatches(turns, microbatch):
        now = policy.log_probs(some, with_values=algorithm.needs_values, with_entropy=True, grad=False)
        if algorithm.needs_values and now.values is None:
            raise ExperienceError("the policy gave no values. This algorithm needs a value head.")
        for row, each in enumerate(some):
            count = len(each.turn.token_ids)
            log_probs = now.log_probs[row, :count].detach().float().cpu()
            value = None if now.values is None else float(now.values[row])
            if not bool(torch.isfinite(log_probs).all()) or not np.isfinite(0.0 if value is None else value):
                raise NonFiniteError(
                    f"version {policy.version} of the policy gives a log-probability or value that is not finite, "
                    "before anything was learned from this batch. Go back to an earlier checkpoint and lower "
                    "trainer.learning_rate."
                )
            entropy = None if now.entropy is None else now.entropy[row, :count].detach().float().cpu()
            found[id(each.turn)] = _Look(log_probs, entropy, value)
    return found


def _references(policy: TrajectoryPolicy, turns: Sequence[TurnInput], microbatch: int) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for some in _microbatches(list({id(each.turn): each for each in turns}.values()), microbatch):
        said = policy.reference_log_probs(some)
        if said is None:
            raise ConfigError(
                "algorithm.kl_coef", "above 0", "the policy keeps no weights from before training",
                "Train with LoRA, keep a frozen copy, or set algorithm.kl_coef=0",
            )  # fmt: skip
        for row, each in enumerate(some):
            found[id(each.turn)] = said[row, : len(each.turn.token_ids)].detach().float().cpu()
    return found


def _microbatches(turns: list[TurnInput], size: int) -> list[list[TurnInput]]:
    order = by_prompt(turns)
    return [[turns[index] for index in order[start : start + size]] for start in range(0, len(order), size)]


def _disagreement(apart: list[Tensor]) -> Disagreement:
    every = torch.cat(apart) if apart else torch.zeros(0)
    if every.numel() == 0:
        return Disagreement(0.0, 0.0, 0)
    return Disagreement(float(every.double().mean()), float(every.max()), every.numel())


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean()) if parts else float("nan")
