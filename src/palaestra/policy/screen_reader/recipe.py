"""From a seed to a reading model: draw pages, train the tower, then the language model, and write the files.

1. *Pages* are drawn by Chromium, with the place of every character and widget.
2. *Vision* (`seeing`): the tower learns to find them.
3. *Language* (`acting`): the language model learns what to do next on further pages. Half of them are given as the
   browser reports them, with noise, and half as the tower reads them.

The same seed, packages, processor and Chromium give the same weights. The directory has the layout of the Hugging Face
hub, with the tower in `vision_tower.safetensors` and a manifest.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palaestra.errors import CheckpointError, ConfigError
from palaestra.policy.model_directory import read_manifest, write_model_directory
from palaestra.policy.screen_reader.architecture import build_model
from palaestra.policy.screen_reader.detection import detect
from palaestra.policy.screen_reader.image_processor import PictureReader, load_tower
from palaestra.policy.screen_reader.language_pretraining import LanguagePage, pretrain_language
from palaestra.policy.screen_reader.pages import Goal, draw_page
from palaestra.policy.screen_reader.rendering import DrawnPage, PageRenderer
from palaestra.policy.screen_reader.tokenizer import build_tokenizer
from palaestra.policy.screen_reader.tower import Tower
from palaestra.policy.screen_reader.vision_pretraining import pretrain_vision
from palaestra.processes.children import exit_with_parent
from palaestra.sessions.browser.browser import Browser
from palaestra.sessions.browser.chromium import find_chromium

SHIPPED = Path(__file__).parent / "checkpoint"
"""The model that comes with the package."""


_FIRST_SEED = 1000
"""Seeds of the pages of the language stage begin above this."""
_SHARD, _BLOCK = 1000, 4
"""Pages that are drawn together, and shards whose examples are sorted into batches together."""


@dataclass(frozen=True, kw_only=True)
class ReaderRecipe:
    """Everything that determines the weights."""

    seed: int = 0
    tower: str = ""
    """Name or directory of a reading model whose tower is used; empty: a tower is trained."""
    see_pages: int = 9000
    """Pages for the tower; a fifth of them is dense text."""
    see_steps: int = 4000
    see_batch: int = 8
    see_rate: float = 2e-3
    act_pages: int = 89_000
    act_steps: int = 6000
    act_tokens: int = 2400
    """Tokens in a batch."""
    act_rate: float = 2e-3
    blur_px: float = 3.0
    """Width of the coordinates' soft labels."""

    def __post_init__(self) -> None:
        for name in ("see_pages", "see_steps", "see_batch", "act_pages", "act_steps", "act_tokens"):
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

    Pages of the language stage are drawn and read in a process of its own, ahead of the training.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tower, seeing = load_named_tower(recipe.tower) if recipe.tower else _train_tower(recipe, log)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed=recipe.seed)
        with start_drawing_process() as executor:
            acting = pretrain_language(
                model,
                tokenizer,
                draw_language_pages(tower, executor, count=recipe.act_pages, seed=recipe.seed),
                steps=recipe.act_steps,
                tokens=recipe.act_tokens,
                learning_rate=recipe.act_rate,
                blur_px=recipe.blur_px,
                seed=recipe.seed,
                log=lambda line: log(f"acting {line}"),
            )
    finally:
        torch.set_num_threads(threads)
    trained: Any = model  # transformers' eval is untyped
    return TrainedReader(trained.eval(), tokenizer, tower, {"seeing": seeing, "acting": acting})


def load_named_tower(name: str) -> tuple[Tower, dict[str, float]]:
    """The tower of a reading model (`tiny-reader` or a directory), and the metrics of its training."""
    directory = SHIPPED if name == "tiny-reader" else Path(name)
    try:
        return load_tower(directory), read_manifest(directory)["figures"]["seeing"]
    except (OSError, KeyError, CheckpointError) as error:
        reason = f"has no tower of a reading model ({error})"
        raise ConfigError("recipe.tower", name, reason, "Name its directory, or tiny-reader") from None


def _train_tower(recipe: ReaderRecipe, log: Callable[[str], None]) -> tuple[Tower, dict[str, float]]:
    """A new tower, and the metrics of its training."""
    torch.manual_seed(recipe.seed)
    tower = Tower()
    pages = asyncio.run(draw_pages(recipe.see_pages, seed=recipe.seed + 1))
    log(f"drew {len(pages)} pages")
    metrics = pretrain_vision(
        tower,
        [page.drawn for page in pages],
        steps=recipe.see_steps,
        batch_size=recipe.see_batch,
        learning_rate=recipe.see_rate,
        seed=recipe.seed,
        log=lambda line: log(f"seeing {line}"),
    )
    return tower.eval(), metrics


@contextmanager
def start_drawing_process() -> Iterator[ProcessPoolExecutor]:
    """An executor whose one process draws pages, and ends with this one. At the end, pages drawn ahead are dropped."""
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(1, mp_context=context, initializer=exit_with_parent)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def draw_language_pages(
    tower: Tower, executor: ProcessPoolExecutor, *, count: int, seed: int, shard: int = _SHARD, block: int = _BLOCK
) -> Iterator[Sequence[LanguagePage]]:
    """Blocks of pages for the language stage, over and over, in the same order.

    `shard` pages are drawn together, and a block is `block` shards. The next block is drawn while one is used.
    """
    sizes = [min(shard, count - start) for start in range(0, count, shard)]
    weights, first = tower.state_dict(), 1000 * seed
    drawn: list[Future[list[LanguagePage]]] = []
    while True:
        for start in range(0, len(sizes), block):
            ahead = range(len(drawn), min(start + 2 * block, len(sizes)))
            drawn.extend(executor.submit(_draw_shard, sizes[place], first + place + 1, weights) for place in ahead)
            yield [page for future in drawn[start : start + block] for page in future.result()]


def _draw_shard(count: int, number: int, weights: dict[str, Tensor]) -> list[LanguagePage]:
    """Pages with goals; half of them as the tower reads them."""
    torch.set_num_threads(1)
    tower, rng = Tower(), random.Random(number)
    tower.load_state_dict(weights)
    tower.eval()
    pages = []
    for page in asyncio.run(draw_pages(count, seed=_FIRST_SEED + number, dense=False)):
        if page.goals:
            is_exact = rng.random() >= 0.5
            read = page.drawn.detections() if is_exact else detect(tower, page.drawn.pixels)
            pages.append(LanguagePage(page.size, page.goals, read, page.drawn.places, is_exact))
    return pages


def write_reader(trained: TrainedReader, recipe: ReaderRecipe, path: Path) -> dict[str, Any]:
    """Write a new model directory atomically; returns its manifest."""

    def save(directory: Path) -> None:
        trained.model.half().save_pretrained(directory)
        trained.tokenizer.save_pretrained(directory)
        PictureReader(trained.tower, trained.tokenizer).save_pretrained(directory)

    weights = [*trained.model.parameters(), *trained.tower.parameters()]
    facts = {
        "recipe": asdict(recipe),
        "parameters": sum(weight.numel() for weight in weights),
        "vocabulary": len(trained.tokenizer),
        "browser": subprocess.run([find_chromium().path, "--version"], capture_output=True, text=True).stdout.strip(),
    }
    return write_model_directory(path, save, facts, trained.figures)
