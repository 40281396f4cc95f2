"""A session belongs to the client that opened it: the gateway's token opens sessions, a session's own token uses it."""

import asyncio

import pytest
from tests.gateway.harness import TOKEN
from tests.gateway.test_http import served
from tests.gateway.test_process import FAKE, started

from palaestra.errors import ConfigError, SessionRefused
from palaestra.gateway import GatewayConfig
from palaestra.gateway.config import OPERATOR_TOKEN_VARIABLE, TOKEN_VARIABLE, read_operator_token
from palaestra.sessions.clients.client import GatewayClient, SessionClient
from palaestra.sessions.task import TaskRequest

OPERATOR = "the-operators-own-token"
BUTTON = {"task": "fake/button", "seed": 1}


def _owned(token):
    return {"X-Palaestra-Session-Token": token}


@served(token=TOKEN)
async def test_another_client_with_the_same_gateway_token_can_do_nothing_to_a_session(gateway):
    _, mine = await gateway.ask("POST", "/sessions", json={})
    _, other = await gateway.ask("POST", "/sessions", json={})
    name, token = mine["session_id"], mine["session_token"]
    assert len(token) >= 32
    assert token != other["session_token"]
    attempts = [
        ("DELETE", f"/sessions/{name}", {}),
        ("POST", f"/sessions/{name}/renew", {"json": {"ttl_s": 60}}),
        ("POST", f"/proxy/{name}/reset", {"json": BUTTON}),
        ("GET", f"/proxy/{name}/screenshot", {}),
    ]
    for headers in ({}, _owned(other["session_token"]), _owned(""), _owned(TOKEN)):
        for method, path, how in attempts:
            status, document = await gateway.ask(method, path, headers=headers, owner=False, **how)
            assert (status, document["error"]["code"]) == (403, "not_your_session"), (method, path, headers)
    assert "session_token" in document["error"]["message"]

    for method, path, how in reversed(attempts[:3]):
        assert (await gateway.ask(method, path, headers=_owned(token), owner=False, **how))[0] == 200
    assert list(gateway.runtime.sessions) == [other["session_id"]]


@served(token=TOKEN)
async def test_the_token_is_sent_once_and_does_not_reach_the_session(gateway):
    _, opened = await gateway.ask("POST", "/sessions", json={})
    name, headers = opened["session_id"], _owned(opened["session_token"])
    _, listing = await gateway.ask("GET", "/sessions")
    _, renewed = await gateway.ask("POST", f"/sessions/{name}/renew", json={"ttl_s": 60}, headers=headers)
    _, seen = await gateway.ask("GET", f"/proxy/{name}/echo", headers=headers)
    for document in (listing, renewed, seen):
        assert opened["session_token"] not in str(document)
    assert "x-palaestra-session-token" not in str(seen).lower()


@served(token=TOKEN)
async def test_a_session_that_is_gone_is_reported_so_to_every_client(gateway):
    name = await gateway.opened()
    assert (await gateway.ask("DELETE", f"/sessions/{name}"))[0] == 200
    status, document = await gateway.ask("GET", f"/proxy/{name}/progress", owner=False)
    assert (status, document["error"]["code"]) == (404, "no_session")


@served(token=TOKEN, operator_token=OPERATOR)
async def test_the_operator_can_use_list_and_close_every_session(gateway):
    name = await gateway.opened()
    operator = {"Authorization": f"Bearer {OPERATOR}"}
    assert (await gateway.ask("POST", f"/proxy/{name}/reset", json=BUTTON, headers=operator, owner=False))[0] == 200
    _, listing = await gateway.ask("GET", "/sessions", headers=operator)
    assert [session["session_id"] for session in listing["sessions"]] == [name]
    assert (await gateway.ask("DELETE", f"/sessions/{name}", headers=operator, owner=False))[0] == 200
    assert gateway.runtime.sessions == {}


@served()
async def test_without_a_token_all_clients_are_the_same(gateway):
    name = await gateway.opened()
    assert (await gateway.ask("DELETE", f"/sessions/{name}", owner=False))[0] == 200


def test_a_gateway_client_cannot_touch_the_session_of_another(tmp_path):
    async def body():
        async with started(tmp_path, command=FAKE, servers=1) as gateway:
            mine, other = GatewayClient(gateway.url, token=TOKEN), GatewayClient(gateway.url, token=TOKEN)
            session = await mine.open(ttl_s=3.0)
            await session.reset(TaskRequest("fake/button", 1))
            stolen = SessionClient(session.url, token=TOKEN)
            with pytest.raises(SessionRefused, match="belongs to the client that opened it") as refusal:
                await stolen.screenshot()
            await stolen.close()
            await other.close()
            await session.screenshot()
            await mine.close()
            return refusal.value.code, (await gateway.ask("GET", "/sessions"))[1]

    assert asyncio.run(body()) == ("not_your_session", {"sessions": []})


def test_the_operators_token_is_optional_and_not_the_clients(tmp_path):
    file = tmp_path / "operator"
    file.write_text(f"{OPERATOR}\n")
    file.chmod(0o600)
    environment = {OPERATOR_TOKEN_VARIABLE: "another-token-of-16", TOKEN_VARIABLE: TOKEN}
    assert read_operator_token(GatewayConfig(operator_token_file=file), environment, TOKEN) == OPERATOR
    assert environment == {TOKEN_VARIABLE: TOKEN}  # taken out, so that no session gets to see it
    assert read_operator_token(GatewayConfig(), {}, TOKEN) is None
    assert read_operator_token(GatewayConfig(), {OPERATOR_TOKEN_VARIABLE: OPERATOR}, TOKEN) == OPERATOR
    with pytest.raises(ConfigError, match="is also the clients' token"):
        read_operator_token(GatewayConfig(), {OPERATOR_TOKEN_VARIABLE: TOKEN}, TOKEN)
    with pytest.raises(ConfigError, match="all callers are the same"):
        read_operator_token(GatewayConfig(allow_anonymous=True), {OPERATOR_TOKEN_VARIABLE: OPERATOR}, None)
