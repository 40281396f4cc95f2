"""All text survives the tokenizer, words are divided alike in every case, and a click is five tokens."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from palaestra.policy.codecs import CODECS, IMAGE_RULES
from palaestra.policy.codecs.qwen_texts import SPECIAL_TOKENS
from palaestra.policy.screen_reader.tokenizer import (
    WordDivider,
    build_tokenizer,
    coordinate_ids,
    press_key,
    text_tokens,
)
from palaestra.sessions.action import Answer, Click, Move, Point, PressKeys, Scroll, Terminate, TypeText, Wait
from palaestra.sessions.screen import Size

FRAME = IMAGE_RULES["unscaled"].frame(Size(160, 210))
CODEC = CODECS["qwen3-vl"]
POINT = st.builds(Point, st.integers(0, 159), st.integers(0, 209))
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=20)
ACTIONS = st.one_of(
    st.builds(Click, POINT, st.sampled_from(["left", "right", "middle"])),
    st.builds(Click, POINT, st.just("left"), st.integers(1, 3)),
    st.builds(Move, POINT),
    st.builds(Scroll, POINT, st.just(0), st.integers(-500, 500).filter(bool)),
    st.builds(TypeText, TEXT),
    st.builds(Answer, TEXT),
    st.builds(PressKeys, st.sampled_from([("Enter",), ("Tab",), ("Control", "a")])),
    st.builds(Wait, st.integers(1, 9)),
    st.builds(Terminate, st.booleans()),
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=150, deadline=None)
@given(action=ACTIONS)
def test_replies_of_the_grammar_survive_encoding_and_decoding(tokenizer, action):
    text = CODEC.encode(action, FRAME)
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=40))
def test_any_printable_text_survives(tokenizer, text):
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


@settings(max_examples=100, deadline=None)
@given(x=st.integers(0, 159), y=st.integers(0, 209))
def test_a_click_is_five_tokens_with_the_end(tokenizer, x, y):
    ids = ids_of(tokenizer, CODEC.encode(Click(Point(x, y)), FRAME) + "<|im_end|>")
    columns, rows = coordinate_ids(tokenizer)
    assert len(ids) == 5
    assert ids[1] in columns
    assert ids[2] in rows
    assert ids[4] == tokenizer.eos_token_id


def test_a_key_is_one_token_and_the_end(tokenizer):
    assert press_key("enter") == CODEC.encode(PressKeys(("Enter",)), FRAME)
    assert len(ids_of(tokenizer, press_key("enter"))) == 1


def test_words_are_divided_into_pieces_digits_into_pairs_and_spaces_are_tokens(tokenizer):
    pieces = [tokenizer.decode([token]) for token in ids_of(tokenizer, 'Enter the code "bafuke 12345".')]
    assert pieces == ["Enter", " ", "the", " ", "code", ' "', "ba", "fu", "ke", " ", "12", "34", "5", '"', "."]


@settings(max_examples=150, deadline=None)
@given(word=st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12))
def test_a_word_is_divided_at_the_same_places_in_every_case(tokenizer, word):
    lengths = [
        [len(piece) for piece in tokenizer.convert_ids_to_tokens(ids_of(tokenizer, written))]
        for written in (word, word.capitalize(), word.upper())
    ]
    assert lengths[0] == lengths[1] == lengths[2]


@settings(max_examples=150, deadline=None)
@given(word=st.text(st.characters(codec="ascii", exclude_categories=("Cc", "Zs")), min_size=1, max_size=12))
def test_words_of_a_screen_are_divided_as_in_text(tokenizer, word):
    divided = WordDivider(tokenizer).divide(word)
    assert "".join(tokenizer.convert_ids_to_tokens(token) for token, _ in divided) == word
    assert sum(length for _, length in divided) == len(word)
    if not any(token >= tokenizer.vocab_size for token in ids_of(tokenizer, word)):
        assert [token for token, _ in divided] == ids_of(tokenizer, word)


def test_its_merges_are_the_same_every_time(tokenizer):
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_each_coordinate_is_one_token_and_x_and_y_have_their_own(tokenizer):
    columns, rows = coordinate_ids(tokenizer)
    assert len({*columns, *rows}) == 2000
    assert tokenizer.decode([columns[0], rows[999]]) == "[0, 999]"


def test_every_token_of_text_has_its_text(tokenizer):
    texts = text_tokens(tokenizer)
    for written in ("Submit", " ", ' "', "7", "42", "•", "@"):
        (token,) = ids_of(tokenizer, written)
        assert texts[token] == written


def test_the_tokens_of_the_family_are_there_and_single(tokenizer):
    assert all(len(ids_of(tokenizer, token)) == 1 for token in SPECIAL_TOKENS)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_the_shipped_model_has_this_tokenizer(tokenizer):
    from transformers import AutoTokenizer

    from palaestra.policy.screen_reader.recipe import SHIPPED

    shipped = AutoTokenizer.from_pretrained(SHIPPED)
    assert shipped.get_vocab() == tokenizer.get_vocab()
    assert shipped.chat_template == tokenizer.chat_template
