"""`TrajectoryTrainer`: improves a policy that speaks tokens from the episodes it played.

Proof, one look without gradients, samples, and the update, in this order; whatever is refused on the way changes
nothing. It owns the optimiser, the shuffles, the replay and the counters, and raises the policy's version after every
update. It collects nothing, prints nothing and writes no file: `state` gives everything but the weights as tensors and
JSON, and a trainer that loads it continues bit for bit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from palaestra.errors import CheckpointError, ConfigError, ExperienceError
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_input import turn_inputs
from palaestra.learner.returns import explained_variance
from palaestra.learner.trajectories.admission import Admission
from palaestra.learner.trajectories.agreement import Agreement, Disagreement, why_disagreeing
from palaestra.learner.trajectories.algorithm import TrajectoryAlgorithm
from palaestra.learner.trajectories.batch import Row, Sample
from palaestra.learner.trajectories.learning_rate import LearningRate, choose_learning_rate, pace
from palaestra.learner.trajectories.policy import Fingerprinted, ReadsReplies, TrajectoryPolicy
from palaestra.learner.trajectories.proof import Expected, ProofConfig
from palaestra.learner.trajectories.replay import ReplayConfig, SuccessReplay
from palaestra.learner.trajectories.reward import RewardConfig
from palaestra.learner.trajectories.survey import Survey, surveyed, weigh_stale
from palaestra.learner.trajectories.task_key import grouped
from palaestra.learner.trajectories.token_update import TokenOptimiser, UpdateConfig, update

__all__ = ["TrainerState", "TrajectoryTrainer"]

_log = logging.getLogger(__name__)

VERSIONS_KNOWN = 1024
"""Newest versions whose fingerprints are remembered."""

TrainerState: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by name, and facts that are plain JSON."""


