"""Log-probabilities of recorded tokens under the current weights, differentiable.

A prompt that several turns share goes through the network once, followed by their replies; otherwise prompts and
replies go through in one padded pass. Only positions that predict a reply token go through the output layer: the
logits of a whole prompt over a vocabulary of 150,000 would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import Turn
from palaestra.experience.turn_scoring import TokenLogProbs, TurnInput
from palaestra.policy.vlm.generation import Completion, TokenRules
from palaestra.policy.vlm.network import Network, deduplicate_prompts, pad_tokens, run_prompts
from palaestra.policy.vlm.picture import Picture
from palaestra.policy.vlm.prompt import Ints, Prompt

CHUNK_NUMBERS = 2**26
"""Logits computed at a time: 256 MB of float32."""


def turn_input(prompt: Prompt, completion: Completion, *, temperature: float = 1.0) -> TurnInput:
    """The scoring input of a reply that was just sampled."""
    turn = Turn(
        pictures=tuple(picture.sha256 for picture in prompt.pictures),
        image_sizes=tuple(picture.size for picture in prompt.pictures),
        prompt_ids=prompt.ids,
        token_ids=completion.token_ids,
        log_probs=completion.log_probs,
        versions=completion.versions,
        text=completion.text,
        action={},
        weights=completion.fingerprint,
    )
    return TurnInput(turn, {picture.sha256: picture.data for picture in prompt.pictures}, temperature)


def score(
    network: Network,
    turns: Sequence[TurnInput],
    rules: TokenRules,
    *,
    with_values: bool = False,
    with_entropy: bool = False,
    with_imitation: bool = False,
) -> TokenLogProbs:
    """Log-probabilities of the turns' tokens, in one batch."""
    if not turns:
        raise ValueError("no turns to score")
    prompts = [_prompt_of(one) for one in turns]
    _check_turns(network, turns, prompts)
    replies = [one.turn.token_ids for one in turns]
    # Sharing prompts saves nothing unless they repeat, and recomputed layers cannot use a cache. The processes of a
    # sharded model must run equally many passes, whatever their prompts are.
    shared = not network.recomputes and not network.sharded and 2 * len(deduplicate_prompts(prompts)[0]) <= len(prompts)
    run = _run_shared_prompts if shared else _run_whole_turns
    hidden, last_prompt_hidden = run(network, prompts, replies, rules)
    targets = torch.from_numpy(np.concatenate(replies).astype(np.int64)).to(network.device)
    lengths = torch.tensor([len(reply) for reply in replies], device=network.device)
    temperature = torch.tensor([one.temperature for one in turns], device=network.device)
    temperature = temperature.repeat_interleave(lengths).unsqueeze(-1)
    wanted = (with_entropy, with_imitation)
    log_probs, entropies, is_top, means = _score_tokens(network, hidden, targets, temperature, rules, *wanted)

    def pad(tokens: Tensor) -> Tensor:
        return pad_sequence(list(torch.split(tokens, lengths.tolist())), batch_first=True)

    return TokenLogProbs(
        log_probs=pad(log_probs),
        mask=torch.arange(int(lengths.max()), device=network.device) < lengths[:, None],
        entropy=None if entropies is None else pad(entropies),
        values=network.value(last_prompt_hidden) if with_values else None,
        is_top=None if is_top is None else pad(is_top),
        mean_log_prob=None if means is None else pad(means),
    )


def _prompt_of(one: TurnInput) -> Prompt:
    turn = one.turn
    missing = [sha for sha in turn.pictures if sha not in one.pictures]
    if missing:
        raise ExperienceError(f"a turn was shown picture {missing[0][:12]}, which its trajectory does not hold.")
    pictures = (Picture(one.pictures[sha], size) for sha, size in zip(turn.pictures, turn.image_sizes, strict=True))
    return Prompt(turn.prompt_ids, tuple(pictures))


def _check_turns(network: Network, turns: Sequence[TurnInput], prompts: Sequence[Prompt]) -> None:
    for place, (one, prompt) in enumerate(zip(turns, prompts, strict=True)):
        reply = one.turn.token_ids
        if not len(prompt.ids) or not len(reply):
            raise ExperienceError(f"turn {place} has {len(prompt.ids)} prompt and {len(reply)} own tokens.")
        if one.temperature <= 0:
            raise ExperienceError(f"turn {place} was sampled at temperature 0: nothing can be learned from it.")
        tokens = int((prompt.ids == network.image_token).sum())
        expected = sum(network.preprocessor.count_tokens(picture) for picture in prompt.pictures)
        if tokens != expected:
            raise ExperienceError(
                f"turn {place} has {tokens} picture tokens in its prompt and {expected} in its "
                f"{len(prompt.pictures)} pictures: they are not the ones it was shown."
            )
        if (reply == network.image_token).any():
            raise ExperienceError(f"turn {place} has a picture's token in its reply, which no sampler returns.")


