"""`TrajectoryLearner`: improves a token policy from trajectories.

An update checks the episodes, scores them without gradients, asks the algorithm for samples, and trains on them. A
refused batch changes nothing. The learner owns the version, the optimiser, the shuffles and the success replay, and
keeps the weights of earlier versions.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palaestra.errors import CheckpointError, ExperienceError
from palaestra.experience.demonstrations import DemonstrationSampler
from palaestra.experience.groups import split_groups
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_credit import EpisodeCredit
from palaestra.experience.turn_scoring import turn_inputs
from palaestra.learner.returns import explained_variance
from palaestra.learner.trajectories.algorithm import TrainingSample, TrajectoryAlgorithm, token_counts
from palaestra.learner.trajectories.policy import (
    Fingerprinted,
    ReadsReplies,
    ScoresPastWeights,
    TrajectoryPolicy,
    trainable_weights,
)
from palaestra.learner.trajectories.proof import Admission, Expected, ProofConfig, check_demonstrations
from palaestra.learner.trajectories.replay import ReplayConfig, SuccessReplay
from palaestra.learner.trajectories.reward import RewardConfig
from palaestra.learner.trajectories.scoring import BatchRefused, ScoredBatch
from palaestra.learner.trajectories.update import (
    Imitation,
    Poll,
    TokenUpdater,
    UpdateConfig,
    choose_learning_rate,
    learning_rate_factor,
)
from palaestra.policy.weight_sync import whole_tensor
from palaestra.transport.ranks import ALONE, Ranks
from palaestra.transport.source import SavedState

_log = logging.getLogger(__name__)

MAX_FINGERPRINTS = 1024
"""Number of versions whose fingerprints are kept."""
KEPT_BYTES = 2 * 2**30
"""Memory limit for the weights of earlier versions."""


@dataclass(frozen=True)
class DemonstrationMix:
    """Demonstrations that are imitated beside the episodes of a policy."""

    sampler: DemonstrationSampler
    count: int
    """Number per update."""
    weight: float
    """Weight of their mean cross entropy in the loss of a policy gradient."""


class TrajectoryLearner:
    """Trains one policy with one algorithm on trajectories."""

    def __init__(
        self,
        policy: TrajectoryPolicy,
        algorithm: TrajectoryAlgorithm,
        config: UpdateConfig | None = None,
        *,
        lora: bool | None = None,
        proof: ProofConfig | None = None,
        replay: ReplayConfig | None = None,
        reward: RewardConfig | None = None,
        demonstrations: DemonstrationMix | None = None,
        temperature: float | None = None,
        kept_versions: int = 1,
        version: int = 0,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        """`lora`: whether an adapter is trained; determines the learning rate if the config has none.

        `temperature`: sampling temperature of the actors; episodes with another one are refused. `kept_versions`:
        number of earlier versions whose weights are kept, to check their tokens. `version`: that of the policy's
        present weights. `ranks`: the processes that learn together. The first one has the batches and selects the
        episodes; all of them compute a part of each step.
        """
        self.policy, self.algorithm = policy, algorithm
        self.config, self.proof = config or UpdateConfig(), proof or ProofConfig()
        self.replay, self.reward, self.temperature = SuccessReplay(replay), reward or RewardConfig(), temperature
        self.demonstrations = demonstrations
        self.n_updates = 0
        self.last_refusal = ""
        """Why the last batch was refused; empty if it was not."""
        self.last_credits: list[EpisodeCredit] = []
        """Advantage and value of every turn of the last update; empty if nothing was learned."""
        self.rate = choose_learning_rate(lora=lora, supervised=algorithm.supervised, given=self.config.learning_rate)
        self._admission = Admission(algorithm, self.replay, self.reward)
        self._ranks = ranks
        self._updater = TokenUpdater(policy, algorithm, self.config, rate=self.rate.rate, ranks=ranks)
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, 3]))
        self._refused_in_a_row = 0
        self.version = version
        """Number of updates that changed the weights."""
        self._fingerprints: dict[int, str] | None = {} if isinstance(policy, Fingerprinted) else None
        """By version."""
        self._kept_versions = self._limit_kept_versions(kept_versions)
        self._kept: dict[int, dict[str, Tensor]] = {}
        """Weights of the latest versions."""
        self._remember_weights()

    def reset_version(self, version: int) -> None:
        """Set the version after the policy's weights were replaced."""
        self.version = version
        self._kept.clear()
        self._remember_weights()

    def weights(self) -> Mapping[str, Tensor]:
        """The trained tensors by name, not copied; whole ones if they are sharded, so all processes call this."""
        return {name: whole_tensor(weight) for name, weight in trainable_weights(self.policy).items()}

    def admit(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """The episodes of a complete group to learn from; empty if another group should be sampled instead."""
        return self._admission.admit(group, self._build_expected())

    def update(self, batch: Sequence[Trajectory], *, poll: Poll = None) -> dict[str, float]:
        """Improve the policy. Trajectories that were not admitted before are admitted first, by groups.

        If the batch is refused or has no learning signal, the metric `trajectories_learned` is 0 and weights and
        version do not change. If `poll` raises, the previous state is restored.
        """
        shuffles, dropout = self._rng.bit_generator.state, torch.get_rng_state()
        mix = self.demonstrations
        position = None if mix is None else mix.sampler.state()
        try:
            return self._update(batch, poll)
        except BaseException:
            self._rng.bit_generator.state = shuffles
            if mix is not None and position is not None:
                mix.sampler.load_state(position)
            torch.set_rng_state(dropout)
            raise

    def state(self) -> SavedState:
        """Everything that determines the next update, except the policy's weights."""
        facts = {
            "n_updates": self.n_updates,
            "version": self.version,
            "refused_in_a_row": self._refused_in_a_row,
            "shuffle": self._rng.bit_generator.state,
            "admitted": dict(self._admission.admitted),
            "fingerprints": {str(version): known for version, known in (self._fingerprints or {}).items()},
            "parameters": [list(parameter.shape) for parameter in self._updater.parameters],
        }
        if self.demonstrations is not None:
            facts["demonstrations"] = self.demonstrations.sampler.state()
        # Dropout uses the random generator of torch.
        tensors = {**self._updater.tensors(), **self.replay.tensors(), "torch_rng": torch.get_rng_state()}
        return SavedState(tensors, facts)

    def load_state(self, state: SavedState) -> None:
        """Continue from `state`; the policy must have the weights it had then."""
        tensors, facts = state
        mine = [list(parameter.shape) for parameter in self._updater.parameters]
        if facts["parameters"] != mine:
            reason = f"trained tensors of other shapes than this policy's {len(mine)}"
            remedy = "Use the configuration it was trained with"
            raise CheckpointError("checkpoint.parameters", len(facts["parameters"]), reason, remedy)
        self._updater.restore(tensors)
        self.replay.restore(tensors)
        self._admission.finish_update(())
        self._admission.admitted = dict(facts["admitted"])
        self._rng.bit_generator.state = facts["shuffle"]
        if self.demonstrations is not None and "demonstrations" in facts:
            self.demonstrations.sampler.load_state(facts["demonstrations"])
        self.n_updates, self._refused_in_a_row = int(facts["n_updates"]), int(facts["refused_in_a_row"])
        if self._fingerprints is not None:
            self._fingerprints = {int(version): str(known) for version, known in facts.get("fingerprints", {}).items()}
        self.reset_version(int(facts["version"]))
        torch.set_rng_state(tensors["torch_rng"])

    def _update(self, batch: Sequence[Trajectory], poll: Poll) -> dict[str, float]:
        began, self.last_credits = time.perf_counter(), []
        chosen, imitated = self._share_choice(batch)
        scored: ScoredBatch | None = None
        learned: dict[str, float] | None = None
        remedy = "see docs/algorithms.md"
        if chosen or imitated:
            # With a single step, the training pass computes the log-probabilities before learning.
            one_step = self.config.epochs == 1 and self.config.minibatches == 1
            scored = ScoredBatch(
                self.policy,
                self.algorithm,
                chosen,
                version=self.version,
                microbatch=self.config.microbatch_turns,
                proof=self.proof,
                past_weights=self._kept,
                defer_checks=one_step and bool(getattr(self.policy, "exact_gradients", False)),
                ranks=self._ranks,
            )
            try:
                learned = self._learn(chosen, imitated, scored, poll)
            except BatchRefused as refusal:
                self.last_refusal = str(refusal)
                remedy = "raise proof.mean_disagreement or proof.max_disagreement"
        if self.last_refusal:
            self._refused_in_a_row += 1
            _log.warning("batch refused: %s", self.last_refusal)
        elif chosen:
            # Demonstrations beside refused episodes are learned from, and do not make the episodes acceptable.
            self._refused_in_a_row = 0
        metrics = self._report(chosen, imitated, time.perf_counter() - began, scored, learned)
        if self.last_refusal and self._refused_in_a_row >= self.proof.refusals_in_a_row:
            raise ExperienceError(
                f"{self._refused_in_a_row} batches in a row were refused at version {self.version}; the last: "
                f"{self.last_refusal} Nothing was learned from their episodes. If this is intended, {remedy}."
            )
        return metrics

    def _learn(
        self, chosen: Sequence[Trajectory], imitated: Sequence[Trajectory], scored: ScoredBatch, poll: Poll
    ) -> dict[str, float] | None:
        """Metrics of the update; None if there is nothing to learn from. `BatchRefused` changes nothing."""
        values = None
        if self.algorithm.needs_values and chosen:
            borders = np.cumsum([len(one) for one in chosen])[:-1]
            values = np.split(np.array([row.value for row in scored.rows], np.float64), borders)
        rewards = self._admission.rewards(chosen)
        samples = self.algorithm.samples(chosen, rewards, values=values) if chosen else []
        imitation = None
        if imitated and self.demonstrations is not None:
            turns = [each for one in imitated for each in turn_inputs(one)]
            imitation = Imitation(turns, self.demonstrations.weight)
        share = learning_rate_factor(self.n_updates, warmup=self.config.warmup_updates, decay=self.config.decay_updates)
        self._updater.set_rate_factor(share)
        scored.check()
        if not samples and imitation is None:
            return None
        metrics = self._updater.run(samples, scored, self._rng, imitation=imitation, poll=poll)
        self.n_updates += 1
        self.version += 1
        self._remember_weights()
        self.last_credits = _credit_turns(chosen, samples, scored, self.version)
        metrics["learning_rate"] = self.rate.rate * share
        return metrics | (self._sample_metrics(samples, scored) if samples else {})

    def _share_choice(self, batch: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
        """The trajectories that the first process chooses from its batch, and demonstrations to imitate beside them.

        Sets `last_refusal` if there are none.
        """
        chosen = self._choose_trajectories(batch) if self._ranks.is_first else []
        refusal = "" if chosen else self._admission.why_all_refused()
        drawn = self._draw_demonstrations() if self._ranks.is_first else []
        shuffles = self._rng.bit_generator.state
        shared = self._ranks.broadcast((chosen, drawn, refusal, shuffles))
        chosen, drawn, self.last_refusal, self._rng.bit_generator.state = shared
        # An algorithm that imitates treats demonstrations as accepted episodes.
        return (chosen + drawn, []) if self.algorithm.supervised else (chosen, drawn)

    def _draw_demonstrations(self) -> list[Trajectory]:
        if self.demonstrations is None:
            return []
        drawn = self.demonstrations.sampler.draw(self.demonstrations.count)
        check_demonstrations(drawn, self._build_expected())
        return drawn

    def _choose_trajectories(self, batch: Sequence[Trajectory]) -> list[Trajectory]:
        if self.algorithm.from_demonstrations:
            return self._admission.admit_demonstrations(batch, self._build_expected())
        admitted = [one for one in batch if self._admission.is_admitted(one)]
        others = split_groups([one for one in batch if not self._admission.is_admitted(one)])
        chosen = admitted + [one for group in others for one in self.admit(group)]
        if self.algorithm.supervised:
            chosen += self.replay.draw(chosen, version=self.version, rng=self._rng)
        return chosen

    def _build_expected(self) -> Expected:
        return Expected(
            version=self.version,
            fingerprints=self._fingerprints,
            foreign_weights=self.proof.foreign_weights,
            temperature=self.temperature,
            vocabulary=getattr(self.policy, "vocabulary", None),
            read_replies=self.policy.read_replies if isinstance(self.policy, ReadsReplies) else None,
            reward=self.reward,
        )

    def _remember_weights(self) -> None:
        """Store the fingerprint and a copy of the present weights, for later checks."""
        if self._fingerprints is not None and isinstance(self.policy, Fingerprinted):
            self._fingerprints[self.version] = self.policy.fingerprint
            while len(self._fingerprints) > MAX_FINGERPRINTS:
                del self._fingerprints[min(self._fingerprints)]
        if self._kept_versions > 0:
            self._kept[self.version] = {name: weight.detach().cpu().clone() for name, weight in self.weights().items()}
            for version in sorted(self._kept)[: -1 - self._kept_versions]:
                del self._kept[version]

    def _limit_kept_versions(self, wanted: int) -> int:
        """`wanted`, limited by memory; 0 if the policy cannot score with earlier weights."""
        if not isinstance(self.policy, ScoresPastWeights):
            return 0
        size = sum(weight.numel() * weight.element_size() for weight in self.weights().values())
        kept = min(wanted, max(0, KEPT_BYTES // max(1, size) - 1))
        if kept < wanted:
            text = (
                "the weights of %d earlier versions are kept instead of %d, which would take more than %d MB: tokens "
                "of older ones are not compared with the weights that sampled them"
            )
            _log.warning(text, kept, wanted, KEPT_BYTES // 2**20)
        return kept

    def _sample_metrics(self, samples: Sequence[TrainingSample], scored: ScoredBatch) -> dict[str, float]:
        rows = [scored.rows[sample.turn] for sample in samples]
        advantage = np.array([sample.advantage for sample in samples])
        metrics: dict[str, float] = {}
        targets = [sample.value_target for sample in samples if sample.value_target is not None]
        values = [row.value for row in rows if row.value is not None]
        if targets and len(targets) == len(values):
            metrics |= {"value_mean": float(np.mean(values)), "return_mean": float(np.mean(targets))}
            metrics["explained_variance"] = explained_variance(torch.tensor(values), torch.tensor(targets))
            advantage = np.array(targets) - np.array(values)  # before normalisation
        metrics |= {"advantage_mean": float(advantage.mean()), "advantage_std": float(advantage.std())}
        if not self.algorithm.supervised:
            weights = torch.cat([row.importance for row in rows])
            metrics |= {
                "behaviour_weight": float(weights.double().mean()),
                "behaviour_weight_max": float(weights.max()),
                "behaviour_weight_capped": sum(row.capped for row in rows) / len(weights),
            }
        return metrics

    def _report(
        self,
        chosen: list[Trajectory],
        imitated: list[Trajectory],
        seconds: float,
        scored: ScoredBatch | None,
        update: dict[str, float] | None,
    ) -> dict[str, float]:
        """The metrics of a call of `update`; with `update` None, nothing was learned."""
        learned = [] if update is None else chosen
        sampled = sum(len(turn.token_ids) for one in chosen for turn in one.turns if not turn.is_demonstration)
        tokens = sum(token_counts(learned))
        metrics = {
            **(update or {}),
            **self._admission.metrics(),
            "update": float(self.n_updates),
            "policy_version": float(self.version),
            "trajectories_learned": float(len(learned)),
            "tokens_learned": float(tokens),
            "learn_seconds": seconds,
            "batches_refused": float(self._refused_in_a_row),
        }
        if scored is not None:
            disagreement = scored.disagreement()
            metrics |= {
                "staleness": scored.staleness,
                "staleness_max": scored.staleness_max,
                "entropy": scored.entropy,
                "behaviour_kl": scored.behaviour_kl,
                "disagreement": disagreement.mean,
                "disagreement_max": disagreement.maximum,
                "unchecked_share": 1.0 - disagreement.tokens / sampled if sampled else math.nan,
            }
        if self.demonstrations is not None or self.algorithm.from_demonstrations:
            turns = [turn for one in (*learned, *(imitated if update is not None else ())) for turn in one.turns]
            metrics["demonstration_turns"] = float(sum(turn.is_demonstration for turn in turns))
        if learned:
            metrics["tokens_per_second"] = tokens / max(seconds, 1e-9)
            metrics["replay_share"] = self._admission.count_replayed(learned) / len(learned)
        self._admission.finish_update(chosen)
        return {name: number for name, number in metrics.items() if not math.isnan(number)}


def _credit_turns(
    chosen: Sequence[Trajectory], samples: Sequence[TrainingSample], scored: ScoredBatch, version: int
) -> list[EpisodeCredit]:
    """The advantage and the value of every turn, by episode."""
    advantages = {sample.turn: sample.advantage for sample in samples}
    credits, first = [], 0
    for trajectory in chosen:
        turns = range(first, first + len(trajectory))
        values = tuple(scored.rows[turn].value for turn in turns)
        credits.append(EpisodeCredit(trajectory.episode_id, version, tuple(map(advantages.get, turns)), values))
        first += len(trajectory)
    return credits
