"""The gateway that training starts, and one that is already running."""

import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request

import pytest

from palaestra.errors import ConfigError
from palaestra.sessions.clients import provider
from palaestra.sessions.clients.provider import check_gateway, start_gateway

FAKE = json.dumps([sys.executable, "-m", "palaestra.sessions.server", "--fake", "--port", "0"])


@pytest.fixture
def fake_servers(monkeypatch):
    """A gateway of our own whose sessions need no browser."""
    real = provider.subprocess.Popen
    started = []

    def popen(command, **how):
        child = real([*command, f"server_command={FAKE}"], **how)
        started.append(child)
        return child

    monkeypatch.setattr(provider.subprocess, "Popen", popen)
    return started


def asked(address, path="/sessions"):
    request = urllib.request.Request(address.url + path, headers={"Authorization": f"Bearer {address.token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_our_own_gateway_answers_to_our_token_alone_and_is_gone_afterwards(fake_servers):
    with start_gateway(max_sessions=3, servers=1) as address:
        assert asked(address) == {"sessions": []}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address.url + "/sessions", timeout=30)
    assert fake_servers[0].returncode == 0
    with pytest.raises(urllib.error.URLError):
        asked(address)


def test_an_error_of_ours_ends_it_as_well(fake_servers):
    with pytest.raises(ZeroDivisionError), start_gateway(max_sessions=3, servers=1):
        raise ZeroDivisionError
    assert fake_servers[0].returncode == 0


def test_one_that_hangs_is_killed(fake_servers, monkeypatch):
    monkeypatch.setattr(provider, "STOP_TIMEOUT_S", 0.1)
    with start_gateway(max_sessions=3, servers=1):
        os.kill(fake_servers[0].pid, signal.SIGSTOP)
    assert fake_servers[0].returncode == -signal.SIGKILL


def test_an_existing_gateway_is_asked_before_anything_is_begun(fake_servers, tmp_path):
    with start_gateway(max_sessions=3, servers=1) as own:
        token = tmp_path / "token"
        token.write_text(own.token + "\n")
        assert check_gateway(own.url, token).token == own.token
        token.write_text("wrong")
        with pytest.raises(ConfigError, match=r"responds with status 401. Give its token"):
            check_gateway(own.url, token)
        with pytest.raises(ConfigError, match="cannot be read"):
            check_gateway(own.url, tmp_path / "none")


def test_a_gateway_that_is_not_there_is_named_with_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot be reached .* Start it with `palaestra gateway`"):
            check_gateway(url, None)
