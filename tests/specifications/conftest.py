"""Screens for the snippets that need some: a real gateway with browsers, and a session server."""

import json
import subprocess
import sys

import pytest

from palaestra.cli import main
from palaestra.errors import ConfigError
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.clients.provider import start_gateway


def _need_a_browser():
    try:
        find_chromium()
    except ConfigError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def cluster_host():
    """`host:port` of a gateway that takes the token of the environment."""
    _need_a_browser()
    with (
        start_gateway(max_sessions=8, servers=1, session_types=("simple_data_entry",)) as address,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PALAESTRA_GATEWAY_TOKEN", address.token)
        yield address.url.removeprefix("http://")


@pytest.fixture(scope="session")
def ui_env_url():
    _need_a_browser()
    command = [sys.executable, "-m", "palaestra.sessions.server", "--until-eof"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        yield f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
        server.stdin.close()


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`palaestra …` in an empty directory: the JSON document it prints, or the message of what it refuses."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["palaestra", *(str(word) for word in words), "--json"])
        with pytest.raises(SystemExit) as left:
            main()
        heard = capsys.readouterr()
        return json.loads(heard.out) if not left.value.code else heard.err

    return call
