"""Train the language model to act on synthetic pages: what to click, what to type and when.

The loss has four parts: the tokens of the grammar, copied tokens, coordinates against their soft labels, and the
attention of the copying heads against their sources. Without the last part the heads take many times as long to find
what to copy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from palaestra.errors import ConfigError
from palaestra.policy.device import has_bfloat16_instructions
from palaestra.policy.screen_reader.architecture import COPY_HEAD, FOCUS_HEAD, HEAD_SIZE, START_HEAD, X_HEAD, Y_HEAD
from palaestra.policy.screen_reader.examples import Example, ExampleBatch, ExampleBuilder, collate, jitter
from palaestra.policy.screen_reader.pages import Goal
from palaestra.policy.screen_reader.symbols import Box, Detections, read_in_order
from palaestra.policy.screen_reader.tokenizer import coordinate_ids

_GRAMMAR_WEIGHT, _ATTENTION_WEIGHT = 0.5, 0.5
_MAX_TOKENS = 400
"""Longer examples are left out: they take most of the time and are few."""
_GOALS_PER_PAGE = 2
_LENGTH_NOISE = 8
"""Examples whose lengths differ by less than this are in random order."""
_LABELLED_HEADS = {
    "look_click": (X_HEAD, Y_HEAD),
    "look_start": (START_HEAD,),
    "look_copy": (COPY_HEAD,),
    "look_focus": (FOCUS_HEAD,),
}
"""Layer and head of those whose attention has labels, by the name of the metric."""


class LanguageTrainer:
    """Takes training steps on batches of examples."""

    def __init__(self, model: Any, tokenizer: Any, *, learning_rate: float, steps: int) -> None:
        self.model, self._rate, self._steps, self._step = model, learning_rate, steps, 0
        x, y = coordinate_ids(tokenizer)
        self._coordinates = torch.tensor([x, y])
        self._optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
        self._inputs: dict[int, dict[str, Any]] = {}
        """Inputs of the attention of layers that have heads with labels."""
        layers = model.model.language_model.layers
        self._hooks = [
            layers[layer].self_attn.register_forward_pre_hook(partial(self._capture, layer), with_kwargs=True)
            for layer in {layer for heads in _LABELLED_HEADS.values() for layer, _ in heads}
        ]
        self.averages: dict[str, float] = {}

    def close(self) -> None:
        """Detach from the model."""
        for hook in self._hooks:
            hook.remove()

    def _capture(self, layer: int, module: Any, arguments: Any, named: dict[str, Any]) -> None:
        self._inputs[layer] = named if "hidden_states" in named else {**named, "hidden_states": arguments[0]}

    def step(self, batch: ExampleBatch) -> None:
        """Train on one batch."""
        progress = self._step / self._steps
        rate = self._rate * min(1.0, (self._step + 1) / 100) * max(0.03, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._step += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16_instructions()):
            loss, metrics = self.loss(batch)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        for name, value in metrics.items():
            self.averages[name] = 0.99 * self.averages.get(name, value) + 0.01 * value

    def loss(self, batch: ExampleBatch) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics of one batch."""
        grid = torch.tensor([[1, count, 1] for count in batch.counts])
        out = self.model.model(batch.ids, attention_mask=batch.mask, pixel_values=batch.rows, image_grid_thw=grid)
        hidden = out.last_hidden_state[batch.at[:, 0], batch.at[:, 1]]
        log_probs = torch.log_softmax(self.model.lm_head(hidden).float(), -1)
        token_loss = -log_probs.gather(-1, batch.labels[:, None]).squeeze(-1)
        is_coordinate = torch.zeros(len(batch.labels), dtype=torch.bool)
        is_coordinate[batch.soft_at] = True
        grammar_loss = token_loss[~is_coordinate].mean()
        total = _GRAMMAR_WEIGHT * grammar_loss
        is_right = log_probs.argmax(-1) == batch.labels
        metrics = {"loss": float(grammar_loss.detach())}
        for name, head in (("started", START_HEAD), ("copied", COPY_HEAD)):
            copied = batch.attend_at[_has_head(batch, head)]
            if len(copied):
                # Mean over copied tokens: a wrong one spoils the whole text.
                total = total + token_loss[copied].mean()
                metrics[name] = float(is_right[copied].float().mean())
        if len(batch.soft):
            ids = self._coordinates.repeat(len(batch.soft) // 2, 1)
            predicted = log_probs[batch.soft_at].gather(-1, ids)
            entropy = -(batch.soft * batch.soft.clamp_min(1e-30).log()).sum(-1)
            distance = (-(batch.soft * predicted).sum(-1) - entropy).mean()
            total = total + distance
            metrics["coordinate_kl"] = float(distance.detach())
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), batch.at[1:, 0] != batch.at[:-1, 0]])
        metrics["action"] = float(is_right[is_first].float().mean())
        for name, heads in _LABELLED_HEADS.items():
            for head in heads:
                chosen = _has_head(batch, head)
                if chosen.any():
                    mass = (self._attention(batch, head, chosen) * batch.attend[chosen]).sum(-1)
                    total = total - _ATTENTION_WEIGHT * mass.clamp_min(1e-5).log().mean()
                    metrics[name] = float(mass.detach().mean())
        return total, metrics

    def _attention(self, batch: ExampleBatch, place: tuple[int, int], chosen: Tensor) -> Tensor:
        """Attention [A, T] of a head at the positions of the chosen labels."""
        layer, head = place
        attention = self.model.model.language_model.layers[layer].self_attn
        hidden = self._inputs[layer]["hidden_states"]
        cos, sin = self._inputs[layer]["position_embeddings"]
        count, length, _ = hidden.shape
        own = slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
        keys = functional.linear(hidden, attention.k_proj.weight[own], attention.k_proj.bias[own]).float()
        keys = _rotate(keys, cos, sin)
        row, column = batch.at[batch.attend_at[chosen]].T
        queries = functional.linear(hidden[row, column], attention.q_proj.weight[own], attention.q_proj.bias[own])
        cos, sin = cos.expand(count, -1, -1)[row, column], sin.expand(count, -1, -1)[row, column]
        scores = torch.einsum("atd,ad->at", keys[row], _rotate(queries.float(), cos, sin)) / math.sqrt(HEAD_SIZE)
        is_visible = (torch.arange(length) <= column[:, None]) & (batch.mask[row] > 0)
        return torch.softmax(scores.masked_fill(~is_visible, float("-inf")), -1)


