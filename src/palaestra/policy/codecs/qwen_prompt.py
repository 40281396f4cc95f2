"""The system prompt that Qwen's vision-language models were trained to follow, word for word.

Their chat templates ignore `tools=`, so the signature of `computer_use` stands in the text. The wording, down to the
sentence that differs between the two generations, is that of the models' own cookbooks.
"""

from __future__ import annotations

from typing import Any

from palaestra.policy.codecs.json_text import written
from palaestra.sessions.screen import Size

__all__ = ["qwen_prompt"]

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
