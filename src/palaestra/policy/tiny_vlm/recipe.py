"""From a seed to a checkpoint: draw screens, pretrain the vision tower, pretrain the language model, write the files.

With the same seed, packages and kind of CPU the weights are the same, bit for bit. Training uses one thread, since more
threads sum in another order. A model directory has the layout of the Hugging Face hub and a manifest:

    config.json, generation_config.json, model.safetensors     weights in float16
    tokenizer.json, tokenizer_config.json, chat_template.jinja, preprocessor_config.json
    tiny_vlm.json                                               recipe, figures, versions, SHA-256 of each file
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from palaestra.errors import ConfigError
from palaestra.policy.model_directory import write_model_directory
from palaestra.policy.tiny_vlm.architecture import build_image_processor, build_model
from palaestra.policy.tiny_vlm.examples import ExampleWriter
from palaestra.policy.tiny_vlm.language_pretraining import pretrain_language
from palaestra.policy.tiny_vlm.screen_dataset import build_dataset
from palaestra.policy.tiny_vlm.tokenizer import build_tokenizer
from palaestra.policy.tiny_vlm.vision_pretraining import AuxiliaryHead, pretrain_vision

SHIPPED = Path(__file__).parent / "checkpoint"
"""The model that comes with the package."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the weights."""

    seed: int = 0
    screens: int = 4000
    """Drawn once and used for several epochs. With fewer the model overfits."""
    questions: int = 8
    """Instructions per screen."""
    others: float = 0.06
    """Share of replies that are not a plain click."""
    see_steps: int = 300
    see_batch: int = 16
    see_rate: float = 2e-3
    speak_steps: int = 500
    speak_batch: int = 8
    """Screens per batch; each comes with all its instructions."""
    speak_rate: float = 2e-3
    blur_px: float = 12.0
    """Width of the coordinates' soft labels. Narrower hits more often and explores less."""

    def __post_init__(self) -> None:
        for name in ("screens", "questions", "see_steps", "see_batch", "speak_steps", "speak_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recipe.{name}", getattr(self, name), "must be at least 1")


@dataclass(frozen=True)
class TrainedModel:
    """The result of a recipe."""

    model: Any
    tokenizer: Any
    figures: dict[str, dict[str, float]]
    """Metrics by stage."""


def train_model(recipe: Recipe, log: Callable[[str], None] = lambda line: None) -> TrainedModel:
    """Train a model; `log` receives progress messages."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed=recipe.seed)
        log(f"drawing {recipe.screens} screens")
        dataset = build_dataset(recipe.screens, seed=recipe.seed, instructions=recipe.questions)
        head = AuxiliaryHead(model.config.text_config.hidden_size, seed=recipe.seed)
        vision = pretrain_vision(
            model,
            head,
            dataset,
            steps=recipe.see_steps,
            batch_size=recipe.see_batch,
            learning_rate=recipe.see_rate,
            seed=recipe.seed,
            log=log,
        )
        writer = ExampleWriter(tokenizer, model.config.image_token_id)
        examples = writer.write_examples(dataset, random.Random(recipe.seed + 1), other_share=recipe.others)
        language = pretrain_language(
            model,
            head,
            tokenizer,
            dataset,
            examples,
            writer.prefix,
            steps=recipe.speak_steps,
            batch_size=recipe.speak_batch,
            learning_rate=recipe.speak_rate,
            blur_px=recipe.blur_px,
            seed=recipe.seed,
            log=log,
        )
    finally:
        torch.set_num_threads(threads)
    return TrainedModel(model.eval(), tokenizer, {"seeing": vision, "speaking": language})


def write_model(trained: TrainedModel, recipe: Recipe, path: Path) -> dict[str, Any]:
    """Write a new model directory atomically; returns its manifest."""

    def save(directory: Path) -> None:
        trained.model.half().save_pretrained(directory)
        trained.tokenizer.save_pretrained(directory)
        build_image_processor().save_pretrained(directory)

    parameters = sum(weight.numel() for weight in trained.model.parameters())
    facts = {"recipe": asdict(recipe), "parameters": parameters, "vocabulary": len(trained.tokenizer)}
    return write_model_directory(path, save, facts, trained.figures)
