"""`LearningPolicy`: a vision-language model as the learner of trajectories wants it.

The model scores tokens in one long row; the learner reads them by turn, padded. A new version means that the weights
as they are now act from the next sampled token on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from palaestra.experience.turn_input import TokenLogProbs, TurnInput
from palaestra.policy.vlm import TurnInput as Scored
from palaestra.policy.vlm import VLMPolicy

__all__ = ["LearningPolicy"]


class LearningPolicy:
    """A `TrajectoryPolicy` over a `VLMPolicy`; whoever else acts with it is told of every new version."""

    def __init__(self, vlm: VLMPolicy, *, published: Callable[[int], None] = lambda version: None) -> None:
        self.vlm = vlm
        self.published = published

    @property
    def version(self) -> int:
        """Of the weights that act."""
        return self.vlm.version

    @version.setter
    def version(self, number: int) -> None:
        self.vlm.publish(number)
        self.published(number)

    def log_probs(
        self, turns: Sequence[TurnInput], *, with_values: bool = False, with_entropy: bool = False, grad: bool = True
    ) -> TokenLogProbs:
        """Log-probabilities of the recorded tokens, in one batch."""
        found = self.vlm.log_probs(_scored(turns), with_values=with_values, with_entropy=with_entropy, grad=grad)
        rows = found.by_turn()
        padded = pad_sequence(list(rows), batch_first=True)
        mask = pad_sequence([row.detach().new_ones(len(row)) for row in rows], batch_first=True).bool()
        entropy = None
        if found.entropies is not None:
            entropy = pad_sequence(list(torch.split(found.entropies, list(found.lengths))), batch_first=True)
        return TokenLogProbs(padded, mask, entropy, found.values)

    def reference_log_probs(self, turns: Sequence[TurnInput]) -> Tensor | None:
        """The same under the weights from before training."""
        return pad_sequence(list(self.vlm.log_probs(_scored(turns), reference=True).by_turn()), batch_first=True)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What is learned."""
        return self.vlm.parameters()

    def value_parameters(self) -> list[nn.Parameter]:
        """Those of them that only the value depends on."""
        return list(self.vlm.learner.value_head.parameters())


def _scored(turns: Sequence[TurnInput]) -> list[Scored]:
    return [Scored.of(one.turn, one.pictures, temperature=one.temperature) for one in turns]
