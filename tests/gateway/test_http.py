"""The gateway over HTTP: each answer it can give, and what it takes to get it."""

import asyncio
import json

import aiohttp
import pytest
from tests.gateway.harness import TOKEN, MemoryRuntime, serving
from yarl import URL

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway import GatewayConfig
from palaestra.gateway.api import build_api
from palaestra.gateway.auth import authorise
from palaestra.gateway.metrics import Metrics
from palaestra.gateway.serving import open_gateway


def served(**settings):
    """Runs an async test against a gateway with these settings."""

    def decorate(test):
        def run():
            async def body():
                async with asyncio.timeout(20):
                    async with serving(**settings) as gateway:
                        await test(gateway)

            asyncio.run(body())

        run.__name__ = test.__name__
        return run

    return decorate


@served()
async def test_a_session_is_opened_listed_used_renewed_and_closed(gateway):
    status, opened = await gateway.ask("POST", "/sessions", json={"session_type": "browser", "ttl_s": 60})
    name = opened["session_id"]
    assert (status, opened["session_type"], opened["ttl_s"]) == (201, "browser", 60.0)

    status, begun = await gateway.ask("POST", f"/proxy/{name}/reset", json={"task": "fake/button", "seed": 3})
    assert (status, begun["instruction"]) == (200, "Click the square.")

    _, listing = await gateway.ask("GET", "/sessions")
    assert [(entry["session_id"], entry["state"]) for entry in listing["sessions"]] == [(name, "leased")]
    assert 59 < listing["sessions"][0]["lease_left_s"] <= 60

    status, renewed = await gateway.ask("POST", f"/sessions/{name}/renew", json={"ttl_s": 120})
    assert (status, renewed["ttl_s"]) == (200, 120.0)
    assert renewed["expires_at"] > opened["expires_at"] + 59

    assert await gateway.ask("DELETE", f"/sessions/{name}") == (200, {"session_id": name, "state": "closed"})
    assert gateway.runtime.sessions == {}
    assert (await gateway.ask("DELETE", f"/sessions/{name}"))[0] == 404


@served(token=TOKEN)
async def test_who_has_no_token_or_a_wrong_one_comes_nowhere_but_to_health(gateway):
    for wrong in ({}, {"Authorization": "Bearer 0123456789abcdeF"}, {"Authorization": f"Basic {TOKEN}"}):
        async with aiohttp.ClientSession(headers=wrong) as stranger:
            for method, path in (("GET", "/sessions"), ("POST", "/sessions"), ("GET", "/proxy/a/act"),
                                 ("GET", "/metrics"), ("GET", "/openapi.json"), ("DELETE", "/sessions/a")):  # fmt: skip
                async with stranger.request(method, gateway.url + path) as response:
                    assert response.status == 401
                    assert response.headers["WWW-Authenticate"].startswith("Bearer")
                    assert (await response.json())["error"]["code"] == "unauthorised"
            async with stranger.get(gateway.url + "/health") as response:
                assert response.status == 200
    assert (await gateway.ask("GET", "/sessions"))[0] == 200


def test_without_a_token_a_web_page_is_not_served():
    authorise([(b"host", b"127.0.0.1:8700")], None)
    authorise([(b"host", b"localhost")], None)
    authorise([(b"host", b"[::1]:8700")], None)
    authorise([(b"host", b"localhost"), (b"sec-fetch-site", b"none")], None)  # typed into a browser
    for headers in (
        [(b"host", b"localhost"), (b"origin", b"http://evil")], [(b"host", b"evil.example:8700")],
        [(b"host", b"localhost"), (b"sec-fetch-site", b"cross-site")],  # an image, which is fetched without an Origin
    ):  # fmt: skip
        with pytest.raises(SessionRefused) as caught:
            authorise(headers, None)
        assert caught.value.status == 403


@served(token=TOKEN)
async def test_a_session_sees_the_request_without_token_cookie_or_connection(gateway):
    name = await gateway.opened()
    path = f"/proxy/{name}/echo/a%20b?x=1&y=%2e%2e&x=2"
    headers = {"Cookie": "a=b", "X-Kept": "1", "Connection": "x-hop", "X-Hop": "1", **gateway.owned(path)}

    async with gateway.http.post(URL(gateway.url + path, encoded=True), headers=headers, data=b"body") as response:
        seen, answered = await response.json(), response.headers

    assert seen["raw_path"] == f"/sessions/{name}/echo/a%20b?x=1&y=%2e%2e&x=2"
    assert (seen["method"], seen["body"]) == ("POST", "body")
    names = [header for header, _ in seen["headers"]]
    assert "x-kept" in names
    assert not {"authorization", "cookie", "connection", "x-hop"} & set(names)
    assert TOKEN not in json.dumps(seen)
    assert ["host", f"127.0.0.1:{gateway.runtime.port}"] in seen["headers"]
    assert (answered["X-Kept"], "Set-Cookie" in answered, "X-Hop" in answered) == ("yes", False, False)


