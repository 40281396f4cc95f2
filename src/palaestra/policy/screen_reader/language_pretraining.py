"""Train the language model to act on synthetic pages: what to click, what to type and when.

The loss has four parts: the tokens of the grammar, copied characters, coordinates against their soft labels, and the
attention of the copying heads against their sources. Without the last part the heads take many times as long to find
what to copy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from palaestra.errors import ConfigError
from palaestra.policy.screen_reader.architecture import COPY_HEAD, HEAD_SIZE
from palaestra.policy.screen_reader.examples import Example, ExampleBatch, ExampleBuilder, collate, jitter
from palaestra.policy.screen_reader.pages import Goal
from palaestra.policy.screen_reader.symbols import Box, Detections, read_in_order
from palaestra.policy.screen_reader.tokenizer import coordinate_ids

_GRAMMAR_WEIGHT, _ATTENTION_WEIGHT = 0.5, 0.5
_MAX_TOKENS = 400
"""Longer examples are left out: they take most of the time and are few."""
_MAX_DRAWS = 100
"""Draws per example of a batch after which pages without a single example are refused."""
_COPYING_HEADS = 3
"""The first heads of the last layer; see `architecture`."""


class LanguageTrainer:
    """Takes training steps on batches of examples."""

    def __init__(self, model: Any, tokenizer: Any, *, learning_rate: float, steps: int) -> None:
        self.model, self._rate, self._steps, self._step = model, learning_rate, steps, 0
        x, y = coordinate_ids(tokenizer)
        self._coordinates = torch.tensor([x, y])
        self._optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
        self._captured: dict[str, Any] = {}
        last = model.model.language_model.layers[-1].self_attn
        self._hook = last.register_forward_pre_hook(self._capture, with_kwargs=True)
        self.averages: dict[str, float] = {}

    def close(self) -> None:
        """Detach from the model."""
        self._hook.remove()

    def _capture(self, module: Any, arguments: Any, named: dict[str, Any]) -> None:
        self._captured = named if "hidden_states" in named else {**named, "hidden_states": arguments[0]}

    def step(self, batch: ExampleBatch) -> None:
        """Train on one batch."""
        progress = self._step / self._steps
        rate = self._rate * min(1.0, (self._step + 1) / 100) * max(0.03, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._step += 1
        with torch.autocast("cpu", torch.bfloat16):
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
        copied = batch.attend_at[batch.attend_head == COPY_HEAD]
        if len(copied):
            # Mean over characters: a wrong character spoils the whole text.
            total = total + token_loss[copied].mean()
            metrics["char"] = float(is_right[copied].float().mean())
            is_start = torch.cat([torch.ones(1, dtype=torch.bool), copied.diff() > 1])
            metrics["first_char"] = float(is_right[copied[is_start]].float().mean())
        if len(batch.soft):
            ids = self._coordinates.repeat(len(batch.soft) // 2, 1)
            predicted = log_probs[batch.soft_at].gather(-1, ids)
            entropy = -(batch.soft * batch.soft.clamp_min(1e-30).log()).sum(-1)
            distance = (-(batch.soft * predicted).sum(-1) - entropy).mean()
            total = total + distance
            metrics["coordinate_kl"] = float(distance.detach())
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), batch.at[1:, 0] != batch.at[:-1, 0]])
        metrics["action"] = float(is_right[is_first].float().mean())
        if len(batch.attend):
            attention = self._attention(batch)
            mass = (attention * batch.attend).sum(-1)
            total = total - _ATTENTION_WEIGHT * mass.clamp_min(1e-5).log().mean()
            is_click = batch.attend_head != COPY_HEAD
            for name, rows in (("look_click", is_click), ("look_copy", ~is_click)):
                if rows.any():
                    metrics[name] = float(mass[rows].detach().mean())
        return total, metrics

    def _attention(self, batch: ExampleBatch) -> Tensor:
        """Attention [A, T] of the last layer's copying heads at the chosen positions."""
        attention = self.model.model.language_model.layers[-1].self_attn
        hidden = self._captured["hidden_states"]
        cos, sin = self._captured["position_embeddings"]
        count, length, _ = hidden.shape
        size = _COPYING_HEADS * HEAD_SIZE
        keys = functional.linear(hidden, attention.k_proj.weight[:size], attention.k_proj.bias[:size])
        keys = _rotate(keys.view(count, length, _COPYING_HEADS, HEAD_SIZE).float(), cos.unsqueeze(2), sin.unsqueeze(2))
        row, column = batch.at[batch.attend_at].T
        queries = functional.linear(hidden[row, column], attention.q_proj.weight[:size], attention.q_proj.bias[:size])
        queries = queries.view(-1, _COPYING_HEADS, HEAD_SIZE)[torch.arange(len(row)), batch.attend_head].float()
        cos, sin = cos.expand(count, -1, -1)[row, column], sin.expand(count, -1, -1)[row, column]
        queries = _rotate(queries, cos, sin)
        head_keys = keys[row, :, batch.attend_head]
        scores = torch.einsum("atd,ad->at", head_keys, queries) / math.sqrt(HEAD_SIZE)
        is_visible = (torch.arange(length) <= column[:, None]) & (batch.mask[row] > 0)
        return torch.softmax(scores.masked_fill(~is_visible, float("-inf")), -1)


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


def pretrain_language(
    model: Any,
    tokenizer: Any,
    pages: Sequence[LanguagePage],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    blur_px: float,
    noisy: bool,
    seed: int,
    log: Callable[[str], None],
) -> dict[str, float]:
    """Train on the goals of pages; returns exponential averages of the metrics.

    `noisy` moves detections a little.
    """
    # Attention with explicit matrices: in bfloat16 its backward pass is faster on a CPU.
    model.model.language_model.set_attn_implementation("eager")
    builder = ExampleBuilder(tokenizer, blur_px=blur_px)
    trainer = LanguageTrainer(model, tokenizer, learning_rate=learning_rate, steps=steps)
    batches = _draw_batches(builder, pages, batch_size, noisy=noisy, seed=seed)
    for step in range(steps):
        trainer.step(collate(next(batches), tokenizer.pad_token_id))
        if step % 100 == 99 or step == steps - 1:
            averages = ", ".join(f"{name} {value:.3f}" for name, value in trainer.averages.items())
            log(f"{step + 1}/{steps}: {averages}")
    trainer.close()
    model.model.language_model.set_attn_implementation("sdpa")
    return trainer.averages


def _draw_batches(
    builder: ExampleBuilder, pages: Sequence[LanguagePage], size: int, *, noisy: bool, seed: int
) -> Iterator[list[Example]]:
    """Endless batches of examples of similar length."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    while True:
        examples: list[Example] = []
        draws = 0
        while len(examples) < 8 * size:
            draws += 1
            if draws > _MAX_DRAWS * size and not examples:
                reason = f"none of {draws - 1} drawn goals can be learned from: their targets are not among the symbols"
                raise ConfigError("recipe.pages", len(pages), reason, "Draw more pages, or train the tower for longer")
            page = rng.choice(pages)
            sequence = read_in_order(jitter(page.detections, noise) if noisy else page.detections)
            example = builder.build(rng.choice(page.goals), sequence, page.places, page.size, rng)
            if example is not None and len(example.ids) <= _MAX_TOKENS:
                examples.append(example)
        examples.sort(key=lambda example: len(example.ids))
        batches = [examples[start : start + size] for start in range(0, len(examples), size)]
        rng.shuffle(batches)
        yield from batches
