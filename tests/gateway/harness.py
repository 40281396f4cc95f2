"""A gateway in this process, at a real port, with sessions in memory: what the HTTP tests share."""

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web
from tests.gateway import fake_server

from palaestra.errors import SessionFailed
from palaestra.gateway import Address, GatewayConfig
from palaestra.gateway.serving import Gateway, open_gateway
from palaestra.http.server import listen, serve_in_background
from palaestra.sessions.fake import FakeSession

TOKEN = "0123456789abcdef"
SERVER = (sys.executable, "-m", "tests.gateway.fake_server")


class MemoryRuntime:
    """Sessions of `fake_server` in this process, made and lost as a test says."""

    session_types = ("browser", "pod")

    def __init__(self):
        self.app = fake_server.build()
        self.sessions = self.app[fake_server.SESSIONS]
        self.opening = asyncio.Event()
        self.opening.set()
        self.fail_next = None
        self.undeletable = set()
        self.port = 0

    async def start(self, on_lost):
        self.lost = on_lost

    async def create(self, session_id, session_type):
        await self.opening.wait()
        if self.fail_next:
            failure, self.fail_next = self.fail_next, None
            raise failure
        self.sessions[session_id] = FakeSession()
        return Address("127.0.0.1", self.port, f"/sessions/{session_id}")

    async def delete(self, session_id):
        if session_id in self.undeletable:
            raise SessionFailed("delete_failed", "asked to")
        self.sessions.pop(session_id, None)

    async def list(self):
        return {name: Address("127.0.0.1", self.port, f"/sessions/{name}") for name in self.sessions}

    def counts(self):
        return {"ready": 1}

    async def stop(self):
        self.sessions.clear()

    def die(self, session_id, reason):
        self.sessions.pop(session_id, None)
        self.lost(session_id, reason)


@dataclass
class Served:
    """A gateway that answers."""

    url: str
    http: aiohttp.ClientSession
    gateway: Gateway
    runtime: MemoryRuntime

    async def ask(self, method, path, *, headers=None, owner=True, **how):
        """Status and JSON of one request; the `owner` of a session sends its token."""
        sent = {**(self.owned(path) if owner else {}), **(headers or {})}
        async with self.http.request(method, self.url + path, headers=sent, **how) as response:
            return response.status, await response.json(content_type=None)

    def owned(self, path):
        """What the client that opened a session sends along."""
        lease = self.gateway.service.leases.get(path.split("/")[2]) if path.count("/") > 1 else None
        return {} if lease is None else {"X-Palaestra-Session-Token": lease.token}

    async def opened(self, **asked):
        status, document = await self.ask("POST", "/sessions", json=asked)
        assert status == 201, document
        return document["session_id"]


@contextlib.asynccontextmanager
async def serving(*, token=None, operator_token=None, sock=None, **settings):
    """A gateway over a `MemoryRuntime`; the client sends `token` by itself."""
    runtime = MemoryRuntime()
    runner = web.AppRunner(runtime.app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    runtime.port = runner.addresses[0][1]
    config = GatewayConfig(allow_anonymous=token is None, session_types=runtime.session_types, **settings)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with sock or listen("127.0.0.1", 0, "gateway.port") as sock:
            async with (
                open_gateway(config, token=token, operator_token=operator_token, runtime=runtime) as gateway,
                serve_in_background(gateway.app, sock),
                aiohttp.ClientSession(headers=headers) as http,
            ):
                yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", http, gateway, runtime)
    finally:
        await runner.cleanup()


def labelled(state_dir):
    """Every process whose gateway keeps its records in `state_dir`, or that keeps files there."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if (
                    str(state_dir).encode() in text
                    and (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
                ):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return found
