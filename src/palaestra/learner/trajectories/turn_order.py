"""In which order turns go through the network: those that answer the same prompt together, because they share its cost.

Members of a group begin on one screen with the same words. A policy that runs a shared prompt once (`policy.vlm`)
saves most of an update when they meet in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from palaestra.experience.turn_input import TurnInput
from palaestra.learner.trajectories.batch import Sample

__all__ = ["by_prompt", "minibatches"]


def by_prompt(turns: Sequence[TurnInput]) -> list[int]:
    """Positions of the turns, short ones first and those with the same prompt together.

    Turns of like length share a microbatch and waste little padding; those with the same prompt share even that.
    """
    return sorted(
        range(len(turns)),
        key=lambda place: (len(turns[place].turn.prompt_ids), _key(turns[place]), len(turns[place].turn.token_ids)),
    )


def minibatches(samples: Sequence[Sample], count: int, rng: np.random.Generator) -> list[list[Sample]]:
    """The samples in random order and equal parts; those that answer the same prompt stay together.

    Besides sharing its cost, a group's better and worse answers push against each other in one step. A border may cut
    through a prompt's answers, so that parts stay equal.
    """
    answers: dict[bytes, list[Sample]] = {}
    for sample in samples:
        answers.setdefault(_key(sample.input), []).append(sample)
    clusters = list(answers.values())
    order = [sample for place in rng.permutation(len(clusters)) for sample in clusters[place]]
    borders = np.linspace(0, len(order), count + 1).round().astype(int)
    return [order[start:end] for start, end in pairwise(borders)]


def _key(one: TurnInput) -> bytes:
    return one.turn.prompt_ids.tobytes() + "".join(one.turn.pictures).encode()
