"""Validation of recorded episodes before learning, and the selection of episodes for an update (`Admission`).

`find_proof_failure` checks one trajectory; `find_group_mismatch` checks that the members of a group started alike and
are not copies. Refused episodes are counted by reason. `scoring` compares their log-probabilities with the recorded
weights. docs/algorithms.md lists what the checks prove together, and what they do not.

A demonstration never passes as a sampled episode, and a sampled episode never as a demonstration
(`find_demonstration_failure`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from palaestra.config import Section
from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import NOT_SAMPLED, Outcome, Source, Trajectory, Turn
from palaestra.experience.turn_scoring import ParsedReply
from palaestra.learner.trajectories.algorithm import TrajectoryAlgorithm
from palaestra.learner.trajectories.replay import SuccessReplay
from palaestra.learner.trajectories.reward import RewardConfig, Rewards, all_equal, reward_range, training_rewards

_log = logging.getLogger(__name__)

ABOVE_ZERO = 1e-4
"""Rounding may raise a log-probability this far above 0."""
ROUNDING = 1e-6
"""Tolerance of sums of rewards."""


class ProofConfig(Section):
    """Strictness of the checks before a batch is learned from."""

    mean_disagreement: float | None = Field(default=None, gt=0, le=1e6)
    """Maximum mean difference (nats) of a batch between recorded log-probabilities and those of the recorded weights;
    four times as much for a single episode. null: 0.002 in float32, where identical code stays below 1e-5, and 0.05
    in half precision, where it reaches about 0.01, and with inference.backend: server. A high value hides a broken
    weight transfer."""
    max_disagreement: float | None = Field(default=None, gt=0, le=1e6)
    """Maximum difference of a single token; unlikely tokens differ most. null: 0.1 in float32, 1 in half precision
    and with inference.backend: server."""
    checked_turns: int | None = Field(default=None, ge=1)
    """Number of turns per update that are compared with the weights that sampled them, evenly spaced; null: all. With
    one step per batch and no dropout, turns of the present version are all compared in the training pass, at no cost.
    Otherwise, and for earlier versions, each costs a pass without gradients, at most a third of an epoch."""
    refusals_in_a_row: int = Field(default=3, ge=1)
    """Number of consecutive refused batches after which training fails."""
    foreign_weights: bool = False
    """Accept episodes of weights that this learner did not publish, such as the archive of another run, or files
    without a fingerprint. Their log-probabilities are not checked (`unchecked_share`) and count as stale."""

    def loosen_for_engines(self) -> ProofConfig:
        """The same with the bounds of half precision where none is given: inference engines round differently."""
        mean, largest = self.bounds(half_precision=True)
        return self.model_copy(update={"mean_disagreement": mean, "max_disagreement": largest})

    def bounds(self, *, half_precision: bool) -> tuple[float, float]:
        """Maximum mean difference of a batch, and maximum difference of a token."""
        mean, largest = (0.05, 1.0) if half_precision else (0.002, 0.1)
        return (
            mean if self.mean_disagreement is None else self.mean_disagreement,
            largest if self.max_disagreement is None else self.max_disagreement,
        )


class Reason(StrEnum):
    """Why a trajectory is refused."""

    ENVIRONMENT = "environment"
    SOURCE = "source"
    EMPTY = "empty"
    VERSION = "version"
    WEIGHTS = "weights"
    LOG_PROB = "log_prob"
    TEMPERATURE = "temperature"
    PICTURE = "picture"
    TEXT = "text"
    REWARD = "reward"
    GROUP = "group"


class ProofFailure(NamedTuple):
    """Why a trajectory is refused: a reason for metrics, and a message."""

    reason: Reason
    detail: str


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the learner knows, to compare recorded episodes with."""

    version: int
    """The newest version."""
    fingerprints: Mapping[int, str] | None = None
    """Fingerprints of the published versions; None: the policy has no fingerprints."""
    foreign_weights: bool = False
    """Whether other weights are accepted."""
    temperature: float | None = None
    """Sampling temperature of this run; None: unknown."""
    vocabulary: int | None = None
    """Number of tokens of the policy; None: unknown."""
    read_replies: Callable[[Trajectory], Sequence[ParsedReply]] | None = None
    """Decodes recorded tokens; None: not supported by the policy."""
    reward: RewardConfig = field(default_factory=RewardConfig)


