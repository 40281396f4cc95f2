"""Detections become symbols in reading order, with spaces, gaps and widgets where they belong."""

import numpy as np
import pytest

from palaestra.policy.screen_reader.symbols import (
    FIRST_WIDGET,
    Detections,
    mean_colours,
    read_in_order,
)
from palaestra.policy.screen_reader.tower import CHAR_CLASSES, CHARACTERS, WIDGET_KINDS


def char(text, left, top, width=6, height=10):
    return CHAR_CLASSES[text], (left, top, width, height)


def widget(kind, left, top, width, height, *, on=False):
    return FIRST_WIDGET + 2 * WIDGET_KINDS[kind] + on, (left, top, width, height)


def detections(*items):
    symbols, boxes = zip(*items, strict=True) if items else ((), ())
    table = np.array(boxes, np.float32).reshape(-1, 4)
    return Detections(np.array(symbols, np.int64), table, np.zeros((len(table), 3), np.float32))


def read(*items):
    return read_in_order(detections(*items))


def test_characters_are_sorted_from_left_to_right_whatever_their_order():
    assert read(char("c", 12, 0), char("a", 0, 0), char("b", 6, 0)).text() == "\nabc"


@pytest.mark.parametrize(("gap", "text"), [(0, "\nab"), (1.6, "\nab"), (1.7, "\na b"), (13, "\na b"), (13.1, "\na  b")])
def test_a_gap_of_a_sixth_of_the_height_is_a_space_and_one_of_more_than_its_1_3_fold_separates_texts(gap, text):
    assert read(char("a", 0, 0), char("b", 6 + gap, 0)).text() == text


def test_a_space_lies_between_its_neighbours():
    sequence = read(char("a", 0, 0), char("b", 10, 0))
    assert sequence.boxes.tolist() == [[0, 0, 1, 10], [0, 0, 6, 10], [6, 0, 4, 10], [10, 0, 6, 10]]


def test_a_line_ends_where_centres_are_more_than_0_45_heights_apart():
    assert read(char("a", 0, 0), char("b", 6, 4.5)).text() == "\nab"
    assert read(char("b", 6, 0), char("a", 0, 4.6)).text() == "\nb\na"


def test_lines_come_from_top_to_bottom():
    assert read(char("c", 0, 40), char("a", 50, 0), char("b", 0, 20)).text() == "\na\nb\nc"


def test_a_widget_comes_before_the_text_inside_it_and_its_label_follows_without_a_space():
    button = widget("button", 10, 0, 30, 20)
    assert read(char("k", 18, 5), button, char("o", 12, 5)).text() == "\n[button]ok"
    box = widget("checkbox", 0, 0, 13, 13, on=True)
    assert read(box, char("a", 17, 1)).text() == "\n[checkbox*]a"


def test_a_widget_after_text_begins_after_a_gap():
    assert read(char("a", 0, 5), widget("field", 8, 0, 60, 20)).text() == "\na  [field]"


def test_a_high_widget_does_not_swallow_the_lines_beside_it():
    """A text area 60 pixels high counts as 24 high: a line is beside it within 0.45 x 10 pixels of its middle."""
    area = widget("textarea", 0, 0, 50, 60)
    assert read(area, char("a", 60, 5), char("b", 60, 25), char("c", 60, 45)).text() == "\na\n[textarea]b\nc"


def test_nothing_gives_an_empty_sequence():
    sequence = read()
    assert len(sequence) == 0
    assert sequence.boxes.shape == (0, 4)
    assert sequence.text() == ""


def test_symbols_are_94_ascii_characters_three_others_three_separators_and_then_widgets():
    assert len(CHARACTERS) == 94 + 3
    assert FIRST_WIDGET == 97 + 3


def test_colours_are_means_over_boxes_that_are_cut_at_the_edges():
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[:, 3:] = (255, 0, 51)
    boxes = np.array([[0, 0, 3, 4], [3, 0, 3, 4], [2, 1, 2, 2], [5, 3, 10, 10], [-4, -4, 2, 2]], np.float32)
    wanted = [[0, 0, 0], [1, 0, 0.2], [0.5, 0, 0.1], [1, 0, 0.2], [0, 0, 0]]
    np.testing.assert_allclose(mean_colours(pixels, boxes), wanted, atol=1e-6)


def test_a_box_covers_every_pixel_that_it_touches():
    pixels = np.zeros((2, 4, 3), np.uint8)
    pixels[:, 1] = 255
    assert mean_colours(pixels, np.array([[0.9, 0, 1.0, 2]], np.float32))[0, 0] == pytest.approx(0.5)
