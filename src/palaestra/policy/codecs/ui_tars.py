"""The prompts UI-TARS was trained to follow, up to the user's instruction, which stands in the user's turn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from palaestra.policy.codecs.call_syntax import Call, call_at, quoted
from palaestra.policy.codecs.codec import DIRECTIONS, check_writable, clicks, no_words, spelled, turned
from palaestra.policy.codecs.coordinates import Frame, Space
from palaestra.policy.codecs.decoding import Arguments, Decoded, Refusal, Shape, Understood, read_answer, shown
from palaestra.policy.codecs.key_names import PYAUTOGUI_KEYS
from palaestra.sessions.action import (
    Answer,
    Button,
    Click,
    Drag,
    Move,
    Point,
    PressKeys,
    Scroll,
    Terminate,
    TypeText,
    UiAction,
    Wait,
)

__all__ = ["FIRST_PROMPT", "POINT_PROMPT", "UiTarsCodec"]


_FORMAT = """\
You are a GUI agent. You are given a task and your action history, with screenshots. You need to perform the next \
action to complete the task.{blank}

## Output Format
```
Thought: ...
Action: ...
```

## Action Space

"""

# Blanks at the ends of lines are the originals': models were trained with them.
FIRST_PROMPT = (
    _FORMAT.format(blank=" ")
    + """\
click(start_box='<|box_start|>(x1,y1)<|box_end|>')
left_double(start_box='<|box_start|>(x1,y1)<|box_end|>')
right_single(start_box='<|box_start|>(x1,y1)<|box_end|>')
drag(start_box='<|box_start|>(x1,y1)<|box_end|>', end_box='<|box_start|>(x3,y3)<|box_end|>')
hotkey(key='')
type(content='') #If you want to submit your input, use "\\n" at the end of `content`.
scroll(start_box='<|box_start|>(x1,y1)<|box_end|>', direction='down or up or right or left')
wait() #Sleep for 5s and take a screenshot to check for any changes.
finished()
call_user() # Submit the task and call the user when the task is unsolvable, or when you need the user's help.


## Note
- Use English in `Thought` part.
- Summarize your next action (with its target element) in one sentence in `Thought` part.
"""
)
"""UI-TARS 1.0."""

POINT_PROMPT = (
    _FORMAT.format(blank="")
    + """\
click(point='<point>x1 y1</point>')
left_double(point='<point>x1 y1</point>')
right_single(point='<point>x1 y1</point>')
drag(start_point='<point>x1 y1</point>', end_point='<point>x2 y2</point>')
hotkey(key='ctrl c') # Split keys with a space and use lowercase. Also, do not use more than 3 keys in one hotkey \
action.
type(content='xxx') # Use escape characters \\', \\", and \\n in content part to ensure we can parse the content in \
normal python string format. If you want to submit your input, use \\n at the end of content.\x20
scroll(point='<point>x1 y1</point>', direction='down or up or right or left') # Show more information on the \
`direction` side.
wait() #Sleep for 5s and take a screenshot to check for any changes.
finished(content='xxx') # Use escape characters \\', \\", and \\n in content part to ensure we can parse the content \
in normal python string format.


