"""The session server as a process: what it announces, how it ends, and that nothing is left of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from palaestra.errors import ConfigError
from palaestra.sessions.action import Click, Point
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.clients.blocking import BlockingSession


def _start(*arguments, **settings):
    command = [sys.executable, "-m", "palaestra.sessions.server", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)


def _ask(method, url, document=None):
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.loads(refused.read())


def _processes(wanted):
    """Living processes whose group number and command line are `wanted`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text(errors="replace")
            state, _, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if state != "Z" and wanted(int(group), command):
            found.append(int(process.name))
    return found


def test_it_prints_where_it_listens_serves_there_and_ends_when_its_input_ends():
    read_end, write_end = os.pipe()
    server = _start("--fake", "--until-eof", f"--announce-fd={write_end}", stdin=subprocess.PIPE, pass_fds=(write_end,))
    os.close(write_end)
    with os.fdopen(read_end) as line:
        announced = json.loads(line.read())  # the descriptor is closed after the one line
    assert announced["url"] == f"http://127.0.0.1:{announced['port']}"
    assert announced["pid"] == server.pid
    assert _ask("GET", f"{announced['url']}/health") == (200, {"schema": 1, "ready": True, "sessions": 0})
    with BlockingSession.on_server(announced["url"]) as session:
        session.reset("fake/button", seed=1)  # the square's corner is at (37, 53)
        assert session.act(Click(Point(37, 53))).progress.success
        assert _ask("GET", f"{announced['url']}/health")[1]["sessions"] == 1
    assert _ask("GET", f"{announced['url']}/health")[1]["sessions"] == 0
    output, errors = server.communicate(b"", timeout=10)
    assert (server.returncode, output, errors) == (0, b"", b"")


@pytest.mark.parametrize("arguments", [["--chromium=/no/such/browser"], ["--fake", "--port=PORT"]])
def test_what_it_cannot_do_it_says_in_one_sentence(arguments):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = _start(*(argument.replace("PORT", port) for argument in arguments))
        output, errors = server.communicate(timeout=20)
    assert (server.returncode, output) == (2, b"")
    assert errors.count(b"\n") == 1
    assert b"is not a program" in errors or b"cannot listen there" in errors


def test_sigterm_in_the_middle_of_an_act_leaves_no_browser_and_no_directory(tmp_path):
    try:
        find_chromium()
    except ConfigError as missing:
        pytest.skip(str(missing))
    server = _start(env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        url = json.loads(server.stdout.readline())["url"]
        assert _ask("POST", f"{url}/sessions", {"session_id": "a"})[0] == 201
        assert _ask("POST", f"{url}/sessions/a/reset", {"task": "click_target/button", "seed": 3})[0] == 200
        browser = min(_processes(lambda group, command: str(tmp_path) in command))
        assert len(_processes(lambda group, command: group == browser)) > 1
        answers = []
        # Page time passes at once, so an act takes long only where the browser does.
        os.killpg(browser, signal.SIGSTOP)
        click = {"step": 1, "action": {"kind": "click", "at": [10, 60]}}
        acting = threading.Thread(target=lambda: answers.append(_ask("POST", f"{url}/sessions/a/act", click)))
        acting.start()
        while _answers_at_once(f"{url}/sessions/a/progress"):
            pass  # a session does one thing at a time: once the act has begun, questions wait
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=10) == 0
        assert time.monotonic() - began < 5.0
        acting.join()
    finally:
        server.kill()
        server.communicate()
    (status, document), *_ = answers
    assert (status, document["error"]["code"], document["error"]["reason"]) == (
        500,
        "environment_failed",
        "browser_gone",
    )
    assert _processes(lambda group, command: group == browser or str(tmp_path) in command) == []
    assert list(tmp_path.iterdir()) == []


def _answers_at_once(url):
    try:
        urllib.request.urlopen(url, timeout=1.0).close()
    except TimeoutError:
        return False
    return True
