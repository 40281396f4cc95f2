"""Several gateways behind one address: ids that name their gateway, forwarding, and sessions opened on a peer."""

import asyncio
import contextlib

import pytest
from tests.gateway.harness import TOKEN, serving

from palaestra.config import parse_section
from palaestra.errors import ConfigError, SessionFailed
from palaestra.gateway import GatewayConfig
from palaestra.http.server import listen
from palaestra.sessions.clients.client import GatewayClient, RetryPolicy
from palaestra.sessions.task import TaskRequest

ONCE = RetryPolicy(attempts=1)
FORWARDED = {"X-Palaestra-Forwarded-By": "c"}


def _port(sock):
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


@contextlib.asynccontextmanager
async def pair(*, token=None, **settings):
    """Gateways a and b, which know each other, with room for one session each unless told otherwise."""
    settings = {"max_sessions": 1, **settings}
    first, second = (listen("127.0.0.1", 0, "gateway.port") for _ in range(2))
    peers_of_a, peers_of_b = {"b": _port(second)}, {"a": _port(first)}
    async with (
        serving(sock=first, token=token, name="a", peers=peers_of_a, **settings) as a,
        serving(sock=second, token=token, name="b", peers=peers_of_b, **settings) as b,
    ):
        yield a, b


def test_a_session_is_played_through_the_gateway_that_does_not_have_it():
    async def body():
        async with pair(token=TOKEN) as (a, b):
            name = await a.opened()
            assert name.startswith("a-")
            owned = a.owned(f"/sessions/{name}")

            asked = {"task": "fake/button", "seed": 0, "params": {}}
            act = {"step": 1, "action": {"kind": "click", "at": [10, 10]}}
            assert (await b.ask("POST", f"/proxy/{name}/reset", json=asked, headers=owned))[1]["seed"] == 0
            status, step = await b.ask("POST", f"/proxy/{name}/act", json=act, headers=owned)
            assert (status, step["progress"]["reward"]) == (200, 1.0)
            assert (await b.ask("POST", f"/sessions/{name}/renew", json={"ttl_s": 5.0}, headers=owned))[1]["ttl_s"] == 5
            assert (await b.ask("DELETE", f"/sessions/{name}", headers=owned))[0] == 200
            assert len(a.gateway.service.leases) == 0
            assert b.gateway.peers.forwarded == {"a": 4}

    asyncio.run(body())


def test_the_token_of_a_session_is_checked_by_its_own_gateway():
    async def body():
        async with pair(token=TOKEN) as (a, b):
            name = await a.opened()
            status, document = await b.ask("GET", f"/proxy/{name}/progress", owner=False)
            assert (status, document["error"]["code"]) == (403, "not_your_session")
            status, _ = await b.ask("GET", f"/proxy/{name}/progress", headers={"Authorization": "Bearer wrong"})
            assert status == 401
            assert b.gateway.peers.forwarded == {"a": 1}

    asyncio.run(body())


def test_a_full_gateway_opens_sessions_on_its_peer_and_two_full_ones_refuse():
    async def body():
        async with pair() as (a, b):
            names = [await a.opened() for _ in range(2)]
            assert [name[:2] for name in names] == ["a-", "b-"]
            assert a.gateway.peers.opened == {"b": 1}
            status, document = await a.ask("POST", "/sessions", json={})
            assert (status, document["error"]["code"]) == (429, "no_room")
            # One refusal here and one at the peer, which did not ask back.
            assert [g.gateway.service.metrics.totals["refused"] for g in (a, b)] == [2, 1]

    asyncio.run(body())


def test_a_gateway_that_shuts_down_opens_sessions_on_its_peer():
    async def body():
        async with pair() as (a, b):
            a.gateway.service.draining = True
            assert (await a.opened()).startswith("b-")
            assert len(b.gateway.service.leases) == 1

    asyncio.run(body())


