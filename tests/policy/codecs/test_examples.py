"""What the families' own pages show is read as they say, and the prompts are theirs."""

import ast
import hashlib
import json
import re
from pathlib import Path

import pytest

import palaestra.policy.codecs as package
from palaestra.errors import ConfigError
from palaestra.policy.codecs import CODECS, IMAGE_RULES, CoordinateFrame, DecodedAction, codec_for_model_type
from palaestra.policy.codecs.qwen import QwenCodec
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
from palaestra.sessions.screen import Size

HD = Size(1920, 1080)
SAME = CoordinateFrame(HD, HD)


def _read(family, text, frame=SAME):
    read = CODECS[family].decode(text, frame)
    assert isinstance(read, DecodedAction), read
    return read.action


def test_a_click_of_qwen_counts_the_resized_pictures_pixels():
    call = '{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [447, 81]}}'
    text = f"<tool_call>\n{call}\n</tool_call>"
    frame = IMAGE_RULES["qwen2.5-vl"].frame(HD)
    assert frame.image == Size(1932, 1092)
    # 447.5 * 1920 / 1932 = 444.7; 81.5 * 1080 / 1092 = 80.6
    assert _read("qwen2.5-vl", text, frame) == Click(Point(444, 80))
    assert CODECS["qwen2.5-vl"].encode(Click(Point(444, 80)), frame) == text
    # Of the third generation the same numbers are thousandths: 447 * 1920 / 999 = 859.1; 81 * 1080 / 999 = 87.6
    assert _read("qwen3-vl", text, frame) == Click(Point(859, 87))


def test_the_denominator_and_the_advertised_size_of_the_third_generation_can_be_chosen():
    cookbook = QwenCodec("cookbook", third=True, denominator=1000, advertised=Size(999, 999))
    said = cookbook.encode(Click(Point(960, 540)), SAME)
    assert '"coordinate": [500, 500]' in said
    assert cookbook.decode(said, SAME).action == Click(Point(960, 540))
    assert "The screen's resolution is 999x999." in cookbook.system_prompt(SAME)


def test_thoughts_around_a_call_are_kept():
    call = '<tool_call>{"name": "computer_use", "arguments": {"action": "wait", "time": 2.5}}</tool_call>'
    text = f"Action: Wait for the page.\n{call}\nDone."
    assert CODECS["qwen3-vl"].decode(text, SAME) == DecodedAction(
        Wait(2.5), "Action: Wait for the page.\nDone.", (27, 27 + len(call))
    )


@pytest.mark.parametrize(
    ("call", "action"),
    [
        ("click(point='<point>200 300</point>')", Click(Point(200, 300))),
        ("left_single(point='<point>200 300</point>')", Click(Point(200, 300))),
        ("left_double(point='<point>200 300</point>')", Click(Point(200, 300), times=2)),
        ("right_single(point='<point>200 300</point>')", Click(Point(200, 300), "right")),
        ("hover(point='<point>200 300</point>')", Move(Point(200, 300))),
        ("click(start_box='(197,525)')", Click(Point(197, 525))),
        ("click(start_box='<|box_start|>(197,525)<|box_end|>')", Click(Point(197, 525))),
        ("click(start_box='(100,200,300,400)')", Click(Point(200, 300))),
        ('click(point="<point>200.4 300.6</point>")', Click(Point(200, 301))),
        (
            "drag(start_point='<point>1 2</point>', end_point='<point>3 4</point>')",
            Drag((Point(1, 2), Point(3, 4))),
        ),
        ("select(start_box='(1,2)', end_box='(3,4)')", Drag((Point(1, 2), Point(3, 4)))),
        ("hotkey(key='ctrl c')", PressKeys(("Control", "c"))),
        ("hotkey(key='arrowleft')", PressKeys(("ArrowLeft",))),
        ("type(content='it\\'s \\\"it\\\"\\n')", TypeText('it\'s "it"\n')),
        ("type(content='two\nlines')", TypeText("two\nlines")),
        ("scroll(point='<point>5 6</point>', direction='down')", Scroll(Point(5, 6), 0, 500)),
        ("scroll(direction='left')", Scroll(None, -500, 0)),
        ("wait()", Wait(5)),
        ("finished()", Terminate(success=True)),
        ("finished(content='')", Terminate(success=True)),
        ("finished(content='forty-two')", Answer("forty-two")),
    ],
)
def test_the_words_of_ui_tars(call, action):
    text = f"Thought: I do it.\nAction: {call}"
    read = CODECS["ui-tars-1.5"].decode(text, SAME)
    assert read == DecodedAction(action, "I do it.", (26, 26 + len(call)))


