"""Train a pretrained language model to act on what the tower reads: connector, new tokens, and adapters.

The weights of the language model stay as they are; adapters of low rank change them and are merged at the end. Of its
embeddings only those of the new tokens are trained. Pages are drawn and read in a process of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from palaestra.errors import ConfigError
from palaestra.policy.device import has_bfloat16_instructions
from palaestra.policy.model_directory import write_model_directory
from palaestra.policy.screen_reader.examples import jitter
from palaestra.policy.screen_reader.image_processor import PictureReader
from palaestra.policy.screen_reader.joined.language_model import (
    extend_tokenizer,
    join_language_model,
    load_language_model,
)
from palaestra.policy.screen_reader.joined.page_examples import (
    PageBatch,
    PageExample,
    PageExampleBuilder,
    collate_pages,
)
from palaestra.policy.screen_reader.language_pretraining import LanguagePage
from palaestra.policy.screen_reader.recipe import (
    TrainedReader,
    draw_language_pages,
    load_named_tower,
    start_drawing_process,
)
from palaestra.policy.screen_reader.symbols import read_in_order

_KINDS = {"a": "action", "n": "name", "x": "x", "y": "y", "t": "typed"}
"""Metrics by the letter of a reply token."""
_ROWS_RATE, _CONNECTOR_RATE = 2.0, 0.2
"""Learning rates of new tokens and of the connector as multiples of that of the adapters."""
_WARMUP = 20
_MAX_TOKENS = 500
"""Longer pages are left out: they take most of the time and are few."""
_SHARD = 500
"""Pages whose examples are sorted into batches together."""


class JointTrainer:
    """Takes training steps on batches of pages."""

    def __init__(self, model: Any, first: int, *, rank: int, learning_rate: float, steps: int) -> None:
        """`first` is the id of the first new token."""
        from peft import LoraConfig, get_peft_model

        self.model, self._first, self._rate, self._steps, self._step = model, first, learning_rate, steps, 0
        model.requires_grad_(False)
        # In bfloat16 the backward pass of attention with explicit matrices is faster on a CPU.
        model.model.language_model.set_attn_implementation("eager")
        layers = [
            name
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear) and name.startswith("model.language_model.")
        ]
        settings = LoraConfig(r=rank, lora_alpha=rank, target_modules=layers, bias="none", task_type="CAUSAL_LM")
        self._wrapped: Any = get_peft_model(model, settings)
        self._embeddings = model.get_input_embeddings().weight
        self._outputs = model.get_output_embeddings().weight
        self.is_tied = self._outputs is self._embeddings
        self._rows = nn.Parameter(self._embeddings[first:].detach().clone())
        self._output_rows = self._rows if self.is_tied else nn.Parameter(self._outputs[first:].detach().clone())
        self._connector = model.model.vision_tower.requires_grad_(True)
        adapters = [weight for name, weight in model.named_parameters() if ".lora_" in name]
        rows = [self._rows] if self.is_tied else [self._rows, self._output_rows]
        groups = ((adapters, 1.0), (rows, _ROWS_RATE), (list(self._connector.parameters()), _CONNECTOR_RATE))
        self._optimizer = torch.optim.AdamW(
            [{"params": weights, "scale": scale} for weights, scale in groups],
            learning_rate,
            weight_decay=0.0,
            betas=(0.9, 0.98),
        )
        self._weights = [*adapters, *rows, *self._connector.parameters()]
        self.averages: dict[str, float] = {}

    def step(self, batch: PageBatch) -> None:
        """Train on one batch."""
        progress = self._step / self._steps
        rate = self._rate * min(1.0, (self._step + 1) / _WARMUP) * max(0.03, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        self._step += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16_instructions()):
            loss, metrics = self.loss(batch)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        for name, value in metrics.items():
            self.averages[name] = 0.95 * self.averages.get(name, value) + 0.05 * value

    def loss(self, batch: PageBatch) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics of one batch."""
        ids = batch.ids
        new = functional.embedding((ids - self._first).clamp_min(0), self._rows)
        embeddings = torch.where((ids >= self._first)[..., None], new, functional.embedding(ids, self._embeddings))
        places = self._connector(batch.rows).to(embeddings.dtype)
        embeddings = embeddings.index_put((batch.rows_at[:, 0], batch.rows_at[:, 1]), places, accumulate=True)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else embeddings.dtype
        mask = torch.zeros(batch.mask.shape, dtype=dtype).masked_fill(~batch.mask, torch.finfo(dtype).min)
        out = self.model.model.language_model(
            inputs_embeds=embeddings, attention_mask=mask, position_ids=batch.positions, use_cache=False
        )
        hidden = out.last_hidden_state[batch.at[:, 0], batch.at[:, 1]]
        old = functional.linear(hidden, self._outputs[: self._first])
        logits = torch.cat([old, functional.linear(hidden, self._output_rows)], -1).float()
        token_loss = functional.cross_entropy(logits, batch.labels, reduction="none")
        is_right = (logits.argmax(-1) == batch.labels).float()
        metrics = {"loss": float(token_loss.detach().mean())}
        for letter, name in _KINDS.items():
            chosen = torch.tensor([kind == letter for kind in batch.kinds])
            if chosen.any():
                metrics[name] = float(is_right[chosen].mean())
        return token_loss.mean(), metrics

    def merge(self) -> Any:
        """The model with its adapters and new tokens merged."""
        with torch.no_grad():
            self._embeddings[self._first :] = self._rows
            if not self.is_tied:
                self._outputs[self._first :] = self._output_rows
        model = self._wrapped.merge_and_unload()
        model.model.language_model.set_attn_implementation("sdpa")
        return model.requires_grad_(False).eval()


