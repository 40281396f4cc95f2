"""The turns of an update as the policy sees them before it learns: one pass without gradients.

`score_batch` gives the value of every turn if those are needed, the proximal log-probabilities and weights of stale
tokens, and the reference's log-probabilities. A fresh token keeps its recorded log-probability untouched, so experience
without staleness is learned from exactly as by plain PPO.

On the way recorded log-probabilities are compared with those of the weights that drew them (`Agreement`): of fresh
tokens with the policy as it is, of stale ones with earlier weights that are still kept. When they differ, sampler and
learner do not have the same weights or do not see the same pictures, or the recording was changed on its way; learning
from it would look healthy while it goes wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from palaestra.errors import ConfigError, ExperienceError, NonFiniteError
from palaestra.experience.trajectory import Trajectory, Turn, TurnInput, turn_inputs
from palaestra.learner.trajectories.algorithm import Sample, TokenBatch, TrajectoryAlgorithm
from palaestra.learner.trajectories.policy import KeepsReference, ScoresPastWeights, TrajectoryPolicy
from palaestra.learner.trajectories.policy_gradient import importance_weights, k3
from palaestra.learner.trajectories.proof import ProofConfig

__all__ = ["Agreement", "BatchRefused", "Row", "ScoredBatch", "build_token_batch", "score_batch", "why_disagreeing"]

SAMPLED = 16
"""Turns that are scored beforehand when the pass that learns sees to all of them: enough for the mean entropy."""
OF_ONE_EPISODE = 4.0
"""How many times the mean of a batch a single episode's may be: a few unlikely tokens weigh more in it."""


class BatchRefused(Exception):
    """The batch cannot be trusted; the text says why."""


class Disagreement(NamedTuple):
    """How far recorded log-probabilities are from those of the weights they name."""

    mean: float
    maximum: float
    tokens: int
    episode_mean: float = 0.0
    """Of the episode in which they differ most."""
    episode: str = ""
    """The id of that episode."""
    worst: str = ""
    """Where the single largest distance is."""


class Agreement:
    """Distances of the tokens of an update, so far."""

    def __init__(
        self, trajectories: Sequence[Trajectory], config: ProofConfig | None = None, *, half_precision: bool = True
    ) -> None:
        self._config, self._half_precision = config or ProofConfig(), half_precision
        self._turns = [(one.episode_id, number, turn) for one in trajectories for number, turn in enumerate(one.turns)]
        self._distances: dict[tuple[int, int], Tensor] = {}
        """By the position of the turn in the update, and version."""

    def add(self, position: int, log_probs: Tensor, version: int) -> float:
        """`log_probs` of a turn's tokens under the weights of a version, whose tokens are compared.

        Returns the largest distance among them; 0 when there are none.
        """
        turn = self._turns[position][2]
        of_version = torch.from_numpy(turn.versions == version)
        if not bool(of_version.any()):
            return 0.0
        distances = (log_probs.detach().float().cpu() - _recorded(turn))[of_version].abs()
        self._distances[position, version] = distances
        return float(distances.max())

    def disagreement(self) -> Disagreement:
        """Of all that was compared."""
        if not self._distances:
            return Disagreement(0.0, 0.0, 0)
        every = torch.cat(list(self._distances.values())).double()
        worst, _ = max(self._distances, key=lambda key: float(self._distances[key].max()))
        episodes: dict[str, list[Tensor]] = {}
        for (position, _), distances in self._distances.items():
            episodes.setdefault(self._turns[position][0], []).append(distances)
        means = {name: float(torch.cat(parts).double().mean()) for name, parts in episodes.items()}
        name = max(means, key=means.__getitem__)
        place = "episode {}, turn {}".format(*self._turns[worst][:2])
        return Disagreement(float(every.mean()), float(every.max()), every.numel(), means[name], name, place)

    def check(self) -> None:
        """Raise `BatchRefused` when what was compared so far differs too much."""
        why = why_disagreeing(self.disagreement(), self._config, half_precision=self._half_precision)
        if why is not None:
            raise BatchRefused(why)

    def check_token(self, distance: float) -> None:
        """The same, if the distance of this single token is too large."""
        if not distance <= self._config.bounds(half_precision=self._half_precision)[1]:
            self.check()


