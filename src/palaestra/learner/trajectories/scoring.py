"""Scores of the turns of an update by the policy before it learns: one pass without gradients.

`ScoredBatch` holds the values (if the algorithm needs them), the proximal log-probabilities and importance weights of
stale tokens, and the reference log-probabilities. A fresh token keeps its recorded log-probability, so fresh experience
is learned from exactly as by plain PPO.

Recorded log-probabilities are compared with those of the weights that sampled them: fresh tokens with the present
policy, stale tokens with earlier weights that are still kept. If they differ, sampler and learner use different weights
or pictures, or the recording was changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from palaestra.errors import ConfigError, ExperienceError, NonFiniteError
from palaestra.experience.trajectory import Trajectory, Turn
from palaestra.experience.turn_scoring import TurnInput, turn_inputs
from palaestra.learner.trajectories.algorithm import TokenBatch, TrainingSample, TrajectoryAlgorithm
from palaestra.learner.trajectories.built_in import importance_weights, k3
from palaestra.learner.trajectories.parallel import assign_microbatches, run_divided
from palaestra.learner.trajectories.policy import KeepsReference, ScoresPastWeights, TrajectoryPolicy
from palaestra.learner.trajectories.proof import ProofConfig
from palaestra.transport.ranks import ALONE, Ranks

R = TypeVar("R")

SAMPLED_TURNS = 16
"""Turns scored in advance if the training pass checks all of them: enough for the mean entropy."""
EPISODE_FACTOR = 4.0
"""The bound on the mean of an episode, relative to that of a batch: it has fewer tokens to average over."""


class BatchRefused(Exception):
    """The batch failed the checks."""


class Disagreement(NamedTuple):
    """Differences between recorded log-probabilities and those of the recorded weights."""

    mean: float
    maximum: float
    tokens: int
    episode_mean: float = 0.0
    episode: str = ""
    """The episode with the largest mean difference."""
    worst: str = ""
    """Location of the largest difference."""


def describe_disagreement(disagreement: Disagreement, bounds: tuple[float, float]) -> str | None:
    """Why the batch must be refused; None if it is within the bounds or nothing was compared."""
    mean, largest = bounds
    allowed = EPISODE_FACTOR * mean
    # NaN must count as too large.
    if disagreement.tokens == 0 or (
        disagreement.mean <= mean and disagreement.maximum <= largest and disagreement.episode_mean <= allowed
    ):
        return None
    return (
        f"sampler and learner disagree about {disagreement.tokens} tokens of the same weights: log-probabilities "
        f"differ by {disagreement.mean:.3g} on average (allowed {mean:g}), by {disagreement.episode_mean:.3g} in "
        f"episode {disagreement.episode} (allowed {allowed:g}), at most by {disagreement.maximum:.3g} in "
        f"{disagreement.worst} (allowed {largest:g}). Likely causes: the updated weights (a LoRA adapter) did not "
        "reach the sampler; the two see different pictures or sizes; another temperature, chat template or precision; "
        "an edited recording."
    )


@dataclass(eq=False)
class ScoredTurn:
    """One turn, scored before the update; every tensor is `[tokens]`."""

    proximal: Tensor
    """Recorded log-probabilities of fresh tokens; the policy's own for stale tokens."""
    importance: Tensor
    """Importance weights; exactly 1 for fresh tokens."""
    value: float | None = None
    reference: Tensor | None = None
    capped: int = 0
    """Number of tokens whose weight was limited."""


