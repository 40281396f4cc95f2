"""What has to hold of an episode before anything is learned from it.

One trajectory is refused by itself (`why_refused`), a group when its members did not start alike or are copies
(`why_group_refused`); each refusal has a reason that is counted and a sentence to read. Whether the log-probabilities
are those of the recorded weights is asked in `scoring`. Decides only; the learner acts. `docs/algorithms.md` says
what all of it together proves and what it does not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from palaestra.config import Section
from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import Outcome, ParsedReply, Trajectory, Turn
from palaestra.learner.trajectories.reward import RewardConfig, reward_range_of

__all__ = ["Expected", "ProofConfig", "Reason", "Refusal", "why_group_refused", "why_refused"]

ABOVE_ZERO = 1e-4
"""Rounding may lift the log-probability of a certain token this far above 0."""
ROUNDING = 1e-6
"""Of sums of rewards."""


class ProofConfig(Section):
    """How strictly a batch is looked at before it is learned from."""

    mean_disagreement: float | None = Field(default=None, gt=0, le=1e6)
    """Largest mean distance (nats) between recorded log-probabilities and those of the recorded weights, over a batch;
    over a single episode four times as much. null: 0.002 for a model in float32, where equal code gives below 1e-5, and
    0.05 in half precision, where it gives about 0.01. Raising it lets a broken weight transfer pass unseen."""
    max_disagreement: float | None = Field(default=None, gt=0, le=1e6)
    """Largest distance of any single token; unlikely tokens differ most. null: 0.1 in float32, 1 in half precision."""
    checked_turns: int | None = Field(default=None, ge=1)
    """How many turns of an update are compared with the weights that drew them, evenly spread; null: all. Turns of the
    present version cost nothing with one step per batch and no dropout, where the pass that learns compares them all.
    Otherwise, and for turns of earlier versions, each costs a pass without gradients, at most a third of an epoch."""
    refusals_in_a_row: int = Field(default=3, ge=1)
    """So many refused batches, one after the other, end the training: they would all be refused."""
    foreign_weights: bool = False
    """Learn from episodes of weights that this learner did not publish, such as the archive of another run or files
    that do not name their weights. Their log-probabilities are believed (`unchecked_share`) and weighed as stale."""

    def bounds(self, *, half_precision: bool) -> tuple[float, float]:
        """The largest mean distance of a batch and the largest of a token."""
        mean, largest = (0.05, 1.0) if half_precision else (0.002, 0.1)
        return (
            mean if self.mean_disagreement is None else self.mean_disagreement,
            largest if self.max_disagreement is None else self.max_disagreement,
        )


class Reason(StrEnum):
    """Why a trajectory is refused."""

    ENVIRONMENT = "environment"
    EMPTY = "empty"
    VERSION = "version"
    WEIGHTS = "weights"
    LOG_PROB = "log_prob"
    TEMPERATURE = "temperature"
    PICTURE = "picture"
    TEXT = "text"
    REWARD = "reward"
    GROUP = "group"


class Refusal(NamedTuple):
    """A reason to count and a sentence to read."""

    reason: Reason
    detail: str


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the learner knows by itself and holds an episode against."""

    version: int
    """The newest there is."""
    fingerprints: Mapping[int, str] | None = None
    """Of the weights of every version that was published; None: the policy has no fingerprints."""
    foreign_weights: bool = False
    """Whether weights that are not among them are accepted."""
    temperature: float | None = None
    """What this run samples at; None: not known."""
    vocabulary: int | None = None
    """How many tokens the policy knows; None: not known."""
    read_replies: Callable[[Trajectory], Sequence[ParsedReply]] | None = None
    """What tokens mean; None: the policy cannot say."""
    reward: RewardConfig = field(default_factory=RewardConfig)


def why_refused(trajectory: Trajectory, expected: Expected) -> Refusal | None:
    """Why nothing may be learned from it; None when nothing speaks against it."""
    if trajectory.outcome is Outcome.ENVIRONMENT_FAILED:
        return Refusal(Reason.ENVIRONMENT, f"the screen broke ({trajectory.reason or 'no reason given'})")
    if not trajectory.turns:
        return Refusal(Reason.EMPTY, "it has no turns")
    wanted = expected.temperature
    if wanted is not None and trajectory.temperature != wanted:
        text = f"it was sampled at temperature {trajectory.temperature:g}, and this run samples at {wanted:g}"
        return Refusal(Reason.TEMPERATURE, text)
    for number, turn in enumerate(trajectory.turns):
        problem = _turn_problem(turn, expected)
        if problem is not None:
            return Refusal(problem.reason, f"turn {number}: {problem.detail}")
    return (
        _picture_problem(trajectory)
        or _reward_problem(trajectory, expected.reward)
        or _text_problem(trajectory, expected)
    )


def _turn_problem(turn: Turn, expected: Expected) -> Refusal | None:
    if len(turn.token_ids) == 0 or len(turn.prompt_ids) == 0:
        return Refusal(Reason.EMPTY, "no prompt or no sampled token")
    for ids in (turn.prompt_ids, turn.token_ids):
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or (expected.vocabulary is not None and highest >= expected.vocabulary):
            return Refusal(Reason.TEXT, f"token {lowest if lowest < 0 else highest} is not in the vocabulary")
    low, high = int(turn.versions.min()), int(turn.versions.max())
    if low < 0 or high > expected.version:
        text = f"tokens of versions {low} to {high}, but there are only versions 0 to {expected.version}"
        return Refusal(Reason.VERSION, text)
    if not bool(np.isfinite(turn.log_probs).all()) or float(turn.log_probs.max()) > ABOVE_ZERO:
        return Refusal(Reason.LOG_PROB, "a log-probability is not finite or above 0")
    if not turn.pictures:
        return Refusal(Reason.PICTURE, "it names no picture")
    if any(width < 1 or height < 1 for width, height in turn.image_sizes):
        return Refusal(Reason.PICTURE, "the size at which a picture was seen is not known")
    return None if expected.fingerprints is None else _weights_problem(turn, expected)


