"""Qwen2.5-VL and Qwen3-VL: a `computer_use` call as JSON between `<tool_call>` tags.

Qwen2.5-VL counts pixels of the image it sees; Qwen3-VL counts 0 to 999 across any image and has three more actions.
A drag starts at the mouse pointer, so it can be encoded and decoded only in a frame that knows the pointer.

The system prompts are those of the models' own cookbooks, word for word. The chat templates ignore `tools=`, so the
signature of `computer_use` is part of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palaestra.policy.codecs.codec import CLICK_ACTIONS, ActionCodec
from palaestra.policy.codecs.coordinates import CoordinateFrame, CoordinateSpace, Grid, ImagePixels
from palaestra.policy.codecs.decoding import (
    SEVERAL,
    Arguments,
    ArgumentSpec,
    DecodedAction,
    DecodeError,
    abbreviate,
    dump_json,
    parse_json_object,
)
from palaestra.policy.codecs.key_names import PYAUTOGUI_KEYS
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
    UiAction,
    Wait,
)
from palaestra.sessions.screen import Size

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
"""Name, first generation that has it ("" for both), explanation."""


def _system_prompt(resolution: Size, *, third: bool) -> str:
    """The prompt for a screen of this resolution; `third` selects Qwen3-VL."""
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
    prompt = _FRAME.format(tool=dump_json({"type": "function", "function": function}))
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


_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_THINK, _THINK_END = "<think>", "</think>"


def _find_call(text: str) -> int:
    """Position of the tool call tag that counts; `DecodeError` (`no_action`) if there is none.

    Models draft calls while they think, so a call after `</think>` takes precedence. Some models do not close their
    thinking before the call, and some close it after the call and write nothing more; then the only call counts.
    """
    end = _thinking_end(text)
    start = text.find(_CALL, end or 0)
    if start >= 0:
        return start
    if end is None or _CALL not in text[:end]:
        raise DecodeError("no_action", f"the reply has no {_CALL}")
    thinking = text[: end - len(_THINK_END)].rstrip()
    if thinking.count(_CALL) == 1 and thinking.endswith(_CALL_END) and not text[end:].strip():
        return thinking.index(_CALL)
    raise DecodeError("no_action", f"{_CALL} occurs only in the thinking, and no call follows {_THINK_END}")


def _strip_think_tags(thought: str) -> str:
    return thought.replace(_THINK, "").replace(_THINK_END, "").strip()


def _thinking_end(text: str) -> int | None:
    """Position after the closing think tag; tags inside the text of a call do not count."""
    at, end = 0, text.find(_THINK_END)
    while end >= 0:
        call = text.find(_CALL, at, end)
        at = text.find(_CALL_END, call) if call >= 0 else -1
        if at < 0 or (at > end and not _is_call(text[call + len(_CALL) : at])):
            return end + len(_THINK_END)
        if at > end:
            end = text.find(_THINK_END, at)
    return None


def _is_call(text: str) -> bool:
    try:
        parse_json_object(text, 0)
    except DecodeError:
        return False
    return True


_ADVERTISED = Size(1000, 1000)
_QWEN2_SPECS: Mapping[str, ArgumentSpec] = {
    "key": ArgumentSpec(("keys",)),
    "type": ArgumentSpec(("text",)),
    "mouse_move": ArgumentSpec(("coordinate",)),
    "left_click": ArgumentSpec((), ("coordinate",)),
    "left_click_drag": ArgumentSpec(("coordinate",)),
    "right_click": ArgumentSpec((), ("coordinate",)),
    "middle_click": ArgumentSpec((), ("coordinate",)),
    "double_click": ArgumentSpec((), ("coordinate",)),
    # The schema neither requires nor forbids a position for scrolling.
    "scroll": ArgumentSpec(("pixels",), ("coordinate",)),
    "wait": ArgumentSpec(("time",)),
    "terminate": ArgumentSpec(("status",)),
}
_QWEN3_SPECS: Mapping[str, ArgumentSpec] = {
    **_QWEN2_SPECS,
    "triple_click": ArgumentSpec((), ("coordinate",)),
    "hscroll": ArgumentSpec(("pixels",), ("coordinate",)),
    "answer": ArgumentSpec(("text",)),
}


@dataclass(frozen=True)
class QwenCodec(ActionCodec):
    """One generation of Qwen's vision-language models."""

    name: str
    third: bool
    """Qwen3-VL: relative coordinates, triple clicks, horizontal scrolling, answers."""
    denominator: int = 999
    """Qwen3-VL: the coordinate of the right and lower edge."""
    advertised: Size = _ADVERTISED
    """Qwen3-VL: the resolution stated in the prompt, independent of the image's."""

    @property
    def space(self) -> CoordinateSpace:
        """The coordinate space of this generation."""
        # The prompt says 1000x1000 and the grid ends at 999, so models also write 1000 for the edge.
        return Grid(self.denominator, "down", self.advertised.width) if self.third else ImagePixels()

    def system_prompt(self, frame: CoordinateFrame) -> str:
        """The models' own prompt, with the size of the image or the advertised one."""
        return _system_prompt(self.advertised if self.third else frame.image, third=self.third)

    def _write(self, action: UiAction, frame: CoordinateFrame) -> str:
        call = dump_json({"name": "computer_use", "arguments": self._arguments(action, frame)})
        # Escape tags of the grammar and special tokens inside typed text.
        for tag in ("<|", _CALL, _CALL_END):
            call = call.replace(tag, "\\u003c" + tag[1:])
        return f"{_CALL}\n{call}\n{_CALL_END}"

    def _arguments(self, action: UiAction, frame: CoordinateFrame) -> dict[str, Any]:
        match action:
            case Click():
                if action.held:
                    raise self._error(action, "cannot hold keys during a click")
                words = {word: click for word, click in CLICK_ACTIONS.items() if word in self._specs}
                return {"action": self._click_word(action, words)} | self._coordinate(action.at, frame)
            case Move(at):
                return {"action": "mouse_move"} | self._coordinate(at, frame)
            case Drag():
                return {"action": "left_click_drag"} | self._coordinate(self._drag_end(action, frame), frame)
            case Scroll():
                return self._scroll(action) | self._coordinate(action.at, frame)
            case TypeText(text):
                return {"action": "type", "text": text}
            case PressKeys(keys):
                return {"action": "key", "keys": self._spell(action, keys, PYAUTOGUI_KEYS)}
            case Wait(seconds):
                return {"action": "wait", "time": seconds}
            case Terminate(success):
                return {"action": "terminate", "status": "success" if success else "failure"}
            case Answer(text):
                if not self.third:
                    raise self._error(action, "has no action for an answer", "Terminate instead")
                return {"action": "answer", "text": text}

    def _drag_end(self, action: Drag, frame: CoordinateFrame) -> Point:
        self._check_straight(action)
        if action.path[0] != frame.pointer:
            remedy = "Move to the first point, then drag in a frame whose pointer is there"
            raise self._error(action, "can only drag from the pointer", remedy)
        return action.path[1]

    def _scroll(self, action: Scroll) -> dict[str, Any]:
        if action.dx == 0:
            return {"action": "scroll", "pixels": -action.dy}
        if action.dy == 0 and self.third:
            return {"action": "hscroll", "pixels": action.dx}
        reason = "scrolls along one axis at a time" if self.third else "scrolls up and down only"
        raise self._error(action, reason)

    def _coordinate(self, at: Point | None, frame: CoordinateFrame) -> dict[str, Any]:
        return {} if at is None else {"coordinate": list(self.space.write(at, frame))}

    @property
    def _specs(self) -> Mapping[str, ArgumentSpec]:
        return _QWEN3_SPECS if self.third else _QWEN2_SPECS

    def _read(self, text: str, frame: CoordinateFrame) -> DecodedAction:
        start = _find_call(text)
        call, end = parse_json_object(text, start + len(_CALL))
        closing = text[end:].lstrip()
        if not closing.startswith(_CALL_END):
            raise DecodeError("unclosed", f"no {_CALL_END} follows the call")
        end = len(text) - len(closing) + len(_CALL_END)
        before, after = _strip_think_tags(text[:start]), _strip_think_tags(text[end:])
        if _CALL in after:
            raise DecodeError("several", SEVERAL)
        outer = Arguments("the call", call, ArgumentSpec(("name", "arguments")))
        if outer.text("name") != "computer_use":
            reason = f"{abbreviate(call['name'])} is not a function. The only one is 'computer_use'"
            raise DecodeError("unknown_action", reason)
        given = call["arguments"]
        if not isinstance(given, dict):
            raise DecodeError("bad_argument", f"arguments = {abbreviate(given)} is not a JSON object")
        if "action" not in given:
            raise DecodeError("missing_argument", "the call's arguments have no action")
        rest = {name: value for name, value in given.items() if name != "action"}
        action = self._action(Arguments.of(given["action"], rest, self._specs, {}), frame)
        return DecodedAction(action, "\n".join(part for part in (before, after) if part), (start, end))

    def _action(self, given: Arguments, frame: CoordinateFrame) -> UiAction:
        if given.word in CLICK_ACTIONS:
            button, times = CLICK_ACTIONS[given.word]
            return Click(self._point(given, frame), button, times)
        match given.word:
            case "mouse_move":
                return Move(self.space.read(*given.pair("coordinate"), frame))
            case "left_click_drag":
                end = self.space.read(*given.pair("coordinate"), frame)
                if frame.pointer is None:
                    raise DecodeError("no_pointer", "the drag starts at the pointer, whose position is unknown")
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

    def _point(self, given: Arguments, frame: CoordinateFrame) -> Point | None:
        return self.space.read(*given.pair("coordinate"), frame) if "coordinate" in given else None