def why_disagreeing(found: Disagreement, config: ProofConfig, *, half_precision: bool = True) -> str | None:
    """Why the batch cannot be trusted; None when it can, or when there was nothing to compare."""
    mean, largest = config.bounds(half_precision=half_precision)
    allowed = OF_ONE_EPISODE * mean
    # Written so that a distance that is no number is too large.
    if found.tokens == 0 or (found.mean <= mean and found.maximum <= largest and found.episode_mean <= allowed):
        return None
    return (
        f"sampler and learner disagree about {found.tokens} tokens of the same weights: log-probabilities differ by "
        f"{found.mean:.3g} on average (allowed {mean:g}), by {found.episode_mean:.3g} in episode "
        f"{found.episode} (allowed {allowed:g}), at most by {found.maximum:.3g} in {found.worst} (allowed "
        f"{largest:g}). Likely causes: the updated weights (a LoRA adapter) did not reach the sampler; "
        "the two see different pictures or sizes; another temperature, chat template or precision; an edited recording."
    )


@dataclass(frozen=True, eq=False)
class Row:
    """One turn as the policy sees it before it learns; every tensor is `[tokens]`."""

    proximal: Tensor
    """The recorded log-probability of fresh tokens, the policy's own of stale ones."""
    importance: Tensor
    """Weight of each token; exactly 1 for fresh ones."""
    value: float | None = None
    reference: Tensor | None = None
    capped: int = 0
    """How many of its tokens weigh less than they should, because of the limit."""


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """The turns of an update, and what is known of each before the policy learns."""

    version: int
    """Of the policy that is to learn."""
    turns: Sequence[TurnInput]
    """Trajectory after trajectory; `Sample.turn` counts them."""
    rows: list[Row]
    """One for each turn."""
    agreement: Agreement
    entropy: float
    """Mean over the tokens scored; NaN when there were none."""
    behaviour_kl: float
    """Distance of the policy from those that sampled, over the tokens scored; NaN when there were none."""
    staleness: float
    staleness_max: float
    in_passing: bool = False
    """Whether comparing fresh tokens and weighing stale ones is left to the first pass that learns."""

    def add_first_pass(self, samples: Sequence[Sample], log_probs: Tensor, algorithm: TrajectoryAlgorithm) -> None:
        """The log-probabilities of a microbatch in that pass, which are those of the policy before it has learned.

        A single token that is far off raises `BatchRefused` here, before it can make the loss overflow.
        """
        largest = 0.0
        for row, sample in enumerate(samples):
            turn = self.turns[sample.turn].turn
            own = log_probs[row, : len(turn.token_ids)].detach().float().cpu()
            largest = max(largest, self.agreement.add(sample.turn, own, self.version))
            self.rows[sample.turn] = _weigh_stale(self.rows[sample.turn], turn, own, algorithm, self.version)
        self.agreement.check_token(largest)