def find_proof_failure(trajectory: Trajectory, expected: Expected) -> ProofFailure | None:
    """The first reason not to learn from a trajectory; None if there is none."""
    return next(_find_problems(trajectory, expected), None)


def find_demonstration_failure(trajectory: Trajectory, expected: Expected) -> ProofFailure | None:
    """The first reason not to imitate a demonstration; None if there is none."""
    return next(_find_demonstration_problems(trajectory, expected), None)


def check_demonstrations(trajectories: Sequence[Trajectory], expected: Expected) -> None:
    """`ExperienceError` for the first that cannot be imitated: unlike episodes, demonstrations are not played again."""
    for one in trajectories:
        failure = find_demonstration_failure(one, expected)
        if failure is not None:
            raise ExperienceError(f"demonstration {one.episode_id} cannot be imitated: {failure.detail}.")


def _find_demonstration_problems(trajectory: Trajectory, expected: Expected) -> Iterator[ProofFailure]:
    if trajectory.source is not Source.DEMONSTRATION:
        yield ProofFailure(Reason.SOURCE, "a policy sampled it; it is not a demonstration")
    yield from _find_missing_turns(trajectory)
    for number, turn in enumerate(trajectory.turns):
        for problem in _find_content_problems(turn, expected):
            yield ProofFailure(problem.reason, f"turn {number}: {problem.detail}")
        if bool((turn.versions != NOT_SAMPLED).any()) or bool(turn.log_probs.any()) or turn.weights:
            text = f"turn {number}: its tokens have a version, log-probabilities or weights as if a policy sampled them"
            yield ProofFailure(Reason.SOURCE, text)
        if turn.action is None:
            yield ProofFailure(Reason.TEXT, f"turn {number}: it has no action ({turn.unreadable})")
    yield from _find_recording_problems(trajectory, expected)


def _find_missing_turns(trajectory: Trajectory) -> Iterator[ProofFailure]:
    if trajectory.outcome is Outcome.ENVIRONMENT_FAILED:
        yield ProofFailure(Reason.ENVIRONMENT, f"the environment failed ({trajectory.reason or 'no reason given'})")
    if not trajectory.turns:
        yield ProofFailure(Reason.EMPTY, "it has no turns")


def _find_problems(trajectory: Trajectory, expected: Expected) -> Iterator[ProofFailure]:
    """Problems in order. Later checks rely on earlier ones, so only the first is evaluated."""
    yield from _find_missing_turns(trajectory)
    if trajectory.source is not Source.POLICY:
        text = "it is a demonstration, which no policy sampled; give its directory as demonstrations.path"
        yield ProofFailure(Reason.SOURCE, text)
    wanted = expected.temperature
    if wanted is not None and trajectory.temperature != wanted:
        text = f"it was sampled at temperature {trajectory.temperature:g}, and this run samples at {wanted:g}"
        yield ProofFailure(Reason.TEMPERATURE, text)
    for number, turn in enumerate(trajectory.turns):
        for problem in _find_turn_problems(turn, expected):
            yield ProofFailure(problem.reason, f"turn {number}: {problem.detail}")
    yield from _find_recording_problems(trajectory, expected)


def _find_recording_problems(trajectory: Trajectory, expected: Expected) -> Iterator[ProofFailure]:
    """Problems of pictures, rewards and texts, whatever the source of the episode is."""
    for number, turn in enumerate(trajectory.turns):
        for sha in turn.pictures:
            if sha not in trajectory.pictures:
                yield ProofFailure(Reason.PICTURE, f"turn {number}: picture {sha[:12]} is missing")
    for sha, data in trajectory.pictures.items():
        if hashlib.sha256(data).hexdigest() != sha:
            yield ProofFailure(Reason.PICTURE, f"picture {sha[:12]} is not what was recorded under that SHA-256")
    yield from (ProofFailure(Reason.REWARD, text) for text in _find_reward_problems(trajectory, expected.reward))
    if expected.read_replies is not None:
        yield from _find_text_problems(trajectory, expected.read_replies)


