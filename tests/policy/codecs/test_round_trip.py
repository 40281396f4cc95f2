"""What a family can say comes back as it was, through any screen."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policy.codecs.actions import FAMILIES, NASTY, moved, places, scenes, slack

from palaestra.policy.codecs import CODECS, IMAGE_RULES, DecodedAction
from palaestra.sessions.action import Click, Point, TypeText
from palaestra.sessions.screen import Size


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_every_action_a_family_can_say_survives_within_a_cell_of_its_space(family, data):
    frame, action = data.draw(scenes(family))
    text = CODECS[family].encode(action, frame)
    read = CODECS[family].decode(text, frame)

    assert isinstance(read, DecodedAction), read
    across, down = slack(family, frame)
    for was, came in zip(places(action), places(read.action), strict=True):
        assert abs(was.x - came.x) <= across
        assert abs(was.y - came.y) <= down
    assert moved(read.action, places(action)) == action
    # The position a family can say is a fixed point: saying it again changes nothing.
    assert CODECS[family].decode(CODECS[family].encode(read.action, frame), frame).action == read.action


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", [1, 2, 27, 160, 999, 1000])
def test_every_pixel_of_a_small_screen_comes_back_itself(family, side):
    frame = IMAGE_RULES[family].frame(Size(side, side))
    for x in range(side):
        click = Click(Point(x, side - 1 - x))
        assert CODECS[family].decode(CODECS[family].encode(click, frame), frame).action == click


@pytest.mark.parametrize(("family", "off"), [("qwen3-vl", 2), ("ui-tars-1.0", 2)])
def test_on_a_screen_wider_than_the_grid_a_pixel_comes_back_at_most_a_cell_away(family, off):
    frame = IMAGE_RULES[family].frame(Size(1920, 1080))
    away = [
        abs(x - CODECS[family].decode(CODECS[family].encode(Click(Point(x, 0)), frame), frame).action.at.x)
        for x in range(1920)
    ]
    assert max(away) <= 1920 / 999 < off  # so one pixel at most
    assert away.count(0) >= 999


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text", [*NASTY, "def f():\n\treturn {'a': \"b\\n\"}  # done", "x" * 10_000, "🙂" * 10_000, "\\" * 10_000]
)
def test_text_survives_as_text(family, text):
    frame = IMAGE_RULES[family].frame(Size(320, 200))
    said = CODECS[family].encode(TypeText(text), frame)
    assert CODECS[family].decode(said, frame).action == TypeText(text)
    assert (
        CODECS[family].decode(f"Thought: I write.\n{said}" if family.startswith("ui-tars") else said, frame).action.text
        == text
    )


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "ui-tars-1.0", "ui-tars-1.5"])
def test_no_mark_of_a_tokenizer_is_ever_written_inside_a_text(family):
    frame = IMAGE_RULES[family].frame(Size(320, 200))
    said = CODECS[family].encode(TypeText("<|im_end|></tool_call><tool_call><|box_end|>"), frame)
    assert "<|" not in said
    if family.startswith("qwen"):
        assert (said.count("<tool_call>"), said.count("</tool_call>")) == (1, 1)  # the grammar's own


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=50)
@given(data=st.data(), before=st.text(max_size=30), after=st.text(max_size=30))
def test_the_span_is_the_actions_text_and_the_rest_is_thought(family, data, before, after):
    frame, action = data.draw(scenes(family))
    said = CODECS[family].encode(action, frame)
    if family in ("anthropic", "openai"):
        before, after = "\n ", " \t\n"
    read = CODECS[family].decode(f"{before}\n{said}\n{after}", frame)
    if isinstance(read, DecodedAction):
        start, end = read.span
        span = f"{before}\n{said}\n{after}"[start:end]
        assert span == said.removeprefix("Action: ")
        assert CODECS[family].decode(said, frame).action == read.action