def score_batch(
    policy: TrajectoryPolicy,
    algorithm: TrajectoryAlgorithm,
    trajectories: Sequence[Trajectory],
    *,
    version: int,
    microbatch: int,
    proof: ProofConfig | None = None,
    past_weights: Mapping[int, Mapping[str, Tensor]] | None = None,
    in_passing: bool = False,
) -> ScoredBatch:
    """Score the turns of an update; each is scored once, and only if something is asked of it.

    Log-probabilities are compared on `proof.checked_turns` of the turns that have tokens of the present version, and of
    each version in `past_weights`. `in_passing`: the pass that learns will compare fresh tokens and weigh stale ones,
    and only a sample of the turns is scored here.
    """
    proof = proof or ProofConfig()
    agreement = Agreement(trajectories, proof, half_precision=bool(getattr(policy, "half_precision", True)))
    turns = [each for one in trajectories for each in turn_inputs(one)]
    scorer = _Scorer(policy, algorithm, turns, version, microbatch, proof.checked_turns)
    with torch.no_grad():
        scores = scorer.score(scorer.positions_to_score(in_passing=in_passing))
        scorer.compare_stale(agreement, past_weights or {})
        references = scorer.score_reference() if algorithm.needs_reference else {}
    rows, behind, entropies = [], [], []
    for position, each in enumerate(turns):
        behaviour, score = _recorded(each.turn), scores.get(position)
        row = Row(behaviour, torch.ones_like(behaviour), None, references.get(position))
        if score is not None:
            agreement.add(position, score.log_probs, version)
            behind.append(k3(behaviour, score.log_probs))
            if score.entropy is not None:
                entropies.append(score.entropy)
            row = _weigh_stale(replace(row, value=score.value), each.turn, score.log_probs, algorithm, version)
        rows.append(row)
    lag = torch.cat([version - torch.tensor(each.turn.versions) for each in turns]).double()
    means = _mean(entropies), _mean(behind), float(lag.mean()), float(lag.max())
    return ScoredBatch(version, turns, rows, agreement, *means, in_passing)


class _Score(NamedTuple):
    log_probs: Tensor
    entropy: Tensor | None
    value: float | None