def test_a_dead_peer_is_an_environment_failure_that_names_it():
    async def body():
        gone = listen("127.0.0.1", 0, "gateway.port")
        url = _port(gone)
        gone.close()
        async with serving(name="a", peers={"b": url}, max_sessions=1) as a:
            status, document = await a.ask("GET", f"/proxy/b-{'0' * 32}/progress")
            error = document["error"]
            assert (status, error["code"], error["reason"]) == (503, "environment_failed", "peer_unreachable")
            assert f"gateway b at {url} cannot be reached" in error["message"]

            # Opening does not wait for it, and neither does a list.
            await a.opened()
            assert (await a.ask("POST", "/sessions", json={}))[0] == 429
            assert (await a.ask("GET", "/gateways"))[1]["gateways"] == [
                {"name": "a", "status": "ok", "sessions": 1, "limit": 1},
                {"name": "b", "status": "unreachable", "sessions": None, "limit": None},
            ]

    asyncio.run(body())


def test_what_a_peer_has_forwarded_is_not_forwarded_again():
    async def body():
        async with pair() as (a, b):
            name = await b.opened()
            status, document = await a.ask("GET", f"/proxy/{name}/progress", headers=FORWARDED)
            assert (status, document["error"]["reason"]) == (502, "peer_loop")
            await a.opened()
            assert (await a.ask("POST", "/sessions", json={}, headers=FORWARDED))[0] == 429
            assert a.gateway.peers.opened == {"b": 0}

    asyncio.run(body())


def test_lists_and_metrics_say_which_gateway_has_a_session():
    async def body():
        async with pair(max_sessions=2) as (a, b):
            ours, theirs = await a.opened(), await b.opened()
            listed = (await a.ask("GET", "/sessions"))[1]["sessions"]
            assert [(one["session_id"], one["gateway"]) for one in listed] == [(ours, "a"), (theirs, "b")]
            assert (await b.ask("GET", "/gateways"))[1]["gateways"] == [
                {"name": "b", "status": "ok", "sessions": 1, "limit": 2},
                {"name": "a", "status": "ok", "sessions": 1, "limit": 2},
            ]
            await a.ask("DELETE", f"/sessions/{theirs}", headers=b.owned(f"/sessions/{theirs}"))
            async with a.http.get(f"{a.url}/metrics") as response:
                lines = (await response.text()).splitlines()
            assert 'palaestra_gateway_sessions{gateway="a",state="leased"} 1' in lines
            assert 'palaestra_gateway_peer_requests_total{gateway="a",peer="b"} 1' in lines
            assert 'palaestra_gateway_peer_reachable{gateway="a",peer="b"} 1' in lines

    asyncio.run(body())


def test_a_client_plays_through_gateways_in_turn_and_gets_a_dead_one_as_a_failure():
    async def body():
        async with pair(token=TOKEN) as (a, b):
            through_a = GatewayClient(a.url, token=TOKEN, retry=ONCE)
            mine, peers = await through_a.open(), await through_a.open()
            assert (mine.session_id[0], peers.session_id[0]) == ("a", "b")
            for session in (mine, peers):
                assert (await session.reset(TaskRequest("fake/button", 3))).seed == 3
            b.runtime.die(peers.session_id, "asked to")
            with pytest.raises(SessionFailed, match="session_lost: asked to"):
                await peers.progress()
            await through_a.close()
            assert [len(g.gateway.service.leases) for g in (a, b)] == [0, 0]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peers": {"b": "http://h:1"}}, "need a name"),
        ({"name": "a", "peers": {"a": "http://h:1"}}, "'a' is the name of this gateway"),
        ({"name": "a", "peers": {"b": "https://h"}}, "is not a URL such as http://"),
        ({"name": "A_"}, "name"),
        ({"runtime": "servers", "name": "a"}, "need each other"),
        ({"keep_sessions": True}, "needs the runtime 'servers'"),
        ({"runtime": "servers", "session_servers": {"browser": ["http://h:1"]}}, "need a name"),
    ],
)
def test_gateways_that_could_not_find_each_other_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_section(GatewayConfig, settings, place="gateway")
