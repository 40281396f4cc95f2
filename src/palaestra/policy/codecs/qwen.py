"""The system prompt that Qwen's vision-language models were trained to follow, word for word.

Their chat templates ignore `tools=`, so the signature of `computer_use` stands in the text. The wording, down to the
sentence that differs between the two generations, is that of the models' own cookbooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palaestra.policy.codecs.codec import check_writable, no_words, spelled
from palaestra.policy.codecs.coordinates import Frame, Grid, ImagePixels, Space
from palaestra.policy.codecs.decoding import (
    Arguments,
    Decoded,
    Refusal,
    Shape,
    Understood,
    object_at,
    read_answer,
    shown,
    written,
)
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
from palaestra.sessions.screen import Size

__all__ = ["CALL", "CALL_END", "QwenCodec", "call_start", "qwen_prompt", "without_marks"]


_FRAME = """\
You are a helpful assistant

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tool}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_RESPONSE_FORMAT = """

# Response format

Response format for every step:
1) Action: a short imperative describing what to do in the UI.
2) A single <tool_call>...</tool_call> block containing only the JSON: \
{"name": <function-name>, "arguments": <args-json-object>}.

Rules:
- Output exactly in the order: Action, <tool_call>.
- Be brief: one sentence for Action.
- Do not output anything else outside those parts.
- If finishing, use action=terminate in the tool call."""

_DESCRIPTION = """\
Use a mouse and keyboard to interact with a computer, and take screenshots.
* This is an interface to a desktop GUI. You do not have access to a terminal or applications menu. You must click on \
desktop icons to start applications.
* Some applications may take time to start or process actions, so you may need to wait and take successive screenshots \
to see the results of your actions. E.g. if you click on Firefox and a window doesn't open, try wait and taking \
another screenshot.
* The screen's resolution is {width}x{height}.
* Whenever you intend to move the cursor to click on an element like an icon, you should consult a screenshot to \
determine the coordinates of the element before moving the cursor.
* If you tried clicking on a program or link but it failed to load, even after waiting, try adjusting your cursor \
position so that the tip of the cursor visually falls on the element that you want to click.
* Make sure to click any buttons, links, icons, etc with the cursor tip in the center of the element. Don't click \
boxes on their edges{edges}."""

_AT = " at a specified (x, y) pixel coordinate on the screen"
_ACTIONS: tuple[tuple[str, str, str], ...] = (
    (
        "key",
        "",
        "Performs key down presses on the arguments passed in order, then performs key releases in reverse order.",
    ),
    ("type", "", "Type a string of text on the keyboard."),
    ("mouse_move", "", "Move the cursor to a specified (x, y) pixel coordinate on the screen."),
    ("left_click", "", "Click the left mouse button{at}."),
    ("left_click_drag", "", "Click and drag the cursor to a specified (x, y) pixel coordinate on the screen."),
    ("right_click", "", "Click the right mouse button{at}."),
    ("middle_click", "", "Click the middle mouse button{at}."),
    ("double_click", "", "Double-click the left mouse button{at}."),
    (
        "triple_click",
        "3",
        "Triple-click the left mouse button{at} (simulated as double-click since it's the closest action).",
    ),
    ("scroll", "", "Performs a scroll of the mouse scroll wheel."),
    ("hscroll", "3", "Performs a horizontal scroll (mapped to regular scroll)."),
    ("wait", "", "Wait specified seconds for the change to happen."),
    ("terminate", "", "Terminate the current task and report its completion status."),
    ("answer", "3", "Answer a question."),
)
"""Word, the generation that is the first to have it, explanation."""


def qwen_prompt(resolution: Size, *, third: bool) -> str:
    """The prompt for a screen of this resolution; `third` is the generation of Qwen3-VL."""
    description = _DESCRIPTION.format(
        width=resolution.width, height=resolution.height, edges="" if third else " unless asked"
    )
    function = {
        "name_for_human": "computer_use",
        "name": "computer_use",
        "description": description,
        "parameters": _parameters(third),
        "args_format": "Format the arguments as a JSON object.",
    }
    prompt = _FRAME.format(tool=written({"type": "function", "function": function}))
    return prompt + _RESPONSE_FORMAT if third else prompt


def _parameters(third: bool) -> dict[str, Any]:
    actions = [(word, text) for word, since, text in _ACTIONS if third or not since]
    lines = [f"* `{word}`: {text.format(at=_AT if third else '')}" for word, text in actions]
    also = {
        "text": " and `action=answer`" if third else "",
        "pixels": " and `action=hscroll`" if third else "",
        "coordinate": "" if third else " Required only by `action=mouse_move` and `action=left_click_drag`.",
    }
    return {
        "properties": {
            "action": {
                "description": "The action to perform. The available actions are:\n" + "\n".join(lines),
                "enum": [word for word, _ in actions],
                "type": "string",
            },
            "keys": {"description": "Required only by `action=key`.", "type": "array"},
            "text": {"description": f"Required only by `action=type`{also['text']}.", "type": "string"},
            "coordinate": {
                "description": "(x, y): The x (pixels from the left edge) and y (pixels from the top edge) coordinates "
                f"to move the mouse to.{also['coordinate']}",
                "type": "array",
            },
            "pixels": {
                "description": "The amount of scrolling to perform. Positive values scroll up, negative values scroll "
                f"down. Required only by `action=scroll`{also['pixels']}.",
                "type": "number",
            },
            "time": {"description": "The seconds to wait. Required only by `action=wait`.", "type": "number"},
            "status": {
                "description": "The status of the task. Required only by `action=terminate`.",
                "type": "string",
                "enum": ["success", "failure"],
            },
        },
        "required": ["action"],
        "type": "object",
    }


CALL, CALL_END = "<tool_call>", "</tool_call>"
_THINK, _THINK_END = "<think>", "</think>"


def call_start(text: str) -> int:
    """Where the mark of the call that counts begins; `Refusal` (`no_action`) when there is none."""
    end = _thinking_end(text)
    start = text.find(CALL, end or 0)
    if start >= 0:
        return start
    if end is None or CALL not in text[:end]:
        raise Refusal("no_action", f"the answer has no {CALL}")
    return _call_at_the_end(text, end)


def without_marks(thought: str) -> str:
    """What was thought, without the marks around it."""
    return thought.replace(_THINK, "").replace(_THINK_END, "").strip()


def _thinking_end(text: str) -> int | None:
    """Just behind the mark that ends the thinking; a mark inside the text of a call is none."""
    at, end = 0, text.find(_THINK_END)
    while end >= 0:
        call = text.find(CALL, at, end)
        at = text.find(CALL_END, call) if call >= 0 else -1
        if at < 0 or (at > end and not _is_call(text[call + len(CALL) : at])):
            return end + len(_THINK_END)
        if at > end:
            end = text.find(_THINK_END, at)
    return None


def _is_call(text: str) -> bool:
    try:
        object_at(text, 0)
    except Refusal:
        return False
    return True


def _call_at_the_end(text: str, end: int) -> int:
    thinking = text[: end - len(_THINK_END)].rstrip()
    if thinking.count(CALL) == 1 and thinking.endswith(CALL_END) and not text[end:].strip():
        return thinking.index(CALL)
    raise Refusal("no_action", f"{CALL} stands in the thinking alone, and no call follows {_THINK_END}")


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