@pytest.mark.parametrize("path", ["/proxy//act", "/proxy/", "/proxy/a/", "/proxy/a/%2e%2e/b", "/proxy/a/http://evil/"])
def test_a_path_that_leads_elsewhere_is_refused(path):
    async def body():
        async with serving() as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400")
            assert b'"bad_path"' in answer
            writer.close()
            await writer.wait_closed()

    asyncio.run(body())


@served()
async def test_an_unknown_session_is_404_whatever_is_asked_of_it(gateway):
    for method, path in (("POST", "/proxy/abc/act"), ("DELETE", "/sessions/abc"), ("POST", "/sessions/abc/renew")):
        status, document = await gateway.ask(method, path, json={"ttl_s": 5})
        assert (status, document["error"]["code"]) == (404, "no_session")


@served()
async def test_a_session_that_is_still_opening_is_409(gateway):
    gateway.runtime.opening.clear()
    opening = asyncio.create_task(gateway.ask("POST", "/sessions", json={}))
    while not (listed := (await gateway.ask("GET", "/sessions"))[1]["sessions"]):
        pass
    name = listed[0]["session_id"]

    assert listed[0]["state"] == "opening"
    assert (await gateway.ask("GET", f"/proxy/{name}/progress"))[0] == 409
    assert (await gateway.ask("DELETE", f"/sessions/{name}"))[0] == 409
    gateway.runtime.opening.set()
    assert (await opening)[0] == 201


@served()
async def test_what_the_session_refuses_comes_through_as_it_is(gateway):
    name = await gateway.opened()

    status, document = await gateway.ask("GET", f"/proxy/{name}/progress")

    assert (status, document["error"]["code"]) == (409, "not_reset")


@served(max_body_bytes=1000)
async def test_a_request_that_is_too_large_is_413_announced_or_not(gateway):
    name = await gateway.opened()

    async def pieces():
        for _ in range(11):
            yield b"x" * 100

    assert (await gateway.ask("POST", f"/proxy/{name}/count", data=b"x" * 1000)) == (200, {"bytes": 1000})
    assert (await gateway.ask("POST", f"/proxy/{name}/count", data=b"x" * 1001))[0] == 413
    assert (await gateway.ask("POST", f"/proxy/{name}/count", data=pieces()))[0] == 413
    assert (await gateway.ask("POST", "/sessions", data=b"x" * 70_000))[0] == 413

    # Announced and never sent: the gateway does not wait for it.
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 70000\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"413"
    writer.close()


def test_what_can_be_opened_is_what_the_runtime_has_whatever_the_configuration_says():
    async def opened():
        runtime = MemoryRuntime()
        runtime.session_types = ("desktop", "phone")
        async with open_gateway(GatewayConfig(allow_anonymous=True), token=None, runtime=runtime) as gateway:
            schema = build_api(gateway.service, GatewayConfig(allow_anonymous=True), gateway.peers).openapi()
            return schema["components"]["schemas"]["OpenRequest"]["properties"]["session_type"]

    schema = asyncio.run(opened())
    assert (schema["default"], schema["enum"]) == ("desktop", ["desktop", "phone"])


@served(min_ttl_s=2, max_ttl_s=100)
async def test_bad_input_is_422_and_opens_nothing(gateway):
    for asked in (
        {"session_type": "browsr"}, {"session_type": 3}, {"ttl_s": 1.9}, {"ttl_s": 100.1}, {"ttl_s": "60"},
        {"ttl_s": True}, {"ttl_s": None}, {"tll_s": 60}, [], "x", None,
    ):  # fmt: skip
        status, document = await gateway.ask("POST", "/sessions", json=asked)
        assert (status, sorted(document["error"])) == (422, ["code", "message"]), asked
    for body in (b"{", b"", b"\xff", b'{"ttl_s": NaN}', b'{"ttl_s": 1e999}', b'{"ttl_s": 60, "ttl_s": 60}'):
        status, _ = await gateway.ask("POST", "/sessions", data=body, headers={"Content-Type": "application/json"})
        assert status == 422, body
    _, document = await gateway.ask("POST", "/sessions", data=b"{", headers={"Content-Type": "application/json"})
    assert document["error"]["message"].startswith("the body is not JSON (")
    twice = b'{"ttl_s": 60, "ttl_s": 60}'
    _, document = await gateway.ask("POST", "/sessions", data=twice, headers={"Content-Type": "application/json"})
    assert document["error"]["message"] == "the body is not JSON (the key 'ttl_s' is given twice at character 0)."
    _, document = await gateway.ask("POST", "/sessions", data=b"{}", headers={"Content-Type": "text/json"})
    assert document["error"]["message"].startswith("Content-Type = 'text/json'")
    _, document = await gateway.ask("POST", "/sessions", json={"session_type": "browsr"})
    assert "Did you mean 'browser'?" in document["error"]["message"]
    assert gateway.runtime.sessions == {}