class ScoredBatch:
    """The turns of an update, scored before the policy learns."""

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
        defer_checks: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Score the turns with the policy of `version`, each at most once, divided among the processes `ranks`.

        Log-probabilities are compared on `proof.checked_turns` turns of the present version, and of each version in
        `past_weights`. `defer_checks`: the training pass compares fresh tokens and weighs stale ones
        (`add_first_pass`), and only a sample of the turns is scored here.
        """
        proof = proof or ProofConfig()
        self.version, self.defer_checks = version, defer_checks
        self._policy, self._algorithm, self._microbatch = policy, algorithm, microbatch
        self._checked_turns, self._ranks = proof.checked_turns, ranks
        self._bounds = proof.bounds(half_precision=bool(getattr(policy, "half_precision", True)))
        self.turns = [each for one in trajectories for each in turn_inputs(one)]
        """Indexed by `TrainingSample.turn`."""
        recorded = [_behaviour_log_probs(each.turn) for each in self.turns]
        self.rows = [ScoredTurn(own, torch.ones_like(own)) for own in recorded]
        self._places = [(one.episode_id, number) for one in trajectories for number in range(len(one.turns))]
        self._distances: dict[tuple[int, int], Tensor] = {}
        """Differences of the tokens compared so far, by turn and version."""
        with torch.no_grad():
            scores = self._score(self._positions_to_score())
            self._compare_stale(past_weights or {})
            if algorithm.needs_reference:
                self._score_reference()
        for position, (log_probs, _) in scores.items():
            self._add(position, log_probs)
        self.entropy = _mean([entropy for _, entropy in scores.values() if entropy is not None])
        """Mean over the scored tokens; NaN if there were none."""
        self.behaviour_kl = _mean([k3(recorded[position], log_probs) for position, (log_probs, _) in scores.items()])
        """KL divergence from the sampling policies over the scored tokens; NaN if there were none."""
        lag = [version - torch.tensor(self.turns[place].turn.versions) for place in self._sampled_positions()]
        self.staleness = _mean(lag)
        """Mean over the sampled tokens; NaN if there were none."""
        self.staleness_max = float(torch.cat(lag).max()) if lag else math.nan

    def disagreement(self) -> Disagreement:
        """Statistics of all comparisons so far."""
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
        """Raise `BatchRefused` if the differences so far exceed the bounds."""
        reason = describe_disagreement(self.disagreement(), self._bounds)
        if reason is not None:
            raise BatchRefused(reason)

    def add_first_pass(self, samples: Sequence[TrainingSample], log_probs: Tensor) -> None:
        """Add the log-probabilities of a microbatch of the first training pass, before any step.

        A large difference of a single token raises `BatchRefused` here, before the loss can overflow.
        """
        positions = [sample.turn for sample in samples]
        own = zip(positions, self._without_padding(log_probs, positions), strict=True)
        worst = max(0.0, *(self._add(*each) for each in own))
        # With several processes all of them check at the end of the pass.
        if worst > self._bounds[1] and self._ranks.size == 1:
            self.check()

    def merge_first_pass(self, samples: Sequence[TrainingSample]) -> None:
        """Add what the other processes found in their parts of the first training pass."""
        if self._ranks.size == 1:
            return
        own = {key[0] for key in self._distances}
        rows = {sample.turn: self.rows[sample.turn] for sample in samples if sample.turn in own}
        for other_rows, distances in self._ranks.gather((rows, self._distances)):
            self._distances |= distances
            for position, row in other_rows.items():
                self.rows[position] = row

    def _add(self, position: int, own: Tensor) -> float:
        """Compare a turn's fresh tokens with the policy's `own` log-probabilities, and weigh its stale tokens.

        Returns the largest difference of a fresh token.
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
        """Compare a turn's tokens of a version with `log_probs` under its weights; returns the largest difference."""
        turn = self.turns[position].turn
        of_version = torch.from_numpy(turn.versions == version)
        if not bool(of_version.any()):
            return 0.0
        distances = (log_probs - _behaviour_log_probs(turn))[of_version].abs()
        self._distances[position, version] = distances
        return float(distances.max())

    def _sampled_positions(self) -> list[int]:
        """Indices of the turns that are not demonstrations, which have nothing to compare."""
        return [place for place, each in enumerate(self.turns) if not each.turn.is_demonstration]

    def _positions_to_score(self) -> list[int]:
        every = self._sampled_positions()
        if self._algorithm.needs_values:
            return every
        if self.defer_checks:
            return _select_evenly(every, SAMPLED_TURNS)
        wanted = set(_select_evenly(self._positions_with(self.version), self._checked_turns))
        if not self._algorithm.supervised:
            wanted |= {place for place in every if bool((self.turns[place].turn.versions != self.version).any())}
        return sorted(wanted)

    def _score(self, wanted: list[int]) -> dict[int, tuple[Tensor, Tensor | None]]:
        """Log-probabilities and entropy of the wanted turns, in order; sets the values of the rows."""
        scores: dict[int, tuple[Tensor, Tensor | None]] = {}
        needs_values = self._algorithm.needs_values

        def forward(asked: list[TurnInput], some: list[int]) -> list[tuple[Tensor, Tensor | None, float | None]]:
            now = self._policy.log_probs(asked, with_values=needs_values, with_entropy=True, grad=False)
            if needs_values and now.values is None:
                raise ExperienceError("the policy returned no values. This algorithm needs a value head.")
            own = self._without_padding(now.log_probs, some)
            entropies = [None] * len(some) if now.entropy is None else self._without_padding(now.entropy, some)
            values = [None] * len(some) if now.values is None else now.values.tolist()
            return list(zip(own, entropies, values, strict=True))

        for position, (log_probs, entropy, value) in self._run(wanted, forward).items():
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
        """Compare stale tokens with the weights that sampled them, if those are still kept."""
        policy = self._policy
        if not isinstance(policy, ScoresPastWeights):
            return
        versions = {int(number) for each in self.turns for number in each.turn.versions} - {self.version}
        for past in sorted(versions & past_weights.keys()):

            def forward(asked: list[TurnInput], some: list[int], past: int = past) -> list[Tensor]:
                return self._without_padding(policy.past_log_probs(asked, past_weights[past]), some)

            wanted = _select_evenly(self._positions_with(past), self._checked_turns)
            for position, own in self._run(wanted, forward).items():
                self._compare(position, own, past)

    def _score_reference(self) -> None:
        def forward(asked: list[TurnInput], some: list[int]) -> list[Tensor]:
            log_probs = self._policy.reference_log_probs(asked) if isinstance(self._policy, KeepsReference) else None
            if log_probs is None:
                reason = "the policy keeps no weights from before training"
                remedy = "Train with LoRA, keep a frozen copy, or set algorithm.kl_coef=0"
                raise ConfigError("algorithm.kl_coef", "above 0", reason, remedy)
            return self._without_padding(log_probs, some)

        for position, own in self._run(list(range(len(self.turns))), forward).items():
            self.rows[position].reference = own

    def _positions_with(self, version: int) -> list[int]:
        """Indices of the turns that have tokens of a version."""
        return [place for place, each in enumerate(self.turns) if bool((each.turn.versions == version).any())]

    def _run(self, positions: list[int], forward: Callable[[list[TurnInput], list[int]], list[R]]) -> dict[int, R]:
        """The results of `forward` for microbatches of the turns, divided among the processes, by position."""
        turns = [self.turns[position] for position in positions]

        def run_own() -> dict[int, R]:
            results: dict[int, R] = {}
            for part in assign_microbatches(self._ranks, turns, self._microbatch, split_microbatches):
                some = [positions[place] for place in part.places]
                scored = forward([turns[place] for place in part.places], some)
                if part.counts:
                    results |= zip(some, scored, strict=True)
            return results

        return run_divided(self._ranks, run_own)

    def _without_padding(self, padded: Tensor, positions: Sequence[int]) -> list[Tensor]:
        """The rows of a microbatch without padding, on the CPU, without gradients."""
        lengths = [len(self.turns[position].turn.token_ids) for position in positions]
        return [padded[row, :length].detach().float().cpu() for row, length in enumerate(lengths)]


