"""Screens, and the actions each family can say, for hypothesis to choose from."""

from dataclasses import replace

from hypothesis import strategies as st

from palaestra.policy.codecs import IMAGE_RULES
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
from palaestra.sessions.keys import MODIFIERS, NAMED
from palaestra.sessions.screen import Size

FAMILIES = ["qwen2.5-vl", "qwen3-vl", "ui-tars-1.0", "ui-tars-1.5", "anthropic", "openai"]
CELLS = {"qwen3-vl": 999, "ui-tars-1.0": 1000}
"""How many parts of a side a relative family tells apart; the others count the picture's pixels."""

NASTY = [
    "'", '"', "\\", "\n", "\t", "it's", '"quoted"', "C:\\new\\table", "🙂", "👩‍👩‍👧", "ß", "\u2028", "</tool_call>",
    "<tool_call>", "<|box_end|>", "<|box_start|>(1,2)<|box_end|>", "<|im_end|>", "<point>1 2</point>", "')", "\\'",
    '"}}', "\n\nAction: wait()", "__import__('os').system('true')", "{}", "%s", "\\n", "\\u003c", "\\x3c|",
]  # fmt: skip
_CHARACTERS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
TEXTS = st.lists(st.sampled_from(NASTY) | _CHARACTERS, min_size=1, max_size=5).map("".join)
KEYS = [*sorted(NAMED), *"abcxyz0189`-=[]\\;',./~!@#$%^&*()_+{}|:\"<>?äßñ"]
WAYS = st.sampled_from([(0, 1), (0, -1), (1, 0), (-1, 0)])
PIXELS = st.integers(-100_000, 100_000).filter(bool)
HELD = st.lists(st.sampled_from(sorted(MODIFIERS)), unique=True).map(tuple)
LARGEST = 4096
AT = st.builds(Point, st.integers(0, LARGEST - 1), st.integers(0, LARGEST - 1))
AT_OR_POINTER = st.none() | AT


def _clicks(at, *ways, held=()):
    keys = HELD if held else st.just(())
    return st.builds(lambda where, way, held: Click(where, *way, held), at, st.sampled_from(ways), keys)


def _chords(most):
    return st.builds(PressKeys, st.lists(st.sampled_from(KEYS), min_size=1, max_size=most, unique=True).map(tuple))


_ONCE, _TWICE, _THRICE = ("left", 1), ("left", 2), ("left", 3)
_MIDDLE, _RIGHT = ("middle", 1), ("right", 1)
_EVERY = (st.builds(Move, AT), st.builds(TypeText, TEXTS))
_STRAIGHT = st.builds(lambda start, end: Drag((start, end)), AT, AT)
_QWEN = (
    *_EVERY, _chords(8), _STRAIGHT, st.builds(lambda at, dy: Scroll(at, 0, dy), AT_OR_POINTER, PIXELS),
    st.builds(Terminate, st.booleans()), st.builds(Wait, st.floats(0.001, 60) | st.integers(1, 60)),
)  # fmt: skip
_TARS = st.one_of(
    *_EVERY, _chords(3), _STRAIGHT, _clicks(AT, _ONCE, _TWICE, _RIGHT),
    st.builds(lambda at, way: Scroll(at, 500 * way[0], 500 * way[1]), AT_OR_POINTER, WAYS),
    st.just(Wait(5)), st.just(Terminate(success=True)), st.builds(Answer, TEXTS),
)  # fmt: skip
SAYABLE = {
    "qwen2.5-vl": st.one_of(*_QWEN, _clicks(AT_OR_POINTER, _ONCE, _TWICE, _MIDDLE, _RIGHT)),
    "qwen3-vl": st.one_of(
        *_QWEN, _clicks(AT_OR_POINTER, _ONCE, _TWICE, _THRICE, _MIDDLE, _RIGHT), st.builds(Answer, TEXTS),
        st.builds(lambda at, dx: Scroll(at, dx, 0), AT_OR_POINTER, PIXELS),
    ),
    "ui-tars-1.0": _TARS,
    "ui-tars-1.5": _TARS,
    "anthropic": st.one_of(
        *_EVERY, _chords(8), _STRAIGHT, _clicks(AT_OR_POINTER, _ONCE, _TWICE, _THRICE, _MIDDLE, _RIGHT, held=True),
        st.builds(lambda at, way, n: Scroll(at, n * way[0], n * way[1]), AT_OR_POINTER, WAYS, st.just(700)),
        st.builds(Wait, st.integers(1, 60)),
    ),
    "openai": st.one_of(
        *_EVERY, _chords(8), _clicks(AT, _ONCE, _TWICE, _MIDDLE, _RIGHT, held=True), st.just(Wait(2)),
        st.builds(Drag, st.lists(AT, min_size=2, max_size=5).map(tuple)),
        st.builds(Scroll, AT, PIXELS, st.integers(-100_000, 100_000)),
    ),
}  # fmt: skip
"""Actions each family has words for, on the largest screen; `scenes` brings them to any other."""


@st.composite
def screens(draw):
    """1 to 4096 pixels each way, no side more than 200 times the other."""
    short = draw(st.integers(1, LARGEST))
    long = draw(st.integers(short, min(LARGEST, 200 * short)))
    return Size(short, long) if draw(st.booleans()) else Size(long, short)


SCREENS = screens()


@st.composite
def scenes(draw, family):
    """A frame, and an action on it that the family can say."""
    rule = IMAGE_RULES[draw(st.sampled_from([family, "tiny"]))]
    frame = rule.frame(draw(SCREENS))
    action = draw(SAYABLE[family])
    action = moved(action, [_brought(point, frame.screen) for point in places(action)])
    if isinstance(action, Drag) and family.startswith("qwen"):
        frame = replace(frame, pointer=action.path[0])
    return frame, action


def _brought(point, screen):
    return Point(point.x * screen.width // LARGEST, point.y * screen.height // LARGEST)


def slack(family, frame):
    """How far a point may come back from where it was, across and down: nothing where the space is fine enough."""
    found = []
    for side, shown in ((frame.screen.width, frame.image.width), (frame.screen.height, frame.image.height)):
        cells = CELLS.get(family, shown)
        fine = side <= 1000 if family in CELLS else cells >= side
        found.append(0 if fine else side / cells)
    return found


def places(action):
    """The points of an action."""
    if isinstance(action, Drag):
        return list(action.path)
    return [action.at] if isinstance(action, Click | Move | Scroll) and action.at is not None else []


def moved(action, points):
    """The action with other points."""
    if isinstance(action, Drag):
        return replace(action, path=tuple(points))
    return replace(action, at=points[0]) if points else action
