"""`palaestra gateway`: its token, and one-line errors."""

import json
import os
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request

import pytest


def _palaestra(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "palaestra", "gateway", *arguments], capture_output=True, text=True, cwd=cwd, timeout=60
    )


def _asked(url, token=None, body=None, kind="application/json", method=None, **more):
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {token}"} if token else {}) | more
    request = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.loads(refusal.read())


def test_it_serves_with_nothing_configured_and_asks_for_its_own_token(tmp_path):
    command = json.dumps([sys.executable, "-m", "palaestra.sessions.server", "--port", "0", "--fake"])
    settings = ["port=0", "servers=1", "warm=0", "drain_s=0", f"state_dir={tmp_path}", f"server_command={command}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "palaestra", "gateway", *settings],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        url = json.loads(process.stdout.readline())["url"]
        token_file = tmp_path / "var" / "gateway.token"
        assert stat.S_IMODE(os.stat(token_file).st_mode) == 0o600
        token = token_file.read_text().strip()
        assert _asked(f"{url}/sessions")[0] == 401
        assert _asked(f"{url}/sessions", "x" * 64)[0] == 401
        status, opened = _asked(f"{url}/sessions", token, b'{"session_type": "browser"}')
        assert status == 201
        proxied = f"{url}/proxy/{opened['session_id']}"
        owned = {"X-Palaestra-Session-Token": opened["session_token"]}
        reset = b'{"task": "fake/button", "seed": 1}'
        assert _asked(f"{proxied}/reset", token, reset)[0] == 403
        status, spec = _asked(f"{proxied}/reset", token, reset, **owned)
        assert (status, spec["instruction"]) == (200, "Click the square.")
        act = b'{"step": 1, "action": {"kind": "click", "at": [40, 60]}}'
        assert _asked(f"{proxied}/act", token, act, **owned)[1]["progress"]["reward"] == 1.0
        operator = (tmp_path / "var" / "gateway-operator.token").read_text().strip()
        closing = f"{url}/sessions/{opened['session_id']}"
        assert _asked(closing, token, method="DELETE")[0] == 403
        assert _asked(closing, operator, method="DELETE")[0] == 200
        status, refusal = _asked(f"{url}/sessions", token, b"{}", kind="application/x-www-form-urlencoded")
        assert status == 422
        assert "Send application/json" in refusal["error"]["message"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prt=8"], "Did you mean 'port'?"),
        (["host=0.0.0.0", "--anonymous"], "needs a loopback host"),
        (["token_file=missing"], "cannot be read"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["max_sessions=0"], "greater than or equal to 1"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(arguments, message, tmp_path):
    done = _palaestra(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []  # no token for a gateway that never was
