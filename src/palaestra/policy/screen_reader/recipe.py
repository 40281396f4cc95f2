"""From a seed to a reading model: draw pages, train the tower, then the language model, and write the files.

1. *Pages* are drawn by Chromium, with the place of every character and widget.
2. *Vision* (`seeing`): the tower learns to find them, in a process of its own.
3. *Language* (`acting`): the language model learns what to do next, from the labels of the browser.
4. *Together* (`reading`): it is trained further on the detections of the tower.

The same seed, packages, processor and Chromium give the same weights. The directory has the layout of the Hugging Face
hub, with the tower in `vision_tower.safetensors` and a manifest.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from palaestra.errors import ConfigError
from palaestra.policy.model_directory import write_model_directory
from palaestra.policy.screen_reader.architecture import build_model
from palaestra.policy.screen_reader.detection import detect
from palaestra.policy.screen_reader.image_processor import PictureReader
from palaestra.policy.screen_reader.language_pretraining import LanguagePage, pretrain_language
from palaestra.policy.screen_reader.pages import Goal, draw_page
from palaestra.policy.screen_reader.rendering import DrawnPage, PageRenderer
from palaestra.policy.screen_reader.tokenizer import build_tokenizer
from palaestra.policy.screen_reader.tower import Tower
from palaestra.policy.screen_reader.vision_pretraining import pretrain_vision
from palaestra.sessions.browser.browser import Browser
from palaestra.sessions.browser.chromium import find_chromium

SHIPPED = Path(__file__).parent / "checkpoint"
"""The model that comes with the package."""


@dataclass(frozen=True, kw_only=True)
class ReaderRecipe:
    """Everything that determines the weights."""

    seed: int = 0
    pages: int = 9000
    """Pages for all stages; a fifth of them is dense text for the tower."""
    more_pages: int = 8000
    """Further pages for the language stage."""
    see_steps: int = 4000
    see_batch: int = 8
    see_rate: float = 2e-3
    act_steps: int = 3000
    act_batch: int = 16
    act_rate: float = 2e-3
    read_steps: int = 700
    read_rate: float = 7e-4
    blur_px: float = 3.0
    """Width of the coordinates' soft labels."""

    def __post_init__(self) -> None:
        for name in ("pages", "more_pages", "see_steps", "see_batch", "act_steps", "act_batch", "read_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recipe.{name}", getattr(self, name), "must be at least 1")


@dataclass(frozen=True)
class TrainedReader:
    """The result of a recipe."""

    model: Any
    tokenizer: Any
    tower: Tower
    figures: dict[str, dict[str, float]]
    """Metrics by stage."""


@dataclass(frozen=True, eq=False)
class LabelledPage:
    """A drawn page and its goals whose target is visible."""

    size: tuple[int, int]
    """Width and height in pixels."""
    goals: Sequence[Goal]
    drawn: DrawnPage


async def draw_pages(count: int, *, seed: int, dense: bool = True) -> list[LabelledPage]:
    """Draw synthetic pages in a browser; `dense`: also pages of text without goals."""
    rng, pages = random.Random(seed), []
    browser = await Browser.start()
    try:
        renderer = PageRenderer(browser)
        for _ in range(count):
            page = draw_page(rng, dense=dense)
            if not page.goals and not dense:
                continue
            drawn = await renderer.draw(page)
            goals = [goal for goal in page.goals if not goal.target or goal.target in drawn.places]
            pages.append(LabelledPage(page.size, goals, drawn))
    finally:
        await browser.stop()
    return pages


def train_reader(recipe: ReaderRecipe, log: Callable[[str], None] = lambda line: None) -> TrainedReader:
    """Train a model; `log` receives progress messages.

    The tower is trained in a process of its own: until the last stage the language model does not need it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            vision = executor.submit(_train_tower, recipe)
            pages = asyncio.run(_draw_first_pages(recipe))
            more = asyncio.run(draw_pages(recipe.more_pages, seed=recipe.seed + 77, dense=False))
            log(f"drew {len(pages) + len(more)} pages")
            tokenizer = build_tokenizer()
            model = build_model(tokenizer, seed=recipe.seed)
            train = partial(pretrain_language, model, tokenizer, batch_size=recipe.act_batch, blur_px=recipe.blur_px)
            labelled = [_use_labels(page) for page in [*pages, *more] if page.goals]
            acting = train(
                labelled,
                steps=recipe.act_steps,
                learning_rate=recipe.act_rate,
                noisy=True,
                seed=recipe.seed,
                log=lambda line: log(f"acting {line}"),
            )
            tower, seeing, lines = vision.result()
        for line in lines:
            log(f"seeing {line}")
        read = [_use_tower(page, tower) for page in pages if page.goals]
        log(f"read {len(read)} pages")
        reading = train(
            read,
            steps=recipe.read_steps,
            learning_rate=recipe.read_rate,
            noisy=False,
            seed=recipe.seed + 1,
            log=lambda line: log(f"reading {line}"),
        )
    finally:
        torch.set_num_threads(threads)
    trained: Any = model  # transformers' eval is untyped
    return TrainedReader(
        trained.eval(), tokenizer, tower.eval(), {"seeing": seeing, "acting": acting, "reading": reading}
    )


async def _draw_first_pages(recipe: ReaderRecipe) -> list[LabelledPage]:
    """The pages that both parts are trained on."""
    return await draw_pages(recipe.pages, seed=recipe.seed + 1)


def _train_tower(recipe: ReaderRecipe) -> tuple[Tower, dict[str, float], list[str]]:
    """The tower, the metrics of its training, and progress messages."""
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    tower = Tower()
    lines: list[str] = []
    pages = asyncio.run(_draw_first_pages(recipe))
    metrics = pretrain_vision(
        tower,
        [page.drawn for page in pages],
        steps=recipe.see_steps,
        batch_size=recipe.see_batch,
        learning_rate=recipe.see_rate,
        seed=recipe.seed,
        log=lines.append,
    )
    return tower, metrics, lines


def write_reader(trained: TrainedReader, recipe: ReaderRecipe, path: Path) -> dict[str, Any]:
    """Write a new model directory atomically; returns its manifest."""

    def save(directory: Path) -> None:
        trained.model.half().save_pretrained(directory)
        trained.tokenizer.save_pretrained(directory)
        PictureReader(trained.tower).save_pretrained(directory)

    weights = [*trained.model.parameters(), *trained.tower.parameters()]
    facts = {
        "recipe": asdict(recipe),
        "parameters": sum(weight.numel() for weight in weights),
        "vocabulary": len(trained.tokenizer),
        "browser": subprocess.run([find_chromium().path, "--version"], capture_output=True, text=True).stdout.strip(),
    }
    return write_model_directory(path, save, facts, trained.figures)


def _use_labels(page: LabelledPage) -> LanguagePage:
    """The page with the browser's labels as detections."""
    return LanguagePage(page.size, page.goals, page.drawn.detections(), page.drawn.places)


def _use_tower(page: LabelledPage, tower: Tower) -> LanguagePage:
    """The page with the tower's detections."""
    return LanguagePage(page.size, page.goals, detect(tower, page.drawn.pixels), page.drawn.places)
