"""`LearningPolicy`: a vision-language model as the learner of trajectories wants it.

The model scores tokens in one long row; the learner reads them by turn, padded. A new version means that the weights
as they are now act from the next sampled token on. The weights of the last few versions are kept, as far as memory
allows, so that tokens which those drew can be held against them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from palaestra.errors import EnvironmentFailed, ExperienceError
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_input import TokenLogProbs, TurnInput
from palaestra.learner.trajectories.policy import ReadReply
from palaestra.policy.codecs.codec import Understood
from palaestra.policy.codecs.reply_reader import ReplyReader
from palaestra.policy.vlm import TurnInput as Scored
from palaestra.policy.vlm import VLMPolicy
from palaestra.sessions.action import encode
from palaestra.sessions.screen import Screenshot
from palaestra.train.grammar import Grammar, grammar_for

__all__ = ["LearningPolicy"]

_log = logging.getLogger(__name__)

KEPT_BYTES = 2 * 2**30
"""The most that the weights of earlier versions may take together."""


class LearningPolicy:
    """A `TrajectoryPolicy` over a `VLMPolicy`; whoever else acts with it is told of every new version."""

    def __init__(
        self,
        vlm: VLMPolicy,
        *,
        published: Callable[[int], None] = lambda version: None,
        grammar: Grammar | None = None,
        kept_versions: int = 1,
    ) -> None:
        """`grammar` is what the actors speak, by default that of the model's family.

        `kept_versions`: how many versions before the present one have their weights kept.
        """
        self.vlm = vlm
        self.published = published
        self._grammar = grammar or grammar_for(vlm)
        size = sum(weight.numel() * weight.element_size() for weight in vlm.parameters())
        self._kept_versions = min(kept_versions, max(0, KEPT_BYTES // max(1, size) - 1))
        if self._kept_versions < kept_versions:
            _log.warning(
                "the weights of %d earlier versions are kept instead of %d, which would take more than %d MB: tokens "
                "of older ones are not compared with the weights that drew them",
                self._kept_versions, kept_versions, KEPT_BYTES // 2**20,
            )  # fmt: skip
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._keep()

    @property
    def version(self) -> int:
        """Of the weights that act."""
        return self.vlm.version

    @version.setter
    def version(self, number: int) -> None:
        self.vlm.publish(number)
        self._keep()
        self.published(number)

    @property
    def fingerprint(self) -> str:
        """Of the weights that act as the present version."""
        return self.vlm.published_fingerprint

    @property
    def exact_gradients(self) -> bool:
        """Whether a pass with gradients gives the same numbers as one without."""
        return self.vlm.config.lora_dropout == 0

    @property
    def half_precision(self) -> bool:
        """Whether any part of the model computes with less than 32 bits."""
        return any(weight.element_size() < 4 for _, weight in self.vlm.learner.named_parameters())

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return self.vlm.learner.vocabulary

    def recalls(self, version: int) -> bool:
        """Whether the weights of this version are still here."""
        return version in self._kept

    def past_log_probs(self, turns: Sequence[TurnInput], *, version: int) -> Tensor:
        """Log-probabilities of the recorded tokens under the weights of an earlier version."""
        return pad_sequence(
            list(self.vlm.past_log_probs(_scored(turns), self._kept[version]).by_turn()), batch_first=True
        )

    def read_replies(self, trajectory: Trajectory) -> list[ReadReply]:
        """What the tokens of each turn say, read as the agent read them."""
        reader = ReplyReader(self._grammar.codec, self._grammar.rule)
        replies = []
        for number, turn in enumerate(trajectory.turns):
            try:
                screen = Screenshot.of(trajectory.pictures[turn.pictures[-1]]).size
            except EnvironmentFailed as error:
                raise ExperienceError(f"turn {number}: its picture cannot be read ({error})") from None
            frame, text = reader.frame(screen), self.vlm.text_of(turn.token_ids.tolist())
            read = reader.read(text, frame)
            action = encode(read.action) if isinstance(read, Understood) else None
            replies.append(ReadReply(text, action, (frame.image.width, frame.image.height)))
        return replies

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

    def _keep(self) -> None:
        """Keep the weights of the present version for when it is an earlier one."""
        if self._kept_versions < 1:
            return
        self._kept[self.version] = self.vlm.trainable_state()
        for version in sorted(self._kept)[: -1 - self._kept_versions]:
            del self._kept[version]


def _scored(turns: Sequence[TurnInput]) -> list[Scored]:
    return [Scored.of(one.turn, one.pictures, temperature=one.temperature) for one in turns]
