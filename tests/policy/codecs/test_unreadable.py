"""Whatever a model says, the answer is an action that fits the screen or a reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policy.codecs.actions import FAMILIES, scenes

from palaestra.policy.codecs import CODECS, CoordinateFrame, DecodedAction, UnreadableReply
from palaestra.sessions.action import fits
from palaestra.sessions.screen import Size

FRAME = CoordinateFrame(Size(100, 100), Size(112, 112))
Q2, Q3, T0, T1, AN, OA = FAMILIES
CODES = {
    "bad_argument", "invalid", "missing_argument", "no_action", "no_pointer", "outside", "several", "syntax",
    "too_long", "unclosed", "unknown_action", "unknown_argument", "unknown_key", "unsupported",
}  # fmt: skip
PIECES = [
    "<tool_call>", "</tool_call>", "\n", '{"name": "computer_use", "arguments": ', '{"action": "left_click", ',
    '"coordinate": [', "1", "99", "-3", "1e400", "NaN", "Infinity", "true", "null", '"12"', ", ", "]", "}", "[", "{",
    '"keys": ["ctrl", "c"]', '"text": "x"', '"pixels": 5', '"time": 0', '"action": "wait"', "Thought: ", "Action: ",
    "click(", "point='", "<point>", "</point>", "'", '"', ")", "start_box=", "<|box_start|>", "(1,2)", "<|box_end|>",
    "drag(", "type(content=", "\\", "\\x", "hotkey(key='", "finished()", "wait()", "\ud800", "\x00", "🙂",
    '{"type": "click", "button": "left", "x": 1, "y": 1}', '{"action": "scroll", "scroll_direction": "up", ',
    '"scroll_amount": 3', '"path": [{"x": 1, "y": 2}, {"x": 3, "y": 4}]', '"type": "drag"',
]  # fmt: skip
SOUP = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=14).map("".join)


def _sound(read, frame):
    if isinstance(read, DecodedAction):
        fits(read.action, frame.screen.width, frame.screen.height)
        assert 0 <= read.span[0] < read.span[1]
    else:
        assert read.code in CODES
        assert read.reason
        assert len(read.reason) < 600


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=150)
@given(text=st.text() | SOUP)
def test_any_text_at_all_is_read_or_refused(family, text):
    _sound(CODECS[family].decode(text, FRAME), FRAME)


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_a_broken_sentence_is_read_or_refused(family, data):
    frame, action = data.draw(scenes(family))
    said = CODECS[family].encode(action, frame)
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(said)), st.integers(0, len(said)))))
    put = data.draw(st.sampled_from(["", said[start:end] * 2, '"', "0", "-", ",", "\\", "}", "'"]) | SOUP)
    _sound(CODECS[family].decode(said[:start] + put + said[end:], frame), frame)


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_half_a_sentence_says_nothing(family, data):
    frame, action = data.draw(scenes(family))
    said = CODECS[family].encode(action, frame)
    for end in {0, 1, len(said) // 2, len(said) - 1, data.draw(st.integers(0, len(said) - 1))}:
        assert isinstance(CODECS[family].decode(said[:end], frame), UnreadableReply)


def _qwen(arguments):
    return f'<tool_call>\n{{"name": "computer_use", "arguments": {arguments}}}\n</tool_call>'


WAIT = _qwen('{"action": "wait", "time": 1}')


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("I would click the button.", "no_action", "the reply has no <tool_call>"),
        ("", "no_action", "the reply has no <tool_call>"),
        (_qwen('{"action": "left_click", "coordinate": [1, 2]}') * 2, "several", "one per step is allowed"),
        (_qwen('{"action": "left_click", "coordinate": [1, 2]')[:-12], "syntax", "not JSON"),
        (_qwen('{"action": "wait", "time": 1}')[:-12], "unclosed", "no </tool_call> follows"),
        (_qwen('{"action": "wait", "time": 1, "time": 2}'), "syntax", "the key 'time' is given twice"),
        (_qwen('{"action": "wait", "time": NaN}'), "syntax", "NaN is not a number"),
        (_qwen('{"action": "wait", "time": 1e999}'), "syntax", "too large"),
        (_qwen('{"action": "wait", "time": -Infinity}'), "syntax", "-Infinity is not a number"),
        (_qwen('{"action": "wait", "time": ' + "9" * 5000 + "}"), "syntax", "a size or depth that no action has"),
        (_qwen('{"action": "wait", "time": ' + "[" * 50_000 + "}"), "syntax", "a size or depth that no action has"),
        (_qwen('{"action": "wait", "time": "2"}'), "bad_argument", "wait.time = '2' is not a number"),
        (_qwen('{"action": "wait", "time": true}'), "bad_argument", "wait.time = True is not a number"),
        (_qwen('{"action": "wait", "time": 61}'), "invalid", "must lie above 0 and up to 60"),
        (_qwen('{"action": "wait"}'), "missing_argument", "wait needs time"),
        (_qwen('{"action": "wait", "times": 2}'), "unknown_argument", "Did you mean 'time'?"),
        (_qwen('{"action": "wait", "time": 2, "text": "x"}'), "unknown_argument", "wait takes no 'text'"),
        (_qwen('{"action": "leftclick"}'), "unknown_action", "Did you mean 'left_click'?"),
        (_qwen('{"action": ["wait"]}'), "unknown_action", "not a text"),
        (_qwen('{"coordinate": [1, 2]}'), "missing_argument", "have no action"),
        (_qwen("[1, 2]"), "bad_argument", "is not a JSON object"),
        (_qwen('"{}"'), "bad_argument", "is not a JSON object"),
        ('<tool_call>{"name": "mobile_use", "arguments": {}}</tool_call>', "unknown_action", "is not a function"),
        ('<tool_call>{"name": "computer_use"}</tool_call>', "missing_argument", "needs arguments"),
        ("<tool_call>[]</tool_call>", "syntax", "not a JSON object"),
        (_qwen('{"action": "left_click", "coordinate": [1]}'), "bad_argument", "is not a pair"),
        (_qwen('{"action": "left_click", "coordinate": ["1", "2"]}'), "bad_argument", "is not a number"),
        (_qwen('{"action": "left_click", "coordinate": [true, 2]}'), "bad_argument", "is not a number"),
        (_qwen('{"action": "left_click", "coordinate": "1, 2"}'), "bad_argument", "is not a pair"),
        (_qwen('{"action": "left_click", "coordinate": [112, 0]}'), "outside", "the picture of 112 x 112 pixels"),
        (_qwen('{"action": "left_click", "coordinate": [0, -1]}'), "outside", "(0, -1) lies outside"),
        (_qwen('{"action": "left_click", "coordinate": [-0.2, 0]}'), "outside", "(-0.2, 0) lies outside"),
        (_qwen('{"action": "key", "keys": ["ctrl", "controll"]}'), "unknown_key", "Did you mean 'control'?"),
        (_qwen('{"action": "key", "keys": "ctrl"}'), "bad_argument", "is not a list of texts"),
        (_qwen('{"action": "key", "keys": []}'), "invalid", "must be 1 to 8 keys"),
        (_qwen('{"action": "key", "keys": ["ctrl", "Control"]}'), "invalid", "held only once"),
        (_qwen('{"action": "type", "text": ""}'), "invalid", "1 to 10000 characters"),
        (_qwen('{"action": "type", "text": "\\ud800"}'), "bad_argument", "half of a surrogate pair"),
        (_qwen('{"action": "type", "text": 5}'), "bad_argument", "is not a text"),
        (_qwen('{"action": "type", "text": "a\nb"}'), "syntax", "Invalid control character"),
        (_qwen('{"action": "scroll", "pixels": 0}'), "invalid", "does not scroll"),
        (_qwen('{"action": "terminate", "status": "done"}'), "bad_argument", "is none of success, failure"),
        (_qwen('{"action": "triple_click", "coordinate": [1, 2]}'), "unknown_action", "Did you mean"),
        ("x" * 200_001, "too_long", "at most 200000 are read"),
        (f"<think>{WAIT}</think>\n\nI am done.", "no_action", "occurs only in the thinking"),
        (f"<think>{WAIT} or {WAIT}</think>", "no_action", "occurs only in the thinking"),
        (f"<think>{WAIT} or not</think>", "no_action", "occurs only in the thinking"),
        (f"<think>a</think>{WAIT}{WAIT}", "several", "one per step"),
        (f"<think>{WAIT}{WAIT}", "several", "one per step"),
        ("<think>a</think>", "no_action", "has no <tool_call>"),
        (_qwen('{"action": "key", "keys": ["ctrl++"]}'), "unknown_key", "'ctrl++' is not a key"),
        (_qwen('{"action": "key", "keys": ["ctrl+a", "Control"]}'), "invalid", "held only once"),
    ],
)  # fmt: skip
def test_a_malformed_call_of_qwen_is_refused_with_the_reason(text, code, reason):
    read = CODECS[Q2].decode(text, FRAME)
    assert isinstance(read, UnreadableReply), read
    assert (read.code, reason in read.reason) == (code, True), read


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("click(point='<point>1 2</point>')", "no_action", "begins with 'Action:'"),
        ("Thought: hm\nAction: ", "syntax", "no call"),
        ("Action: click(point='<point>1 2</point>'", "syntax", "neither a comma nor a parenthesis"),
        ("Action: click(point='<point>1 2</point>)", "syntax", "the text of point has no end"),
        ("Action: click(10, 20)", "syntax", "no argument such as"),
        ("Action: click(point=f())", "syntax", "no argument such as"),
        ("Action: click(point='<point>1 2</point>', point='<point>1 2</point>')", "syntax", "given twice"),
        ("Action: click(point='<point>1 2</point>', start_box='(1,2)')", "syntax", "'point' twice"),
        ("Action: click(point='<point>1 2</point>')\n\nclick(point='<point>1 2</point>')", "several", "one per step"),
        ("Action: wait()\nAction: wait()", "several", "one per step"),
        ("Action: wait() wait()", "several", "one per step"),
        ("Action: click()", "missing_argument", "click needs point"),
        ("Action: click(points='<point>1 2</point>')", "unknown_argument", "Did you mean 'point'?"),
        ("Action: click(point='1 2')", "bad_argument", "'1 2' is not a point"),
        ("Action: click(point='<point>1 2 3</point>')", "bad_argument", "is not a point"),
        ("Action: click(point='<point>112 2</point>')", "outside", "112 x 112"),
        ("Action: click(point='<point>-1 2</point>')", "outside", "(-1, 2)"),
        ("Action: clik(point='<point>1 2</point>')", "unknown_action", "Did you mean 'click'?"),
        ("Action: os.system('true')", "syntax", "no call"),
        ("Action: call_user()", "unsupported", "no user to call"),
        ("Action: press(key='enter')", "unsupported", "hotkey"),
        ("Action: type(content='C:\\Users')", "syntax", "is not an escape"),
        ("Action: type(content='\\ud83d')", "bad_argument", "half of a surrogate pair"),
        ("Action: type(content='')", "invalid", "1 to 10000"),
        ("Action: scroll(direction='downwards')", "bad_argument", "is none of up, down, left, right"),
        ("Action: hotkey(key='ctrl++')", "unknown_key", "'ctrl++' is not a key"),
        ("Action: hotkey(key='ctrl+controll')", "unknown_key", "Did you mean 'control'?"),
        ("Action: type(content='f('x')')", "syntax", "not clear where it ends"),
        ("Action: type(content='it's') wait()", "syntax", "neither a comma nor a parenthesis"),
        ("Action: type(content='it's \\')", "syntax", "neither a comma nor a parenthesis"),
        ("Action: type(content='it's\n')", "syntax", "neither a comma nor a parenthesis"),
        ("Action: type(content='it's)", "syntax", "neither a comma nor a parenthesis"),
        ("Action: type(content='it's')\n\nAction: wait()", "several", "one per step"),
        ("Action: scroll(direction='it's', point='<point>1 2</point>')", "syntax", "neither a comma"),
        ("Action: hotkey(key='')", "invalid", "1 to 8 keys"),
    ],
)  # fmt: skip
def test_a_malformed_call_of_ui_tars_is_refused_with_the_reason(text, code, reason):
    read = CODECS[T1].decode(text, FRAME)
    assert isinstance(read, UnreadableReply), read
    assert (read.code, reason in read.reason) == (code, True), read


@pytest.mark.parametrize(
    ("family", "text", "code", "reason"),
    [
        (AN, "", "no_action", "empty"),
        (AN, 'Sure! {"action": "wait", "duration": 1}', "syntax", "not JSON"),
        (AN, '{"action": "wait", "duration": 1} Done.', "syntax", "something follows"),
        (AN, '{"action": "wait", "duration": 1}{"action": "wait", "duration": 1}', "several", "one per step"),
        (AN, '{"action": "left_click", "coordinate": [1.0, 2]}', "bad_argument", "not in whole pixels"),
        (AN, '{"action": "left_click", "coordinate": [112, 2]}', "outside", "112 x 112"),
        (AN, '{"action": "left_click", "text": "a"}', "invalid", "can be held"),
        (AN, '{"action": "screenshot"}', "unsupported", "a screenshot follows every action"),
        (AN, '{"action": "key", "text": "ctrl++"}', "unknown_key", "is not a key"),
        (AN, '{"action": "key", "text": "a", "repeat": 3}', "unsupported", "presses keys once"),
        (AN, '{"action": "scroll", "scroll_direction": "up", "scroll_amount": -1}', "bad_argument", "negative"),
        (AN, '{"action": "scroll", "scroll_direction": "up", "scroll_amount": 0}', "invalid", "does not scroll"),
        (AN, '{"action": "scroll", "scroll_direction": "up", "scroll_amount": 1, "text": "a"}', "unsupported", "click"),
        (AN, '{"action": "left_click_drag", "coordinate": [1, 2]}', "missing_argument", "needs start_coordinate"),
        (OA, '[{"type": "wait"}, {"type": "wait"}]', "several", "one per step"),
        (OA, "[]", "no_action", "calls no tool"),
        (OA, "[3]", "syntax", "the list holds 3"),
        (OA, '[[{"type": "wait"}]]', "syntax", "not a JSON object"),
        (OA, '"wait"', "syntax", "not a JSON object"),
        (OA, '{"type": "computer_call"}', "missing_argument", "has no action"),
        (OA, '{"type": "computer_call", "action": 3}', "syntax", "the action is 3"),
        (OA, '{"type": "computer_call", "action": {"type": "wait"}, "status": "incomplete"}', "unclosed", "incomplete"),
        (OA, '{"type": "computer_call", "actions": [{"type": "wait"}, {"type": "wait"}]}', "several", "one per step"),
        (OA, '{"type": "computer_call", "action": {"type": "wait"}, "actions": [{"type": "wait"}]}', "several", "both"),
        (OA, '{"type": "computer_call", "action": {"type": "wait"}, "pending_safety_checks": [{"id": "a"}]}',
         "unsupported", "they cannot be confirmed"),
        (OA, '{"object": "response", "output": [{"type": "function_call"}]}', "unsupported", "is not read"),
        (OA, '{"object": "response", "output": [{"type": "message", "content": []}]}', "no_action", "calls no tool"),
        (AN, '{"type": "tool_use", "name": "bash", "input": {}}', "unknown_action", "'bash' is not a tool"),
        (AN, '{"type": "tool_use", "name": "computer", "input": "wait"}', "syntax", "not a JSON object"),
        (AN, '{"role": "assistant", "content": "Done."}', "no_action", "calls no tool"),
        (AN, '[{"type": "image"}]', "unsupported", "'image' is not read"),
        (AN, '[{"action": "wait", "duration": 1}, {"action": "wait", "duration": 1}]', "several", "one per step"),
        (OA, '{"type": "click", "x": 1, "y": 2}', "missing_argument", "click needs button"),
        (OA, '{"type": "click", "button": "back", "x": 1, "y": 2}', "unsupported", "no back button"),
        (OA, '{"type": "click", "button": "left", "x": 1.5, "y": 2}', "bad_argument", "not a whole number"),
        (OA, '{"type": "move", "x": 1, "y": 2, "keys": ["CTRL"]}', "unsupported", "held during a click"),
        (OA, '{"type": "drag", "path": [{"x": 1, "y": 2}]}', "invalid", "2 to 256 points"),
        (OA, '{"type": "drag", "path": [[1, 2], [3, 4]]}', "bad_argument", "not a list of objects"),
        (OA, '{"type": "drag", "path": [{"x": 1, "z": 2}]}', "unknown_argument", "takes no 'z'"),
        (OA, '{"action": "wait"}', "missing_argument", "no type"),
    ],
)  # fmt: skip
def test_a_malformed_object_of_an_interface_is_refused_with_the_reason(family, text, code, reason):
    read = CODECS[family].decode(text, FRAME)
    assert isinstance(read, UnreadableReply), read
    assert (read.code, reason in read.reason) == (code, True), read


def test_a_number_at_the_edge_is_brought_in_only_by_what_rounding_adds():
    def at(family, x):
        arguments = f'{{"action": "mouse_move", "coordinate": [{x}, 0]}}'
        return CODECS[family].decode(_qwen(arguments), FRAME)

    assert at(Q2, 111).action.at.x == 99  # the last of 112
    assert at(Q2, 111.9).action.at.x == 99  # inside, and rounds to 112
    assert at(Q2, 112).code == "outside"
    assert at(Q3, 999).action.at.x == 99  # the right edge is the last pixel's
    assert at(Q3, 1000).action.at.x == 99  # the size that the prompt tells, which models write for the edge
    assert at(Q3, 999.4).action.at.x == 99
    assert at(Q3, 1000.1).code == "outside"
    assert at(Q3, 1001).code == "outside"
