"""The gateway as a process: started, drained, killed with -9 and started again."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time

import aiohttp
import pytest
from tests.gateway.harness import SERVER, TOKEN, labelled

from palaestra.errors import ConfigError
from palaestra.gateway import GatewayConfig
from palaestra.gateway.config import TOKEN_VARIABLE, read_token
from palaestra.processes.procfs import list_descendants
from palaestra.sessions.clients.client import GatewayClient
from palaestra.sessions.conformance import check_session

FAKE = (sys.executable, "-m", "palaestra.sessions.server", "--port", "0", "--fake")


class Started:
    """A gateway process that has printed where it listens."""

    def __init__(self, process, facts):
        self.process, self.url, self.port = process, facts["url"], facts["port"]
        self.http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
        self.tokens = {}

    async def ask(self, method, path, **how):
        async with self.http.request(method, self.url + path, headers=self.owned(path), **how) as response:
            return response.status, await response.json(content_type=None)

    async def opened(self):
        status, document = await self.ask("POST", "/sessions", json={})
        assert status == 201, document
        self.tokens[document["session_id"]] = document["session_token"]
        return document["session_id"]

    def owned(self, path):
        """What the client that opened a session sends along."""
        found = [token for name, token in self.tokens.items() if f"/{name}" in path]
        return {"X-Palaestra-Session-Token": found[0]} if found else {}


@contextlib.asynccontextmanager
async def started(state_dir, *, command=SERVER, **settings):
    settings = {
        "port": 0,
        "servers": 2,
        "warm": 0,
        "state_dir": str(state_dir),
        "server_command": list(command),
        **settings,
    }
    arguments = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "palaestra.gateway", *arguments, env={**os.environ, TOKEN_VARIABLE: TOKEN},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    gateway = Started(process, json.loads(await asyncio.wait_for(process.stdout.readline(), 60)))
    try:
        yield gateway
    finally:
        await gateway.http.close()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 30)
        process._transport.close()


async def _gone_within(seconds, state_dir):
    """How long it took until nothing of any gateway was left."""
    begin = time.monotonic()
    while left := labelled(state_dir):
        assert time.monotonic() - begin < seconds, left
        await asyncio.sleep(0.05)
    return time.monotonic() - begin


def test_killed_with_9_under_load_a_gateway_leaves_nothing_10_s_later_and_the_next_one_serves(tmp_path):
    async def body():
        async with started(tmp_path) as gateway:
            names = [await gateway.opened() for _ in range(8)]

            async def load(name):
                with contextlib.suppress(aiohttp.ClientError):
                    while True:
                        assert (await gateway.ask("GET", f"/proxy/{name}/echo"))[0] == 200

            loads = [asyncio.create_task(load(name)) for name in names]
            while len(labelled(tmp_path)) < 7:  # the gateway, and twice guard, server and browser
                await asyncio.sleep(0.01)
            gateway.process.kill()
            await gateway.process.wait()
            await asyncio.gather(*loads)
            await _gone_within(10.0, tmp_path)

        async with started(tmp_path) as gateway:
            assert (await gateway.ask("GET", "/sessions")) == (200, {"sessions": []})
            await gateway.opened()
        assert labelled(tmp_path) == {}
        assert list(tmp_path.iterdir()) == []

    asyncio.run(body())


def test_what_outlives_gateway_and_guards_is_removed_by_the_next_gateway(tmp_path):
    async def body():
        async with started(tmp_path, servers=1) as gateway:
            await gateway.opened()
            below_it = list_descendants(gateway.process.pid)
            guard = next(pid for pid, command in labelled(tmp_path).items() if b"process_guard.py" in command)
            browser = next(pid for pid, command in labelled(tmp_path).items() if b"3600" in command)
            assert {guard, browser} <= below_it
            os.kill(guard, signal.SIGSTOP)  # it cannot notice
            gateway.process.kill()
            await gateway.process.wait()
            os.kill(guard, signal.SIGKILL)
            assert browser in labelled(tmp_path)

        async with started(tmp_path, servers=1) as gateway:
            left = labelled(tmp_path)
            assert browser not in left
            await gateway.opened()
        assert list(tmp_path.iterdir()) == []

    asyncio.run(body())


def test_sigterm_lets_running_sessions_finish_and_opens_no_others(tmp_path):
    async def body():
        async with started(tmp_path, servers=1) as gateway:
            name = await gateway.opened()
            gateway.process.send_signal(signal.SIGTERM)
            while (await gateway.ask("GET", "/health"))[1]["status"] != "draining":
                await asyncio.sleep(0.01)

            status, document = await gateway.ask("POST", "/sessions", json={})
            assert (status, document["error"]["code"]) == (503, "draining")
            assert (await gateway.ask("GET", f"/proxy/{name}/echo"))[0] == 200
            assert (await gateway.ask("DELETE", f"/sessions/{name}"))[0] == 200

            assert await asyncio.wait_for(gateway.process.wait(), 20) == 0
            assert list(tmp_path.iterdir()) == []

    asyncio.run(body())


def test_after_the_grace_what_is_still_open_is_closed(tmp_path):
    async def body():
        async with started(tmp_path, servers=1, drain_s=0.2) as gateway:
            await gateway.opened()
            gateway.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(gateway.process.wait(), 20) == 0
            assert labelled(tmp_path) == {}

    asyncio.run(body())


def test_a_gateway_that_is_to_stop_with_its_parent_does(tmp_path):
    async def body():
        async with started(tmp_path, servers=1, stop_with_stdin=True) as gateway:
            await gateway.opened()
            gateway.process.stdin.close()
            assert await asyncio.wait_for(gateway.process.wait(), 20) == 0
            assert labelled(tmp_path) == {}

    asyncio.run(body())


def test_a_session_of_the_real_server_through_the_gateway_keeps_every_rule_of_the_kit(tmp_path):
    async def body():
        async with started(tmp_path, command=FAKE, servers=1) as gateway:
            client = GatewayClient(gateway.url, token=TOKEN)
            try:
                await check_session(client.open, "fake/button")
            finally:
                await client.close()
            assert (await gateway.ask("GET", "/sessions"))[1] == {"sessions": []}

    asyncio.run(body())


def test_sessions_do_not_inherit_the_token(tmp_path):
    async def body():
        async with started(tmp_path, servers=1) as gateway:
            assert (await gateway.ask("GET", f"/proxy/{await gateway.opened()}/echo"))[1]["environment"] == []

    asyncio.run(body())


def test_a_token_comes_from_a_private_file_or_the_environment_and_stays_there(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    environment = {TOKEN_VARIABLE: "another-token-of-16"}

    assert read_token(GatewayConfig(token_file=file), environment) == TOKEN
    assert environment == {}
    assert read_token(GatewayConfig(), {TOKEN_VARIABLE: TOKEN}) == TOKEN
    assert read_token(GatewayConfig(allow_anonymous=True), {}) is None
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="other users can read it"):
        read_token(GatewayConfig(token_file=file), {})
    with pytest.raises(ConfigError, match="needs a token"):
        read_token(GatewayConfig(), {})
    with pytest.raises(ConfigError, match="at least 16") as caught:
        read_token(GatewayConfig(), {TOKEN_VARIABLE: "short"})
    assert "short" not in str(caught.value)


def test_only_this_machine_can_be_served_without_a_token():
    for host in ("127.0.0.1", "localhost", "::1"):
        GatewayConfig(host=host, allow_anonymous=True)
    for host in ("0.0.0.0", "10.0.0.1", "example.org", "::"):
        with pytest.raises(ValueError, match="needs a loopback host"):
            GatewayConfig(host=host, allow_anonymous=True)


def test_a_refused_configuration_says_so_in_one_line_with_exit_code_2(tmp_path):
    async def body():
        for argument, message in (("port=1", b"needs a token"), ("prt=0", b"Did you mean 'port'?"), ("x", b"key=value"),
                               ("port=[", b"not a YAML value")):  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "palaestra.gateway", argument, stderr=asyncio.subprocess.PIPE,
                env={name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
            )  # fmt: skip
            _, errors = await process.communicate()
            assert (process.returncode, errors.count(b"\n")) == (2, 1)
            assert message in errors

    asyncio.run(body())


@pytest.mark.slow
def test_nothing_that_the_description_allows_is_answered_otherwise_than_described(tmp_path):
    """Schemathesis against a running gateway: every operation, every check it has."""
    pytest.importorskip("schemathesis")

    async def body():
        async with started(tmp_path, command=FAKE, servers=1, max_sessions=4) as gateway:
            await gateway.opened()
            fuzzing = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/openapi.json", "--seed", "1",
                "-H", f"Authorization: Bearer {TOKEN}", "--max-examples", "50", "--no-color", cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            output, _ = await fuzzing.communicate()
            assert fuzzing.returncode == 0, output.decode()[-5000:]

    asyncio.run(body())