def test_the_first_ui_tars_counts_thousandths():
    text = "Action: click(start_box='<|box_start|>(235,512)<|box_end|>')"
    assert _read("ui-tars-1.0", text) == Click(Point(451, 553))  # 1920 * 0.235 = 451.2; 1080 * 0.512 = 552.96
    assert CODECS["ui-tars-1.0"].encode(Click(Point(451, 553)), SAME) == text
    assert _read("ui-tars-1.0", text.replace("235,512", "1000,1000")) == Click(Point(1919, 1079))


def test_a_reflection_is_a_thought_like_another():
    text = "Reflection: It failed.\nAction_Summary: Wait.\nAction: wait()"
    assert CODECS["ui-tars-1.5"].decode(text, SAME).thought == "Reflection: It failed.\nAction_Summary: Wait."


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"action": "key", "text": "ctrl+s"}', PressKeys(("Control", "s"))),
        ('{"action": "key", "text": "Return"}', PressKeys(("Enter",))),
        ('{"action": "key", "text": "Page_Down", "repeat": 1}', PressKeys(("PageDown",))),
        ('{"action": "key", "text": "ctrl+plus"}', PressKeys(("Control", "+"))),
        ('{"action": "left_click"}', Click(None)),
        ('{"action": "left_click", "coordinate": null}', Click(None)),
        (
            '{"action": "triple_click", "coordinate": [9, 8], "text": "ctrl+shift"}',
            Click(Point(9, 8), times=3, held=("Control", "Shift")),
        ),
        (
            '{"action": "left_click_drag", "start_coordinate": [1, 2], "coordinate": [3, 4]}',
            Drag((Point(1, 2), Point(3, 4))),
        ),
        (
            ' {"action": "scroll", "scroll_direction": "right", "scroll_amount": 3, "coordinate": [5, 6]}\n',
            Scroll(Point(5, 6), 300, 0),
        ),
        ('{"action": "wait", "duration": 1.5}', Wait(1.5)),
    ],
)
def test_the_inputs_of_anthropics_tool(text, action):
    assert _read("anthropic", text) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"type": "click", "button": "wheel", "x": 1, "y": 2}', Click(Point(1, 2), "middle")),
        ('{"type": "click", "button": "left", "x": 1, "y": 2, "keys": ["ALT"]}', Click(Point(1, 2), held=("Alt",))),
        ('{"type": "double_click", "x": 1, "y": 2, "keys": null}', Click(Point(1, 2), times=2)),
        ('{"type": "drag", "path": [{"x": 1, "y": 2}, {"x": 3, "y": 4}]}', Drag((Point(1, 2), Point(3, 4)))),
        ('{"type": "keypress", "keys": ["CTRL", "A"]}', PressKeys(("Control", "a"))),
        ('{"type": "scroll", "x": 1, "y": 2, "scroll_x": 0, "scroll_y": 120, "keys": []}', Scroll(Point(1, 2), 0, 120)),
        ('{"type": "wait"}', Wait(2)),
        ('{"type": "type", "text": "ü"}', TypeText("ü")),
    ],
)  # fmt: skip
def test_the_actions_of_openais_tool(text, action):
    assert _read("openai", text) == action