def build_token_batch(
    samples: Sequence[TrainingSample],
    rows: Sequence[ScoredTurn],
    *,
    token_share: float,
    turn_share: float,
    device: torch.device,
) -> TokenBatch:
    """Samples and the scores of their turns as padded tensors."""
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
    """Indices of the turns in parts of `size`, sorted by length, turns with the same prompt together.

    Turns of similar length, prompt and reply together, need little padding. Members of a group begin with the same
    prompt: a policy that runs a shared prompt once saves most of an update if they are in one microbatch. They are
    sorted by the longest of them.
    """
    prompts = [prompt_key(each) for each in turns]
    longest: dict[bytes, int] = {}
    for key, each in zip(prompts, turns, strict=True):
        length = len(each.turn.prompt_ids) + len(each.turn.token_ids)
        longest[key] = max(longest.get(key, 0), length)
    keys = [(longest[key], key, len(each.turn.token_ids)) for key, each in zip(prompts, turns, strict=True)]
    order = sorted(range(len(turns)), key=keys.__getitem__)
    return [order[start : start + size] for start in range(0, len(order), size)]


def prompt_key(one: TurnInput) -> bytes:
    """Equal for turns with the same prompt."""
    return one.turn.prompt_ids.tobytes() + "".join(one.turn.pictures).encode()


def _select_evenly(positions: list[int], count: int | None) -> list[int]:
    """`count` of the positions, evenly spaced; all if None."""
    if count is None or count >= len(positions):
        return positions
    return [positions[place] for place in np.linspace(0, len(positions) - 1, count).round().astype(int)]


def _behaviour_log_probs(turn: Turn) -> Tensor:
    """A copy of the recorded log-probabilities."""
    return torch.tensor(turn.log_probs, dtype=torch.float32)


def _pad(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    return pad_sequence(list(rows), batch_first=True).to(device)


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean()) if parts else float("nan")
