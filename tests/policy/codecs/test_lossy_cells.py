"""What a family has no exact words for is refused with a reason, cell by cell."""

import pickle

import pytest
from tests.policy.codecs.actions import FAMILIES

from palaestra.errors import UnsupportedAction
from palaestra.policy.codecs import CODECS, CoordinateFrame, DecodedAction
from palaestra.sessions.action import (
    Answer,
    Click,
    Drag,
    Move,
    Point,
    PressKeys,
    Scroll,
    Terminate,
    TypeText,
    Wait,
)
from palaestra.sessions.screen import Size

A, B, C = Point(3, 4), Point(50, 60), Point(70, 80)
FRAME = CoordinateFrame(Size(100, 100), Size(112, 112))
Q2, Q3, T0, T1, AN, OA = FAMILIES
TARS, API = {T0, T1}, {AN, OA}

CELLS = [
    ("three clicks", Click(A, times=3), {Q3, AN}),
    ("two clicks of the right button", Click(A, "right", 2), set()),
    ("three clicks of the middle button", Click(A, "middle", 3), set()),
    ("a click of the middle button", Click(A, "middle"), {Q2, Q3, AN, OA}),
    ("a click where the pointer is", Click(None), {Q2, Q3, AN}),
    ("a click with a key held", Click(A, held=("Control",)), API),
    ("a click with two keys held", Click(A, held=("Control", "Shift")), API),
    ("a move", Move(A), set(FAMILIES)),
    ("a drag from elsewhere than the pointer", Drag((A, B)), {T0, T1, AN, OA}),
    ("a drag around a corner", Drag((A, B, C)), {OA}),
    ("a drag with the right button", Drag((A, B), "right"), set()),
    ("a scroll by seven pixels", Scroll(A, 0, 7), {Q2, Q3, OA}),
    ("a scroll by three clicks", Scroll(A, 0, 300), {Q2, Q3, AN, OA}),
    ("a scroll by five clicks", Scroll(A, 0, -500), set(FAMILIES)),
    ("a scroll sideways", Scroll(A, 500, 0), {Q3, T0, T1, AN, OA}),
    ("a scroll both ways", Scroll(A, 500, 500), {OA}),
    ("a scroll where the pointer is", Scroll(None, 0, 500), {Q2, Q3, T0, T1, AN}),
    ("a wait of half a second", Wait(0.5), {Q2, Q3}),
    ("a wait of one second", Wait(1), {Q2, Q3, AN}),
    ("a wait of two seconds", Wait(2), {Q2, Q3, AN, OA}),
    ("a wait of five seconds", Wait(5.0), {Q2, Q3, T0, T1, AN}),
    ("success", Terminate(success=True), {Q2, Q3, T0, T1}),
    ("giving up", Terminate(success=False), {Q2, Q3}),
    ("an answer", Answer("42"), {Q3, T0, T1}),
    ("an empty answer", Answer(""), {Q3}),
    ("a text", TypeText("a\nb"), set(FAMILIES)),
    ("four keys", PressKeys(("Control", "Shift", "Alt", "a")), {Q2, Q3, AN, OA}),
    ("a capital letter as a key", PressKeys(("Shift", "A")), set(FAMILIES) - {OA}),
    ("the space bar by its two names", PressKeys(("Space", " ")), set()),
    ("a point that is not on the screen", Move(Point(100, 0)), set()),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("what", "action", "by"), CELLS, ids=[cell[0] for cell in CELLS])
def test_a_family_says_an_action_exactly_or_refuses_it(what, action, by, family):
    if family in by:
        said = CODECS[family].encode(action, FRAME)
        assert CODECS[family].decode(said, FRAME).action == action
    else:
        with pytest.raises(UnsupportedAction) as refused:
            CODECS[family].encode(action, FRAME)
        assert refused.value.place == f"{family}.{action.kind}"
        assert refused.value.value == action
        assert len(refused.value.reason) > 10


@pytest.mark.parametrize("family", [Q2, Q3])
def test_a_drag_is_a_move_and_then_a_drag_from_the_pointer(family):
    codec = CODECS[family]
    with pytest.raises(UnsupportedAction, match="Move to the first point"):
        codec.encode(Drag((A, B)), FRAME)
    there = CoordinateFrame(
        FRAME.screen, FRAME.image, pointer=codec.decode(codec.encode(Move(A), FRAME), FRAME).action.at
    )
    said = codec.encode(Drag((A, B)), there)
    assert codec.decode(said, there).action == Drag((A, B))
    # Without the pointer the same words mean no particular drag.
    assert codec.decode(said, FRAME).code == "no_pointer"


def test_the_refusal_says_place_value_reason_and_remedy_and_travels_between_processes():
    with pytest.raises(UnsupportedAction) as refused:
        CODECS[Q2].encode(Answer("42"), FRAME)
    text = "qwen2.5-vl.answer = Answer(text='42'): has no action for an answer. Terminate instead."
    assert str(refused.value) == text
    assert str(pickle.loads(pickle.dumps(refused.value))) == text


def test_the_end_of_a_scroll_is_where_more_of_the_page_comes_into_view():
    down = Scroll(A, 0, 500)
    assert '"pixels": -500' in CODECS[Q2].encode(down, FRAME)
    assert '"pixels": -500' in CODECS[Q3].encode(down, FRAME)
    assert '"pixels": 500' in CODECS[Q3].encode(Scroll(A, 500, 0), FRAME)  # to the right
    assert "direction='down'" in CODECS[T0].encode(down, FRAME)
    assert '"scroll_direction": "down", "scroll_amount": 5' in CODECS[AN].encode(down, FRAME)
    assert '"scroll_x": 0, "scroll_y": 500' in CODECS[OA].encode(down, FRAME)


def test_success_and_failure_are_told_apart():
    for success, word in ((True, "success"), (False, "failure")):
        said = CODECS[Q3].encode(Terminate(success), FRAME)
        assert f'"status": "{word}"' in said
        assert CODECS[Q3].decode(said, FRAME) == DecodedAction(Terminate(success), "", (0, len(said)))
