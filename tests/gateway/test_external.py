"""Session servers that outlive their gateway: opened on, listed, adopted after a restart, behind nginx."""

import asyncio
import contextlib
import json
import resource
import shutil
import signal
from pathlib import Path

import aiohttp
import pytest
from tests.gateway.harness import TOKEN
from tests.gateway.test_process import FAKE, started

from palaestra.errors import ConfigError, SessionFailed
from palaestra.gateway import check_runtime
from palaestra.gateway.external.lease_journal import LeaseJournal, SavedLease
from palaestra.gateway.external.runtime import ExternalRuntime
from palaestra.gateway.local.runtime import make_client
from palaestra.http.server import listen, serve_in_background
from palaestra.sessions.action import Click, Move, Point
from palaestra.sessions.clients.client import GatewayClient
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.server.app import build_app
from palaestra.sessions.task import TaskRequest

PATIENT_TASK = TaskRequest("fake/button", 0, {"step_limit": 1000})


@contextlib.asynccontextmanager
async def serving_sessions():
    """The URL of a session server in this process."""
    with listen("127.0.0.1", 0, "server.port") as sock:
        async with serve_in_background(build_app(FakeSession), sock):
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@contextlib.asynccontextmanager
async def server_process():
    """The URL of a session server in a process of its own."""
    process = await asyncio.create_subprocess_exec(*FAKE, stdout=asyncio.subprocess.PIPE)
    try:
        yield json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["url"]
    finally:
        process.terminate()
        await process.wait()
        process._transport.close()


async def _listed(http, url):
    async with http.get(f"{url}/sessions") as response:
        return (await response.json())["sessions"]


def test_servers_started_elsewhere_keep_every_rule_of_a_runtime():
    async def body():
        async with serving_sessions() as url, make_client() as http:

            async def kill(runtime, session_id, address):
                await (await http.delete(address.url)).read()

            await check_runtime(
                lambda: ExternalRuntime({"browser": [url]}, http, "kit", check_every_s=0.05), kill, timeout_s=30
            )
            assert await _listed(http, url) == []

    asyncio.run(body())


def test_a_session_is_opened_on_the_server_of_its_type_with_the_fewest_and_never_on_a_dead_one():
    async def body():
        gone = listen("127.0.0.1", 0, "server.port")
        dead = f"http://127.0.0.1:{gone.getsockname()[1]}"
        gone.close()
        async with serving_sessions() as one, serving_sessions() as two, make_client() as http:
            runtime = ExternalRuntime({"browser": [dead, one, two], "phone": [dead]}, http, "a")
            await runtime.start(lambda session_id, reason: None)
            assert runtime.counts() == {"ready": 2, "unreachable": 1}
            for number in range(4):
                await runtime.create(f"a-{number}", "browser")
            assert [len(await _listed(http, url)) for url in (one, two)] == [2, 2]
            with pytest.raises(SessionFailed, match=f"no session server answers at {dead}"):
                await runtime.create("a-9", "phone")
            await runtime.stop()
            assert [await _listed(http, url) for url in (one, two)] == [[], []]

    asyncio.run(body())


def test_a_runtime_lists_sessions_of_its_name_and_leaves_others_alone():
    async def body():
        async with serving_sessions() as url, make_client() as http:
            others = ExternalRuntime({"browser": [url]}, http, "b", keep_sessions=True)
            await others.start(lambda session_id, reason: None)
            await others.create("b-1", "browser")
            ours = ExternalRuntime({"browser": [url]}, http, "a")
            await ours.start(lambda session_id, reason: None)
            await ours.create("a-1", "browser")
            assert set(await ours.list()) == {"a-1"}
            await ours.stop()
            await others.stop()
            next_one = ExternalRuntime({"browser": [url]}, http, "b")
            await next_one.start(lambda session_id, reason: None)
            assert set(await next_one.list()) == {"b-1"}
            await next_one.stop()
            assert await _listed(http, url) == []

    asyncio.run(body())


