"""Log-probabilities of tokens that were said before, under the weights as they are now; what learning differentiates.

A prompt that several turns share goes through the network once, and their answers after it; otherwise prompts and
answers go in one padded pass. Only the positions that predict an answer's token go through the output layer: scores of
a whole prompt over a vocabulary of 150,000 would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import TokenLogProbs, Turn, TurnInput
from palaestra.policy.vlm.generation import Completion, TokenRules
from palaestra.policy.vlm.network import Network, distinct, run_prompts
from palaestra.policy.vlm.picture import Picture
from palaestra.policy.vlm.prompt import Prompt

__all__ = ["score", "turn_input"]

Ints = npt.NDArray[np.int32]
CHUNK_NUMBERS = 2**26
"""Scores held at a time: 256 MB of float32."""


def turn_input(prompt: Prompt, answer: Completion, *, temperature: float = 1.0) -> TurnInput:
    """What was just sampled, to be scored."""
    turn = Turn(
        pictures=tuple(picture.sha256 for picture in prompt.pictures),
        image_sizes=tuple(picture.size for picture in prompt.pictures),
        prompt_ids=prompt.ids,
        token_ids=answer.token_ids,
        log_probs=answer.log_probs,
        versions=answer.versions,
        text=answer.text,
        action={},
        weights=answer.fingerprint,
    )
    return TurnInput(turn, {picture.sha256: picture.data for picture in prompt.pictures}, temperature)


def score(
    network: Network,
    turns: Sequence[TurnInput],
    rules: TokenRules,
    *,
    with_values: bool = False,
    with_entropy: bool = False,
    batch_size: int | None = None,
) -> TokenLogProbs:
    """Log-probabilities of the turns' tokens, `batch_size` turns a pass."""
    if not turns:
        raise ValueError("no turns to score")
    size = len(turns) if batch_size is None else batch_size
    passes = [
        _score_pass(network, turns[start : start + size], rules, with_values, with_entropy)
        for start in range(0, len(turns), size)
    ]
    lengths = [len(one.turn.token_ids) for one in turns]

    def pad(parts: list[Tensor]) -> Tensor:
        return pad_sequence(list(torch.split(torch.cat(parts), lengths)), batch_first=True)

    return TokenLogProbs(
        log_probs=pad([part.log_probs for part in passes]),
        mask=torch.arange(max(lengths), device=network.device) < torch.tensor(lengths, device=network.device)[:, None],
        entropy=pad([part.entropy for part in passes if part.entropy is not None]) if with_entropy else None,
        values=torch.cat([part.values for part in passes if part.values is not None]) if with_values else None,
    )


class _Pass(NamedTuple):
    """What one pass gives, its tokens one after the other."""

    log_probs: Tensor
    entropy: Tensor | None
    values: Tensor | None


def _score_pass(
    network: Network, turns: Sequence[TurnInput], rules: TokenRules, with_values: bool, with_entropy: bool
) -> _Pass:
    prompts = [_prompt_of(one) for one in turns]
    _refuse_what_cannot_be_scored(network, turns, prompts)
    answers = [one.turn.token_ids for one in turns]
    predicting, before = _after_shared_prompts(network, prompts, answers, rules) or _in_one_pass(
        network, prompts, answers, rules
    )
    targets = torch.from_numpy(np.concatenate(answers).astype(np.int64)).to(network.device)
    heat = torch.tensor([one.temperature for one in turns], device=network.device)
    lengths = torch.tensor([len(answer) for answer in answers], device=network.device)
    heat = heat.repeat_interleave(lengths).unsqueeze(-1)
    log_probs, entropies = _through_the_head(network, predicting, targets, heat, rules, with_entropy)
    return _Pass(log_probs, entropies, network.value(before) if with_values else None)


def _prompt_of(one: TurnInput) -> Prompt:
    turn = one.turn
    missing = [sha for sha in turn.pictures if sha not in one.pictures]
    if missing:
        raise ExperienceError(f"a turn was shown picture {missing[0][:12]}, which its trajectory does not hold.")
    shown = (Picture(one.pictures[sha], size) for sha, size in zip(turn.pictures, turn.image_sizes, strict=True))
    return Prompt(turn.prompt_ids, tuple(shown))


def _refuse_what_cannot_be_scored(network: Network, turns: Sequence[TurnInput], prompts: Sequence[Prompt]) -> None:
    for place, (one, prompt) in enumerate(zip(turns, prompts, strict=True)):
        answer = one.turn.token_ids
        if not len(prompt.ids) or not len(answer):
            raise ExperienceError(f"turn {place} has {len(prompt.ids)} prompt and {len(answer)} own tokens.")
        if one.temperature <= 0:
            raise ExperienceError(f"turn {place} was played without chance (temperature 0): nothing to learn from it.")
        shown = int((prompt.ids == network.image_token).sum())
        wanted = sum(network.shop.tokens(picture.size) for picture in prompt.pictures)
        if shown != wanted:
            raise ExperienceError(
                f"turn {place} has {shown} picture tokens in its prompt and {wanted} in its {len(prompt.pictures)} "
                "pictures: they are not the ones it was shown."
            )
        if (answer == network.image_token).any():
            raise ExperienceError(f"turn {place} has a picture's token in its answer, which no sampler here draws.")


Predicting = tuple[Tensor, Tensor]
"""Hidden states that predict the tokens of the answers, turn after turn, and those before the answers, [B, H]."""


def _after_shared_prompts(
    network: Network, prompts: Sequence[Prompt], answers: Sequence[Ints], rules: TokenRules
) -> Predicting | None:
    """Every distinct prompt once, then all answers after them. None where that would save nothing or cannot be done."""
    if network.recomputes or 2 * len(distinct(prompts)[0]) > len(prompts):
        return None
    prefix = run_prompts(network, prompts, rules.padding)
    # The last token predicts nothing that is asked for, so it is left out.
    ids, mask = _padded([answer[:-1] for answer in answers], rules.padding, network.device)
    after = prefix.last.unsqueeze(1)
    if ids.shape[1]:
        whole = torch.cat([prefix.mask, mask], -1)
        said = network.hidden(ids, whole, prefix.positions(ids.shape[1]), cache=prefix.cache)
        after = torch.cat([after, said], 1)
    return _picked(after, answers, [0] * len(answers)), prefix.last


def _in_one_pass(network: Network, prompts: Sequence[Prompt], answers: Sequence[Ints], rules: TokenRules) -> Predicting:
    whole = [np.concatenate([prompt.ids, answer])[:-1] for prompt, answer in zip(prompts, answers, strict=True)]
    ids, mask = _padded(whole, rules.padding, network.device)
    pictures = [picture for prompt in prompts for picture in prompt.pictures]
    positions, _ = network.positions(ids, mask, pictures)
    hidden = network.hidden(ids, mask, positions, pictures=pictures)
    last = [len(prompt.ids) - 1 for prompt in prompts]
    return _picked(hidden, answers, last), hidden[torch.arange(len(answers)), torch.tensor(last)]


def _padded(sequences: Sequence[Ints], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(sequences), max(len(row) for row in sequences)), padding)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(sequences):
        ids[index, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask[index, : len(row)] = 1
    return ids.to(device), mask.to(device)


def _picked(hidden: Tensor, answers: Sequence[Ints], starts: Sequence[int]) -> Tensor:
    """The states that predict the answers' tokens; those of an answer begin at its column in `starts`."""
    rows = torch.cat([torch.full((len(answer),), row) for row, answer in enumerate(answers)])
    columns = [torch.arange(len(answer)) + start for answer, start in zip(answers, starts, strict=True)]
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
