"""Making a tiny model: screens, both stages at a few steps, files, and the same again from the same seed."""

import json

import numpy as np
import pytest
import torch

from palaestra.errors import CheckpointError, ConfigError
from palaestra.policy.model_directory import MANIFEST, read_manifest
from palaestra.policy.tiny_vlm import Recipe, train_model, write_model
from palaestra.policy.tiny_vlm.architecture import build_image_processor
from palaestra.policy.tiny_vlm.screen_dataset import build_dataset, cut_patches
from palaestra.policy.tiny_vlm.screens import HEIGHT, WIDTH

SMALL = Recipe(seed=3, screens=12, questions=3, see_steps=3, see_batch=4, speak_steps=3, speak_batch=4)


@pytest.fixture(scope="module")
def pool():
    return build_dataset(24, seed=1, instructions=4)


def test_widgets_lie_on_the_screen_and_every_instruction_means_one_of_them(pool):
    for widgets, asked in zip(pool.widgets, pool.instructions, strict=True):
        assert len(asked) == 4
        assert all(one.widget in widgets for one in asked)
        for widget in widgets:
            left, top, right, bottom = widget.box
            assert 0 <= left < right < WIDTH
            assert 0 <= top < bottom < HEIGHT


def test_the_same_seed_draws_the_same_screens_and_another_seed_others(pool):
    again, other = build_dataset(24, seed=1, instructions=4), build_dataset(24, seed=2, instructions=4)
    assert np.array_equal(pool.pixels, again.pixels)
    assert pool.instructions == again.instructions
    assert not np.array_equal(pool.pixels, other.pixels)


def test_pictures_are_cut_up_as_the_image_processor_cuts_them(pool):
    from PIL import Image

    made = build_image_processor()(
        images=[Image.fromarray(one) for one in pool.pixels[:3]], do_resize=False, return_tensors="pt"
    )
    ours, grid = cut_patches(pool.pixels[:3])
    assert torch.equal(grid, made["image_grid_thw"])
    torch.testing.assert_close(ours, made["pixel_values"], atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def lines():
    return []


@pytest.fixture(scope="module")
def taught(lines):
    return train_model(SMALL, lines.append)


@pytest.fixture(scope="module")
def directory(taught, tmp_path_factory):
    place = tmp_path_factory.mktemp("made") / "model"
    write_model(taught, SMALL, place)
    return place


def test_both_stages_say_how_far_they_are(taught, lines):
    assert any(line.startswith("seeing 3/3") for line in lines)
    assert any(line.startswith("speaking 3/3") for line in lines)
    assert set(taught.figures) == {"seeing", "speaking"}


def test_the_same_recipe_gives_the_same_weights(directory, tmp_path):
    write_model(train_model(SMALL), SMALL, tmp_path / "again")
    names = ("model.safetensors", "tokenizer.json", "config.json")
    assert all((directory / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_the_manifest_tells_the_recipe_and_notices_a_changed_file(directory, tmp_path):
    import shutil

    manifest = read_manifest(directory)
    assert manifest["recipe"]["seed"] == 3
    assert set(manifest["files"]) | {MANIFEST} == {file.name for file in directory.iterdir()}
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (copy / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json.*changed"):
        read_manifest(copy)


def test_nothing_is_overwritten_and_nothing_is_left_half_written(taught, directory, tmp_path):
    with pytest.raises(ConfigError, match="exists already"):
        write_model(taught, SMALL, directory)
    assert [entry.name for entry in directory.parent.iterdir()] == ["model"]


def test_a_directory_without_a_manifest_is_refused(tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps({"recipe": {}}))
    with pytest.raises(CheckpointError, match="no readable"):
        read_manifest(tmp_path)


def test_a_recipe_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"recipe\.screens = 0"):
        Recipe(screens=0)