def _find_content_problems(turn: Turn, expected: Expected) -> Iterator[ProofFailure]:
    """Problems of the tokens and pictures of a turn, however it was sampled."""
    if len(turn.token_ids) == 0 or len(turn.prompt_ids) == 0:
        yield ProofFailure(Reason.EMPTY, "no prompt or no sampled token")
    for ids in (turn.prompt_ids, turn.token_ids):
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or (expected.vocabulary is not None and highest >= expected.vocabulary):
            yield ProofFailure(Reason.TEXT, f"token {lowest if lowest < 0 else highest} is not in the vocabulary")
    if not turn.pictures:
        yield ProofFailure(Reason.PICTURE, "it names no picture")
    if any(width < 1 or height < 1 for width, height in turn.image_sizes):
        yield ProofFailure(Reason.PICTURE, "the size of a picture in the prompt is unknown")


def _find_turn_problems(turn: Turn, expected: Expected) -> Iterator[ProofFailure]:
    yield from _find_content_problems(turn, expected)
    low, high = int(turn.versions.min()), int(turn.versions.max())
    if low < 0 or high > expected.version:
        text = f"tokens of versions {low} to {high}, but there are only versions 0 to {expected.version}"
        yield ProofFailure(Reason.VERSION, text)
    if not bool(np.isfinite(turn.log_probs).all()) or float(turn.log_probs.max()) > ABOVE_ZERO:
        yield ProofFailure(Reason.LOG_PROB, "a log-probability is not finite or above 0")
    if expected.fingerprints is not None:
        yield from _find_weight_problems(turn, expected, expected.fingerprints)


def _find_weight_problems(turn: Turn, expected: Expected, fingerprints: Mapping[int, str]) -> Iterator[ProofFailure]:
    """A turn must be sampled by one published version, with the fingerprint it records."""
    low, high = int(turn.versions.min()), int(turn.versions.max())
    if low != high:
        yield ProofFailure(
            Reason.WEIGHTS, f"its tokens are of versions {low} to {high}; a turn must be sampled by one version"
        )
    published = fingerprints.get(low)
    if expected.foreign_weights and (published is None or not turn.weights):
        return
    remedy = "proof.foreign_weights=true accepts it"
    if not turn.weights:
        yield ProofFailure(Reason.WEIGHTS, f"it does not name the weights that sampled it; {remedy}")
    if published is None:
        yield ProofFailure(Reason.WEIGHTS, f"version {low} was not published by this learner; {remedy}")
    elif turn.weights != published:
        text = f"it was sampled by weights {turn.weights[:12]}, and version {low} was published as {published[:12]}"
        yield ProofFailure(Reason.WEIGHTS, text)


def _find_reward_problems(trajectory: Trajectory, config: RewardConfig) -> Iterator[str]:
    """Rewards must be within the range of the task and agree with the outcome."""
    declared = trajectory.task.get("reward_range")
    try:
        low, high = reward_range(trajectory, config)
    except (TypeError, ValueError):
        yield f"its task declares the reward range {declared!r}, which is not two numbers"
        return
    total = 0.0
    for number, turn in enumerate(trajectory.turns):
        if not isinstance(turn.reward, int | float) or not math.isfinite(turn.reward):
            yield f"turn {number}: its reward is {turn.reward!r}"
        if turn.action is None and turn.reward != 0:
            yield f"turn {number}: no action was performed, but the recorded reward is {turn.reward:g}"
        total += turn.reward
        if not low - ROUNDING <= total <= high + ROUNDING:
            source = "" if declared is not None else " (reward.assumed_range; the task declares none)"
            yield f"turn {number}: the return is {total:g}, and the range of the task is {low:g} to {high:g}{source}"
    # Without a declared range, a success may have less than the maximum, but not nothing.
    least = high if declared is not None else ROUNDING * 2
    if trajectory.success and total < least - ROUNDING:
        yield f"it ended as a success with a return of {total:g}, and that of a success is {high:g}"
    if not trajectory.success and total > high - ROUNDING:
        yield f"it ended as {trajectory.outcome.value} with a return of {total:g}, which only a success has"


