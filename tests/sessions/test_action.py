"""Actions: only those that can be performed can be made, and JSON brings back what it was given."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.errors import InvalidAction
from palaestra.sessions import action as actions
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
    decode,
    encode,
    fits,
)
from palaestra.sessions.keys import MODIFIERS, NAMED, get_key, is_known_key

POINTS = st.builds(Point, st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
BUTTONS = st.sampled_from(["left", "middle", "right"])
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40)
KEYS = st.one_of(st.sampled_from(sorted(NAMED)), st.characters(categories=["L", "N", "P", "S"]))
ACTIONS = st.one_of(
    st.builds(
        Click, st.none() | POINTS, BUTTONS, st.integers(1, 3), st.sets(st.sampled_from(sorted(MODIFIERS))).map(tuple)
    ),
    st.builds(Move, POINTS),
    st.builds(Drag, st.lists(POINTS, min_size=2, max_size=6).map(tuple), BUTTONS),
    st.builds(TypeText, TEXT),
    st.builds(PressKeys, st.lists(KEYS, min_size=1, max_size=4, unique=True).map(tuple)),
    st.builds(Scroll, st.none() | POINTS, st.integers(-900, 900), st.integers(1, 900)),
    st.builds(Wait, st.floats(0.001, 60)),
    st.builds(Terminate, st.booleans()),
    st.builds(Answer, TEXT),
)


@given(ACTIONS)
def test_every_action_survives_json(action):
    assert decode(json.loads(json.dumps(encode(action)))) == action


def test_the_wire_form_is_plain():
    assert encode(Click(Point(10, 20), times=2)) == {
        "kind": "click", "at": [10, 20], "button": "left", "times": 2, "held": [],
    }  # fmt: skip
    assert decode({"kind": "click", "at": [10, 20]}) == Click(Point(10, 20))
    assert decode({"kind": "click"}) == Click(None)  # where the pointer is
    assert decode({"kind": "scroll", "dy": 120}) == Scroll(None, 0, 120)
    assert decode({"kind": "press", "keys": ["Control", "a"]}) == PressKeys(("Control", "a"))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("click", "is not a mapping"),
        ({}, "action.kind = None: is none of click, move"),
        ({"kind": "clik"}, "is none of click"),
        ({"kind": ["click"]}, "is none of click"),
        ({"kind": "click", "at": [1]}, "not a point"),
        ({"kind": "click", "at": [1.5, 2]}, "in whole pixels"),
        ({"kind": "click", "at": [True, 2]}, "in whole pixels"),
        ({"kind": "click", "at": {"x": 1, "y": 2}}, "not a point"),
        ({"kind": "click", "at": [1, 2], "buton": "left"}, "Did you mean 'button'?"),
        ({"kind": "click", "at": [1, 2], "button": "third"}, "none of left, middle, right"),
        ({"kind": "click", "at": [1, 2], "times": 4}, "must be 1, 2 or 3"),
        ({"kind": "click", "at": [1, 2], "held": ["q"]}, "can be held"),
        ({"kind": "move"}, "move.at = None: required"),
        ({"kind": "move", "at": None}, "not a point"),
        ({"kind": "click", "held": [[1]]}, "can be held"),
        ({"kind": "wait", "seconds": 10**400}, "up to 60"),
        ({"kind": "drag", "path": [[1, 2]]}, "2 to 256 points"),
        ({"kind": "drag", "path": 7}, "is not a list"),
        ({"kind": "type", "text": ""}, "1 to 10000"),
        ({"kind": "type", "text": "a\x00"}, "control character"),
        ({"kind": "type", "text": "\ud83d"}, "half of a surrogate"),
        ({"kind": "type", "text": 5}, "must be a text"),
        ({"kind": "press", "keys": ["Entr"]}, "Did you mean 'Enter'?"),
        ({"kind": "press", "keys": []}, "1 to 8 keys"),
        ({"kind": "press", "keys": ["a", "a"]}, "held only once"),
        ({"kind": "press", "keys": [3]}, "no key has this name"),
        ({"kind": "scroll"}, "does not scroll"),
        ({"kind": "scroll", "dy": 1.5}, "whole number"),
        ({"kind": "wait", "seconds": 0}, "above 0"),
        ({"kind": "wait", "seconds": float("nan")}, "above 0"),
        ({"kind": "wait", "seconds": 61}, "up to 60"),
        ({"kind": "terminate", "success": "yes"}, "true or false"),
        ({"kind": "answer"}, "required"),
        ({"kind": "answer", "text": "\ud83d"}, "half of a surrogate"),
    ],
)
def test_what_cannot_be_performed_is_refused_by_place_and_reason(document, message):
    with pytest.raises(InvalidAction) as refused:
        decode(document)
    assert message in str(refused.value)
    assert refused.value.status == 422


def _nested(inner):
    return st.lists(inner) | st.dictionaries(st.sampled_from(["kind", "at", "path", "keys", "text", "times"]), inner)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), _nested, max_leaves=8))
def test_any_document_is_an_action_or_a_refusal(document):
    with contextlib.suppress(InvalidAction):
        assert isinstance(decode(document), tuple(actions.KINDS.values()))


def test_a_point_outside_the_screen_does_not_fit():
    fits(Click(Point(159, 209)), 160, 210)
    fits(Click(None), 160, 210)
    for action in (
        Click(Point(160, 0)),
        Move(Point(0, 210)),
        Drag((Point(0, 0), Point(-1, 0))),
        Scroll(Point(5, 999), 0, 1),
    ):
        with pytest.raises(InvalidAction, match="outside the screen of 160 x 210"):
            fits(action, 160, 210)


def test_keys_are_what_a_browser_calls_them():
    assert (get_key("a").code, get_key("a").number) == ("KeyA", 65)
    assert (get_key("A").name, get_key("A").code) == ("A", "KeyA")
    assert (get_key("!").code, get_key("!").text) == ("Digit1", "!")
    assert get_key(" ").code == get_key("Space").code == "Space"
    assert get_key("ß").code == ""
    assert get_key("Enter").text == "\r"
    assert not is_known_key("Banana")
