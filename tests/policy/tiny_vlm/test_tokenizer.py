"""Every text of the grammar comes back as it went in, and a click is six tokens."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from palaestra.policy.codecs import CODECS, IMAGE_RULES
from palaestra.policy.codecs.qwen_texts import SPECIAL_TOKENS
from palaestra.policy.tiny_vlm.tokenizer import build_tokenizer
from palaestra.sessions.action import Answer, Click, Move, Point, PressKeys, Scroll, Terminate, TypeText, Wait
from palaestra.sessions.screen import Size

FRAME = IMAGE_RULES["tiny"].frame(Size(160, 210))
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
def test_what_the_grammar_says_survives_encoding_and_decoding(tokenizer, action):
    text = CODECS["qwen3-vl"].encode(action, FRAME)
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_survives(tokenizer, text):
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


def test_a_click_is_five_tokens_and_the_end(tokenizer):
    text = CODECS["qwen3-vl"].encode(Click(Point(80, 105)), FRAME)
    assert len(ids_of(tokenizer, text)) == 5


def test_every_coordinate_is_one_token(tokenizer):
    assert {len(ids_of(tokenizer, str(number))) for number in range(1000)} == {1}


def test_an_instruction_is_words_and_a_caption_is_letters(tokenizer):
    pieces = [tokenizer.decode([token]) for token in ids_of(tokenizer, 'Click the button "apple".')]
    assert pieces == ["Click", " the", " button", " ", '"', "a", "p", "p", "l", "e", '"', "."]


def test_the_tokens_of_the_family_are_there_and_single(tokenizer):
    assert all(len(ids_of(tokenizer, token)) == 1 for token in SPECIAL_TOKENS)
    assert tokenizer.eos_token == "<|im_end|>"