def _find_text_problems(
    trajectory: Trajectory, read_replies: Callable[[Trajectory], Sequence[ParsedReply]]
) -> Iterator[ProofFailure]:
    """The tokens must decode to the recorded text, and the text to the recorded action."""
    try:
        replies = read_replies(trajectory)
    except ExperienceError as error:
        yield ProofFailure(Reason.PICTURE, str(error))
        return
    for number, (turn, read) in enumerate(zip(trajectory.turns, replies, strict=True)):
        if turn.text != read.text:
            text = f"turn {number}: its tokens say {_short(read.text)}, and its text is {_short(turn.text)}"
            yield ProofFailure(Reason.TEXT, text)
        # A session may refuse a readable action; then none is recorded.
        read_action, action = _plain(read.action), _plain(turn.action)
        if turn.action is not None and action != read_action:
            text = f"turn {number}: its text says {_short(read_action)}, and its action is {_short(action)}"
            yield ProofFailure(Reason.TEXT, text)
        if turn.image_sizes[-1] != read.image_size:
            recorded, expected = (" x ".join(map(str, size)) for size in (turn.image_sizes[-1], read.image_size))
            text = f"turn {number}: its screen was recorded at {recorded}, and this model uses {expected}"
            yield ProofFailure(Reason.PICTURE, text)


def _plain(action: Mapping[str, Any] | None) -> str:
    return "no action" if action is None else json.dumps(dict(action), sort_keys=True, default=str)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def find_group_mismatch(group: Sequence[Trajectory]) -> str | None:
    """Why these episodes cannot be compared as a group; None if they can."""
    first = group[0]
    for other in group[1:]:
        for name in ("task", "temperature", "codec"):
            one, another = getattr(first, name), getattr(other, name)
            if one != another:
                return f"{_pair(first, other)} have another {name} ({_difference(one, another)})"
        mine, theirs = first.turns[0], other.turns[0]
        if mine.pictures[-1] != theirs.pictures[-1]:
            return (
                f"{_pair(first, other)} began on different screens ({mine.pictures[-1][:12]} and "
                f"{theirs.pictures[-1][:12]}), though task, params and seed are the same. Look at them with palaestra "
                "trajectories view; a task whose first screen is not repeatable cannot be compared in groups"
            )
        if mine.image_sizes != theirs.image_sizes or not np.array_equal(mine.prompt_ids, theirs.prompt_ids):
            return f"{_pair(first, other)} began with different prompts"
    seen: dict[Any, Trajectory] = {}
    for member in group:
        for key in _identities(member):
            if key in seen:
                return f"{_pair(seen[key], member)} are the same one ({key[0]} {key[1]})"
            seen[key] = member
    return None


def _identities(trajectory: Trajectory) -> list[tuple[str, Any]]:
    """Values that are unique to an episode. Tokens alone may repeat if the policy is confident."""
    own: list[tuple[str, Any]] = [("episode id", trajectory.episode_id)]
    if trajectory.session_id:
        own.append(("session", trajectory.session_id))
    if trajectory.started_at:
        tokens = b"".join(turn.token_ids.tobytes() for turn in trajectory.turns)
        own.append(("start and tokens", (trajectory.started_at, hashlib.sha256(tokens).hexdigest()[:12])))
    return own


def _pair(one: Trajectory, other: Trajectory) -> str:
    return f"episodes {one.episode_id} and {other.episode_id}"


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        key = min(key for key in {**one, **other} if one.get(key) != other.get(key))
        return f"{key} {one.get(key)!r} and {other.get(key)!r}"
    return f"{one!r} and {other!r}"