## Note
- Use English in `Thought` part.
- Write a small plan and finally summarize your next action (with its target element) in one sentence in `Thought` \
part.
"""
)
"""UI-TARS 1.5."""


SCROLL_CLICKS, WAIT_S, MAX_HOTKEY = 5, 5, 3
_CLICKS: Mapping[str, tuple[Button, int]] = {
    "click": ("left", 1), "left_double": ("left", 2), "right_single": ("right", 1), "left_single": ("left", 1),
}  # fmt: skip
_SHAPES: Mapping[str, Shape] = {
    "click": Shape(("point",)),
    "left_single": Shape(("point",)),
    "left_double": Shape(("point",)),
    "right_single": Shape(("point",)),
    "hover": Shape(("point",)),
    "drag": Shape(("start_point", "end_point")),
    "select": Shape(("start_point", "end_point")),
    "hotkey": Shape(("key",)),
    "type": Shape(("content",)),
    "scroll": Shape(("direction",), ("point",)),
    "wait": Shape(),
    "finished": Shape((), ("content",)),
}
_UNSUPPORTED: Mapping[str, str] = {
    "call_user": "there is nobody to call",
    "error_env": "whether the environment failed is not for the agent to say",
    **dict.fromkeys(("press", "keydown", "release", "keyup"), "keys are pressed and released in one action, hotkey"),
    **dict.fromkeys(("long_press", "open_app", "press_home", "press_back"), "is for telephones"),
}
_LABEL = re.compile(r"^[ \t]*Action:[ \t]*", re.MULTILINE)
_ANOTHER = re.compile(rf"\b(?:{'|'.join((*_SHAPES, *_UNSUPPORTED))})\s*\(|^[ \t]*Action:", re.MULTILINE)
_NUMBER = r"(-?\d{1,9}(?:\.\d{1,9})?)"
_POINT = re.compile(rf"\s*<point>\s*{_NUMBER}\s+{_NUMBER}\s*</point>\s*", re.ASCII)
_BOX = re.compile(
    rf"\s*(?:<\|box_start\|>)?\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*(?:,\s*{_NUMBER}\s*,\s*{_NUMBER}\s*)?\)(?:<\|box_end\|>)?\s*",
    re.ASCII,
)


@dataclass(frozen=True)
class UiTarsCodec:
    """One generation of UI-TARS."""

    name: str
    space: Space
    boxes: bool
    """Whether points are written as boxes, as the first generation does."""

    def system_prompt(self, frame: Frame) -> str:
        """The models' own prompt, which tells no size."""
        return FIRST_PROMPT if self.boxes else POINT_PROMPT

    def encode(self, action: UiAction, frame: Frame) -> str:
        """The line that says the action."""
        check_writable(self.name, action, frame)
        return f"Action: {self._call(action, frame)}"

    def decode(self, text: str, frame: Frame) -> Decoded:
        """What an answer's one call says."""
        return read_answer(text, lambda: self._read(text, frame))

    def _call(self, action: UiAction, frame: Frame) -> str:
        match action:
            case Click():
                return self._click(action, frame)
            case Move(at):
                return f"hover({self._at(at, frame)})"
            case Drag():
                return self._drag(action, frame)
            case Scroll():
                return self._scroll(action, frame)
            case TypeText(text):
                return f"type(content={quoted(text)})"
            case PressKeys(keys):
                if len(keys) > MAX_HOTKEY:
                    raise no_words(self.name, action, f"presses at most {MAX_HOTKEY} keys at once")
                return f"hotkey(key={quoted(' '.join(spelled(self.name, action, keys, PYAUTOGUI_KEYS)))})"
            case Wait(seconds):
                if seconds != WAIT_S:
                    raise no_words(self.name, action, f"waits {WAIT_S} seconds and no other time")
                return "wait()"
            case Terminate() | Answer():
                return self._finished(action)

    def _click(self, action: Click, frame: Frame) -> str:
        if action.held:
            raise no_words(self.name, action, "cannot hold keys during a click")
        if action.at is None:
            raise no_words(self.name, action, "clicks at a point only", "Say where the pointer is")
        for word, clicked in _CLICKS.items():
            if clicked == (action.button, action.times):
                return f"{word}({self._at(action.at, frame)})"
        raise no_words(self.name, action, f"has no word for {action.times} clicks of the {action.button} button")

    def _drag(self, action: Drag, frame: Frame) -> str:
        if len(action.path) != 2 or action.button != "left":
            raise no_words(self.name, action, "drags with the left button and straight to one point")
        start, end = action.path
        return f"drag({self._at(start, frame, 'start')}, {self._at(end, frame, 'end')})"

    def _scroll(self, action: Scroll, frame: Frame) -> str:
        turn = clicks(action)
        if turn is None or turn[1] != SCROLL_CLICKS:
            raise no_words(self.name, action, f"scrolls by {SCROLL_CLICKS} clicks of the wheel and no other way")
        place = "" if action.at is None else f"{self._at(action.at, frame)}, "
        return f"scroll({place}direction='{turn[0]}')"

    def _finished(self, action: Terminate | Answer) -> str:
        match action:
            case Answer(""):
                raise no_words(self.name, action, "an empty answer is the word for success", "Terminate instead")
            case Answer(text):
                return f"finished(content={quoted(text)})"
            case Terminate(False):
                raise no_words(self.name, action, "has no word for giving up")
            case _:
                return "finished()"

    def _at(self, point: Point, frame: Frame, end: str = "") -> str:
        x, y = self.space.write(point, frame)
        if self.boxes:
            return f"{end or 'start'}_box='<|box_start|>({x},{y})<|box_end|>'"
        return f"{end + '_' if end else ''}point='<point>{x} {y}</point>'"

    def _read(self, text: str, frame: Frame) -> Understood:
        label = _LABEL.search(text)
        if label is None:
            raise Refusal("no_action", "no line of the answer begins with 'Action:'")
        call = call_at(text, label.end())
        start, end = call.span
        after = text[end:].strip()
        if _ANOTHER.search(after):
            raise Refusal("several", "the answer says several actions; one is taken a step")
        action = self._action(_arguments(call), frame)
        before = text[: label.start()].strip().removeprefix("Thought:").strip()
        return Understood(action, "\n".join(part for part in (before, after) if part), (start, end))

    def _action(self, given: Arguments, frame: Frame) -> UiAction:
        if given.word in _CLICKS:
            button, times = _CLICKS[given.word]
            return Click(self._point(given, "point", frame), button, times)
        match given.word:
            case "hover":
                return Move(self._point(given, "point", frame))
            case "drag" | "select":
                return Drag((self._point(given, "start_point", frame), self._point(given, "end_point", frame)))
            case "hotkey":
                return PressKeys(tuple(key for word in given.text("key").split() for key in PYAUTOGUI_KEYS.keys(word)))
            case "type":
                return TypeText(given.text("content"))
            case "scroll":
                at = self._point(given, "point", frame) if "point" in given else None
                return turned(at, given.choice("direction", DIRECTIONS), SCROLL_CLICKS)
            case "wait":
                return Wait(WAIT_S)
            case _:
                answer = given.text("content") if "content" in given else ""
                return Answer(answer) if answer else Terminate(success=True)

    def _point(self, given: Arguments, name: str, frame: Frame) -> Point:
        text = given.text(name)
        match = _POINT.fullmatch(text) or _BOX.fullmatch(text)
        if match is None:
            raise Refusal("bad_argument", f"{given.word}.{name} = {shown(text)} is not a point")
        numbers = [float(number) if "." in number else int(number) for number in match.groups() if number is not None]
        if len(numbers) == 4:
            # A box stands for its middle, as in the family's own parser.
            left, top, right, bottom = numbers
            return self.space.read((left + right) / 2, (top + bottom) / 2, frame)
        return self.space.read(numbers[0], numbers[1], frame)


def _arguments(call: Call) -> Arguments:
    """A call's arguments under one name each, whichever way points are written."""
    two = "start_point" in _SHAPES.get(call.name, Shape()).required
    names = {"start_box": "start_point", "end_box": "end_point"} if two else {"start_box": "point"}
    given: dict[str, str] = {}
    for name, value in call.arguments.items():
        known = names.get(name, name)
        if known in given:
            raise Refusal("syntax", f"{call.name} is given {shown(known)} twice")
        given[known] = value
    return Arguments.of(call.name, given, _SHAPES, _UNSUPPORTED)
