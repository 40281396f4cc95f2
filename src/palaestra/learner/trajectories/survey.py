"""The turns of an update as the policy sees them before it learns: one pass without gradients.

It gives the value of every turn if those are needed, the proximal log-probabilities and weights of stale tokens, and
the reference's log-probabilities. It compares recorded log-probabilities with those of the weights that drew them: of
fresh tokens with the policy as it is, of stale ones with earlier weights that the policy still has. A fresh token keeps
its recorded log-probability untouched, so experience without staleness is learned from exactly as by plain PPO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from palaestra.errors import ConfigError, ExperienceError, NonFiniteError
from palaestra.experience.trajectory import Turn
from palaestra.experience.turn_input import TurnInput
from palaestra.learner.trajectories.agreement import Agreement
from palaestra.learner.trajectories.algorithm import TrajectoryAlgorithm
from palaestra.learner.trajectories.batch import Row, behaviour_of
from palaestra.learner.trajectories.policy import RecallsVersions, TrajectoryPolicy
from palaestra.learner.trajectories.token_loss import importance_weights, k3
from palaestra.learner.trajectories.turn_order import by_prompt

__all__ = ["Survey", "surveyed", "weigh_stale"]

SAMPLED = 16
"""Turns that are looked at beforehand when the pass that learns sees to all of them: enough for the mean entropy."""


@dataclass(frozen=True, eq=False)
class Survey:
    """What one look at the turns of an update found."""

    rows: dict[int, Row]
    """By the identity of the turn."""
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
    agreement: Agreement,
    checked_turns: int | None,
    in_passing: bool = False,
) -> Survey:
    """Look at the turns; each is looked at once, and only if something is asked of it.

    Fills `agreement` with `checked_turns` of the turns that have tokens of each version that the policy recalls; None:
    all. `in_passing`: the pass that learns will compare fresh tokens and weigh stale ones (`weigh_stale`), and only a
    sample of the turns is looked at here.
    """
    version = policy.version
    wanted = _to_look_at(turns, algorithm, version, checked_turns, in_passing=in_passing)
    looks = _looks(policy, algorithm, wanted, microbatch)
    _compare_stale(policy, turns, agreement, microbatch=microbatch, checked_turns=checked_turns)
    references = _references(policy, turns, microbatch) if algorithm.needs_reference else {}
    rows: dict[int, Row] = {}
    behind, entropies, lags = [], [], []
    for each in turns:
        behaviour = behaviour_of(each.turn)
        look = looks.get(id(each.turn))
        row = Row(behaviour, torch.ones_like(behaviour), None, references.get(id(each.turn)))
        lags.append(version - torch.tensor(each.turn.versions))
        if look is not None:
            agreement.add(each.turn, look.log_probs, version)
            behind.append(k3(behaviour, look.log_probs))
            if look.entropy is not None:
                entropies.append(look.entropy)
            row = weigh_stale(replace(row, value=look.value), each.turn, look.log_probs, algorithm, version)
        rows[id(each.turn)] = row
    lag = torch.cat(lags).double()
    return Survey(rows, _mean(entropies), _mean(behind), float(lag.mean()), float(lag.max()))


def weigh_stale(row: Row, turn: Turn, own: Tensor, algorithm: TrajectoryAlgorithm, version: int) -> Row:
    """The row with its stale tokens weighed; `own` are the log-probabilities of the policy before it learns."""
    stale = torch.tensor(turn.versions) != version
    if algorithm.supervised or not bool(stale.any()):
        return row
    behaviour = behaviour_of(turn)
    proximal = torch.where(stale, own, behaviour)
    importance = importance_weights(proximal, behaviour, stale, limit=algorithm.weight_limit)
    capped = int((proximal - behaviour > math.log(algorithm.weight_limit)).sum())
    return replace(row, proximal=proximal, importance=importance, capped=capped)


def _to_look_at(
    turns: Sequence[TurnInput],
    algorithm: TrajectoryAlgorithm,
    version: int,
    checked_turns: int | None,
    *,
    in_passing: bool,
) -> list[TurnInput]:
    distinct = list({id(each.turn): each for each in turns}.values())
    if algorithm.needs_values:
        return distinct
    if in_passing:
        return [distinct[index] for index in _spread(list(range(len(distinct))), SAMPLED)]
    fresh = [index for index, each in enumerate(distinct) if bool((each.turn.versions == version).any())]
    wanted = set(_spread(fresh, checked_turns))
    if not algorithm.supervised:
        wanted |= {index for index, each in enumerate(distinct) if bool((each.turn.versions != version).any())}
    return [distinct[index] for index in sorted(wanted)]


def _spread(indices: list[int], count: int | None) -> list[int]:
    """`count` of them, evenly spread; all when None or when there are no more."""
    if count is None or count >= len(indices):
        return indices
    return [indices[place] for place in np.linspace(0, len(indices) - 1, count).round().astype(int)]


def _compare_stale(
    policy: TrajectoryPolicy,
    turns: Sequence[TurnInput],
    agreement: Agreement,
    *,
    microbatch: int,
    checked_turns: int | None,
) -> None:
    """Compare stale tokens with the weights that drew them, as far as the policy still has those."""
    if not isinstance(policy, RecallsVersions):
        return
    distinct = list({id(each.turn): each for each in turns}.values())
    versions = {int(version) for each in distinct for version in each.turn.versions} - {policy.version}
    for version in sorted(version for version in versions if policy.recalls(version)):
        own = [index for index, each in enumerate(distinct) if bool((each.turn.versions == version).any())]
        for some in _microbatches([distinct[index] for index in _spread(own, checked_turns)], microbatch):
            log_probs = policy.past_log_probs(some, version=version)
            for row, each in enumerate(some):
                agreement.add(each.turn, log_probs[row, : len(each.turn.token_ids)], version)


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


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean()) if parts else float("nan")
