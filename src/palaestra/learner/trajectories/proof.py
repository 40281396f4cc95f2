"""What has to be proven before anything is learned: where every token came from, and that both sides agree on it.

One trajectory is refused by itself (`why_refused`), with a reason that is counted. A whole batch is refused
(`why_disagreeing`) when the policy that learns does not give the log-probabilities that the sampler recorded at the
same version: then the two do not have the same weights or do not see the same pictures, and learning would look healthy
while it goes wrong. Decides only; the trainer acts.
"""

from __future__ import annotations

import hashlib
import math
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from pydantic import Field

from palaestra.config import Section
from palaestra.experience.trajectory import Outcome, Trajectory, Turn

__all__ = ["Disagreement", "ProofConfig", "Reason", "Refusal", "why_disagreeing", "why_refused"]

ABOVE_ZERO = 1e-4
"""Rounding may lift the log-probability of a certain token this far above 0."""


class ProofConfig(Section):
    """How strictly a batch is looked at before it is learned from."""

    mean_disagreement: float = Field(default=0.05, gt=0, le=1e6)
    """Largest mean distance (nats) between recorded log-probabilities and the learner's own at the same version. Equal
    code in float32 gives below 1e-4, bfloat16 about 0.01. Raising it lets a broken weight transfer pass unseen."""

    max_disagreement: float = Field(default=3.0, gt=0, le=1e6)
    """Largest distance of a single token. Unlikely tokens differ most."""

    checked_turns: int | None = Field(default=64, ge=1)
    """How many turns of an update are compared, evenly spread. null: all, for a third of the cost of learning."""

    refusals_in_a_row: int = Field(default=3, ge=1)
    """So many refused batches, one after the other, end the training: they would all be refused."""


class Reason(StrEnum):
    """Why a trajectory is refused."""

    ENVIRONMENT = "environment"
    EMPTY = "empty"
    VERSION = "version"
    LOG_PROB = "log_prob"
    PICTURE = "picture"
    REWARD = "reward"


class Refusal(NamedTuple):
    """A reason to count and a sentence to read."""

    reason: Reason
    detail: str


def why_refused(trajectory: Trajectory, *, version: int) -> Refusal | None:
    """Why nothing may be learned from it by the policy of this version; None when everything is proven."""
    if trajectory.outcome is Outcome.ENVIRONMENT_FAILED:
        return Refusal(Reason.ENVIRONMENT, f"the screen broke ({trajectory.reason or 'no reason given'})")
    if not trajectory.turns:
        return Refusal(Reason.EMPTY, "it has no turns")
    for number, turn in enumerate(trajectory.turns):
        found = _unproven(turn, version)
        if found is not None:
            return Refusal(found.reason, f"turn {number}: {found.detail}")
    for number, turn in enumerate(trajectory.turns):
        for sha in turn.pictures:
            if sha not in trajectory.pictures:
                return Refusal(Reason.PICTURE, f"turn {number}: picture {sha[:12]} is missing")
    for sha, data in trajectory.pictures.items():
        if hashlib.sha256(data).hexdigest() != sha:
            return Refusal(Reason.PICTURE, f"picture {sha[:12]} is not what was recorded under that SHA-256")
    return None


def _unproven(turn: Turn, version: int) -> Refusal | None:
    if len(turn.token_ids) == 0 or len(turn.prompt_ids) == 0:
        return Refusal(Reason.EMPTY, "no prompt or no sampled token")
    if int(turn.versions.min()) < 0 or int(turn.versions.max()) > version:
        low, high = int(turn.versions.min()), int(turn.versions.max())
        return Refusal(
            Reason.VERSION, f"tokens of versions {low} to {high}, but there are only versions 0 to {version}"
        )
    if not bool(np.isfinite(turn.log_probs).all()) or float(turn.log_probs.max()) > ABOVE_ZERO:
        return Refusal(Reason.LOG_PROB, "a log-probability is not finite or above 0")
    if not turn.pictures:
        return Refusal(Reason.PICTURE, "it names no picture")
    if any(width < 1 or height < 1 for width, height in turn.image_sizes):
        return Refusal(Reason.PICTURE, "the size at which a picture was seen is not known")
    if not math.isfinite(turn.reward):
        return Refusal(Reason.REWARD, f"its reward is {turn.reward}")
    return None


class Disagreement(NamedTuple):
    """How far the learner's log-probabilities are from those that the sampler recorded at the same version."""

    mean: float
    maximum: float
    tokens: int


def why_disagreeing(found: Disagreement, config: ProofConfig) -> str | None:
    """Why the batch cannot be trusted; None when it can, or when there was nothing to compare."""
    if found.tokens == 0 or (found.mean <= config.mean_disagreement and found.maximum <= config.max_disagreement):
        return None
    return (
        f"sampler and learner disagree about {found.tokens} tokens of the same version: log-probabilities differ by "
        f"{found.mean:.3g} on average (allowed {config.mean_disagreement:g}), at most {found.maximum:.3g} (allowed "
        f"{config.max_disagreement:g}). Likely causes: the updated weights (a LoRA adapter) did not reach the sampler; "
        "the two see different pictures or sizes; another temperature, chat template or precision."
    )
