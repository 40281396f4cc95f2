"""Log-probabilities of tokens that were said before, under the weights as they are now; what learning differentiates.

A prompt that several turns share goes through the network once, and their answers after it; otherwise prompts and
answers go in one padded pass. Only the positions that predict an answer's token go through the output layer: scores of
a whole prompt over a vocabulary of 150,000 would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import Turn
from palaestra.policy.vlm.network import Network
from palaestra.policy.vlm.picture import Picture
from palaestra.policy.vlm.prefix import distinct, run_prompts
from palaestra.policy.vlm.prompt import Prompt
from palaestra.policy.vlm.sampling import TokenRules

__all__ = ["TokenLogProbs", "TurnInput", "joined", "score"]

CHUNK_NUMBERS = 2**26
"""Scores held at a time: 256 MB of float32."""


@dataclass(frozen=True, eq=False)
class TurnInput:
    """One turn to be scored: what was shown, and what was said."""

    prompt_ids: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    pictures: tuple[Picture, ...]
    temperature: float = 1.0
    """What the tokens were drawn at."""

    @classmethod
    def of(cls, turn: Turn, pictures: Mapping[str, bytes], *, temperature: float = 1.0) -> TurnInput:
        """A recorded turn, with the pictures of its trajectory."""
        missing = [sha for sha in turn.pictures if sha not in pictures]
        if missing:
            raise ExperienceError(f"a turn was shown picture {missing[0][:12]}, which its trajectory does not hold.")
        shown = tuple(
            Picture(pictures[sha], size) for sha, size in zip(turn.pictures, turn.image_sizes, strict=True)
        )  # fmt: skip
        return cls(turn.prompt_ids, turn.token_ids, shown, temperature)


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """Numbers of every token of several turns, one after the other."""

    log_probs: Tensor
    """[tokens], float32, of the distribution at the turn's temperature."""
    lengths: tuple[int, ...]
    """Tokens of each turn."""
    entropies: Tensor | None = None
    """[tokens]."""
    values: Tensor | None = None
    """[turns]: what the value head expects, seen from the end of the prompt."""

    def by_turn(self) -> tuple[Tensor, ...]:
        """The log-probabilities turn by turn."""
        return torch.split(self.log_probs, list(self.lengths))


def score(
    network: Network, turns: Sequence[TurnInput], rules: TokenRules, *, with_values: bool, with_entropy: bool
) -> TokenLogProbs:
    """Log-probabilities of the turns' tokens in one pass."""
    _refuse_what_cannot_be_scored(network, turns)
    lengths = tuple(len(turn.token_ids) for turn in turns)
    predicting, before = _after_shared_prompts(network, turns, rules) or _in_one_pass(network, turns, rules)
    targets = torch.from_numpy(np.concatenate([turn.token_ids for turn in turns]).astype(np.int64)).to(network.device)
    heat = torch.tensor([turn.temperature for turn in turns], device=network.device)
    heat = heat.repeat_interleave(torch.tensor(lengths, device=network.device)).unsqueeze(-1)
    log_probs, entropies = _through_the_head(network, predicting, targets, heat, rules, with_entropy)
    return TokenLogProbs(log_probs, lengths, entropies, network.value(before) if with_values else None)


def joined(parts: Sequence[TokenLogProbs]) -> TokenLogProbs:
    """Several passes as one."""
    entropies = [part.entropies for part in parts if part.entropies is not None]
    values = [part.values for part in parts if part.values is not None]
    return TokenLogProbs(
        torch.cat([part.log_probs for part in parts]),
        tuple(length for part in parts for length in part.lengths),
        torch.cat(entropies) if entropies else None,
        torch.cat(values) if values else None,
    )


