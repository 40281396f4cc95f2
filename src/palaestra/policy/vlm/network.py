"""`Network`: one set of weights that turns token ids and pictures into hidden states, next-token scores and values.

Positions and the cache are arguments, never state kept in the model, so that a pass depends on nothing that ran
before it. Sampling and learning go through the same functions here; that their probabilities agree rests on it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palaestra.errors import CheckpointError
from palaestra.policy.fingerprint import weights_fingerprint
from palaestra.policy.vlm.lora import in_vision_tower
from palaestra.policy.vlm.picture import Memory, Picture, PicturePreprocessor
from palaestra.policy.vlm.prompt import Prompt
from palaestra.policy.weight_sync import copy_weights

__all__ = [
    "Network",
    "Prefix",
    "distinct",
    "learned_fingerprint",
    "load_trainable_state",
    "run_prompts",
    "trainable_state",
]


Seen = tuple[Tensor, ...]
"""What the vision tower makes of one picture: its tokens, then those for deeper layers where a family has them."""


class Network:
    """A transformers model, its adapters if it has any, and a value head."""

    def __init__(
        self,
        model: Any,
        shop: PicturePreprocessor,
        *,
        wrapped: Any = None,
        memory: Memory[Seen],
        value_gradient: bool = False,
    ) -> None:
        self.model, self.wrapped, self.shop, self.memory = model, wrapped, shop, memory
        self.value_gradient = value_gradient
        text = model.config.get_text_config()
        self.image_token = int(model.config.image_token_id)
        self.vocabulary = int(text.vocab_size)
        self.longest = int(text.max_position_embeddings)
        self.softcap = getattr(text, "final_logit_softcapping", None)
        self.value_head = nn.Linear(int(text.hidden_size), 1).to(device=model.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        # Pictures mean the same until the tower learns, so what it saw once need not be computed again.
        self.sees_the_same = not any(p.requires_grad for name, p in model.named_parameters() if in_vision_tower(name))
        self.takes_features = "mm_encoder_outputs" in inspect.signature(model.base_model.forward).parameters
        self.dropouts = [part for name, part in model.named_modules() if "lora_dropout" in name]

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes layers again instead of keeping them; such a pass can keep no cache."""
        return torch.is_grad_enabled() and bool(getattr(self.model, "is_gradient_checkpointing", False))

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        device: torch.device = self.value_head.weight.device
        return device

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight with its name; the value head's start with `value_head`."""
        yield from self.model.named_parameters()
        for name, weight in self.value_head.named_parameters():
            yield f"value_head.{name}", weight

    def trainable(self) -> dict[str, nn.Parameter]:
        """The weights that learn."""
        return {name: weight for name, weight in self.named_parameters() if weight.requires_grad}

    def twin(self) -> Network:
        """Another network with copies of the weights that learn; all others are shared, and cost nothing."""
        shared: dict[int, Any] = {id(p): p for _, p in self.named_parameters() if not p.requires_grad}
        shared |= {id(buffer): buffer for buffer in self.model.buffers()}
        shared |= {id(self.shop): self.shop, id(self.memory): self.memory}
        other = copy.deepcopy(self, shared)
        for weight in other.trainable().values():
            weight.requires_grad_(False)
        return other

    def without_adapters(self) -> AbstractContextManager[Any]:
        """While it lasts the model is what it was before it had adapters."""
        return nullcontext() if self.wrapped is None else self.wrapped.disable_adapter()

    def set_dropout(self, on: bool) -> None:
        """Adapters drop inputs in a pass that is learned from, and in no other."""
        for part in self.dropouts:
            part.training = on

    def positions(self, ids: Tensor, mask: Tensor, pictures: Sequence[Picture]) -> tuple[Tensor, Tensor]:
        """Positions of the tokens ([B, T], or [3, B, T] where pictures count in two directions) and the next ones [B].

        Padding may be on either side.
        """
        base = self.model.base_model
        counted = mask.sum(-1)
        if not hasattr(base, "get_rope_index"):
            return (mask.cumsum(-1) - 1).clamp_min(0), counted
        placed, delta = base.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.image_token).int(),
            image_grid_thw=self._grid(pictures) if pictures else None,
            attention_mask=mask,
        )
        return placed, counted + delta.squeeze(-1).to(counted.device)

    def hidden(
        self, ids: Tensor, mask: Tensor, positions: Tensor, *, pictures: Sequence[Picture] = (), cache: Any = None
    ) -> Tensor:
        """Last hidden states [B, T, H]; with a cache, of the tokens that follow what is in it."""
        seen: dict[str, Any] = {}
        if pictures and self.takes_features:
            seen = {"mm_encoder_outputs": {"image": self._look(pictures)}}
        elif pictures:
            seen = {"pixel_values": self._pixels(pictures), "image_grid_thw": self._grid(pictures)}
        out = self.model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
            use_cache=cache is not None, **seen,
        )  # fmt: skip
        hidden: Tensor = out.last_hidden_state
        return hidden

    def scores(self, hidden: Tensor) -> Tensor:
        """Next-token scores in float32, [..., V], before any temperature."""
        scores: Tensor = self.model.get_output_embeddings()(hidden).float()
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores

    def value(self, hidden: Tensor) -> Tensor:
        """What the rest of the episode is worth, [...]."""
        features = hidden if self.value_gradient else hidden.detach()
        value: Tensor = self.value_head(features.float())
        return value.squeeze(-1)

    def _look(self, pictures: Sequence[Picture]) -> SimpleNamespace:
        """The vision tower's output for the pictures, each computed once however often it is shown."""
        held: dict[Any, Seen] = {}
        fresh: list[Picture] = []
        for picture in {picture.key: picture for picture in pictures}.values():
            known = self.memory.get(picture.key) if self.sees_the_same else None
            if known is None:
                fresh.append(picture)
            else:
                held[picture.key] = known
        if fresh:
            with torch.no_grad() if self.sees_the_same else nullcontext():
                out = self.model.base_model.get_image_features(self._pixels(fresh), self._grid(fresh), return_dict=True)
            deeper = list(getattr(out, "deepstack_features", None) or [])
            for picture, *parts in zip(fresh, out.pooler_output, *deeper, strict=True):
                held[picture.key] = tuple(parts)
                if self.sees_the_same:
                    # A slice would keep the whole batch's tensor alive.
                    kept = tuple(part.clone() for part in parts)
                    self.memory.put(picture.key, kept, sum(part.nbytes for part in kept))
        columns = list(zip(*(held[picture.key] for picture in pictures), strict=True))
        return SimpleNamespace(pooler_output=columns[0], deepstack_features=columns[1:])

    def _pixels(self, pictures: Sequence[Picture]) -> Tensor:
        return torch.cat([self.shop.patches(picture).pixels for picture in pictures]).to(self.device)

    def _grid(self, pictures: Sequence[Picture]) -> Tensor:
        step = self.shop.patch
        return torch.tensor([[1, p.size[1] // step, p.size[0] // step] for p in pictures], device=self.device)


def trainable_state(network: Network) -> dict[str, Tensor]:
    """Copies of the weights that learn, by name, on the CPU."""
    return {name: weight.detach().cpu().clone() for name, weight in network.trainable().items()}


def load_trainable_state(network: Network, state: Mapping[str, Tensor], *, place: str = "weights") -> None:
    """Give the network other values of the weights that learn; refuses, before changing anything, what does not fit."""
    own = network.trainable()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or extra:
        raise CheckpointError(
            place, f"{len(state)} tensors",
            f"they are of another model or other adapters (missing {missing[:2] or 'nothing'}, "
            f"unexpected {extra[:2] or 'nothing'})",
            "Use the section model of the configuration they were trained with",
        )  # fmt: skip
    for name, weight in own.items():
        if weight.shape != state[name].shape:
            raise CheckpointError(
                place, name, f"has shape {tuple(state[name].shape)}, this model needs {tuple(weight.shape)}",
                "Use the section model of the configuration they were trained with",
            )  # fmt: skip
    copy_weights(state, own)


def learned_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Differs when the weights an answer is drawn from do; the value head is none of them."""
    return weights_fingerprint({name: weight for name, weight in weights.items() if not name.startswith("value_head")})


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