def _weights_problem(turn: Turn, expected: Expected) -> Refusal | None:
    """A turn is drawn by one set of weights, which the learner has published under the version it names."""
    low, high = int(turn.versions.min()), int(turn.versions.max())
    if low != high:
        return Refusal(Reason.WEIGHTS, f"its tokens are of versions {low} to {high}; a turn is drawn by one")
    published = (expected.fingerprints or {}).get(low)
    if expected.foreign_weights and (published is None or not turn.weights):
        return None
    remedy = "proof.foreign_weights=true accepts it"
    if not turn.weights:
        return Refusal(Reason.WEIGHTS, f"it does not name the weights it was drawn from; {remedy}")
    if published is None:
        return Refusal(Reason.WEIGHTS, f"version {low} was not published by this learner; {remedy}")
    if turn.weights != published:
        text = f"it was drawn from weights {turn.weights[:12]}, and version {low} was published as {published[:12]}"
        return Refusal(Reason.WEIGHTS, text)
    return None


def _picture_problem(trajectory: Trajectory) -> Refusal | None:
    for number, turn in enumerate(trajectory.turns):
        for sha in turn.pictures:
            if sha not in trajectory.pictures:
                return Refusal(Reason.PICTURE, f"turn {number}: picture {sha[:12]} is missing")
    for sha, data in trajectory.pictures.items():
        if hashlib.sha256(data).hexdigest() != sha:
            return Refusal(Reason.PICTURE, f"picture {sha[:12]} is not what was recorded under that SHA-256")
    return None


def _reward_problem(trajectory: Trajectory, config: RewardConfig) -> Refusal | None:
    """Rewards lie within what the task pays, and are those of the outcome."""
    try:
        low, high = reward_range_of(trajectory, config)
    except (TypeError, ValueError):
        text = f"its task declares the reward range {trajectory.task['reward_range']!r}, which is not two numbers"
        return Refusal(Reason.REWARD, text)
    paid = 0.0
    for number, turn in enumerate(trajectory.turns):
        if not isinstance(turn.reward, int | float) or not math.isfinite(turn.reward):
            return Refusal(Reason.REWARD, f"turn {number}: its reward is {turn.reward!r}")
        if turn.action is None and turn.reward != 0:
            text = f"turn {number}: nothing was done, and the environment is said to have paid {turn.reward:g} for it"
            return Refusal(Reason.REWARD, text)
        paid += turn.reward
        if not low - ROUNDING <= paid <= high + ROUNDING:
            text = f"turn {number}: paid {paid:g} in all, and the task pays from {low:g} to {high:g}"
            if trajectory.task.get("reward_range") is None:
                text += " (reward.assumed_range; the task declares none)"
            return Refusal(Reason.REWARD, text)
    if trajectory.success:
        # A task that declares no range may pay a solved episode less than the most, but not nothing.
        least = high if trajectory.task.get("reward_range") is not None else ROUNDING * 2
        if paid < least - ROUNDING:
            return Refusal(Reason.REWARD, f"it ended as a success and was paid {paid:g}, and solving pays {high:g}")
    elif paid > high - ROUNDING:
        text = f"it ended as {trajectory.outcome.value} and was paid {paid:g}, which only a success is"
        return Refusal(Reason.REWARD, text)
    return None


def _text_problem(trajectory: Trajectory, expected: Expected) -> Refusal | None:
    """Tokens say the text, and the text says the action."""
    if expected.read_replies is None:
        return None
    try:
        replies = expected.read_replies(trajectory)
    except ExperienceError as error:
        return Refusal(Reason.PICTURE, str(error))
    for number, (turn, read) in enumerate(zip(trajectory.turns, replies, strict=True)):
        if turn.text != read.text:
            text = f"turn {number}: its tokens say {_short(read.text)}, and its text is {_short(turn.text)}"
            return Refusal(Reason.TEXT, text)
        # A session may refuse an action that can be read; then there is none, and the reason says so.
        if turn.action is not None and _plain(turn.action) != _plain(read.action):
            text = f"turn {number}: its text says {_short(_plain(read.action))}, and its action is "
            return Refusal(Reason.TEXT, text + _short(_plain(turn.action)))
        if turn.image_sizes[-1] != read.image_size:
            seen, wanted = (" x ".join(map(str, size)) for size in (turn.image_sizes[-1], read.image_size))
            return Refusal(
                Reason.PICTURE, f"turn {number}: its screen was seen at {seen}, and this model sees {wanted}"
            )
    return None


def _plain(action: Mapping[str, Any] | None) -> str:
    return "no action" if action is None else json.dumps(dict(action), sort_keys=True, default=str)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def why_group_refused(group: Sequence[Trajectory]) -> str | None:
    """Why these episodes cannot be compared with each other; None when they can."""
    first = group[0]
    for other in group[1:]:
        for name, one, another in (
            ("task", first.task, other.task), ("temperature", first.temperature, other.temperature),
            ("codec", first.codec, other.codec),
        ):  # fmt: skip
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
    """What two episodes never have in common. Their tokens may well be the same, when the policy is sure."""
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
