"""`Network`: one set of weights that turns token ids and pictures into hidden states, next-token logits and values.

Positions and the key-value cache are arguments, never state kept in the model, so that a forward pass does not depend
on earlier ones. Sampling and learning call the same functions, so that their probabilities agree.
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
from torch.nn.utils.rnn import pad_sequence

from palaestra.errors import CheckpointError
from palaestra.policy.fingerprint import weights_fingerprint
from palaestra.policy.vlm.lora import in_vision_tower
from palaestra.policy.vlm.picture import LRUCache, Picture, PicturePreprocessor
from palaestra.policy.vlm.prompt import Ints, Prompt
from palaestra.policy.weight_sync import copy_weights, whole_tensor

NO_TOKEN = -1
"""In place of the image token of a model that takes text only."""

CPU_PATCHES = 2100
"""Patches that go through the vision tower at once on a CPU. More of them leave its cache: sixteen small screens in one
call take a quarter more processor time than four by four."""

ImageFeatures = tuple[Tensor, ...]
"""The vision tower's output for one picture: its tokens, then those for deeper layers where a family has them."""


class Network:
    """A transformers model, its adapters if it has any, and a value head."""

    def __init__(
        self,
        model: Any,
        preprocessor: PicturePreprocessor,
        *,
        wrapped: Any = None,
        feature_cache: LRUCache[ImageFeatures],
        value_gradient: bool = False,
    ) -> None:
        """`wrapped` is PEFT's wrapper of the model; None if it has no adapters."""
        self.model, self.wrapped = model, wrapped
        self.preprocessor, self.feature_cache = preprocessor, feature_cache
        self.value_gradient = value_gradient
        self.sharded = False
        """Whether several processes have a part of the weights each; each forward pass is then an exchange."""
        text = model.config.get_text_config()
        self.image_token = int(getattr(model.config, "image_token_id", NO_TOKEN))
        self.vocabulary = int(text.vocab_size)
        self.max_length = int(text.max_position_embeddings)
        self._softcap = getattr(text, "final_logit_softcapping", None)
        self.value_head = nn.Linear(int(text.hidden_size), 1).to(device=model.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        # While the vision tower is frozen, its features can be cached.
        self._tower_frozen = not any(p.requires_grad for name, p in model.named_parameters() if in_vision_tower(name))
        self._takes_features = "mm_encoder_outputs" in inspect.signature(model.base_model.forward).parameters
        self._dropouts = [part for name, part in model.named_modules() if "lora_dropout" in name]
        self._recomputed = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes layers (gradient checkpointing); such a pass cannot use a cache."""
        return torch.is_grad_enabled() and bool(getattr(self.model, "is_gradient_checkpointing", False))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        device: torch.device = self.value_head.weight.device
        return device

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All weights by name; those of the value head start with `value_head`."""
        yield from self.model.named_parameters()
        for name, weight in self.value_head.named_parameters():
            yield f"value_head.{name}", weight

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trainable weights by name."""
        return {name: weight for name, weight in self.named_parameters() if weight.requires_grad}

    def whole_trainable(self) -> dict[str, Tensor]:
        """The trainable weights by name, whole ones if they are sharded; then all processes call this."""
        return {name: whole_tensor(weight.detach()) for name, weight in self.trainable().items()}

    def load_trainable(self, state: Mapping[str, Tensor], *, place: str = "weights") -> None:
        """Replace the values of the trainable weights; `CheckpointError`, with nothing changed, if they do not fit."""
        own = self.trainable()
        remedy = "Use the section model of the configuration they were trained with"
        missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or extra:
            names = f"missing {missing[:2] or 'nothing'}, unexpected {extra[:2] or 'nothing'}"
            reason = f"they are of another model or other adapters ({names})"
            raise CheckpointError(place, f"{len(state)} tensors", reason, remedy)
        for name, weight in own.items():
            if weight.shape != state[name].shape:
                reason = f"has shape {tuple(state[name].shape)}, this model needs {tuple(weight.shape)}"
                raise CheckpointError(place, name, reason, remedy)
        copy_weights(state, own)

    def clone(self, device: torch.device | None = None) -> Network:
        """A network with copies of the trainable weights; all others are shared, unless it is on another device."""
        shared: dict[int, Any] = {id(self.preprocessor): self.preprocessor}
        elsewhere = device is not None and device != self.device
        if elsewhere:
            shared[id(self.feature_cache)] = LRUCache(self.feature_cache.capacity_bytes)
        else:
            shared |= {id(p): p for _, p in self.named_parameters() if not p.requires_grad}
            shared |= {id(part): part for part in (*self.model.buffers(), self.feature_cache)}
        other = copy.deepcopy(self, shared)
        if elsewhere:
            other.model.to(device)
            other.value_head.to(device)
        for weight in other.trainable().values():
            weight.requires_grad_(False)
        return other

    def without_adapters(self) -> AbstractContextManager[Any]:
        """Context in which the adapters are disabled."""
        return nullcontext() if self.wrapped is None else self.wrapped.disable_adapter()

    def set_dropout(self, on: bool) -> None:
        """Switch the dropout of the adapters on or off."""
        for part in self._dropouts:
            part.training = on

    def positions(self, ids: Tensor, mask: Tensor, pictures: Sequence[Picture]) -> tuple[Tensor, Tensor]:
        """Positions of the tokens ([B, T], or [3, B, T] for models with 2D image positions) and the next ones [B].

        Padding may be on either side.
        """
        base = self.model.base_model
        lengths = mask.sum(-1)
        if not hasattr(base, "get_rope_index"):
            return (mask.cumsum(-1) - 1).clamp_min(0), lengths
        positions, delta = base.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.image_token).int(),
            image_grid_thw=self._grid(pictures) if pictures else None,
            attention_mask=mask,
        )
        return positions, lengths + delta.squeeze(-1).to(lengths.device)

    def hidden_states(
        self, ids: Tensor, mask: Tensor, positions: Tensor, *, pictures: Sequence[Picture] = (), cache: Any = None
    ) -> Tensor:
        """Last hidden states [B, T, H]; with a cache, of the tokens that follow it."""
        images: dict[str, Any] = {}
        if pictures and self._takes_features:
            images = {"mm_encoder_outputs": {"image": self._encode_pictures(pictures)}}
        elif pictures:
            images = {"pixel_values": self._pixels(pictures), "image_grid_thw": self._grid(pictures)}
        for layer in self._recomputed:
            # A layer that recomputes drops the cache, so only passes with gradients may switch it on. The layer checks
            # its own flag; its sub-modules, such as dropout, stay in eval mode.
            layer.training = torch.is_grad_enabled()
        out = self.model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            **images,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits in float32, [..., V], before any temperature."""
        logits: Tensor = self.model.get_output_embeddings()(hidden).float()
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def value(self, hidden: Tensor) -> Tensor:
        """Value of the rest of the episode, [...]."""
        features = hidden if self.value_gradient else hidden.detach()
        value: Tensor = self.value_head(features.float())
        return value.squeeze(-1)

    def _encode_pictures(self, pictures: Sequence[Picture]) -> SimpleNamespace:
        """The vision tower's output; each distinct picture is encoded once."""
        features: dict[Any, ImageFeatures] = {}
        fresh: list[Picture] = []
        for picture in {picture.key: picture for picture in pictures}.values():
            cached = self.feature_cache.get(picture.key) if self._tower_frozen else None
            if cached is None:
                fresh.append(picture)
            else:
                features[picture.key] = cached
        for some in self._split_pictures(fresh):
            with torch.no_grad() if self._tower_frozen else nullcontext():
                out = self.model.base_model.get_image_features(self._pixels(some), self._grid(some), return_dict=True)
            deeper = list(getattr(out, "deepstack_features", None) or [])
            for picture, *parts in zip(some, out.pooler_output, *deeper, strict=True):
                features[picture.key] = tuple(parts)
                if self._tower_frozen:
                    # A slice would keep the whole batch's tensor alive.
                    copies = tuple(part.clone() for part in parts)
                    self.feature_cache.put(picture.key, copies, sum(part.nbytes for part in copies))
        columns = list(zip(*(features[picture.key] for picture in pictures), strict=True))
        return SimpleNamespace(pooler_output=columns[0], deepstack_features=columns[1:])

    def _split_pictures(self, pictures: Sequence[Picture]) -> list[list[Picture]]:
        """The pictures in parts that go through the vision tower at once."""
        if self.device.type != "cpu":
            return [list(pictures)] if pictures else []
        parts: list[list[Picture]] = []
        room = 0
        for picture in pictures:
            patches = picture.size[0] * picture.size[1] // self.preprocessor.patch**2
            if patches > room:
                parts.append([])
                room = CPU_PATCHES
            parts[-1].append(picture)
            room -= patches
        return parts

    def _pixels(self, pictures: Sequence[Picture]) -> Tensor:
        return torch.cat([self.preprocessor.patches(picture) for picture in pictures]).to(self.device)

    def _grid(self, pictures: Sequence[Picture]) -> Tensor:
        return torch.tensor([self.preprocessor.grid(picture) for picture in pictures], device=self.device)


def sampling_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Fingerprint of the weights that replies depend on: all but the value head."""
    return weights_fingerprint({name: weight for name, weight in weights.items() if not name.startswith("value_head")})


@dataclass
class PromptCache:
    """Prompts that went through the network, ready to be continued by B replies.

    Episodes of a group start with the same screen and instruction, and prompts are much longer than replies. Running a
    shared prompt once saves most of the cost of sampling and learning. Gradients flow through the shared part.
    """

    cache: Any
    """Keys and values of the prompts, one row per reply."""
    mask: Tensor
    """[B, L]: 1 where there is a token; padding is on the left, so the last column is the last token of every row."""
    next_position: Tensor
    """[B]: the position of the first reply token."""
    flat: bool
    """Whether positions are [B, T], not [3, B, T]."""
    last_hidden: Tensor
    """[B, H]: hidden state of the last prompt token, which predicts the first reply token."""

    def positions(self, count: int) -> Tensor:
        """Positions of the next `count` tokens of every row."""
        positions = self.next_position.unsqueeze(-1) + torch.arange(count, device=self.next_position.device)
        return positions if self.flat else positions.expand(3, -1, -1)


def deduplicate_prompts(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[int]]:
    """The distinct prompts, and the index of each prompt among them."""
    index: dict[Any, int] = {}
    unique: list[Prompt] = []
    places = []
    for prompt in prompts:
        key = (prompt.ids.tobytes(), tuple(picture.key for picture in prompt.pictures))
        if key not in index:
            index[key] = len(unique)
            unique.append(prompt)
        places.append(index[key])
    return unique, places


def pad_tokens(
    sequences: Sequence[Ints], padding: int, device: torch.device, *, side: str = "right"
) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], and a mask that is 1 where there is a token."""
    rows = [torch.from_numpy(row.astype(np.int64)) for row in sequences]
    ids = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side=side)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return ids.to(device), mask.to(device)


def run_prompts(network: Network, prompts: Sequence[Prompt], padding: int) -> PromptCache:
    """Run the distinct prompts in one forward pass."""
    from transformers import DynamicCache

    unique, places = deduplicate_prompts(prompts)
    ids, mask = pad_tokens([prompt.ids for prompt in unique], padding, network.device, side="left")
    pictures = [picture for prompt in unique for picture in prompt.pictures]
    positions, following = network.positions(ids, mask, pictures)
    cache = DynamicCache(config=network.model.config.get_text_config())
    last = network.hidden_states(ids, mask, positions, pictures=pictures, cache=cache)[:, -1]
    if len(unique) < len(prompts):
        rows = torch.tensor(places, device=ids.device)
        cache.batch_select_indices(rows)
        mask, following, last = mask[rows], following[rows], last[rows]
    return PromptCache(cache, mask, following, positions.dim() == 2, last)