class TrajectoryTrainer:
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
        temperature: float | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`lora` says whether an adapter is trained; it decides the learning rate when the config gives none.

        `temperature` is what the actors sample at; episodes sampled at another one are refused.
        """
        self.policy, self.algorithm = policy, algorithm
        self.config, self.proof = config or UpdateConfig(), proof or ProofConfig()
        self.replay, self.reward, self.temperature = SuccessReplay(replay), reward or RewardConfig(), temperature
        self.n_updates = 0
        self.last_refusal = ""
        """Why the last batch was refused; empty when it was not."""
        self.rate = self._chosen_rate(lora)
        self._admission = Admission(algorithm, self.replay, self.reward)
        self._fingerprints: dict[int, str] = {}
        """Of the weights of every version, as they were published."""
        self._note_version()
        self._optimiser = TokenOptimiser(policy, self.config, rate=self.rate.rate)
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, 3]))
        self._clock = clock
        self._refused_in_a_row = 0

    def admit(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """What of a complete group is worth learning from; nothing when another should be sampled in its place."""
        return self._admission.admit(group, self._expected())

    def learn(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Improve the policy on these; what has not been through `admit` goes through it first, by groups.

        Trajectories stay as they are. When nothing is worth learning from, or the batch is refused, the metrics say so
        (`trajectories_learned` is 0) and neither weights nor version change.
        """
        began = self._clock()
        chosen = self._let_in(trajectories)
        if not chosen:
            self.last_refusal = self._admission.counts.why_all_refused()
            return self._refuse([], began) if self.last_refusal else self._report([], began)
        turns = [each for one in chosen for each in turn_inputs(one)]
        agreement, in_passing = Agreement(chosen), self._compares_while_learning
        survey = surveyed(
            self.policy, self.algorithm, turns, microbatch=self.config.microbatch_turns, agreement=agreement,
            checked_turns=self.proof.checked_turns, in_passing=in_passing,
        )  # fmt: skip
        first_pass = _FirstPass(agreement, self.proof, self.policy, self.algorithm, survey.rows)
        samples = self.algorithm.samples(
            chosen, self._admission.rewards(chosen), values=self._values(chosen, survey)
        )  # fmt: skip
        share = pace(self.n_updates, warmup=self.config.warmup_updates, decay=self.config.decay_updates)
        self._optimiser.set_pace(share)
        metrics: dict[str, float] | None = None
        try:
            first_pass.check()
            if samples:
                metrics = update(
                    self.policy, self.algorithm, self._optimiser, samples, survey.rows, self.config, self._rng,
                    first_pass if in_passing else None,
                )  # fmt: skip
        except _Disagrees as refusal:
            self.last_refusal = str(refusal)
            return self._refuse(chosen, began, survey, agreement.disagreement())
        self.last_refusal, self._refused_in_a_row = "", 0
        if metrics is not None:
            metrics |= {"learning_rate": self.rate.rate * share, **self._about(samples, survey)}
            self.n_updates += 1
            self.policy.version += 1
            self._note_version()
        return self._report(chosen, began, survey, agreement.disagreement(), metrics)

    def state(self) -> TrainerState:
        """Everything the next number depends on, except the policy's weights."""
        facts = {
            "n_updates": self.n_updates, "version": self.policy.version, "refused_in_a_row": self._refused_in_a_row,
            "shuffle": self._rng.bit_generator.state, "admitted": self._admission.facts(),
            "fingerprints": {str(version): known for version, known in self._fingerprints.items()},
            "parameters": [list(parameter.shape) for parameter in self._optimiser.parameters],
        }  # fmt: skip
        # Dropout draws from torch's own stream.
        return {**self._optimiser.tensors(), **self.replay.tensors(), "torch_rng": torch.get_rng_state()}, facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; the policy's weights must be those of that moment."""
        mine = [list(parameter.shape) for parameter in self._optimiser.parameters]
        if facts["parameters"] != mine:
            raise CheckpointError(
                "checkpoint.parameters", len(facts["parameters"]),
                f"trained tensors of other shapes than this policy's {len(mine)}",
                "Use the configuration it was trained with",
            )  # fmt: skip
        self._optimiser.restore(tensors)
        self.replay.restore(tensors)
        self._admission.restore(dict(facts["admitted"]))
        self._rng.bit_generator.state = facts["shuffle"]
        self.n_updates, self.policy.version = int(facts["n_updates"]), int(facts["version"])
        self._refused_in_a_row = int(facts["refused_in_a_row"])
        self._fingerprints = {int(version): str(known) for version, known in facts.get("fingerprints", {}).items()}
        self._note_version()
        torch.set_rng_state(tensors["torch_rng"])

    # ------------------------------------------------------------------ what it is made of

    @property
    def _compares_while_learning(self) -> bool:
        """Whether the first pass with gradients gives the log-probabilities of the policy before it has learned."""
        one_step = self.config.epochs == 1 and self.config.minibatches == 1
        return one_step and bool(getattr(self.policy, "exact_gradients", False))

    def _expected(self) -> Expected:
        self._note_version()
        known = isinstance(self.policy, Fingerprinted)
        return Expected(
            version=self.policy.version, fingerprints=self._fingerprints if known else None,
            foreign_weights=self.proof.foreign_weights, temperature=self.temperature, reward=self.reward,
            vocabulary=getattr(self.policy, "vocabulary", None),
            read_replies=self.policy.read_replies if isinstance(self.policy, ReadsReplies) else None,
        )  # fmt: skip

    def _note_version(self) -> None:
        """Remember which weights act as the policy's present version."""
        if isinstance(self.policy, Fingerprinted):
            self._fingerprints[self.policy.version] = self.policy.fingerprint
            while len(self._fingerprints) > VERSIONS_KNOWN:
                del self._fingerprints[min(self._fingerprints)]

    def _chosen_rate(self, lora: bool | None) -> LearningRate:
        given = self.config.learning_rate
        if given is None and lora is None:
            raise ConfigError(
                "trainer.learning_rate", None, "cannot be chosen without knowing what is trained",
                "Say lora=True or lora=False, or give a learning rate",
            )  # fmt: skip
        return choose_learning_rate(lora=bool(lora), supervised=self.algorithm.supervised, given=given)

    def _let_in(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        known = [one for one in trajectories if self._admission.knows(one)]
        others = grouped([one for one in trajectories if not self._admission.knows(one)])
        chosen = known + [one for group in others for one in self.admit(group)]
        if self.algorithm.supervised:
            chosen += self.replay.drawn(chosen, version=self.policy.version, rng=self._rng)
        return chosen

    def _values(self, chosen: Sequence[Trajectory], survey: Survey) -> list[np.ndarray[Any, Any]] | None:
        if not self.algorithm.needs_values:
            return None
        return [np.array([survey.rows[id(turn)].value for turn in one.turns], np.float64) for one in chosen]

    def _refuse(
        self,
        chosen: Sequence[Trajectory],
        began: float,
        survey: Survey | None = None,
        disagreement: Disagreement | None = None,
    ) -> dict[str, float]:
        self._refused_in_a_row += 1
        _log.warning("batch refused: %s", self.last_refusal)
        metrics = self._report(chosen, began, survey, disagreement)
        if self._refused_in_a_row >= self.proof.refusals_in_a_row:
            remedy = "raise proof.mean_disagreement or proof.max_disagreement" if survey else "see docs/algorithms.md"
            raise ExperienceError(
                f"{self._refused_in_a_row} batches in a row were refused at version {self.policy.version}; the last: "
                f"{self.last_refusal} Nothing was learned from them. If this is meant to be so, {remedy}."
            )
        return metrics

    def _about(self, samples: Sequence[Sample], survey: Survey) -> dict[str, float]:
        """What there is to say about the samples of an update."""
        own = [survey.rows[id(sample.input.turn)] for sample in samples]
        advantage = np.array([sample.advantage for sample in samples])
        about: dict[str, float] = {}
        targets = [sample.value_target for sample in samples if sample.value_target is not None]
        values = [row.value for row in own if row.value is not None]
        if targets and len(targets) == len(values):
            about |= {"value_mean": float(np.mean(values)), "return_mean": float(np.mean(targets))}
            about["explained_variance"] = explained_variance(torch.tensor(values), torch.tensor(targets))
            advantage = np.array(targets) - np.array(values)  # as it was before it was normalised
        about |= {"advantage_mean": float(advantage.mean()), "advantage_std": float(advantage.std())}
        if not self.algorithm.supervised:
            weights = torch.cat([row.importance for row in own])
            about |= {
                "behaviour_weight": float(weights.double().mean()),
                "behaviour_weight_max": float(weights.max()),
                "behaviour_weight_capped": sum(row.capped for row in own) / len(weights),
            }
        return about

    def _report(
        self,
        chosen: Sequence[Trajectory],
        began: float,
        survey: Survey | None = None,
        disagreement: Disagreement | None = None,
        said: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """The metrics of a call of `learn`; without `said` nothing was learned."""
        seconds = self._clock() - began
        learned = [] if said is None else chosen
        tokens = sum(len(turn.token_ids) for one in learned for turn in one.turns)
        metrics = {
            **(said or {}),
            **self._admission.counts.metrics(grouped=self.algorithm.group_size > 1),
            "update": float(self.n_updates),
            "policy_version": float(self.policy.version),
            "trajectories_learned": float(len(learned)),
            "tokens_learned": float(tokens),
            "learn_seconds": seconds,
            "batches_refused": float(self._refused_in_a_row),
        }
        if survey is not None:
            metrics |= {
                "staleness": survey.staleness, "staleness_max": survey.staleness_max,
                "entropy": survey.entropy, "behaviour_kl": survey.behaviour_kl,
            }  # fmt: skip
        if disagreement is not None:
            total = sum(len(turn.token_ids) for one in chosen for turn in one.turns)
            metrics |= {
                "disagreement": disagreement.mean, "disagreement_max": disagreement.maximum,
                "unchecked_share": 1.0 - disagreement.tokens / max(1, total),
            }  # fmt: skip
        if learned:
            metrics |= {
                "tokens_per_second": tokens / max(seconds, 1e-9),
                "replay_share": self._replayed(learned) / len(learned),
            }
        self._admission.close(chosen)
        return {name: number for name, number in metrics.items() if not math.isnan(number)}

    def _replayed(self, learned: Sequence[Trajectory]) -> int:
        # Those that were mixed in by the trainer itself were never let in.
        return sum(not self._admission.knows(one) for one in learned) + self._admission.replayed(learned)


class _Disagrees(Exception):
    """The batch cannot be trusted; its text says why."""


class _FirstPass:
    """Uses the log-probabilities of the pass that learns, before a step is taken: compares fresh tokens with the
    recorded ones, and weighs stale tokens.
    """

    def __init__(
        self,
        agreement: Agreement,
        config: ProofConfig,
        policy: TrajectoryPolicy,
        algorithm: TrajectoryAlgorithm,
        rows: dict[int, Row],
    ) -> None:
        self._agreement, self._config, self._version = agreement, config, policy.version
        self._algorithm, self._rows = algorithm, rows
        self._half_precision = bool(getattr(policy, "half_precision", True))

    def see(self, samples: Sequence[Sample], log_probs: Tensor) -> None:
        """A microbatch; a single token that is far off ends it here, before it can make the loss overflow."""
        largest = 0.0
        for row, sample in enumerate(samples):
            turn = sample.input.turn
            own = log_probs[row, : len(turn.token_ids)].detach().float().cpu()
            largest = max(largest, self._agreement.add(turn, own, self._version))
            known = self._rows[id(turn)]
            self._rows[id(turn)] = weigh_stale(known, turn, own, self._algorithm, self._version)
        if not largest <= self._config.bounds(half_precision=self._half_precision)[1]:
            self.check()

    def check(self) -> None:
        """Raise when what was compared so far differs too much."""
        why = why_disagreeing(
            self._agreement.disagreement(), self._config, half_precision=self._half_precision
        )  # fmt: skip
        if why is not None:
            raise _Disagrees(why)
