"""From a seed to a checkpoint: screens are drawn, the tower learns to see, the language model to speak.

With the same seed, packages and kind of processor the weights come out the same, bit for bit; with others they come out
as good. Computing is held to one thread, since more of them sum in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from palaestra.errors import ConfigError
from palaestra.policy.tiny_vlm.architecture import build_model
from palaestra.policy.tiny_vlm.lesson import Teacher
from palaestra.policy.tiny_vlm.pool import draw_pool
from palaestra.policy.tiny_vlm.seeing import Quiz, learn_to_see
from palaestra.policy.tiny_vlm.speaking import learn_to_speak
from palaestra.policy.tiny_vlm.tokenizer import build_tokenizer

__all__ = ["Recipe", "Taught", "teach"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 0
    screens: int = 4000
    """Drawn once and shown several times. Fewer are learned by heart."""
    questions: int = 8
    """Instructions per screen."""
    others: float = 0.06
    """The share of answers that are no plain click."""
    see_steps: int = 300
    see_batch: int = 16
    see_rate: float = 2e-3
    speak_steps: int = 500
    speak_batch: int = 8
    """Screens; each comes with all its questions."""
    speak_rate: float = 2e-3
    blur_px: float = 12.0
    """Width of the bell that coordinates are taught with. Narrower hits more often and explores less."""

    def __post_init__(self) -> None:
        for name in ("screens", "questions", "see_steps", "see_batch", "speak_steps", "speak_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recipe.{name}", getattr(self, name), "must be at least 1")


@dataclass(frozen=True)
class Taught:
    """What came of a recipe."""

    model: Any
    tokenizer: Any
    figures: dict[str, dict[str, float]]
    """By stage."""


def teach(recipe: Recipe, say: Callable[[str], None] = lambda line: None) -> Taught:
    """Follow the recipe; `say` hears how far it is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed=recipe.seed)
        say(f"drawing {recipe.screens} screens")
        pool = draw_pool(recipe.screens, seed=recipe.seed, questions=recipe.questions)
        quiz = Quiz(model.config.text_config.hidden_size, seed=recipe.seed)
        seen = learn_to_see(
            model,
            quiz,
            pool,
            steps=recipe.see_steps,
            batch=recipe.see_batch,
            rate=recipe.see_rate,
            seed=recipe.seed,
            say=say,
        )
        teacher = Teacher(tokenizer, model.config.image_token_id)
        lessons = teacher.lessons(pool, random.Random(recipe.seed + 1), other=recipe.others)
        spoken = learn_to_speak(
            model, quiz, tokenizer, pool, lessons, teacher.prefix, steps=recipe.speak_steps, batch=recipe.speak_batch,
            rate=recipe.speak_rate, blur_px=recipe.blur_px, seed=recipe.seed, say=say,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    return Taught(model.eval(), tokenizer, {"seeing": seen, "speaking": spoken})