@dataclass(frozen=True, kw_only=True)
class JoinRecipe:
    """Everything that determines the weights, besides the language model."""

    seed: int = 0
    tower: str = "tiny-reader"
    """Name or directory of the reading model whose tower is used."""
    pages: int = 2500
    steps: int = 260
    tokens: int = 900
    """Tokens in a batch."""
    rank: int = 32
    """Rank of the adapters, which are merged at the end."""
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("pages", "steps", "tokens", "rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recipe.{name}", getattr(self, name), "must be at least 1")


def train_joined_reader(
    language: Path, recipe: JoinRecipe, log: Callable[[str], None] = lambda line: None
) -> TrainedReader:
    """Join the language model of a directory or GGUF file to a tower, and train it; `log` gets progress messages."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tower, seeing = load_named_tower(recipe.tower)
        pretrained, base = load_language_model(language)
        tokenizer = extend_tokenizer(base)
        model = join_language_model(pretrained, base, tokenizer, seed=recipe.seed)
        del pretrained
        with start_drawing_process() as executor:
            blocks = draw_language_pages(tower, executor, count=recipe.pages, seed=recipe.seed, shard=_SHARD, block=1)
            batches = draw_page_batches(PageExampleBuilder(tokenizer), blocks, tokens=recipe.tokens, seed=recipe.seed)
            trained, acting = train_on_batches(model, tokenizer, batches, recipe, first=len(base), log=log)
    finally:
        torch.set_num_threads(threads)
    return TrainedReader(trained, tokenizer, tower, {"seeing": seeing, "acting": acting})


def train_on_batches(
    model: Any,
    tokenizer: Any,
    batches: Iterator[Sequence[PageExample]],
    recipe: JoinRecipe,
    *,
    first: int,
    log: Callable[[str], None],
) -> tuple[Any, dict[str, float]]:
    """Train on batches of pages; returns the model with its adapters merged, and averages of the metrics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        trainer = JointTrainer(model, first, rank=recipe.rank, learning_rate=recipe.learning_rate, steps=recipe.steps)
        replies = 0
        for step in range(recipe.steps):
            batch = collate_pages(next(batches), tokenizer.pad_token_id)
            replies += batch.kinds.count("a")
            trainer.step(batch)
            if step % 20 == 19 or step == recipe.steps - 1:
                averages = ", ".join(f"{name} {value:.3f}" for name, value in trainer.averages.items())
                log(f"{step + 1}/{recipe.steps}: {replies} replies, {averages}")
    return trainer.merge(), {**trainer.averages, "replies": float(replies)}


def draw_page_batches(
    builder: PageExampleBuilder, blocks: Iterator[Sequence[LanguagePage]], *, tokens: int, seed: int
) -> Iterator[list[PageExample]]:
    """Batches of pages of similar length, from one block after the other."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    for pages in blocks:
        examples: list[PageExample] = []
        for page in pages:
            sequence = read_in_order(jitter(page.detections, noise) if page.is_exact else page.detections)
            goals = rng.sample(page.goals, min(len(page.goals), 2))
            example = builder.build(goals, sequence, page.places, page.size, rng)
            if example is not None and len(example) <= _MAX_TOKENS:
                examples.append(example)
        examples.sort(key=lambda example: len(example) + rng.random())
        batches: list[list[PageExample]] = [[]]
        for example in examples:
            if batches[-1] and (len(batches[-1]) + 1) * len(example) > tokens:
                batches.append([])
            batches[-1].append(example)
        rng.shuffle(batches)
        yield from batches


def write_joined_reader(trained: TrainedReader, language: Path, recipe: JoinRecipe, path: Path) -> dict[str, Any]:
    """Write a new model directory atomically; returns its manifest."""

    def save(directory: Path) -> None:
        trained.model.half().save_pretrained(directory)
        trained.tokenizer.save_pretrained(directory)
        PictureReader(trained.tower, trained.tokenizer).save_pretrained(directory)

    weights = [*trained.model.parameters(), *trained.tower.parameters()]
    facts = {
        "recipe": {**asdict(recipe), "language": language.name},
        "parameters": sum(weight.numel() for weight in weights),
        "vocabulary": len(trained.tokenizer),
    }
    return write_model_directory(path, save, facts, trained.figures)
