"""Peaks of the tower's maps become boxes; of two peaks on one character the stronger one is kept."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from palaestra.policy.screen_reader import detection
from palaestra.policy.screen_reader.detection import detect
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, read_in_order
from palaestra.policy.screen_reader.tower import CHAR_CLASSES, CHARACTERS, WIDGETS, Tower, TowerOutput, to_pixels

FORM = Path(__file__).parent / "focused_form.png"


def logit(probability):
    return math.log(probability / (1 - probability))


class FakeTower:
    """Has one character, `A`, and one focused field on its maps."""

    def __call__(self, pixels):
        _, _, height, width = pixels.shape
        char_heat = torch.full((1, height // 4, width), -9.0)
        char_heat[0, 2, 30] = logit(0.9)
        widget_heat = torch.full((1, len(WIDGETS), height // 8, width // 8), -9.0)
        widget_heat[0, 0, 5, 4] = logit(0.8)
        rest = torch.zeros(1, 5, height // 8, width // 8)
        rest[0, 0, 5, 4] = 3.0
        return TowerOutput(char_heat, torch.zeros(1, 2, height // 4, width), widget_heat, rest)

    def describe_chars(self, features):
        logits = torch.zeros(len(features), len(CHARACTERS))
        logits[:, CHAR_CLASSES["A"]] = 5.0
        boxes = torch.zeros(len(features), 4)
        boxes[:, 0] = 0.25
        return logits, boxes


def screen(height=210, width=160, colour=(255, 255, 255)):
    pixels = np.full((height, width, 3), 255, np.uint8)
    pixels[: height // 2, ::2] = (0, 128, 255)
    pixels[-1, -1] = colour
    return pixels


def test_offsets_and_logarithms_become_boxes():
    result = detect(FakeTower(), screen())
    assert result.symbols.tolist() == [CHAR_CLASSES["A"], FIRST_WIDGET + 1]
    # The centre is 0.25 columns right of column 30's middle, and in the middle of row 2, which has pixels 8 to 11.
    x, y = 30.75, 10.0
    assert result.boxes[0].tolist() == pytest.approx([x - 3, y - 6, 6, 12])
    assert result.boxes[1].tolist() == pytest.approx([4.5 * 8 - 20, 5.5 * 8 - 10, 40, 20])
    assert result.colours.shape == (2, 3)


def test_peaks_are_local_maxima_above_the_threshold():
    heat = torch.zeros(6, 8)
    heat[1, 1], heat[1, 2], heat[4, 6], heat[3, 3] = 0.9, 0.8, 0.36, 0.35
    rows, columns = detection._peaks(heat, 0.35)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == [(1, 1), (4, 6)]


def test_a_wide_letter_with_two_peaks_is_one_letter_and_neighbours_stay():
    """Boxes 10 wide reach 0.3 x (10 + 10) = 6 pixels: centres 5 apart are one letter, centres 7 apart two."""
    boxes = torch.tensor([[0.0, 0, 10, 12], [5, 0, 10, 12], [12, 0, 10, 12], [0, 8, 10, 12]])
    assert detection._drop_overlapping(boxes, torch.tensor([0.5, 0.9, 0.7, 0.6])) == [1, 2, 3]
    assert detection._drop_overlapping(boxes, torch.tensor([0.9, 0.5, 0.7, 0.6])) == [0, 2, 3]
    assert detection._drop_overlapping(torch.zeros(0, 4), torch.zeros(0)) == []


def test_narrow_letters_side_by_side_stay():
    boxes = torch.tensor([[0.0, 0, 3, 12], [3, 0, 3, 12], [6, 0, 3, 12]])
    assert detection._drop_overlapping(boxes, torch.tensor([0.9, 0.9, 0.9])) == [0, 1, 2]


def test_only_the_part_with_content_and_16_rows_below_it_goes_through_the_tower():
    pixels = np.full((210, 160, 3), 255, np.uint8)
    assert detection._content_height(pixels) == 16
    pixels[100, 5] = 0
    assert detection._content_height(pixels) == 116
    pixels[209, 5] = 0
    assert detection._content_height(pixels) == 210


def test_sides_are_padded_with_white_to_multiples_of_8():
    pixels = to_pixels([np.zeros((210, 161, 3), np.uint8)])
    assert pixels.shape == (1, 3, 216, 168)
    assert pixels[0, :, :210, :161].unique().tolist() == [-1.0]
    assert pixels[0, :, 210:].unique().tolist() == [1.0]


def test_an_untrained_tower_has_430_thousand_weights_and_takes_any_size():
    torch.manual_seed(0)
    tower = Tower()
    assert round(sum(weight.numel() for weight in tower.parameters()), -4) == 430_000
    for height, width in ((24, 40), (210, 160)):
        out = tower(to_pixels([np.zeros((height, width, 3), np.uint8)]))
        tall, wide = -(-height // 8) * 8, -(-width // 8) * 8
        assert out.char_heat.shape == (1, tall // 4, wide)
        assert out.widget_heat.shape == (1, len(WIDGETS), tall // 8, wide // 8)


def test_the_shipped_tower_reads_a_form():
    from PIL import Image

    from palaestra.policy.screen_reader.image_processor import PictureReader
    from palaestra.policy.screen_reader.recipe import SHIPPED

    reader = PictureReader.from_pretrained(SHIPPED)
    with Image.open(FORM) as image:
        result = detect(reader.tower, np.asarray(image.convert("RGB")))
    assert read_in_order(result).text() == (
        '\nEnter "Kolumbet" into the text\nfield and press Submit.\nName:\n[field*]\n[checkbox*]zarqu7\n'
        "[checkbox]Fro 42\n[button]Submit"
    )
    left, top, width, height = result.boxes[result.symbols == FIRST_WIDGET + 1][0]
    # The browser reports a field of 120 x 21 pixels at (4, 70).
    assert (left + width / 2, top + height / 2) == pytest.approx((64, 80.5), abs=2)
