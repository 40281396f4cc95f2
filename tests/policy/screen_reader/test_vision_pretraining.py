"""Labels of the vision stage: where the maps have their peaks, and what a crop keeps."""

import math
import random

import numpy as np
import pytest
import torch

from palaestra.policy.screen_reader.rendering import DrawnPage
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, read_in_order
from palaestra.policy.screen_reader.tower import CHAR_CLASSES, WIDGET_KINDS, Tower
from palaestra.policy.screen_reader.vision_pretraining import build_targets, crop_rows, pretrain_vision, vision_loss


def page(chars=(), widgets=(), size=(48, 32)):
    width, height = size
    return DrawnPage(np.full((height, width, 3), 255, np.uint8), list(chars), list(widgets), {})


def test_a_character_is_a_peak_in_the_cell_of_its_centre():
    """`a` from (9, 10) of 6 x 12 pixels: centre (12, 16), which is column 12 and row 4 (pixels 16 to 19)."""
    targets = build_targets([page([("a", 9, 10, 6, 12)])])
    assert targets.pixels.shape == (1, 3, 32, 48)
    assert targets.char_at.tolist() == [[0, 4, 12]]
    assert targets.char_class.tolist() == [CHAR_CLASSES["a"]]
    assert targets.char_box[0].tolist() == pytest.approx([-0.5, -0.5, 0, 0])
    heat = targets.char_heat[0]
    assert heat.shape == (8, 48)
    assert heat[4, 12] == 1.0
    assert int((heat == 1.0).sum()) == 1
    # The centre is on the border of columns 11 and 12 and of rows 3 and 4: half a cell away from all four.
    around = math.exp(-0.5 * ((0.5 / 0.45) ** 2 + (0.5 / 0.8) ** 2))
    assert heat[3, 11].item() == heat[3, 12].item() == heat[4, 11].item() == pytest.approx(around)
    assert heat[0].sum() == heat[7].sum() == 0


def test_sides_are_logarithms_relative_to_6_by_12_pixels_and_of_widgets_to_40_by_20():
    targets = build_targets([page([("b", 0, 0, 12, 24)], [("button", 1, 2, 4, 20, 10)])])
    assert targets.char_box[0, 2:].tolist() == pytest.approx([math.log(2), math.log(2)])
    assert targets.widget_box[0, 2:].tolist() == pytest.approx([-math.log(2), -math.log(2)])
    # The button's centre is (12, 9): column 1, row 1, a quarter cell left of and three eighths above its middle.
    assert targets.widget_at.tolist() == [[0, 1, 1, WIDGET_KINDS["button"]]]
    assert targets.widget_box[0, :2].tolist() == pytest.approx([0.0, 9 / 8 - 1.5])
    assert targets.widget_on.tolist() == [1.0]
    assert targets.widget_heat[0, WIDGET_KINDS["button"], 1, 1] == 1.0
    assert targets.widget_heat.sum() == 1.0


def test_characters_without_a_class_and_those_outside_the_page_have_no_label():
    targets = build_targets([page([("é", 9, 10, 6, 12), ("a", 60, 10, 6, 12), ("a", 9, -20, 6, 12)])])
    assert targets.char_at.shape == (0, 3)
    assert targets.char_heat.sum() == 0


def test_a_crop_keeps_the_labels_of_its_rows_and_moves_them():
    whole = page([("a", 9, 10, 6, 12), ("b", 9, 150, 6, 12)], [("field", 0, 4, 148, 40, 20)], size=(48, 200))
    whole.pixels[150:162, 9] = 0  # what `b` looks like
    crops = [crop_rows(whole, 104, random.Random(seed)) for seed in range(40)]
    chars = [char for part in crops for char in part.chars]
    assert {char for char, *_ in chars} == {"a", "b"}
    for part in crops:
        assert part.pixels.shape == (104, 48, 3)
        assert len(part.chars) <= 1, "the two characters are too far apart for one crop"
        for char, _, top, _, _ in part.chars:
            assert 2 < top + 6 < 102
            # `b` and the field, which is two pixels higher, come together.
            if char == "b":
                assert [y for *_, y, _, _ in part.widgets] == [top - 2]
                assert np.flatnonzero(part.pixels[:, 9, 0] == 0)[0] == top
    assert len({top for char, _, top, *_ in chars if char == "b"}) > 5, "bands begin at different rows"
    small = page(size=(48, 32))
    assert crop_rows(small, 104, random.Random(0)) is small


def test_a_loss_without_widgets_or_characters_is_a_number():
    torch.manual_seed(0)
    tower = Tower()
    targets = build_targets([page()])
    loss, parts = vision_loss(tower, tower(targets.pixels), targets)
    assert torch.isfinite(loss)
    assert parts["char_class"].isnan()


@torch.no_grad()
def parts_of(tower, targets):
    return {name: float(part) for name, part in vision_loss(tower, tower(targets.pixels), targets)[1].items()}


def test_training_on_one_page_lowers_every_part_of_the_loss():
    torch.manual_seed(0)
    lines = []
    one = page([("a", 9, 10, 6, 12), ("b", 20, 10, 6, 12)], [("field", 1, 4, 8, 40, 20)])
    tower = Tower()
    targets = build_targets([one])
    before = parts_of(tower, targets)
    pretrain_vision(tower, [one], steps=25, batch_size=2, learning_rate=2e-3, seed=0, log=lines.append)
    after = parts_of(tower, targets)
    assert all(after[name] < before[name] for name in before)
    assert lines[-1].startswith("25/25: char_heat")


def test_labels_in_the_form_of_detections_read_as_the_page_does():
    drawn = page([("k", 16, 8, 6, 12), ("o", 10, 8, 6, 12), ("é", 30, 8, 6, 12)], [("button", 0, 4, 4, 30, 20)])
    result = drawn.detections()
    assert result.symbols.tolist() == [CHAR_CLASSES["k"], CHAR_CLASSES["o"], FIRST_WIDGET + 2]
    assert result.colours.tolist() == [[1, 1, 1]] * 3
    assert read_in_order(result).text() == "\n[button]ok"
