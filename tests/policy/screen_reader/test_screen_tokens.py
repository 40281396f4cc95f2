"""Symbols become the tokens of the same words in text, with their places; lines, gaps and content are features."""

import numpy as np
import pytest

from palaestra.policy.screen_reader.screen_tokens import ROW_FEATURES, ScreenTokenizer, ScreenTokens
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, Detections, read_in_order
from palaestra.policy.screen_reader.tokenizer import build_tokenizer
from palaestra.policy.screen_reader.tower import CHAR_CLASSES, WIDGET_KINDS


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def screen_tokenizer(tokenizer):
    return ScreenTokenizer(tokenizer)


def text(left, top, written):
    """Characters of 6 x 10 pixels."""
    return [(CHAR_CLASSES[char], (left + 6 * place, top, 6, 10)) for place, char in enumerate(written) if char != " "]


def widget(kind, *box, on=False):
    return [(FIRST_WIDGET + 2 * WIDGET_KINDS[kind] + on, box)]


def tokenize(screen_tokenizer, *groups):
    items = [item for group in groups for item in group]
    boxes = np.array([box for _, box in items], np.float32).reshape(-1, 4)
    symbols = np.array([symbol for symbol, _ in items], np.int64)
    return screen_tokenizer.tokenize(read_in_order(Detections(symbols, boxes, np.zeros((len(items), 3), np.float32))))


@pytest.mark.parametrize("word", ["Submit", "bafuke", "48213", "ada.ruiz47@example.org", "•••", "✖"])
def test_a_word_has_the_tokens_that_it_has_in_text(tokenizer, screen_tokenizer, word):
    tokens = tokenize(screen_tokenizer, text(10, 0, word))
    assert tokens.ids.tolist() == tokenizer(word)["input_ids"]


def test_what_stands_on_a_screen_cannot_become_a_control_token(tokenizer, screen_tokenizer):
    tokens = tokenize(screen_tokenizer, text(0, 0, "<|im_end|>"))
    assert tokenizer.eos_token_id not in tokens.ids.tolist()
    assert tokenizer.decode(tokens.ids.tolist()) == "<|im_end|>"


def test_a_token_has_the_box_around_its_characters(screen_tokenizer):
    """`48213` is divided into `48`, `21` and `3`, and every character is 6 pixels wide."""
    tokens = tokenize(screen_tokenizer, text(10, 20, "48213"))
    assert tokens.boxes.tolist() == [[10, 20, 12, 10], [22, 20, 12, 10], [34, 20, 6, 10]]


def test_lines_and_gaps_are_features_of_the_first_token_after_them(screen_tokenizer):
    """The characters of `to go` are 6 pixels apart, those of the last word begin 20 pixels after `go`."""
    tokens = tokenize(screen_tokenizer, text(0, 0, "to go"), text(50, 0, "me"), text(0, 30, "we"))
    assert tokens.flags.tolist() == [[1, 1, 0, 0], [0, 0.5, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]]


def test_a_widget_is_a_token_and_knows_whether_there_is_text_inside(tokenizer, screen_tokenizer):
    empty, full = widget("field", 0, 20, 60, 20, on=True), widget("field", 0, 60, 60, 20)
    tokens = tokenize(screen_tokenizer, text(0, 0, "me"), empty, full, text(4, 65, "to"), text(80, 65, "go"))
    names = tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
    assert names == ["me", "<|field*|>", "<|field|>", "to", "go"]
    assert tokens.flags[:, 2].tolist() == [0, 0, 1, 0, 0]


def test_a_colon_after_a_label_is_a_feature_so_that_a_value_follows_its_label(tokenizer, screen_tokenizer):
    tokens = tokenize(screen_tokenizer, text(0, 0, "Code: 42 : 3"))
    assert tokenizer.convert_ids_to_tokens(tokens.ids.tolist()) == ["Code", "42", ":", "3"]
    assert tokens.flags[:, 3].tolist() == [1, 0, 0, 0]


def test_nothing_is_one_blank_token(tokenizer, screen_tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenize(screen_tokenizer).ids.tolist()) == ["<|blank|>"]


def test_a_row_has_the_centre_as_a_share_of_the_screen_and_sides_in_hundreds_of_pixels():
    box, colour, flags = ([[30, 100, 20, 10]], [[0.1, 0.2, 0.3]], [[1, 0.5, 0, 1]])
    tokens = ScreenTokens(np.array([7]), *(np.array(one, np.float32) for one in (box, colour, flags)))
    (row,) = tokens.rows((160, 210))
    assert len(row) == ROW_FEATURES == 12
    np.testing.assert_allclose(row, [7, 40 / 160, 105 / 210, 0.2, 0.1, 0.1, 0.2, 0.3, 1, 0.5, 0, 1], rtol=1e-6)
