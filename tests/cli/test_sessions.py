"""`palaestra tasks` and `palaestra sessions try`."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from palaestra.cli.sessions import parse_action
from palaestra.errors import ConfigError, InvalidAction
from palaestra.sessions.action import Answer, Click, Drag, Move, Point, PressKeys, Scroll, Terminate, TypeText, Wait
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.screen import Screenshot, Size


@pytest.mark.parametrize(
    ("line", "action"),
    [
        ("click 80 120", Click(Point(80, 120))),
        ("click 80,120", Click(Point(80, 120))),
        ("double 1 2", Click(Point(1, 2), times=2)),
        ("right 1 2", Click(Point(1, 2), "right")),
        ("move 1 2", Move(Point(1, 2))),
        ("drag 1 2 3 4", Drag((Point(1, 2), Point(3, 4)))),
        ("type hello  world", TypeText("hello  world")),
        ("press Control+a", PressKeys(("Control", "a"))),
        ("press +", PressKeys(("+",))),
        ("press Control++", PressKeys(("Control", "+"))),
        ("scroll -120", Scroll(None, 0, -120)),
        ("scroll 50 10 20", Scroll(Point(10, 20), 0, 50)),
        ("wait 0.5", Wait(0.5)),
        ("answer forty two", Answer("forty two")),
        ("done", Terminate(True)),
        ("give-up", Terminate(False)),
        ('{"kind": "click", "at": [5, 6]}', Click(Point(5, 6))),
    ],
)
def test_an_action_in_words_is_the_action(line, action):
    assert parse_action(line) == action


@pytest.mark.parametrize(
    "line",
    [
        "clik 1 2",
        "click 1",
        "click a b",
        "click nan 2",
        "click inf 2",
        "click 1.5 2",
        "scroll 1e999",
        "wait nan",
        "drag 1 2 3",
        "press Entr",
        "{oops",
        "{" * 5 + '"a":' * 5,
        '{"a":' * 100_000,
        "wait",
        "type",
    ],
    ids=lambda line: line[:20],
)
def test_what_is_not_understood_is_refused(line):
    with pytest.raises(InvalidAction):
        parse_action(line)


def _palaestra(*arguments, given="", cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "palaestra", *arguments],
        input=given,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
    )


def test_tasks_are_listed_and_filtered():
    found = json.loads(_palaestra("tasks", "data", "--json").stdout)
    assert found == ["data_entry/field", "data_entry/fields", "data_entry/form"]


@pytest.fixture
def _browser():
    try:
        find_chromium()
    except ConfigError as missing:
        pytest.skip(str(missing))


@pytest.mark.usefixtures("_browser")
def test_a_task_is_opened_shown_and_played_from_a_file_of_actions(tmp_path):
    done = _palaestra("sessions", "try", "click_target/button", "--json", given="wait 0.01\n\ngive-up\n", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [step["action"]["kind"] for step in result["steps"]] == ["wait", "terminate"]
    assert (result["progress"]["done"], result["progress"]["success"], result["progress"]["reward"]) == (
        True,
        False,
        0.0,
    )
    assert result["instruction"] in done.stderr
    assert Screenshot.of((tmp_path / "screen.png").read_bytes()).size == Size(160, 210)


@pytest.mark.usefixtures("_browser")
@pytest.mark.parametrize(
    ("arguments", "given", "message"),
    [
        (["nothing/here"], "", "no suite has this name"),
        (["click_target"], "", "suite/name"),
        (["click_target/button", "difficulty=99"], "", "between 1 and 8"),
        (["click_target/button", "difficulty"], "", "key=value"),
        (["click_target/button", "difficulty=["], "", "is not a YAML value"),
        (["click_target/button", "--seed", "-1"], "", "whole number from 0"),
        (["click_target/button", "--picture", "nowhere/screen.png"], "", "its directory does not exist"),
        (["click_target/button"], "click nan 1\n", "not a whole number"),
        (["click_target/button"], "click 999 1\n", "outside the screen of 160 x 210"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, given, message, tmp_path):
    done = _palaestra("sessions", "try", *arguments, given=given, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("_browser")
def test_a_closed_standard_input_has_no_actions(tmp_path):
    words = [sys.executable, "-m", "palaestra", "sessions", "try", "click_target/button"]
    close = "import os, sys; os.close(0); os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", close, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "Screen of 160 x 210 pixels" in done.stdout


def _read_until(terminal, end):
    """The output of a terminal until it ends with these characters, or until the process has closed it."""
    output = b""
    while not output.endswith(end):
        try:
            output += os.read(terminal, 4096)
        except OSError:
            break
    return output.decode()


@pytest.fixture
def prompt(tmp_path):
    """`sessions try` on a terminal of its own, at its prompt: the process, the terminal and the output so far."""
    terminal, other = pty.openpty()
    words = [sys.executable, "-m", "palaestra", "sessions", "try", "click_target/button"]
    streams = {"stdin": other, "stdout": other, "stderr": other}
    # A session of its own with this terminal makes Ctrl-C a signal, as in a shell.
    attach = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", attach, *words], **streams, cwd=tmp_path, start_new_session=True)
    os.close(other)
    try:
        yield process, terminal, _read_until(terminal, b"> ")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(terminal)


@pytest.mark.usefixtures("_browser")
def test_ctrl_c_at_the_prompt_ends_at_once(prompt):
    process, terminal, _ = prompt
    os.write(terminal, b"\x03")
    output = _read_until(terminal, b"interrupted\r\n")
    assert process.wait(timeout=30) == 130, output
    assert "Traceback" not in output


@pytest.mark.usefixtures("_browser")
def test_actions_are_typed_at_the_prompt_until_ctrl_d(prompt):
    process, terminal, output = prompt
    assert "Ctrl-D ends the session." in output
    os.write(terminal, b"nonsense\n")
    assert "is not an action" in _read_until(terminal, b"> ")
    os.write(terminal, b"wait 0.01\n")
    assert "step 1: reward 0, running" in _read_until(terminal, b"> ")
    os.write(terminal, b"\x04")
    _read_until(terminal, b"nothing ends with this")
    assert process.wait(timeout=30) == 0
