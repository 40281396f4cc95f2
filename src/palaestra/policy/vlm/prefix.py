"""`Prefix`: prompts that went through the network, ready to be continued; each distinct one went through once.

Episodes of a group begin on the same screen with the same words. Their prompts are thousands of tokens for a large
model, their answers a few dozen, so running a shared prompt once is most of the cost of sampling and of learning saved.
Gradients flow through the shared part as through separate ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palaestra.policy.vlm.network import Network
from palaestra.policy.vlm.prompt import Prompt

__all__ = ["Prefix", "distinct", "run_prompts"]


@dataclass
class Prefix:
    """Where B answers begin."""

    cache: Any
    """Keys and values of the prompts, a row per answer."""
    mask: Tensor
    """[B, L]: 1 where there is a token; padding is on the left, so that the last column is every row's last token."""
    next: Tensor
    """[B]: the position of the first token to come."""
    flat: bool
    """Whether positions are [B, T], not [3, B, T]."""
    last: Tensor
    """[B, H]: the hidden state of the last prompt token, which predicts the first of the answer."""

    def positions(self, count: int) -> Tensor:
        """Those of the next `count` tokens of every row."""
        positions = self.next.unsqueeze(-1) + torch.arange(count, device=self.next.device)
        return positions if self.flat else positions.expand(3, -1, -1)


def distinct(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[int]]:
    """The prompts without repetitions, and which of them each one is."""
    found: dict[Any, int] = {}
    firsts: list[Prompt] = []
    places = []
    for prompt in prompts:
        key = (prompt.ids.tobytes(), tuple(picture.key for picture in prompt.pictures))
        if key not in found:
            found[key] = len(firsts)
            firsts.append(prompt)
        places.append(found[key])
    return firsts, places


def run_prompts(network: Network, prompts: Sequence[Prompt], padding: int) -> Prefix:
    """Run the prompts, one pass for all."""
    from transformers import DynamicCache

    firsts, places = distinct(prompts)
    length = max(len(prompt.ids) for prompt in firsts)
    ids = torch.full((len(firsts), length), padding)
    mask = torch.zeros(len(firsts), length, dtype=torch.long)
    for row, prompt in enumerate(firsts):
        own = torch.from_numpy(prompt.ids.astype(np.int64))
        ids[row, length - len(own) :] = own
        mask[row, length - len(own) :] = 1
    ids, mask = ids.to(network.device), mask.to(network.device)
    pictures = [picture for prompt in firsts for picture in prompt.pictures]
    positions, following = network.positions(ids, mask, pictures)
    cache = DynamicCache(config=network.model.config.get_text_config())
    last = network.hidden(ids, mask, positions, pictures=pictures, cache=cache)[:, -1]
    if len(firsts) < len(prompts):
        rows = torch.tensor(places, device=ids.device)
        cache.batch_select_indices(rows)
        mask, following, last = mask[rows], following[rows], last[rows]
    return Prefix(cache, mask, following, positions.dim() == 2, last)