@served(max_sessions=16)
async def test_of_200_openings_at_once_exactly_16_succeed_and_the_others_get_a_time_to_retry(gateway):
    async def attempt():
        async with gateway.http.post(gateway.url + "/sessions", json={"ttl_s": 20}) as response:
            return response.status, response.headers.get("Retry-After")

    answers = await asyncio.gather(*(attempt() for _ in range(200)))

    assert sorted(status for status, _ in answers) == [201] * 16 + [429] * 184
    assert all(1 <= int(after) <= 20 for status, after in answers if status == 429)
    assert len(gateway.runtime.sessions) == 16
    assert "palaestra_gateway_sessions_refused_total 184" in await _metrics(gateway)


async def _metrics(gateway):
    async with gateway.http.get(gateway.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return await response.text()


@served()
async def test_a_gateway_that_drains_opens_nothing_and_serves_what_is_open(gateway):
    name = await gateway.opened()
    draining = asyncio.create_task(gateway.gateway.service.drain(30))
    while not gateway.gateway.service.draining:
        await asyncio.sleep(0)

    status, document = await gateway.ask("POST", "/sessions", json={})
    assert (status, document["error"]["code"]) == (503, "draining")
    assert (await gateway.ask("GET", "/health")) == (503, {"status": "draining"})
    assert (await gateway.ask("GET", f"/proxy/{name}/echo"))[0] == 200
    assert not draining.done()
    await gateway.ask("DELETE", f"/sessions/{name}")
    await draining


@served()
async def test_a_lost_session_is_an_environment_failure_with_its_reason_and_only_it(gateway):
    lost, other = await gateway.opened(), await gateway.opened()

    gateway.runtime.die(lost, "its session server was killed by signal 9")

    status, document = await gateway.ask("POST", f"/proxy/{lost}/act", json={"step": 1})
    assert status == 502
    assert document["error"] == {
        "code": "environment_failed", "reason": "session_lost", "message": "its session server was killed by signal 9",
    }  # fmt: skip
    assert (await gateway.ask("POST", f"/sessions/{lost}/renew", json={}))[0] == 502
    assert (await gateway.ask("GET", f"/proxy/{other}/echo"))[0] == 200
    assert (await gateway.ask("DELETE", f"/sessions/{lost}"))[0] == 200
    assert "palaestra_gateway_sessions_lost_total 1" in await _metrics(gateway)


@served()
async def test_a_session_whose_server_cannot_be_reached_is_an_environment_failure(gateway):
    gateway.runtime.port = 1
    name = await gateway.opened()

    status, document = await gateway.ask("GET", f"/proxy/{name}/progress")

    assert (status, document["error"]["code"], document["error"]["reason"]) == (
        502,
        "environment_failed",
        "session_lost",
    )


@served(request_timeout_s=0.05)
async def test_a_session_that_hangs_is_a_504_environment_failure(gateway):
    name = await gateway.opened()

    status, document = await gateway.ask("GET", f"/proxy/{name}/hang")

    assert (status, document["error"]["reason"]) == (504, "session_timeout")


@served()
async def test_an_opening_that_fails_says_why_and_takes_no_place(gateway):
    gateway.runtime.fail_next = SessionFailed("browser_gone", "it could not be started")

    status, document = await gateway.ask("POST", "/sessions", json={})

    assert (status, document["error"]["reason"]) == (502, "browser_gone")
    assert (await gateway.ask("GET", "/sessions"))[1] == {"sessions": []}
    assert "palaestra_gateway_sessions_failed_total 1" in await _metrics(gateway)


@served()
async def test_an_answer_that_is_cut_off_does_not_look_like_a_whole_one(gateway):
    name = await gateway.opened()

    with pytest.raises(aiohttp.ClientPayloadError):
        await gateway.ask("GET", f"/proxy/{name}/cut")


@served()
async def test_bodies_stream_in_both_directions_piece_by_piece(gateway):
    """Each piece is sent only after the echo of the one before came back, so the proxy did not wait for the whole."""
    name = await gateway.opened()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(
        f"POST /proxy/{name}/mirror HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )
    for number in range(5):
        piece = b"piece %d." % number
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if number == 0:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert (await reader.readuntil(b".")).endswith(piece)
    writer.write(b"0\r\n\r\n")
    assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"0\r\n\r\n")
    writer.close()
    await writer.wait_closed()


@served()
async def test_answers_without_a_body_come_through_as_such(gateway):
    name = await gateway.opened()

    async with gateway.http.head(f"{gateway.url}/proxy/{name}/echo") as response:
        assert (response.status, await response.read()) == (200, b"")
        assert int(response.headers["Content-Length"]) > 0
    async with gateway.http.get(f"{gateway.url}/proxy/{name}/unchanged") as response:
        assert (response.status, await response.read()) == (304, b"")
    assert (await gateway.ask("GET", f"/proxy/{name}/echo"))[0] == 200


@served()
async def test_a_request_whose_client_leaves_half_way_does_not_reach_the_session(gateway):
    name = await gateway.opened()
    _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(f"POST /proxy/{name}/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n".encode())
    await writer.drain()
    while not next(iter(gateway.gateway.service.leases)).in_flight:
        await asyncio.sleep(0)

    writer.close()
    await writer.wait_closed()
    while next(iter(gateway.gateway.service.leases)).in_flight:
        await asyncio.sleep(0)

    assert 'palaestra_gateway_proxy_requests_total{status="499"} 1' in await _metrics(gateway)


@served()
async def test_half_a_request_opens_nothing_even_if_it_makes_sense(gateway):
    port = int(gateway.url.rpartition(":")[2])
    head = "POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for half in ("Content-Length: 40\r\n\r\n{}", "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((head + half).encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    # Requests are taken up in the order they come in, so the two are over when this one is.
    await gateway.opened()

    assert len(gateway.runtime.sessions) == 1


@served(request_timeout_s=0.2)
async def test_a_client_that_never_sends_its_body_does_not_hold_the_session(gateway):
    name = await gateway.opened()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(f"POST /proxy/{name}/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n".encode())

    answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "slow_request"' in answer
    assert next(iter(gateway.gateway.service.leases)).in_flight == 0


@served()
async def test_48_megabytes_pass_through_either_way(gateway):
    name = await gateway.opened()

    async def pieces():
        for _ in range(768):
            yield b"x" * 65536

    assert await gateway.ask("POST", f"/proxy/{name}/count", data=pieces()) == (200, {"bytes": 768 * 65536})
    async with gateway.http.get(f"{gateway.url}/proxy/{name}/large?pieces=768") as response:
        assert sum([len(piece) async for piece in response.content.iter_any()]) == 768 * 65536


@served()
async def test_the_numbers_add_up(gateway):
    name = await gateway.opened()
    await gateway.ask("GET", f"/proxy/{name}/echo")
    await gateway.ask("GET", "/proxy/unknown/echo")

    text = await _metrics(gateway)

    assert 'palaestra_gateway_sessions{state="leased"} 1' in text
    assert "palaestra_gateway_sessions_created_total 1" in text
    assert 'palaestra_gateway_proxy_requests_total{status="200"} 1' in text
    assert 'palaestra_gateway_proxy_requests_total{status="404"} 1' in text
    assert "palaestra_gateway_proxy_seconds_count 2" in text


def test_a_histogram_counts_everything_up_to_its_bounds():
    metrics = Metrics()
    for seconds in (0.001, 0.002, 0.2, 99.0):
        metrics.record_request(200, seconds)

    text = metrics.render({}, limit=1, servers={})

    assert 'proxy_seconds_bucket{le="0.001"} 1' in text
    assert 'proxy_seconds_bucket{le="0.0025"} 2' in text
    assert 'proxy_seconds_bucket{le="0.25"} 3' in text
    assert 'proxy_seconds_bucket{le="30.0"} 3' in text
    assert 'proxy_seconds_bucket{le="+Inf"} 4' in text
    assert "proxy_seconds_sum 99.203" in text


@served()
async def test_every_answer_that_is_not_a_success_has_one_shape(gateway):
    for method, path, status in (
        ("GET", "/nowhere", 404), ("GET", "/sessions/", 404), ("PUT", "/sessions", 405), ("TRACE", "/proxy/a/b", 405),
    ):  # fmt: skip
        found, document = await gateway.ask(method, path, allow_redirects=False)
        assert found == status
        assert sorted(document["error"]) == ["code", "message"]
    async with gateway.http.put(gateway.url + "/sessions") as response:
        assert response.headers["Allow"] == "GET, POST"
