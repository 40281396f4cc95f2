"""`Network`: one set of weights that turns token ids and pictures into hidden states, next-token scores and values.

Positions and the cache are arguments, never state kept in the model, so that a pass depends on nothing that ran
before it. Sampling and learning go through the same functions here; that their probabilities agree rests on it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from palaestra.policy.vlm.lora import in_vision_tower
from palaestra.policy.vlm.memory import Memory
from palaestra.policy.vlm.picture import Picture, PictureShop

__all__ = ["Network"]

Seen = tuple[Tensor, ...]
"""What the vision tower makes of one picture: its tokens, then those for deeper layers where a family has them."""


class Network:
    """A transformers model, its adapters if it has any, and a value head."""

    def __init__(
        self, model: Any, shop: PictureShop, *, wrapped: Any = None, memory: Memory[Seen], value_gradient: bool = False
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