def _has_head(batch: ExampleBatch, head: tuple[int, int]) -> Tensor:
    """Which labels are for this head, [A]."""
    return torch.tensor([one == head for one in batch.attend_head], dtype=torch.bool)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


@dataclass(frozen=True, eq=False)
class LanguagePage:
    """A page for the language stage."""

    size: tuple[int, int]
    """The width and height of the screen in pixels."""
    goals: Sequence[Goal]
    detections: Detections
    places: Mapping[str, Box]
    """Boxes of the elements that goals refer to."""
    is_exact: bool
    """Whether the detections are the labels of the browser; they are then moved a little, as a tower's are."""


def pretrain_language(
    model: Any,
    tokenizer: Any,
    blocks: Iterator[Sequence[LanguagePage]],
    *,
    steps: int,
    tokens: int,
    learning_rate: float,
    blur_px: float,
    seed: int,
    log: Callable[[str], None],
) -> dict[str, float]:
    """Train on the goals of blocks of pages, in batches of about `tokens`; returns averages of the metrics."""
    # Attention with explicit matrices: in bfloat16 its backward pass is faster on a CPU.
    model.model.language_model.set_attn_implementation("eager")
    builder = ExampleBuilder(tokenizer, blur_px=blur_px)
    trainer = LanguageTrainer(model, tokenizer, learning_rate=learning_rate, steps=steps)
    batches = draw_batches(builder, blocks, tokens=tokens, seed=seed)
    for step in range(steps):
        trainer.step(collate(next(batches), tokenizer.pad_token_id))
        if step % 100 == 99 or step == steps - 1:
            averages = ", ".join(f"{name} {value:.3f}" for name, value in trainer.averages.items())
            log(f"{step + 1}/{steps}: {averages}")
    trainer.close()
    model.model.language_model.set_attn_implementation("sdpa")
    return trainer.averages


def draw_batches(
    builder: ExampleBuilder, blocks: Iterator[Sequence[LanguagePage]], *, tokens: int, seed: int
) -> Iterator[list[Example]]:
    """Batches of examples of similar length, from one block of pages after the other."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    for pages in blocks:
        examples: list[Example] = []
        for page in pages:
            sequence = read_in_order(jitter(page.detections, noise) if page.is_exact else page.detections)
            goals = page.goals if len(page.goals) <= _GOALS_PER_PAGE else rng.sample(page.goals, _GOALS_PER_PAGE)
            for goal in goals:
                example = builder.build(goal, sequence, page.places, page.size, rng)
                if example is not None and len(example.ids) <= _MAX_TOKENS:
                    examples.append(example)
        if not examples:
            reason = f"none of the goals of {len(pages)} pages can be learned from: their targets are not on the screen"
            raise ConfigError("recipe.act_pages", len(pages), reason, "Draw more pages, or train the tower for longer")
        examples.sort(key=lambda example: len(example.ids) + _LENGTH_NOISE * rng.random())
        batches = _divide(examples, tokens)
        rng.shuffle(batches)
        yield from batches


def _divide(examples: Sequence[Example], tokens: int) -> list[list[Example]]:
    """Batches that have at most so many tokens after padding, or one example; examples are sorted by length."""
    batches: list[list[Example]] = [[]]
    for example in examples:
        if batches[-1] and (len(batches[-1]) + 1) * len(example.ids) > tokens:
            batches.append([])
        batches[-1].append(example)
    return batches
