"""Qwen2.5-VL and Qwen3-VL: a `computer_use` call as JSON between `<tool_call>` marks.

The second generation counts pixels of the picture it sees; the third counts 0 to 999 across any picture and knows three
words more. A drag starts where the pointer is, so it can be said and read only in a frame that knows the pointer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palaestra.policy.codecs.codec import Decoded, Understood
from palaestra.policy.codecs.frame import Frame
from palaestra.policy.codecs.json_text import object_at, written
from palaestra.policy.codecs.key_names import PYAUTOGUI_KEYS
from palaestra.policy.codecs.qwen_prompt import qwen_prompt
from palaestra.policy.codecs.reading import Arguments, Refusal, Shape, read_answer, shown
from palaestra.policy.codecs.space import Grid, ImagePixels, Space
from palaestra.policy.codecs.thinking import CALL, CALL_END, call_start, without_marks
from palaestra.policy.codecs.writing import check_writable, no_words, spelled
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
from palaestra.sessions.screen import Size

__all__ = ["QwenCodec"]

_THOUSAND = Size(1000, 1000)
_CLICKS: Mapping[str, tuple[Button, int]] = {
    "left_click": ("left", 1), "right_click": ("right", 1), "middle_click": ("middle", 1),
    "double_click": ("left", 2), "triple_click": ("left", 3),
}  # fmt: skip
_SECOND: Mapping[str, Shape] = {
    "key": Shape(("keys",)),
    "type": Shape(("text",)),
    "mouse_move": Shape(("coordinate",)),
    "left_click": Shape((), ("coordinate",)),
    "left_click_drag": Shape(("coordinate",)),
    "right_click": Shape((), ("coordinate",)),
    "middle_click": Shape((), ("coordinate",)),
    "double_click": Shape((), ("coordinate",)),
    # The schema neither asks for a place to scroll at nor forbids one; one that is given is meant.
    "scroll": Shape(("pixels",), ("coordinate",)),
    "wait": Shape(("time",)),
    "terminate": Shape(("status",)),
}
_THIRD: Mapping[str, Shape] = {
    **_SECOND,
    "triple_click": Shape((), ("coordinate",)),
    "hscroll": Shape(("pixels",), ("coordinate",)),
    "answer": Shape(("text",)),
}


@dataclass(frozen=True)
class QwenCodec:
    """One generation of Qwen's vision-language models."""

    name: str
    third: bool
    """Whether it is the generation of Qwen3-VL: relative coordinates, three clicks, sideways scrolling, answers."""
    denominator: int = 999
    """Third generation: the number that means the right or lower edge."""
    advertised: Size = _THOUSAND
    """Third generation: the resolution the prompt tells, whatever the picture's is."""

    @property
    def space(self) -> Space:
        """What its coordinates count."""
        # The prompt says 1000x1000 and the grid ends at 999, so models also write 1000 for the edge.
        return Grid(self.denominator, "down", self.advertised.width) if self.third else ImagePixels()

    def system_prompt(self, frame: Frame) -> str:
        """The models' own prompt, with the size of the picture they see or the one they are told."""
        return qwen_prompt(self.advertised if self.third else frame.image, third=self.third)

    def encode(self, action: UiAction, frame: Frame) -> str:
        """The call that says the action."""
        check_writable(self.name, action, frame)
        call = written({"name": "computer_use", "arguments": self._arguments(action, frame)})
        # Marks of the grammar and of the tokenizer would be taken for marks wherever they stand.
        for mark in ("<|", CALL, CALL_END):
            call = call.replace(mark, "\\u003c" + mark[1:])
        return f"{CALL}\n{call}\n{CALL_END}"

    def decode(self, text: str, frame: Frame) -> Decoded:
        """What an answer's one call says."""
        return read_answer(text, lambda: self._read(text, frame))

    def _arguments(self, action: UiAction, frame: Frame) -> dict[str, Any]:
        match action:
            case Click():
                return {"action": self._click_word(action)} | self._coordinate(action.at, frame)
            case Move(at):
                return {"action": "mouse_move"} | self._coordinate(at, frame)
            case Drag():
                return {"action": "left_click_drag"} | self._coordinate(self._drag_end(action, frame), frame)
            case Scroll():
                return self._scroll(action) | self._coordinate(action.at, frame)
            case TypeText(text):
                return {"action": "type", "text": text}
            case PressKeys(keys):
                return {"action": "key", "keys": spelled(self.name, action, keys, PYAUTOGUI_KEYS)}
            case Wait(seconds):
                return {"action": "wait", "time": seconds}
            case Terminate(success):
                return {"action": "terminate", "status": "success" if success else "failure"}
            case Answer(text):
                if not self.third:
                    raise no_words(self.name, action, "has no word for an answer", "Terminate instead")
                return {"action": "answer", "text": text}

    def _click_word(self, action: Click) -> str:
        if action.held:
            raise no_words(self.name, action, "cannot hold keys during a click")
        for word, clicked in _CLICKS.items():
            if clicked == (action.button, action.times) and word in self._shapes:
                return word
        raise no_words(self.name, action, f"has no word for {action.times} clicks of the {action.button} button")

    def _drag_end(self, action: Drag, frame: Frame) -> Point:
        if len(action.path) != 2 or action.button != "left":
            raise no_words(self.name, action, "drags with the left button and straight to one point")
        if action.path[0] != frame.pointer:
            remedy = "Move to the first point, then drag in a frame whose pointer is there"
            raise no_words(self.name, action, "drags from where the pointer is", remedy)
        return action.path[1]

    def _scroll(self, action: Scroll) -> dict[str, Any]:
        if action.dx == 0:
            return {"action": "scroll", "pixels": -action.dy}
        if action.dy == 0 and self.third:
            return {"action": "hscroll", "pixels": action.dx}
        reason = "scrolls along one axis at a time" if self.third else "scrolls up and down only"
        raise no_words(self.name, action, reason)

    def _coordinate(self, at: Point | None, frame: Frame) -> dict[str, Any]:
        return {} if at is None else {"coordinate": list(self.space.write(at, frame))}

    @property
    def _shapes(self) -> Mapping[str, Shape]:
        return _THIRD if self.third else _SECOND

    def _read(self, text: str, frame: Frame) -> Understood:
        start = call_start(text)
        call, end = object_at(text, start + len(CALL))
        closing = text[end:].lstrip()
        if not closing.startswith(CALL_END):
            raise Refusal("unclosed", f"no {CALL_END} follows the call")
        end = len(text) - len(closing) + len(CALL_END)
        before, after = without_marks(text[:start]), without_marks(text[end:])
        if CALL in after:
            raise Refusal("several", "the answer says several actions; one is taken a step")
        outer = Arguments("the call", call, Shape(("name", "arguments")))
        if outer.text("name") != "computer_use":
            raise Refusal("unknown_action", f"{shown(call['name'])} is no function. There is only 'computer_use'")
        given = call["arguments"]
        if not isinstance(given, dict):
            raise Refusal("bad_argument", f"arguments = {shown(given)} is not a JSON object")
        if "action" not in given:
            raise Refusal("missing_argument", "the call's arguments name no action")
        rest = {name: value for name, value in given.items() if name != "action"}
        action = self._action(Arguments.of(given["action"], rest, self._shapes, {}), frame)
        return Understood(action, "\n".join(part for part in (before, after) if part), (start, end))

    def _action(self, given: Arguments, frame: Frame) -> UiAction:
        if given.word in _CLICKS:
            button, times = _CLICKS[given.word]
            return Click(self._point(given, frame), button, times)
        match given.word:
            case "mouse_move":
                return Move(self.space.read(*given.pair("coordinate"), frame))
            case "left_click_drag":
                end = self.space.read(*given.pair("coordinate"), frame)
                if frame.pointer is None:
                    raise Refusal("no_pointer", "the drag starts where the pointer is, and nobody knows where that is")
                return Drag((frame.pointer, end))
            case "scroll":
                return Scroll(self._point(given, frame), 0, -round(given.number("pixels")))
            case "hscroll":
                return Scroll(self._point(given, frame), round(given.number("pixels")), 0)
            case "key":
                return PressKeys(tuple(key for word in given.words("keys") for key in PYAUTOGUI_KEYS.keys(word)))
            case "type":
                return TypeText(given.text("text"))
            case "wait":
                return Wait(given.number("time"))
            case "terminate":
                return Terminate(given.choice("status", ("success", "failure")) == "success")
            case _:
                return Answer(given.text("text"))

    def _point(self, given: Arguments, frame: Frame) -> Point | None:
        return self.space.read(*given.pair("coordinate"), frame) if "coordinate" in given else None
