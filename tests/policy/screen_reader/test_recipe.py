"""Making a reading model: pages in a browser, two stages at a few steps, files, and the same again."""

import asyncio
import random
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from palaestra.errors import ConfigError, SessionFailed
from palaestra.policy.model_directory import MANIFEST, read_manifest
from palaestra.policy.screen_reader.image_processor import WEIGHTS, load_tower
from palaestra.policy.screen_reader.pages import draw_page
from palaestra.policy.screen_reader.recipe import (
    ReaderRecipe,
    draw_language_pages,
    start_drawing_process,
    train_reader,
    write_reader,
)
from palaestra.policy.screen_reader.rendering import PageRenderer
from palaestra.policy.screen_reader.tower import Tower
from palaestra.sessions.browser.browser import Browser
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.browser.page import Page

SMALL = ReaderRecipe(
    seed=3, see_pages=10, see_steps=2, see_batch=2, act_pages=40, act_steps=2, act_tokens=300
)  # fmt: skip


@pytest.fixture(scope="module")
def chromium():
    try:
        find_chromium()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def lines():
    return []


@pytest.fixture(scope="module")
def directory(chromium, lines, tmp_path_factory):
    place = tmp_path_factory.mktemp("made") / "model"
    write_reader(train_reader(SMALL, lines.append), SMALL, place)
    return place


def test_the_same_recipe_gives_the_same_weights(directory, tmp_path):
    write_reader(train_reader(SMALL), SMALL, tmp_path / "again")
    for name in ("model.safetensors", WEIGHTS, "tokenizer.json", "config.json"):
        assert (directory / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_all_stages_report_their_progress_and_are_in_the_manifest(directory, lines):
    assert [line.split(":")[0] for line in lines if "/2" in line] == ["seeing 2/2", "acting 2/2"]
    manifest = read_manifest(directory)
    assert set(manifest["figures"]) == {"seeing", "acting"}
    assert manifest["recipe"]["seed"] == 3
    assert manifest["browser"].startswith("Chrom")
    assert set(manifest["files"]) | {MANIFEST} == {file.name for file in directory.iterdir()}


def test_a_made_model_is_a_policy(directory):
    from palaestra.policy.vlm import ModelConfig, VLMPolicy

    policy = VLMPolicy.from_config(ModelConfig(name=str(directory), lora_rank=4, history=0))
    assert policy.prompts.request == "{instruction}"


def test_labels_lie_on_the_page_where_there_is_ink(chromium):
    async def draw():
        browser = await Browser.start()
        try:
            renderer, rng = PageRenderer(browser), random.Random(5)
            return [await renderer.draw(draw_page(rng)) for _ in range(6)]
        finally:
            await browser.stop()

    pages = asyncio.run(draw())
    count = 0
    for page in pages:
        height, width, _ = page.pixels.shape
        for char, left, top, wide, tall in page.chars:
            if char in ".,:'`-_•":
                continue  # small, and hard to tell from noise
            part = page.pixels[max(0, int(top)) : int(top + tall) + 1, max(0, int(left)) : int(left + wide) + 1]
            assert 0 <= left + wide / 2 < width
            assert 0 <= top + tall / 2 < height
            assert np.ptp(part.astype(int), axis=(0, 1)).max() > 40, f"nothing is drawn where {char!r} should be"
            count += 1
    assert count > 200


def test_a_page_whose_screenshot_fails_is_drawn_again(chromium, monkeypatch, caplog):
    failures = [SessionFailed("no_picture", "as a test")]
    draw = Page.draw

    async def fail_once(self):
        if failures:
            raise failures.pop()
        return await draw(self)

    async def run():
        browser = await Browser.start()
        try:
            renderer, page = PageRenderer(browser), draw_page(random.Random(5))
            first = await renderer.draw(page)
            monkeypatch.setattr(Page, "draw", fail_once)
            return first, await renderer.draw(page)
        finally:
            await browser.stop()

    first, again = asyncio.run(run())
    assert np.array_equal(first.pixels, again.pixels)
    assert "drawn again: no_picture" in caplog.text


def test_a_recipe_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"recipe\.act_steps = 0"):
        ReaderRecipe(act_steps=0)


def test_a_recipe_can_use_the_tower_of_another_model(chromium, directory):
    trained = train_reader(replace(SMALL, tower=str(directory)))
    for name, weight in load_tower(directory).state_dict().items():
        assert torch.equal(trained.tower.state_dict()[name], weight), name


def test_a_tower_that_is_not_there_is_refused_before_pages_are_drawn(tmp_path):
    with pytest.raises(ConfigError, match=r"recipe\.tower = .*: has no tower of a reading model"):
        train_reader(replace(SMALL, tower=str(tmp_path)))


def test_an_error_in_the_training_does_not_wait_for_pages_that_are_to_be_drawn():
    with suppress(ConfigError), start_drawing_process() as executor:
        futures = [executor.submit(time.sleep, 0.1) for _ in range(200)]
        raise ConfigError("recipe.act_rate", 0, "no such rate")
    assert futures[-1].cancelled()


class RecordingExecutor:
    """Computes nothing: the pages of a shard are its number."""

    def __init__(self):
        self.numbers = []

    def submit(self, draw, size, number, weights):
        self.numbers.append(number)
        future = Future()
        future.set_result([number] * size)
        return future


def test_only_the_next_block_of_pages_is_drawn_ahead_and_each_page_once():
    executor = RecordingExecutor()
    blocks = draw_language_pages(Tower(), executor, count=9, seed=0, shard=2, block=2)
    assert next(blocks) == [1, 1, 2, 2]
    assert executor.numbers == [1, 2, 3, 4]
    assert [next(blocks), next(blocks), next(blocks)] == [[3, 3, 4, 4], [5], [1, 1, 2, 2]]
    assert executor.numbers == [1, 2, 3, 4, 5]
