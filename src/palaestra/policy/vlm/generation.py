"""Token-by-token generation of several replies at once, with the exact probability of every token.

We do not use transformers' `generate`. Each request has its own random numbers, so that its reply does not depend on
the rest of the batch. The distribution is not truncated, except for tokens that can never be learned from. The
recorded log-probability is that of the distribution the token was sampled from.
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

# The largest number whose product with a sum of probabilities is certain to be below that sum.
BELOW_ONE = 1 - 1e-12


@dataclass(frozen=True)
class SampleRequest:
    """A prompt to reply to, and the seed of the reply."""

    prompt: Prompt
    seed: int


@dataclass(frozen=True, eq=False)
class Completion:
    """A reply, with everything the learner needs to know about how it was sampled."""

    token_ids: npt.NDArray[np.int32]
    """Sampled tokens, including the end token."""
    log_probs: npt.NDArray[np.float32]
    """Log-probability of each token under the distribution it was sampled from."""
    versions: npt.NDArray[np.int32]
    """Policy version of the weights that sampled each token."""
    text: str
    """Without the end token."""
    ended: bool
    """Whether the model ended the reply; False if it was cut at the token limit."""
    fingerprint: str
    """Fingerprint of the acting weights."""


@dataclass(frozen=True)
class TokenRules:
    """Which tokens may be drawn, and which end a reply."""

    ends: frozenset[int]
    forbidden: tuple[int, ...]
    """Placeholders of images and videos, which cannot be decoded as text, and ids beyond the tokenizer's vocabulary."""
    padding: int

    def mask_forbidden(self, logits: Tensor) -> Tensor:
        """Logits with those of forbidden tokens set to -inf."""
        if not self.forbidden:
            return logits
        return logits.index_fill(-1, torch.tensor(self.forbidden, device=logits.device), float("-inf"))


@dataclass(eq=False)
class GeneratedTokens:
    """The tokens of one reply and their log-probabilities."""

    token_ids: list[int]
    log_probs: list[float]
    ended: bool


def generate_tokens(
    network: Network, requests: Sequence[SampleRequest], rules: TokenRules, *, temperature: float, max_new_tokens: int
) -> list[GeneratedTokens]:
    """Generate a reply to each request, in one batch. At temperature 0 the most likely token is chosen."""
    if not requests:
        return []
    longest = max(len(request.prompt.ids) for request in requests)
    if longest + max_new_tokens > network.max_length:
        lengths = f"a prompt of {longest} tokens and a reply of {max_new_tokens}"
        reason = f"{lengths} exceed the model's {network.max_length}"
        remedy = "Lower model.history, model.max_new_tokens or the size of the pictures"
        raise ConfigError("model.history", longest, reason, remedy)
    uniform = np.stack([np.random.default_rng(request.seed).random(max_new_tokens) for request in requests])
    replies = [GeneratedTokens([], [], ended=False) for _ in requests]
    with torch.no_grad():
        batch = _DecodingBatch(network, requests, rules)
        for step in range(max_new_tokens):
            logits = rules.mask_forbidden(batch.logits)
            tokens, log_probs = _sample_tokens(logits, temperature, uniform[batch.rows, step])
            unfinished = []
            for place, (token, log_prob) in enumerate(zip(tokens.tolist(), log_probs.tolist(), strict=True)):
                reply = replies[batch.rows[place]]
                if reply.ended:
                    continue
                reply.token_ids.append(token)
                reply.log_probs.append(log_prob)
                reply.ended = token in rules.ends
                if not reply.ended:
                    unfinished.append(place)
            if not unfinished or step == max_new_tokens - 1:
                break
            batch.advance(tokens, unfinished)
    return replies


def _sample_tokens(logits: Tensor, temperature: float, uniform: npt.NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability; `uniform` holds one number in [0, 1) per row."""
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros_like(tokens, dtype=torch.float32)
    log_probs = torch.log_softmax(logits / temperature, -1)
    # Inverse transform sampling. In float64: over a large vocabulary the rounding of float32 sums exceeds the
    # probability of a rare token.
    cumulative = log_probs.double().exp().cumsum(-1)
    wanted = torch.as_tensor(uniform, device=logits.device).clamp_max(BELOW_ONE).unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, wanted, right=True)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)


class _DecodingBatch:
    """The cache and the next-token logits of the replies that are being generated."""

    def __init__(self, network: Network, requests: Sequence[SampleRequest], rules: TokenRules) -> None:
        self._network = network
        self.rows = list(range(len(requests)))
        self._prompts = run_prompts(network, [request.prompt for request in requests], rules.padding)
        self.logits = network.logits(self._prompts.last_hidden)

    def advance(self, tokens: Tensor, unfinished: list[int]) -> None:
        """Feed the tokens. Finished rows are dropped once they are half of the batch, and padded until then."""
        state = self._prompts
        if 2 * len(unfinished) <= len(self.rows):
            keep = torch.tensor(unfinished, device=tokens.device)
            state.cache.batch_select_indices(keep)
            state.mask, state.next_position, tokens = state.mask[keep], state.next_position[keep], tokens[keep]
            self.rows = [self.rows[place] for place in unfinished]
        state.mask = torch.cat([state.mask, torch.ones_like(state.mask[:, :1])], -1)
        positions = state.positions(1)
        hidden = self._network.hidden_states(tokens.unsqueeze(-1), state.mask, positions, cache=state.cache)
        state.next_position = state.next_position + 1
        self.logits = self._network.logits(hidden[:, -1])