@pytest.mark.parametrize("family", ["qwen2.5-vl", "anthropic", "openai"])
def test_a_prompt_tells_the_size_of_the_picture_and_not_of_the_screen(family):
    prompt = CODECS[family].system_prompt(CoordinateFrame(Size(1920, 1080), Size(1316, 728)))
    assert "1316x728" in prompt
    assert "1920" not in prompt


def test_prompts_are_the_families_own_to_the_letter():
    digests = {
        family: hashlib.sha256(
            CODECS[family].system_prompt(CoordinateFrame(HD, Size(1932, 1092))).encode()
        ).hexdigest()[:16]
        for family in ("qwen2.5-vl", "qwen3-vl", "ui-tars-1.0", "ui-tars-1.5")
    }
    # Descriptions and schemas were compared with the published ones when these were taken.
    assert digests == {
        "qwen2.5-vl": "803d23554660b3fa",
        "qwen3-vl": "e619ee0dd635875b",
        "ui-tars-1.0": "4fd13edb45ae415c",
        "ui-tars-1.5": "a9a7ef626d2c3dc2",
    }


@pytest.mark.parametrize(("family", "added"), [("qwen2.5-vl", 0), ("qwen3-vl", 3)])
def test_qwens_prompt_holds_a_schema_whose_words_are_all_understood(family, added):
    prompt = CODECS[family].system_prompt(CoordinateFrame(HD, Size(1932, 1092)))
    tool = json.loads(re.search(r"<tools>\n(.*)\n</tools>", prompt)[1])
    properties = tool["function"]["parameters"]["properties"]
    words = properties["action"]["enum"]
    assert len(words) == 11 + added
    assert list(properties) == ["action", "keys", "text", "coordinate", "pixels", "time", "status"]
    resolution = "1932x1092" if family == "qwen2.5-vl" else "1000x1000"
    assert f"* The screen's resolution is {resolution}." in tool["function"]["description"]
    every = {
        "keys": ["ctrl", "a"], "text": "x", "coordinate": [1, 2], "pixels": -3, "time": 1, "status": "failure",
    }  # fmt: skip
    frame = CoordinateFrame(HD, Size(1932, 1092), pointer=Point(0, 0))
    for word in words:
        assert f"* `{word}`: " in properties["action"]["description"]
        needed = {name: value for name, value in every.items() if f"`action={word}`" in properties[name]["description"]}
        call = json.dumps({"name": "computer_use", "arguments": {"action": word} | needed})
        if word in ("mouse_move", "left_click_drag"):
            call = call.replace(f'"{word}"', f'"{word}", "coordinate": [1, 2]') if not needed else call
        _read(family, f"<tool_call>{call}</tool_call>", frame)


def test_a_codec_is_chosen_by_name_or_by_the_models_type():
    assert [name for name, codec in CODECS.items() if codec.name != name] == []
    assert codec_for_model_type("qwen2_5_vl") == "qwen2.5-vl"
    assert codec_for_model_type("qwen3_vl") == "qwen3-vl"
    # Plain Qwen2-VL and UI-TARS 1.0 are of this type, and only one of them speaks a grammar.
    with pytest.raises(ConfigError, match=r"qwen2_vl.*Name the codec: one of qwen2.5-vl, qwen3-vl, ui-tars-1.0"):
        codec_for_model_type("qwen2_vl")


def test_no_module_evaluates_text_or_imports_a_deep_learning_library():
    modules = sorted(Path(package.__file__).parent.glob("*.py"))
    assert len(modules) >= 10
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name | ast.Attribute):
                word = node.id if isinstance(node, ast.Name) else node.attr
                assert word not in ("eval", "exec", "literal_eval", "compile", "__import__") or (
                    word == "compile" and ast.unparse(node) == "re.compile"
                ), f"{path.name}:{node.lineno}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not {name.split(".")[0] for name in names} & {"ast", "torch", "transformers", "pickle"}


def test_public_names_are_ten_at_most_and_exist():
    assert len(package.__all__) == 10
    assert all(hasattr(package, name) for name in package.__all__)