class _Scorer(NamedTuple):
    policy: TrajectoryPolicy
    algorithm: TrajectoryAlgorithm
    turns: Sequence[TurnInput]
    version: int
    microbatch: int
    checked_turns: int | None

    def positions_to_score(self, *, in_passing: bool) -> list[int]:
        every = list(range(len(self.turns)))
        if self.algorithm.needs_values:
            return every
        if in_passing:
            return _spread(every, SAMPLED)
        wanted = set(_spread(self._positions_with(self.version), self.checked_turns))
        if not self.algorithm.supervised:
            wanted |= {place for place in every if bool((self.turns[place].turn.versions != self.version).any())}
        return sorted(wanted)

    def score(self, wanted: list[int]) -> dict[int, _Score]:
        scores: dict[int, _Score] = {}
        needs_values = self.algorithm.needs_values
        for some, asked in self._microbatches(wanted):
            now = self.policy.log_probs(asked, with_values=needs_values, with_entropy=True, grad=False)
            if needs_values and now.values is None:
                raise ExperienceError("the policy gave no values. This algorithm needs a value head.")
            for row, position in enumerate(some):
                length = len(self.turns[position].turn.token_ids)
                log_probs = now.log_probs[row, :length].detach().float().cpu()
                value = None if now.values is None else float(now.values[row])
                if not bool(torch.isfinite(log_probs).all()) or not np.isfinite(0.0 if value is None else value):
                    raise NonFiniteError(
                        f"version {self.version} of the policy gives a log-probability or value that is not finite, "
                        "before anything was learned from this batch. Go back to an earlier checkpoint and lower "
                        "trainer.learning_rate."
                    )
                entropy = None if now.entropy is None else now.entropy[row, :length].detach().float().cpu()
                scores[position] = _Score(log_probs, entropy, value)
        return scores

    def compare_stale(self, agreement: Agreement, past_weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Compare stale tokens with the weights that drew them, as far as those are still there."""
        if not isinstance(self.policy, ScoresPastWeights):
            return
        versions = {int(number) for each in self.turns for number in each.turn.versions} - {self.version}
        for past in sorted(versions & past_weights.keys()):
            for some, asked in self._microbatches(_spread(self._positions_with(past), self.checked_turns)):
                log_probs = self.policy.past_log_probs(asked, past_weights[past])
                for row, position in enumerate(some):
                    agreement.add(position, log_probs[row, : len(self.turns[position].turn.token_ids)], past)

    def score_reference(self) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for some, asked in self._microbatches(list(range(len(self.turns)))):
            log_probs = self.policy.reference_log_probs(asked) if isinstance(self.policy, KeepsReference) else None
            if log_probs is None:
                reason = "the policy keeps no weights from before training"
                remedy = "Train with LoRA, keep a frozen copy, or set algorithm.kl_coef=0"
                raise ConfigError("algorithm.kl_coef", "above 0", reason, remedy)
            for row, position in enumerate(some):
                found[position] = log_probs[row, : len(self.turns[position].turn.token_ids)].detach().float().cpu()
        return found

    def _positions_with(self, version: int) -> list[int]:
        """Positions of the turns that have tokens of a version."""
        return [place for place, each in enumerate(self.turns) if bool((each.turn.versions == version).any())]

    def _microbatches(self, positions: list[int]) -> Iterator[tuple[list[int], list[TurnInput]]]:
        order = order_by_prompt([self.turns[position] for position in positions])
        for start in range(0, len(order), self.microbatch):
            some = [positions[place] for place in order[start : start + self.microbatch]]
            yield some, [self.turns[position] for position in some]


def build_token_batch(
    samples: Sequence[Sample], rows: Sequence[Row], *, token_share: float, turn_share: float, device: torch.device
) -> TokenBatch:
    """Samples with the rows of their turns as padded tensors."""
    own = [rows[sample.turn] for sample in samples]
    mask = _pad([torch.ones(len(row.proximal), dtype=torch.bool) for row in own], device)
    references = [row.reference for row in own if row.reference is not None]
    targets = [sample.value_target for sample in samples if sample.value_target is not None]
    weight = torch.tensor([sample.weight for sample in samples], device=device)
    return TokenBatch(
        proximal=_pad([row.proximal for row in own], device),
        importance=_pad([row.importance for row in own], device),
        mask=mask,
        weight=weight[:, None] * mask,
        advantage=torch.tensor([sample.advantage for sample in samples], device=device),
        token_share=token_share,
        turn_share=turn_share,
        reference=_pad(references, device) if len(references) == len(own) else None,
        value_target=torch.tensor(targets, device=device) if len(targets) == len(samples) else None,
    )


def order_by_prompt(turns: Sequence[TurnInput]) -> list[int]:
    """Positions of the turns, short ones first and those with the same prompt together.

    Turns of like length share a microbatch and waste little padding. Members of a group begin on one screen with the
    same words: a policy that runs a shared prompt once saves most of an update when they meet in one pass.
    """
    keys = [(len(each.turn.prompt_ids), prompt_key(each), len(each.turn.token_ids)) for each in turns]
    return sorted(range(len(turns)), key=keys.__getitem__)


def prompt_key(one: TurnInput) -> bytes:
    """Equal for turns that answer the same prompt."""
    return one.turn.prompt_ids.tobytes() + "".join(one.turn.pictures).encode()


def _spread(positions: list[int], count: int | None) -> list[int]:
    """`count` of them, evenly spread; all when None or when there are no more."""
    if count is None or count >= len(positions):
        return positions
    return [positions[place] for place in np.linspace(0, len(positions) - 1, count).round().astype(int)]


def _weigh_stale(row: Row, turn: Turn, own: Tensor, algorithm: TrajectoryAlgorithm, version: int) -> Row:
    """The row with its stale tokens weighed; `own` are the log-probabilities of the policy before it learns."""
    stale = torch.tensor(turn.versions) != version
    if algorithm.supervised or not bool(stale.any()):
        return row
    behaviour = _recorded(turn)
    proximal = torch.where(stale, own, behaviour)
    importance = importance_weights(proximal, behaviour, stale, limit=algorithm.weight_limit)
    capped = int((proximal - behaviour > math.log(algorithm.weight_limit)).sum())
    return replace(row, proximal=proximal, importance=importance, capped=capped)


def _recorded(turn: Turn) -> Tensor:
    """The recorded log-probabilities, in memory of their own."""
    return torch.tensor(turn.log_probs, dtype=torch.float32)


def _pad(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    return pad_sequence(list(rows), batch_first=True).to(device)


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean()) if parts else float("nan")