def _run_shared_prompts(
    network: Network, prompts: Sequence[Prompt], replies: Sequence[Ints], rules: TokenRules
) -> tuple[Tensor, Tensor]:
    """Run each distinct prompt once, then all replies.

    Returns the hidden states that predict the reply tokens, turn after turn, and those of the last prompt tokens.
    """
    prefix = run_prompts(network, prompts, rules.padding)
    # The last token predicts nothing that is asked for.
    ids, mask = pad_tokens([reply[:-1] for reply in replies], rules.padding, network.device)
    hidden = prefix.last_hidden.unsqueeze(1)
    if ids.shape[1]:
        mask = torch.cat([prefix.mask, mask], -1)
        following = network.hidden_states(ids, mask, prefix.positions(ids.shape[1]), cache=prefix.cache)
        hidden = torch.cat([hidden, following], 1)
    return _select_predicting(hidden, replies, [0] * len(replies)), prefix.last_hidden


def _run_whole_turns(
    network: Network, prompts: Sequence[Prompt], replies: Sequence[Ints], rules: TokenRules
) -> tuple[Tensor, Tensor]:
    """Run every prompt with its reply; returns the same as `_run_shared_prompts`."""
    turns = [np.concatenate([prompt.ids, reply])[:-1] for prompt, reply in zip(prompts, replies, strict=True)]
    ids, mask = pad_tokens(turns, rules.padding, network.device)
    pictures = [picture for prompt in prompts for picture in prompt.pictures]
    positions, _ = network.positions(ids, mask, pictures)
    hidden = network.hidden_states(ids, mask, positions, pictures=pictures)
    last = [len(prompt.ids) - 1 for prompt in prompts]
    return _select_predicting(hidden, replies, last), hidden[torch.arange(len(replies)), torch.tensor(last)]


def _select_predicting(hidden: Tensor, replies: Sequence[Ints], starts: Sequence[int]) -> Tensor:
    """The hidden states that predict the reply tokens; those of a reply begin at its column in `starts`."""
    rows = torch.cat([torch.full((len(reply),), row) for row, reply in enumerate(replies)])
    columns = [torch.arange(len(reply)) + start for reply, start in zip(replies, starts, strict=True)]
    return hidden[rows, torch.cat(columns)]


def _score_tokens(
    network: Network,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    rules: TokenRules,
    with_entropy: bool,
    with_imitation: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Log-probabilities of the target tokens, in chunks that bound the memory of the logits.

    On request also entropies, whether each target is the most likely token, and the means over all tokens.
    """

    def score_chunk(hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        log_probs = torch.log_softmax(rules.mask_forbidden(network.logits(hidden)) / temperature, -1)
        scores = [log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)]
        if with_entropy:
            # A forbidden token has probability 0 and log-probability -inf; their product must be 0.
            finite = log_probs.clamp_min(torch.finfo(log_probs.dtype).min)
            scores.append(-(log_probs.exp() * finite).sum(-1))
        if with_imitation:
            allowed = network.vocabulary - len(rules.forbidden)
            scores.append(log_probs.detach().argmax(-1) == targets)
            scores.append(log_probs.masked_fill(log_probs == -torch.inf, 0.0).sum(-1) / allowed)
        return tuple(scores)

    size = max(1, CHUNK_NUMBERS // network.vocabulary)
    chunks = list(zip(*(torch.split(whole, size) for whole in (hidden, targets, temperature)), strict=True))
    if len(chunks) == 1 or not torch.is_grad_enabled():
        scored = [score_chunk(*chunk) for chunk in chunks]
    else:
        # Recompute the logits in the backward pass instead of keeping those of every chunk.
        scored = [checkpoint(score_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    columns = [torch.cat(column) for column in zip(*scored, strict=True)]
    log_probs = columns.pop(0)
    entropies = columns.pop(0) if with_entropy else None
    is_top, means = columns if with_imitation else (None, None)
    return log_probs, entropies, is_top, means
