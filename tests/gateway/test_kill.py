"""The gateway killed with -9 while agents play in real browsers: what it leaves, and for how long."""

import asyncio
import contextlib
import time

import aiohttp
import pytest
from benchmarks.session_watch import identities, living, look
from tests.gateway.harness import TOKEN, labelled
from tests.gateway.test_process import started

from palaestra.errors import ConfigError, SessionFailed
from palaestra.gateway import GatewayConfig
from palaestra.sessions.action import Move, Point
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.clients.client import GatewayClient, RetryPolicy
from palaestra.sessions.task import TaskRequest

try:
    find_chromium()
except ConfigError as missing:
    pytest.skip(str(missing), allow_module_level=True)

SERVER = GatewayConfig(allow_anonymous=True).server_command
IMPATIENT = RetryPolicy(attempt_s=60.0, attempts=1, pause_s=0.01)


async def _play(session, playing):
    """Acts until the gateway is gone."""
    with contextlib.suppress(SessionFailed):
        await session.reset(TaskRequest("click_target/button", 1, {"step_limit": 100_000}))
        for step in range(1, 100_000):
            await session.act(Move(Point(step % 160, 5)), step=step)
            playing.set()


async def _abandoned(state_dir):
    """A gateway with four agents in two browsers, killed; every process that it had."""
    async with started(state_dir, command=SERVER, servers=2, warm=0) as gateway:
        client = GatewayClient(gateway.url, token=TOKEN, retry=IMPATIENT)
        sessions = [await client.open() for _ in range(4)]
        events = [asyncio.Event() for _ in sessions]
        plays = [asyncio.create_task(_play(*pair)) for pair in zip(sessions, events, strict=True)]
        await asyncio.gather(*(event.wait() for event in events))
        found = look(gateway.process.pid)
        known = identities({gateway.process.pid} | found.all())
        gateway.process.kill()
        await gateway.process.wait()
        await asyncio.gather(*plays)
        with contextlib.suppress(SessionFailed):
            await client.close()
        await client._client.close()
    return found, known


def test_killed_with_9_while_real_browsers_play_nothing_is_orphaned_10_s_later(tmp_path, monkeypatch):
    state, temporary = tmp_path / "state", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))

    async def body():
        found, known = await _abandoned(state)
        assert (len(found.guards), len(found.servers), len(found.browsers)) == (2, 2, 2)
        assert len(found.renderers) >= 4  # one page per agent
        begin = time.monotonic()
        async with started(state, command=SERVER, servers=1, warm=0) as gateway:
            while left := living(known):
                assert time.monotonic() - begin < 10.0, left
                await asyncio.sleep(0.05)
            assert [path.name for path in temporary.iterdir()] == []
            assert len([path for path in state.iterdir() if path.is_dir()]) == 1  # the living one's
            assert (await gateway.ask("GET", "/sessions")) == (200, {"sessions": []})
            client = GatewayClient(gateway.url, token=TOKEN)
            session = await client.open()
            assert (await session.reset(TaskRequest("click_target/button", 2))).seed == 2
            await client.close()
        assert labelled(state) == {}
        assert list(state.iterdir()) == []

    asyncio.run(body())


def test_a_session_of_a_killed_gateway_is_unknown_to_the_next(tmp_path):
    async def body():
        async with started(tmp_path, servers=1) as gateway:
            name = await gateway.opened()
            gateway.process.kill()
            await gateway.process.wait()
            with pytest.raises(aiohttp.ClientError):
                await gateway.ask("GET", f"/proxy/{name}/progress")
        async with started(tmp_path, servers=1) as gateway:
            status, document = await gateway.ask("GET", f"/proxy/{name}/progress")
            assert (status, document["error"]["code"]) == (404, "no_session")

    asyncio.run(body())
