"""The turns of an update as the policy sees them before it learns: one pass without gradients.

`ScoredBatch` has the value of every turn if those are needed, the proximal log-probabilities and weights of stale
tokens, and the reference's log-probabilities. A fresh token keeps its recorded log-probability untouched, so experience
without staleness is learned from exactly as by plain PPO.

On the way recorded log-probabilities are compared with those of the weights that drew them: of fresh tokens with the
policy as it is, of stale ones with earlier weights that are still kept. When they differ, sampler and learner do not
have the same weights or pictures, or the recording was changed; learning from it would look healthy and go wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from palaestra.errors import ConfigError, ExperienceError, NonFiniteError
from palaestra.experience.trajectory import Trajectory, Turn, TurnInput, turn_inputs
from palaestra.learner.trajectories.algorithm import TokenBatch, TrainingSample, TrajectoryAlgorithm
from palaestra.learner.trajectories.built_in import importance_weights, k3
from palaestra.learner.trajectories.policy import KeepsReference, ScoresPastWeights, TrajectoryPolicy
from palaestra.learner.trajectories.proof import ProofConfig

__all__ = ["BatchRefused", "Row", "ScoredBatch", "build_token_batch", "why_disagreeing"]

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
    episode: str = ""
    """In which they differ most, and how far."""
    worst: str = ""
    """Where the single largest distance is."""


def why_disagreeing(found: Disagreement, bounds: tuple[float, float]) -> str | None:
    """Why the batch cannot be trusted; None when it can, or when there was nothing to compare."""
    mean, largest = bounds
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


@dataclass(eq=False)
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


class ScoredBatch:
    """The turns of an update, and what is known of each before the policy learns."""

    def __init__(
        self,
        policy: TrajectoryPolicy,
        algorithm: TrajectoryAlgorithm,
        trajectories: Sequence[Trajectory],
        *,
        version: int,
        microbatch: int,
        proof: ProofConfig | None = None,
        past_weights: Mapping[int, Mapping[str, Tensor]] | None = None,
        in_passing: bool = False,
    ) -> None:
        """Score the turns with the policy of `version`; each once, and only if something is asked of it.

        Log-probabilities are compared on `proof.checked_turns` of the turns that have tokens of the present version,
        and of each version in `past_weights`. `in_passing`: the pass that learns will compare fresh tokens and weigh
        stale ones, and only a sample of the turns is scored here.
        """
        proof = proof or ProofConfig()
        self.version, self.in_passing = version, in_passing
        self._policy, self._algorithm, self._microbatch = policy, algorithm, microbatch
        self._checked_turns = proof.checked_turns
        self._bounds = proof.bounds(half_precision=bool(getattr(policy, "half_precision", True)))
        self.turns = [each for one in trajectories for each in turn_inputs(one)]
        """Trajectory after trajectory; `TrainingSample.turn` counts them."""
        recorded = [_behaviour_log_probs(each.turn) for each in self.turns]
        self.rows = [Row(own, torch.ones_like(own)) for own in recorded]
        """One for each turn."""
        self._places = [(one.episode_id, number) for one in trajectories for number in range(len(one.turns))]
        self._distances: dict[tuple[int, int], Tensor] = {}
        """Of the tokens compared so far, by the position of the turn and version."""
        with torch.no_grad():
            scores = self._score(self._positions_to_score())
            self._compare_stale(past_weights or {})
            if algorithm.needs_reference:
                self._score_reference()
        for position, (log_probs, _) in scores.items():
            self._add(position, log_probs)
        self.entropy = _mean([entropy for _, entropy in scores.values() if entropy is not None])
        """Mean over the tokens scored; NaN when there were none."""
        self.behaviour_kl = _mean([k3(recorded[position], log_probs) for position, (log_probs, _) in scores.items()])
        """Distance of the policy from those that sampled, over the tokens scored; NaN when there were none."""
        lag = torch.cat([version - torch.tensor(each.turn.versions) for each in self.turns]).double()
        self.staleness, self.staleness_max = float(lag.mean()), float(lag.max())

    def disagreement(self) -> Disagreement:
        """Of all that was compared."""
        if not self._distances:
            return Disagreement(0.0, 0.0, 0)
        every = torch.cat(list(self._distances.values())).double()
        worst, _ = max(self._distances, key=lambda key: float(self._distances[key].max()))
        episodes: dict[str, list[Tensor]] = {}
        for (position, _), distances in self._distances.items():
            episodes.setdefault(self._places[position][0], []).append(distances)
        means = {name: _mean(parts) for name, parts in episodes.items()}
        name = max(means, key=means.__getitem__)
        place = "episode {}, turn {}".format(*self._places[worst])
        return Disagreement(float(every.mean()), float(every.max()), every.numel(), means[name], name, place)

    def check(self) -> None:
        """Raise `BatchRefused` when what was compared so far differs too much."""
        why = why_disagreeing(self.disagreement(), self._bounds)
        if why is not None:
            raise BatchRefused(why)

    def add_first_pass(self, samples: Sequence[TrainingSample], log_probs: Tensor) -> None:
        """The log-probabilities of a microbatch in the first pass that learns: of the policy before it has learned.

        A single token that is far off raises `BatchRefused` here, before it can make the loss overflow.
        """
        positions = [sample.turn for sample in samples]
        own = zip(positions, self._without_padding(log_probs, positions), strict=True)
        if max(0.0, *(self._add(*each) for each in own)) > self._bounds[1]:
            self.check()

    def _add(self, position: int, own: Tensor) -> float:
        """Compare a turn's fresh tokens with the policy's `own` log-probabilities, and weigh its stale ones by them.

        Returns the largest distance of a fresh one.
        """
        turn, row, limit = self.turns[position].turn, self.rows[position], self._algorithm.weight_limit
        stale = torch.tensor(turn.versions) != self.version
        if not self._algorithm.supervised and bool(stale.any()):
            behaviour = _behaviour_log_probs(turn)
            row.proximal = torch.where(stale, own, behaviour)
            row.importance = importance_weights(row.proximal, behaviour, stale, limit=limit)
            row.capped = int((row.proximal - behaviour > math.log(limit)).sum())
        return self._compare(position, own, self.version)

    def _compare(self, position: int, log_probs: Tensor, version: int) -> float:
        """Hold a turn's tokens of a version against their `log_probs` under its weights; the largest distance, or 0."""
        turn = self.turns[position].turn
        of_version = torch.from_numpy(turn.versions == version)
        if not bool(of_version.any()):
            return 0.0
        distances = (log_probs - _behaviour_log_probs(turn))[of_version].abs()
        self._distances[position, version] = distances
        return float(distances.max())

    def _positions_to_score(self) -> list[int]:
        every = list(range(len(self.turns)))
        if self._algorithm.needs_values:
            return every
        if self.in_passing:
            return _spread(every, SAMPLED)
        wanted = set(_spread(self._positions_with(self.version), self._checked_turns))
        if not self._algorithm.supervised:
            wanted |= {place for place in every if bool((self.turns[place].turn.versions != self.version).any())}
        return sorted(wanted)

    def _score(self, wanted: list[int]) -> dict[int, tuple[Tensor, Tensor | None]]:
        """Log-probabilities and entropy of each turn, in the order of the turns; values go into the rows."""
        scores: dict[int, tuple[Tensor, Tensor | None]] = {}
        needs_values = self._algorithm.needs_values
        for some, asked in self._microbatches(wanted):
            now = self._policy.log_probs(asked, with_values=needs_values, with_entropy=True, grad=False)
            if needs_values and now.values is None:
                raise ExperienceError("the policy gave no values. This algorithm needs a value head.")
            own = self._without_padding(now.log_probs, some)
            entropies = [None] * len(some) if now.entropy is None else self._without_padding(now.entropy, some)
            values = [None] * len(some) if now.values is None else now.values.tolist()
            for position, log_probs, entropy, value in zip(some, own, entropies, values, strict=True):
                if not bool(torch.isfinite(log_probs).all()) or not math.isfinite(value or 0.0):
                    raise NonFiniteError(
                        f"version {self.version} of the policy gives a log-probability or value that is not finite, "
                        "before anything was learned from this batch. Go back to an earlier checkpoint and lower "
                        "trainer.learning_rate."
                    )
                self.rows[position].value = value
                scores[position] = log_probs, entropy
        return {position: scores[position] for position in sorted(scores)}

    def _compare_stale(self, past_weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Compare stale tokens with the weights that drew them, as far as those are still there."""
        if not isinstance(self._policy, ScoresPastWeights):
            return
        versions = {int(number) for each in self.turns for number in each.turn.versions} - {self.version}
        for past in sorted(versions & past_weights.keys()):
            for some, asked in self._microbatches(_spread(self._positions_with(past), self._checked_turns)):
                log_probs = self._without_padding(self._policy.past_log_probs(asked, past_weights[past]), some)
                for position, own in zip(some, log_probs, strict=True):
                    self._compare(position, own, past)

    def _score_reference(self) -> None:
        for some, asked in self._microbatches(list(range(len(self.turns)))):
            log_probs = self._policy.reference_log_probs(asked) if isinstance(self._policy, KeepsReference) else None
            if log_probs is None:
                reason = "the policy keeps no weights from before training"
                remedy = "Train with LoRA, keep a frozen copy, or set algorithm.kl_coef=0"
                raise ConfigError("algorithm.kl_coef", "above 0", reason, remedy)
            for position, own in zip(some, self._without_padding(log_probs, some), strict=True):
                self.rows[position].reference = own

    def _positions_with(self, version: int) -> list[int]:
        """Positions of the turns that have tokens of a version."""
        return [place for place, each in enumerate(self.turns) if bool((each.turn.versions == version).any())]

    def _microbatches(self, positions: list[int]) -> Iterator[tuple[list[int], list[TurnInput]]]:
        for part in split_microbatches([self.turns[position] for position in positions], self._microbatch):
            some = [positions[place] for place in part]
            yield some, [self.turns[position] for position in some]

    def _without_padding(self, padded: Tensor, positions: Sequence[int]) -> list[Tensor]:
        """The rows of a microbatch, each as long as its turn, on the CPU and without gradients."""
        lengths = [len(self.turns[position].turn.token_ids) for position in positions]
        return [padded[row, :length].detach().float().cpu() for row, length in enumerate(lengths)]


def build_token_batch(
    samples: Sequence[TrainingSample],
    rows: Sequence[Row],
    *,
    token_share: float,
    turn_share: float,
    device: torch.device,
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


def split_microbatches(turns: Sequence[TurnInput], size: int) -> list[list[int]]:
    """Positions of the turns, in parts of `size` that waste little padding and share prompts."""
    order = order_by_prompt(turns)
    return [order[start : start + size] for start in range(0, len(order), size)]


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


def _behaviour_log_probs(turn: Turn) -> Tensor:
    """The recorded log-probabilities, in memory of their own."""
    return torch.tensor(turn.log_probs, dtype=torch.float32)


def _pad(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    return pad_sequence(list(rows), batch_first=True).to(device)


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean()) if parts else float("nan")