def _refuse_what_cannot_be_scored(network: Network, turns: Sequence[TurnInput]) -> None:
    for place, turn in enumerate(turns):
        if not len(turn.prompt_ids) or not len(turn.token_ids):
            raise ExperienceError(
                f"turn {place} has {len(turn.prompt_ids)} prompt and {len(turn.token_ids)} own tokens."
            )
        if turn.temperature <= 0:
            raise ExperienceError(f"turn {place} was played without chance (temperature 0): nothing to learn from it.")
        shown = int((np.asarray(turn.prompt_ids) == network.image_token).sum())
        wanted = sum(network.shop.tokens(picture.size) for picture in turn.pictures)
        if shown != wanted:
            raise ExperienceError(
                f"turn {place} has {shown} picture tokens in its prompt and {wanted} in its {len(turn.pictures)} "
                "pictures: they are not the ones it was shown."
            )
        if (np.asarray(turn.token_ids) == network.image_token).any():
            raise ExperienceError(f"turn {place} has a picture's token in its answer, which no sampler here draws.")


Predicting = tuple[Tensor, Tensor]
"""Hidden states that predict the tokens of the answers, turn after turn, and those before the answers, [B, H]."""


def _after_shared_prompts(network: Network, turns: Sequence[TurnInput], rules: TokenRules) -> Predicting | None:
    """Every distinct prompt once, then all answers after them. None where that would save nothing or cannot be done."""
    prompts = [Prompt(turn.prompt_ids, turn.pictures) for turn in turns]
    if network.recomputes or 2 * len(distinct(prompts)[0]) > len(turns):
        return None
    prefix = run_prompts(network, prompts, rules.padding)
    # The last token predicts nothing that is asked for, so it is left out.
    ids, mask = _padded([turn.token_ids[:-1] for turn in turns], rules.padding, network.device)
    after = prefix.last.unsqueeze(1)
    if ids.shape[1]:
        whole = torch.cat([prefix.mask, mask], -1)
        said = network.hidden(ids, whole, prefix.positions(ids.shape[1]), cache=prefix.cache)
        after = torch.cat([after, said], 1)
    return _picked(after, turns, [0] * len(turns)), prefix.last


def _in_one_pass(network: Network, turns: Sequence[TurnInput], rules: TokenRules) -> Predicting:
    whole = [np.concatenate([turn.prompt_ids, turn.token_ids])[:-1] for turn in turns]
    ids, mask = _padded(whole, rules.padding, network.device)
    pictures = [picture for turn in turns for picture in turn.pictures]
    positions, _ = network.positions(ids, mask, pictures)
    hidden = network.hidden(ids, mask, positions, pictures=pictures)
    last = [len(turn.prompt_ids) - 1 for turn in turns]
    return _picked(hidden, turns, last), hidden[torch.arange(len(turns)), torch.tensor(last)]


def _padded(sequences: Sequence[npt.NDArray[np.int32]], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(sequences), max(len(row) for row in sequences)), padding)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(sequences):
        ids[index, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask[index, : len(row)] = 1
    return ids.to(device), mask.to(device)


def _picked(hidden: Tensor, turns: Sequence[TurnInput], starts: Sequence[int]) -> Tensor:
    """The states that predict the turns' tokens; those of a turn begin at its column in `starts`."""
    rows = torch.cat([torch.full((len(turn.token_ids),), row) for row, turn in enumerate(turns)])
    columns = [torch.arange(len(turn.token_ids)) + start for turn, start in zip(turns, starts, strict=True)]
    return hidden[rows, torch.cat(columns)]


def _through_the_head(
    network: Network, hidden: Tensor, targets: Tensor, heat: Tensor, rules: TokenRules, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    def scored(hidden: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(rules.allowed(network.scores(hidden)) / heat, -1)
        said = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        if not with_entropy:
            return said, said
        # A forbidden token has probability 0 and log-probability -inf, whose product is to be 0.
        return said, -(log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)

    size = max(1, CHUNK_NUMBERS // network.vocabulary)
    pieces = list(zip(*(torch.split(whole, size) for whole in (hidden, targets, heat)), strict=True))
    if len(pieces) == 1 or not torch.is_grad_enabled():
        done = [scored(*piece) for piece in pieces]
    else:
        # Otherwise the backward pass would keep every chunk's scores after all.
        done = [checkpoint(scored, *piece, use_reentrant=False) for piece in pieces]
    log_probs, entropies = (torch.cat(column) for column in zip(*done, strict=True))
    return log_probs, entropies if with_entropy else None