def test_a_journal_holds_what_has_begun_and_not_ended_also_after_half_a_line(tmp_path):
    journal = LeaseJournal(tmp_path, "a")
    leases = [SavedLease(f"a-{number}", "browser", 60.0, f"token-{number}") for number in range(3)]
    for lease in leases:
        journal.begin(lease)
    journal.end("a-1")
    journal.end("a-unknown")
    with pytest.raises(ConfigError, match="another gateway of this name runs"):
        LeaseJournal(tmp_path, "a")
    journal.close(keep=True)
    file = tmp_path / "leases-a.jsonl"
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(file.read_bytes() + b'\n{"begin": {"session_id": "a-3", "sess')

    again = LeaseJournal(tmp_path, "a")
    assert list(again.open.values()) == [leases[0], leases[2]]
    again.begin(leases[1])
    again.close(keep=True)
    assert sorted(LeaseJournal(tmp_path, "a").open) == ["a-0", "a-1", "a-2"]


def test_a_journal_does_not_grow_with_the_sessions_that_ended(tmp_path):
    journal = LeaseJournal(tmp_path, "a")
    for number in range(5000):
        journal.begin(SavedLease(f"a-{number}", "browser", 60.0, "token"))
        journal.end(f"a-{number}")
    assert (tmp_path / "leases-a.jsonl").read_bytes().count(b"\n") <= 1000
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_cannot_be_written_is_a_warning_and_later_lines_are_whole(tmp_path, caplog):
    journal = LeaseJournal(tmp_path, "a")
    leases = [SavedLease(f"a-{number}", "browser", 60.0, "t" * 40_000) for number in range(3)]
    journal.begin(leases[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        journal.begin(leases[1])  # the first 20,000 bytes fit
        journal.end("a-0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.message.rpartition(" (")[0] for record in caplog.records] == [
        f"{tmp_path}/leases-a.jsonl cannot be written"
    ] * 2
    journal.begin(leases[2])
    journal.close(keep=True)
    assert sorted(LeaseJournal(tmp_path, "a").open) == ["a-0", "a-2"]


def test_sessions_of_a_server_that_misses_the_first_check_are_found_all_the_same():
    async def body():
        async with serving_sessions() as url, make_client() as client:
            async with client.post(f"{url}/sessions", json={"session_id": "a-1"}) as response:
                assert response.status == 201
            runtime = ExternalRuntime({"fake": [url]}, client, "a", check_every_s=0.01)
            list_sessions, misses = runtime._calls.list_sessions, []

            async def miss_once(url, *, timeout_s):
                if not misses:
                    misses.append(url)
                    raise aiohttp.ClientConnectionError
                return await list_sessions(url, timeout_s=timeout_s)

            runtime._calls.list_sessions = miss_once
            await runtime.start(lambda *_: None)
            assert (misses, list(await runtime.list())) == ([url], ["a-1"])
            await runtime.stop()

    asyncio.run(body())


def test_a_gateway_killed_with_9_is_replaced_and_the_episode_goes_on_through_its_peer(tmp_path):
    """Gateway a dies between two acts; its successor adopts the session, and the client notices nothing."""

    async def body():
        ports = [listen("127.0.0.1", 0, "gateway.port") for _ in range(2)]
        urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in ports]
        for sock in ports:
            sock.close()
        async with server_process() as server, aiohttp.ClientSession() as http, contextlib.AsyncExitStack() as stack:
            common = {"runtime": "servers", "session_servers": {"browser": [server]}}

            def start(name, own, other):
                peers = {"b" if name == "a" else "a": urls[other]}
                port = int(urls[own].rpartition(":")[2])
                return started(tmp_path, name=name, port=port, peers=peers, **common)

            b = await stack.enter_async_context(start("b", 1, 0))
            async with start("a", 0, 1) as a:
                through_a, through_b = GatewayClient(a.url, token=TOKEN), GatewayClient(b.url, token=TOKEN)
                session = await through_a.open()
                await session.reset(PATIENT_TASK)
                # The same session by the address of the other gateway, as behind a load balancer.
                session._client = through_b._client
                assert (await session.act(Move(Point(1, 1)), step=1)).number == 1
                a.process.send_signal(signal.SIGKILL)
                await a.process.wait()

            waiting = asyncio.create_task(session.act(Click(Point(10, 10)), step=2))
            async with start("a", 0, 1) as a:
                step = await waiting
                assert (step.number, step.progress.reward, step.progress.success) == (2, 1.0, True)
                async with a.http.get(f"{a.url}/metrics") as response:
                    assert 'sessions_adopted_total{gateway="a"} 1' in await response.text()
                await session.close()
                assert await _listed(http, server) == []
                await through_b.open()
                assert len(await _listed(http, server)) == 1
                await through_a.close()
                await through_b._client.close()
                for renewal in through_b._renewals.values():
                    renewal.cancel()
            await stack.aclose()
            assert await _listed(http, server) == []
        assert list(tmp_path.iterdir()) == []

    asyncio.run(body())


def test_stopped_with_keep_sessions_a_gateway_leaves_them_to_its_successor(tmp_path):
    async def body():
        settings = {"runtime": "servers", "name": "a", "keep_sessions": True}
        async with server_process() as server:
            settings |= {"session_servers": {"browser": [server]}}
            async with started(tmp_path, **settings) as gateway:
                name = await gateway.opened()
                tokens = gateway.tokens
                gateway.process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(gateway.process.wait(), 20) == 0
            async with started(tmp_path, **settings) as gateway:
                gateway.tokens = tokens
                assert (await gateway.ask("GET", f"/proxy/{name}/health"))[0] == 200
                gateway.tokens = {}
                assert (await gateway.ask("GET", f"/proxy/{name}/health"))[0] == 403

    asyncio.run(body())


NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


@contextlib.asynccontextmanager
async def nginx(directory, ports):
    """nginx with the configuration that we ship, at other ports; yields its URL."""
    with listen("127.0.0.1", 0, "nginx") as sock:
        port = sock.getsockname()[1]
    shipped = Path("deploy/nginx/gateways.conf").read_text()
    for ours, theirs in zip(("8700", "8701", "8702"), (port, *ports), strict=True):
        shipped = shipped.replace(f"127.0.0.1:{ours}", f"127.0.0.1:{theirs}")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {directory}/{kind};\n" for kind in kinds)
    (directory / "nginx.conf").write_text(
        f"daemon off; pid {directory}/pid; error_log stderr error; worker_processes 1;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{places}{shipped}\n}}\n"
    )
    process = await asyncio.create_subprocess_exec(NGINX, "-c", str(directory / "nginx.conf"), "-p", str(directory))
    try:
        async with asyncio.timeout(20):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except OSError:
                    assert process.returncode is None, "nginx did not start"
                    await asyncio.sleep(0.02)
        writer.close()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()
        process._transport.close()


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx-light)")
def test_behind_nginx_sessions_stick_to_their_gateway_and_outlive_the_other_one(tmp_path):
    async def body():
        state = tmp_path / "state"
        async with started(state, command=FAKE, name="a", servers=1) as a:
            async with (
                started(state, command=FAKE, name="b", servers=1) as b,
                nginx(tmp_path, (a.port, b.port)) as url,
            ):
                client = GatewayClient(url, token=TOKEN)
                sessions = [await client.open() for _ in range(4)]
                owners = [session.session_id[0] for session in sessions]
                assert sorted(owners) == ["a", "a", "b", "b"]  # each in turn
                for session in sessions:
                    await session.reset(PATIENT_TASK)
                    # No gateway knows the other here: every act has found its own.
                    assert (await session.act(Move(Point(1, 1)), step=1)).number == 1
                b.process.kill()
                await b.process.wait()
                for session, owner in zip(sessions, owners, strict=True):
                    act = session.act(Click(Point(10, 10)), step=2)
                    if owner == "a":
                        assert (await act).progress.reward == 1.0
                    else:
                        with pytest.raises(SessionFailed):  # never a reward
                            await act
                # What is opened from now on is opened on the living one.
                assert {(await client.open()).session_id[0] for _ in range(2)} == {"a"}
                await client.close()
            assert (await a.ask("GET", "/sessions"))[1] == {"sessions": []}

    asyncio.run(body())