class Admission:
    """Selects the episodes of a group to learn from: those that pass the checks and that the algorithm selects.

    The experience source admits groups as they complete; the learner admits trajectories that were not admitted before.
    Counters are reported with the next update and then reset.
    """

    def __init__(self, algorithm: TrajectoryAlgorithm, replay: SuccessReplay, reward: RewardConfig) -> None:
        self._algorithm, self._replay, self._reward = algorithm, replay, reward
        self.admitted: dict[str, bool] = {}
        """Admitted trajectories that were not learned from yet, by name; True if from replay."""
        self.finish_update(())

    def finish_update(self, learned: Sequence[Trajectory]) -> None:
        """Remove the trajectories of an update, and reset the counters."""
        for one in learned:
            self.admitted.pop(_name(one), None)
        self._counts: Counter[str] = Counter()
        self._refused: Counter[Reason] = Counter()
        self._earned = 0.0
        self._last_refusal = ""
        """Message of the last refusal that was not an environment failure."""

    def rewards(self, trajectories: Sequence[Trajectory]) -> Rewards:
        """Training rewards of each turn."""
        return [training_rewards(one, self._reward) for one in trajectories]

    def admit(self, group: Sequence[Trajectory], expected: Expected) -> list[Trajectory]:
        """The episodes of a complete group to learn from; empty if another group should be sampled instead."""
        self._counts["offered"] += len(group)
        proven = self._check_group([one for one in group if self._check_trajectory(one, expected)])
        rewards = self.rewards(proven)
        self._earned += float(sum(earned.sum() for earned in rewards))
        kept = list(self._algorithm.select(proven, rewards))
        if not kept and self._algorithm.group_size > 1:
            filled = self._replay.fill_group(proven, version=expected.version)
            if len(filled) > 1 and find_group_mismatch(filled) is None:
                kept = list(self._algorithm.select(filled, self.rewards(filled)))
        self._counts["groups"] += 1
        self._counts["short"] += not kept and len(proven) < 2
        self._counts["alike"] += not kept and len(proven) >= 2 and all_equal(rewards)
        for one in proven:
            self._replay.add(one)
        fresh = {_name(one) for one in proven}
        self.admitted |= {_name(one): _name(one) not in fresh for one in kept}
        self._counts["admitted"] += sum(_name(one) in fresh for one in kept)
        return kept

    def admit_demonstrations(self, drawn: Sequence[Trajectory], expected: Expected) -> list[Trajectory]:
        """Demonstrations that are all there is to learn from; `ExperienceError` if one cannot be imitated."""
        check_demonstrations(drawn, expected)
        self._counts["offered"] += len(drawn)
        self._counts["admitted"] += len(drawn)
        self._earned += float(sum(earned.sum() for earned in self.rewards(drawn)))
        return list(drawn)

    def is_admitted(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory was admitted and not learned from yet."""
        return _name(trajectory) in self.admitted

    def count_replayed(self, trajectories: Sequence[Trajectory]) -> int:
        """Number of replayed trajectories: group members from replay, and those added without being admitted."""
        sampled = [one for one in trajectories if one.source is Source.POLICY]
        return sum(self.admitted.get(_name(one), True) for one in sampled)

    def why_all_refused(self) -> str:
        """Why every episode was refused, environment failures aside; empty if some were not."""
        broken = self._refused[Reason.ENVIRONMENT]
        refused = self._refused.total() - broken
        if not refused or refused + broken < self._counts["offered"]:
            return ""
        return f"all {refused} episodes without an environment failure were refused, the last: {self._last_refusal}."

    def metrics(self) -> dict[str, float]:
        """Counts of offered, refused and admitted episodes since the last update."""
        counts, refused = self._counts, self._refused.total()
        metrics = {
            "trajectories_offered": float(counts["offered"]),
            "accepted_share": counts["admitted"] / max(1, counts["offered"]),
            "trajectories_refused": float(refused),
        }
        metrics |= {f"refused_{reason.value}": float(self._refused[reason]) for reason in Reason}
        if counts["offered"] > refused:
            metrics["reward_mean"] = self._earned / (counts["offered"] - refused)
        if self._algorithm.group_size > 1:
            metrics["zero_variance_share"] = counts["alike"] / max(1, counts["groups"])
            metrics["short_group_share"] = counts["short"] / max(1, counts["groups"])
        return metrics

    def _check_group(self, members: list[Trajectory]) -> list[Trajectory]:
        """The members, or none if they cannot be compared."""
        needs_comparison = self._algorithm.group_size > 1 and len(members) > 1
        mismatch = find_group_mismatch(members) if needs_comparison else None
        if mismatch is None:
            return members
        self._refused[Reason.GROUP] += len(members)
        self._last_refusal = mismatch
        _log.warning("group %s of %d episodes is not learned from: %s", members[0].group, len(members), mismatch)
        return []

    def _check_trajectory(self, trajectory: Trajectory, expected: Expected) -> bool:
        refusal = find_proof_failure(trajectory, expected)
        if refusal is None:
            return True
        self._refused[refusal.reason] += 1
        if refusal.reason is not Reason.ENVIRONMENT:
            self._last_refusal = f"{trajectory.episode_id}: {refusal.detail}"
        # Environment failures are common; anything else indicates a defective recording.
        level = logging.INFO if refusal.reason is Reason.ENVIRONMENT else logging.WARNING
        _log.log(level, "episode %s is not learned from: %s", trajectory.episode_id, refusal.detail)
        return False


def _name(trajectory: Trajectory) -> str:
    return f"{trajectory.group} {trajectory.episode_id}"
