"""From a seed to a checkpoint: screens are drawn, the tower learns to see, the language model to speak.

With the same seed, packages and kind of processor the weights come out the same, bit for bit; with others they come out
as good. Computing is held to one thread, since more of them sum in another order.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.atomic import new_directory
from palaestra.policy.tiny_vlm.architecture import build_image_processor, build_model
from palaestra.policy.tiny_vlm.examples import Teacher
from palaestra.policy.tiny_vlm.language_pretraining import learn_to_speak
from palaestra.policy.tiny_vlm.screen_dataset import draw_pool
from palaestra.policy.tiny_vlm.tokenizer import build_tokenizer
from palaestra.policy.tiny_vlm.vision_pretraining import Quiz, learn_to_see

__all__ = ["MANIFEST", "SHIPPED", "Recipe", "Taught", "read_manifest", "refuse_existing", "teach", "write_model"]


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


MANIFEST = "tiny_vlm.json"
SHIPPED = Path(__file__).parent / "checkpoint"
"""The model that comes with the package."""
_PACKAGES = ("torch", "transformers", "tokenizers", "pillow", "numpy", "safetensors")


def refuse_existing(path: Path) -> None:
    """Nothing that is there is ever overwritten."""
    if path.exists():
        raise ConfigError("output", str(path), "exists already", "Name a directory that does not, or remove it")


def write_model(taught: Taught, recipe: Recipe, path: Path) -> dict[str, Any]:
    """Write a directory that does not exist yet; returns its manifest."""
    refuse_existing(path)
    with new_directory(path) as building:
        taught.model.half().save_pretrained(building)
        taught.tokenizer.save_pretrained(building)
        build_image_processor().save_pretrained(building)
        for file in building.iterdir():
            file.chmod(0o644)
        manifest = _manifest(taught, recipe, building)
        (building / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_manifest(path: Path = SHIPPED) -> dict[str, Any]:
    """The manifest of a directory, after every file was held against its hash."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        wanted = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("model", str(path), f"has no readable {MANIFEST} ({error})", "Make it again") from None
    for name, digest in wanted.items():
        file = path / name
        if not file.is_file() or _digest(file) != digest:
            raise CheckpointError("model", str(file), "is missing or was changed since it was made", "Make it again")
    return manifest


def _manifest(taught: Taught, recipe: Recipe, place: Path) -> dict[str, Any]:
    return {
        "recipe": asdict(recipe),
        "parameters": sum(weight.numel() for weight in taught.model.parameters()),
        "vocabulary": len(taught.tokenizer),
        "figures": {
            stage: {name: round(value, 4) for name, value in found.items()} for stage, found in taught.figures.items()
        },
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES}
        | {"python": platform.python_version(), "machine": platform.machine()},
        "files": {file.name: _digest(file) for file in sorted(place.iterdir())},
    }


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
