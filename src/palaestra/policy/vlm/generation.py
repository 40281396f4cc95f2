"""Answers drawn from a network, several at once, with the exact probability of every token.

The loop is our own: each request has its own random numbers, so that its answer does not depend on who else is in the
batch; nothing is cut off the distribution except tokens that can never be learned from; and what is recorded is the
log-probability under the distribution that was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from palaestra.errors import ConfigError
from palaestra.policy.vlm.network import Network, run_prompts
from palaestra.policy.vlm.prompt import Prompt

__all__ = ["Completion", "Drawn", "SampleRequest", "TokenRules", "draw"]

# The largest number below 1 that times a sum of probabilities is surely below that sum.
BELOW_ONE = 1 - 1e-12


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to answer, and the randomness to answer it with."""

    prompt: Prompt
    seed: int


@dataclass(frozen=True, eq=False)
class Completion:
    """One answer."""

    token_ids: npt.NDArray[np.int32]
    """What was drawn, the end token included."""
    log_probs: npt.NDArray[np.float32]
    """Of each token, under the distribution it was drawn from."""
    versions: npt.NDArray[np.int32]
    """Which published weights each token was drawn from."""
    text: str
    """Without the end token."""
    ended: bool
    """Whether the model ended it; False when it was cut."""
    fingerprint: str
    """Of the weights that were drawn from, as they lie in memory."""


@dataclass(frozen=True)
class TokenRules:
    """What may be drawn, and what ends an answer."""

    ends: frozenset[int]
    forbidden: tuple[int, ...]
    """Placeholders of pictures and videos: an answer that contains one cannot be read back as text. And numbers
    beyond the tokenizer's."""
    padding: int

    def allowed(self, scores: Tensor) -> Tensor:
        """Scores with what is forbidden made impossible."""
        if not self.forbidden:
            return scores
        return scores.index_fill(-1, torch.tensor(self.forbidden, device=scores.device), float("-inf"))


@dataclass(frozen=True, eq=False)
class Drawn:
    """Tokens of one request and their log-probabilities."""

    token_ids: list[int]
    log_probs: list[float]
    ended: bool


def draw(
    network: Network, requests: Sequence[SampleRequest], rules: TokenRules, *, temperature: float, max_new_tokens: int
) -> list[Drawn]:
    """An answer to each request, all in one batch. At temperature 0, the likeliest token each time."""
    if not requests:
        return []
    _refuse_what_is_too_long(network, requests, max_new_tokens)
    chance = np.stack([np.random.default_rng(request.seed).random(max_new_tokens) for request in requests])
    drawn = [Drawn([], [], ended=False) for _ in requests]
    with torch.no_grad():
        state = _Decoding(network, requests, rules)
        for step in range(max_new_tokens):
            tokens, log_probs = _choose(rules.allowed(state.scores), temperature, chance[state.rows, step])
            going = []
            for place, (token, log_prob) in enumerate(zip(tokens.tolist(), log_probs.tolist(), strict=True)):
                one = drawn[state.rows[place]]
                if one.ended:
                    continue
                one.token_ids.append(token)
                one.log_probs.append(log_prob)
                if token in rules.ends:
                    drawn[state.rows[place]] = Drawn(one.token_ids, one.log_probs, ended=True)
                else:
                    going.append(place)
            if not going or step == max_new_tokens - 1:
                break
            state.advance(tokens, going)
    return drawn


def _choose(scores: Tensor, temperature: float, chance: npt.NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability; `chance` holds one number in [0, 1) per row."""
    if temperature == 0:
        tokens = scores.argmax(-1)
        return tokens, torch.zeros_like(tokens, dtype=torch.float32)
    log_probs = torch.log_softmax(scores / temperature, -1)
    # The first token at which the sum of probabilities exceeds the number; in float64, or the sum over a large
    # vocabulary would be off by more than a rare token's probability.
    total = log_probs.double().exp().cumsum(-1)
    wanted = torch.as_tensor(chance, device=scores.device).clamp_max(BELOW_ONE).unsqueeze(-1) * total[:, -1:]
    tokens = torch.searchsorted(total, wanted, right=True)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)


def _refuse_what_is_too_long(network: Network, requests: Sequence[SampleRequest], max_new_tokens: int) -> None:
    longest = max(len(request.prompt.ids) for request in requests)
    if longest + max_new_tokens > network.longest:
        raise ConfigError(
            "model.history", longest,
            f"a prompt of {longest} tokens and an answer of {max_new_tokens} exceed the model's {network.longest}",
            "Lower model.history, model.max_new_tokens or the size of the pictures",
        )  # fmt: skip


class _Decoding:
    """A batch of prompts on the way: their cache, and the scores of the next token of each row."""

    def __init__(self, network: Network, requests: Sequence[SampleRequest], rules: TokenRules) -> None:
        self.network = network
        self.rows = list(range(len(requests)))
        self.prefix = run_prompts(network, [request.prompt for request in requests], rules.padding)
        self.scores = network.scores(self.prefix.last)

    def advance(self, tokens: Tensor, going: list[int]) -> None:
        """Feed the tokens. Rows that ended are dropped once they are half of the batch, and padded until then."""
        on = self.prefix
        if 2 * len(going) <= len(self.rows):
            keep = torch.tensor(going, device=tokens.device)
            on.cache.batch_select_indices(keep)
            on.mask, on.next, tokens = on.mask[keep], on.next[keep], tokens[keep]
            self.rows = [self.rows[place] for place in going]
        on.mask = torch.cat([on.mask, torch.ones_like(on.mask[:, :1])], -1)
        hidden = self.network.hidden(tokens.unsqueeze(-1), on.mask, on.positions(1), cache=on.cache)
        on.next = on.next + 1
        self.scores = self.network.scores(hidden[:, -1])
