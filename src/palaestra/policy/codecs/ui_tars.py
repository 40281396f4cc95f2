"""UI-TARS 1.0 and 1.5: `Thought: ...` and `Action: click(point='<point>10 20</point>')`.

Version 1.0 counts 0 to 1000 across any image and writes points as boxes; 1.5 counts pixels of the image it sees and
writes points as points. Both forms are accepted in both versions, since the grammars do not differ otherwise and a
tokenizer may drop the tags around a box. The prompts are those the models were trained with, up to the user's
instruction, which belongs in the user's turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from palaestra.policy.codecs.call_syntax import Call, parse_call, quote
from palaestra.policy.codecs.codec import DIRECTIONS, ActionCodec, scroll_by_clicks, wheel_clicks
from palaestra.policy.codecs.coordinates import CoordinateFrame, CoordinateSpace
from palaestra.policy.codecs.decoding import SEVERAL, Arguments, ArgumentSpec, DecodedAction, DecodeError, abbreviate
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

# Trailing spaces are part of the original prompts.
_BOX_PROMPT = (
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

_POINT_PROMPT = (
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
    "click": ("left", 1),
    "left_double": ("left", 2),
    "right_single": ("right", 1),
    "left_single": ("left", 1),
}
_SPECS: Mapping[str, ArgumentSpec] = {
    "click": ArgumentSpec(("point",)),
    "left_single": ArgumentSpec(("point",)),
    "left_double": ArgumentSpec(("point",)),
    "right_single": ArgumentSpec(("point",)),
    "hover": ArgumentSpec(("point",)),
    "drag": ArgumentSpec(("start_point", "end_point")),
    "select": ArgumentSpec(("start_point", "end_point")),
    "hotkey": ArgumentSpec(("key",)),
    "type": ArgumentSpec(("content",)),
    "scroll": ArgumentSpec(("direction",), ("point",)),
    "wait": ArgumentSpec(),
    "finished": ArgumentSpec((), ("content",)),
}
_UNSUPPORTED: Mapping[str, str] = {
    "call_user": "there is no user to call",
    "error_env": "an agent cannot report environment failures",
    **dict.fromkeys(("press", "keydown", "release", "keyup"), "keys are pressed and released in one action, hotkey"),
    **dict.fromkeys(("long_press", "open_app", "press_home", "press_back"), "is for phones"),
}
_LABEL = re.compile(r"^[ \t]*Action:[ \t]*", re.MULTILINE)
_ANOTHER = re.compile(rf"\b(?:{'|'.join((*_SPECS, *_UNSUPPORTED))})\s*\(|^[ \t]*Action:", re.MULTILINE)
_NUMBER = r"(-?\d{1,9}(?:\.\d{1,9})?)"
_POINT = re.compile(rf"\s*<point>\s*{_NUMBER}\s+{_NUMBER}\s*</point>\s*", re.ASCII)
_BOX = re.compile(
    rf"\s*(?:<\|box_start\|>)?\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*(?:,\s*{_NUMBER}\s*,\s*{_NUMBER}\s*)?\)(?:<\|box_end\|>)?\s*",
    re.ASCII,
)


@dataclass(frozen=True)
class UiTarsCodec(ActionCodec):
    """One generation of UI-TARS."""

    name: str
    space: CoordinateSpace
    boxes: bool
    """Whether points are written as boxes (version 1.0)."""

    def system_prompt(self, frame: CoordinateFrame) -> str:
        """The models' own prompt, which states no size."""
        return _BOX_PROMPT if self.boxes else _POINT_PROMPT

    def _write(self, action: UiAction, frame: CoordinateFrame) -> str:
        return f"Action: {self._call(action, frame)}"

    def _call(self, action: UiAction, frame: CoordinateFrame) -> str:
        match action:
            case Click():
                return self._click(action, frame)
            case Move(at):
                return f"hover({self._at(at, frame)})"
            case Drag(path):
                self._check_straight(action)
                return f"drag({self._at(path[0], frame, 'start')}, {self._at(path[1], frame, 'end')})"
            case Scroll():
                return self._scroll(action, frame)
            case TypeText(text):
                return f"type(content={quote(text)})"
            case PressKeys(keys):
                return f"hotkey(key={quote(self._hotkey(action, keys))})"
            case Wait(seconds):
                if seconds != WAIT_S:
                    raise self._error(action, f"can only wait {WAIT_S} seconds")
                return "wait()"
            case Answer() | Terminate():
                return self._encode_finished(action)

    def _encode_finished(self, action: Answer | Terminate) -> str:
        if isinstance(action, Answer):
            if not action.text:
                reason = "an empty answer is the word for success"
                raise self._error(action, reason, "Terminate instead")
            return f"finished(content={quote(action.text)})"
        if not action.success:
            raise self._error(action, "has no action for giving up")
        return "finished()"

    def _hotkey(self, action: UiAction, keys: tuple[str, ...]) -> str:
        if len(keys) > MAX_HOTKEY:
            raise self._error(action, f"can press at most {MAX_HOTKEY} keys at once")
        return " ".join(self._spell(action, keys, PYAUTOGUI_KEYS))

    def _click(self, action: Click, frame: CoordinateFrame) -> str:
        if action.held:
            raise self._error(action, "cannot hold keys during a click")
        if action.at is None:
            raise self._error(action, "can only click at a point", "Give the position of the pointer")
        return f"{self._click_word(action, _CLICKS)}({self._at(action.at, frame)})"

    def _scroll(self, action: Scroll, frame: CoordinateFrame) -> str:
        clicks = wheel_clicks(action)
        if clicks is None or clicks[1] != SCROLL_CLICKS:
            raise self._error(action, f"can only scroll by {SCROLL_CLICKS} clicks of the wheel")
        place = "" if action.at is None else f"{self._at(action.at, frame)}, "
        return f"scroll({place}direction='{clicks[0]}')"

    def _at(self, point: Point, frame: CoordinateFrame, end: str = "") -> str:
        x, y = self.space.write(point, frame)
        if self.boxes:
            return f"{end or 'start'}_box='<|box_start|>({x},{y})<|box_end|>'"
        return f"{end + '_' if end else ''}point='<point>{x} {y}</point>'"

    def _read(self, text: str, frame: CoordinateFrame) -> DecodedAction:
        label = _LABEL.search(text)
        if label is None:
            raise DecodeError("no_action", "no line of the reply begins with 'Action:'")
        call = parse_call(text, label.end())
        start, end = call.span
        after = text[end:].strip()
        if _ANOTHER.search(after):
            raise DecodeError("several", SEVERAL)
        action = self._action(_arguments(call), frame)
        before = text[: label.start()].strip().removeprefix("Thought:").strip()
        return DecodedAction(action, "\n".join(part for part in (before, after) if part), (start, end))

    def _action(self, given: Arguments, frame: CoordinateFrame) -> UiAction:
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
                return scroll_by_clicks(at, given.choice("direction", DIRECTIONS), SCROLL_CLICKS)
            case "wait":
                return Wait(WAIT_S)
            case _:
                answer = given.text("content") if "content" in given else ""
                return Answer(answer) if answer else Terminate(success=True)

    def _point(self, given: Arguments, name: str, frame: CoordinateFrame) -> Point:
        text = given.text(name)
        match = _POINT.fullmatch(text) or _BOX.fullmatch(text)
        if match is None:
            raise DecodeError("bad_argument", f"{given.word}.{name} = {abbreviate(text)} is not a point")
        numbers = [float(number) if "." in number else int(number) for number in match.groups() if number is not None]
        if len(numbers) == 4:
            # A box means its centre, as in the family's own parser.
            left, top, right, bottom = numbers
            return self.space.read((left + right) / 2, (top + bottom) / 2, frame)
        return self.space.read(numbers[0], numbers[1], frame)


def _arguments(call: Call) -> Arguments:
    """The arguments of a call, with the names of boxes replaced by those of points."""
    two = "start_point" in _SPECS.get(call.name, ArgumentSpec()).required
    names = {"start_box": "start_point", "end_box": "end_point"} if two else {"start_box": "point"}
    given: dict[str, str] = {}
    for name, value in call.arguments.items():
        known = names.get(name, name)
        if known in given:
            raise DecodeError("syntax", f"{call.name} has the argument {abbreviate(known)} twice")
        given[known] = value
    return Arguments.of(call.name, given, _SPECS, _UNSUPPORTED)
