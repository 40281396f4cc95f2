"""Where real models are known to vary and one meaning is left, their answers are read."""

import json

import pytest
from tests.policy.codecs.test_unreadable import FRAME

from palaestra.policy.codecs import CODECS, DecodedAction
from palaestra.sessions.action import Answer, Click, Point, PressKeys, TypeText, Wait


def _read(family, text):
    read = CODECS[family].decode(text, FRAME)
    assert isinstance(read, DecodedAction), read
    return read


def _qwen(**arguments):
    return f"<tool_call>\n{json.dumps({'name': 'computer_use', 'arguments': arguments})}\n</tool_call>"


CLICK = _qwen(action="left_click", coordinate=[0, 0])
WAIT = _qwen(action="wait", time=1)


@pytest.mark.parametrize(
    ("keys", "pressed"),
    [
        (["ctrl+a"], ("Control", "a")),
        (["Ctrl + Shift + T"], ("Control", "Shift", "T")),
        (["ctrl", "shift+Page_Down"], ("Control", "Shift", "PageDown")),
        (["+"], ("+",)),
        (["ctrl", "+"], ("Control", "+")),
    ],
)
def test_keys_joined_by_a_plus_are_a_chord(keys, pressed):
    for family in ("qwen2.5-vl", "qwen3-vl"):
        assert _read(family, _qwen(action="key", keys=keys)).action == PressKeys(pressed)


def test_a_hotkey_of_ui_tars_may_be_joined_by_a_plus():
    for spelling in ("ctrl c", "ctrl+c", "Control+c"):
        assert _read("ui-tars-1.5", f"Action: hotkey(key='{spelling}')").action == PressKeys(("Control", "c"))


@pytest.mark.parametrize(
    ("call", "action"),
    [
        ("type(content='it's')", TypeText("it's")),
        ("type(content='it's what's \\'ours\\'\\n')", TypeText("it's what's 'ours'\n")),
        ("type(content='rock 'n' roll')", TypeText("rock 'n' roll")),
        ('type(content="say "hi" twice" )', TypeText('say "hi" twice')),
        ("finished(content='it's done')", Answer("it's done")),
        ("type(content='a, b='c')", TypeText("a, b='c")),
    ],
)
def test_quotes_that_are_not_escaped_are_text_if_only_one_can_be_the_last(call, action):
    for family in ("ui-tars-1.0", "ui-tars-1.5"):
        read = _read(family, f"Thought: I type.\nAction: {call}\n")
        assert (read.action, read.thought) == (action, "I type.")
        assert f"Thought: I type.\nAction: {call}\n"[slice(*read.span)] == call


def test_the_edge_that_the_prompt_of_qwen3_names_is_the_last_pixel():
    assert _read("qwen3-vl", _qwen(action="left_click", coordinate=[1000, 1000])).action == Click(Point(99, 99))


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        (f"<think>Or rather {WAIT}? No.</think>\n\n{CLICK}", f"Or rather {WAIT}? No."),  # a draft is no call
        (f"Or rather {WAIT}? No.</think>\n\n{CLICK}", f"Or rather {WAIT}? No."),  # the template wrote <think>
        (f"<think>I click.\n{CLICK}", "I click."),  # it forgot to stop thinking
        (f"<think>I click.\n{CLICK}\n</think>\n", "I click."),  # it thought to the end, and said nothing more
        (f"I think so.\n{CLICK}", "I think so."),
        (f"<think>Broken: <tool_call>{{ hm</think>{CLICK}", "Broken: <tool_call>{ hm"),
    ],
)
def test_a_call_counts_after_the_thinking_or_as_its_end(text, thought):
    for family in ("qwen2.5-vl", "qwen3-vl"):
        read = _read(family, text)
        assert (read.action, read.thought) == (Click(Point(0, 0)), thought)
        assert text[slice(*read.span)] == CLICK


def test_marks_of_thinking_inside_a_typed_text_stay_text():
    typed = TypeText("<think>no</think><tool_call>")
    for family in ("qwen2.5-vl", "qwen3-vl"):
        said = CODECS[family].encode(typed, FRAME)
        assert _read(family, said).action == typed
        assert _read(family, f"<think>hm</think>{said}").action == typed


INPUT = {"action": "wait", "duration": 1}
USE = {"type": "tool_use", "id": "toolu_1", "name": "computer", "input": INPUT}
MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use",
    "content": [
        {"type": "thinking", "thinking": "It loads.", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I wait."}, USE,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "thought"),
    [(INPUT, ""), (USE, ""), ([USE], ""), ([INPUT], ""), (MESSAGE, "It loads.\nI wait."),
     ({"role": "assistant", "content": MESSAGE["content"][2:]}, "I wait."), (MESSAGE["content"], "It loads.\nI wait.")],
)  # fmt: skip
def test_a_message_of_anthropics_interface_is_unwrapped(answer, thought):
    text = json.dumps(answer)
    read = _read("anthropic", f" {text}\n")
    assert (read.action, read.thought, read.span) == (Wait(1), thought, (1, 1 + len(text)))


ACTION = {"type": "click", "button": "left", "x": 0, "y": 0}
CALL = {"type": "computer_call", "id": "cu_1", "call_id": "c", "action": ACTION, "pending_safety_checks": [],
        "status": "completed"}  # fmt: skip
OUTPUT = [
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "There it is."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I click."}]},
    CALL,
]


@pytest.mark.parametrize(
    ("answer", "thought"),
    [(ACTION, ""), ([ACTION], ""), (CALL, ""), ({**CALL, "action": None, "actions": [ACTION]}, ""),
     (OUTPUT, "There it is.\nI click."),
     ({"id": "resp_1", "object": "response", "output": OUTPUT}, "There it is.\nI click.")],
)  # fmt: skip
def test_a_response_of_openais_interface_is_unwrapped(answer, thought):
    read = _read("openai", json.dumps(answer))
    assert (read.action, read.thought) == (Click(Point(0, 0)), thought)
