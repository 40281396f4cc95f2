"""Clients through a gateway process: sessions opened, kept, used and given back, whatever the wire does."""

import asyncio
import contextlib
import json
import sys

import pytest
from tests.gateway.harness import TOKEN, serving
from tests.gateway.test_process import started
from tests.sessions.serving import listening, request_read, response

from palaestra.errors import ConfigError, SessionFailed, SessionRefused
from palaestra.gateway import GatewayConfig
from palaestra.http.server import listen
from palaestra.sessions.action import Click, Point, TypeText
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.clients.blocking import BlockingSession
from palaestra.sessions.clients.client import GatewayClient, RetryPolicy
from palaestra.sessions.task import TaskRequest
from palaestra.sessions.wire import STEP_HEADER

FAKE = (sys.executable, "-m", "palaestra.sessions.server", "--port", "0", "--fake")
BUTTON = TaskRequest("fake/button", 1)  # the square's corner is at (37, 53)


async def _names(gateway):
    return [session["session_id"] for session in (await gateway.ask("GET", "/sessions"))[1]["sessions"]]


async def _until(condition):
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _losing(gateway, *, answers_to):
    """The URL of a wire to the gateway that loses the first answer to each of these paths, after it was asked for."""
    to_lose, asked = list(answers_to), []

    async def relay(reader, writer):
        while True:
            method, path, body = await request_read(reader)
            kind = {"Content-Type": "application/json", "Accept": "image/png" if path.endswith("/act") else "*/*"}
            sent = {**kind, **gateway.owned(path)}
            async with gateway.http.request(method, gateway.url + path, data=body or None, headers=sent) as answer:
                data = await answer.read()
            if (method, path) == ("POST", "/sessions"):
                opened = json.loads(data)
                gateway.tokens[opened["session_id"]] = opened["session_token"]
            asked.append(path.rpartition("/")[2])
            if asked[-1] in to_lose:
                to_lose.remove(asked[-1])
                return
            more = {STEP_HEADER: answer.headers[STEP_HEADER]} if STEP_HEADER in answer.headers else {}
            status = f"{answer.status} {answer.reason}"
            writer.write(response(data, status=status, media=answer.content_type, **more))

    async with listening(relay) as url:
        yield url, asked


def test_an_act_whose_answer_is_lost_twice_is_performed_once(tmp_path):
    async def body():
        async with (
            started(tmp_path, command=FAKE, servers=1) as gateway,
            _losing(gateway, answers_to=["act", "act", "progress"]) as (url, asked),
        ):
            client = GatewayClient(url, retry=RetryPolicy(attempt_s=30.0, attempts=4, pause_s=0.001))
            session = await client.open()
            await session.reset(BUTTON)
            typed = await session.act(TypeText("abc"), step=1)
            again = await session.progress()
            clicked = await session.act(Click(Point(37, 53)), step=2)
            await client.close()
            return typed, again, clicked, asked, await _names(gateway)

    typed, again, clicked, asked, left = asyncio.run(body())
    assert (typed.number, typed.progress.detail) == (1, {"typed": "abc"})
    assert again == typed.progress
    assert (clicked.number, clicked.progress.success) == (2, True)
    assert [what for what in asked if what in ("act", "progress")] == ["act"] * 3 + ["progress"] * 2 + ["act"]
    assert left == []


def test_a_session_is_kept_while_it_is_held_and_reaped_when_its_holder_sleeps(tmp_path):
    async def body():
        async with started(tmp_path, command=FAKE, servers=1, min_ttl_s=0.1) as gateway:
            client = GatewayClient(gateway.url, token=TOKEN)
            held, slept_over = await client.open(ttl_s=5.0), await client.open(ttl_s=0.5)
            await held.reset(BUTTON)
            await slept_over.reset(BUTTON)
            names = [session.url.rpartition("/")[2] for session in (held, slept_over)]
            client._renewals[names[1]].cancel()  # as in a process that is stopped

            async def reaped():
                return names[1] not in await _names(gateway)

            await _until(reaped)
            with pytest.raises(SessionRefused, match="its lease expired") as refused:
                await slept_over.progress()
            assert refused.value.status == 404
            assert not (await held.progress()).done
            await client.close()
            return await _names(gateway)

    assert asyncio.run(body()) == []


def test_a_full_gateway_says_when_to_come_back_and_the_client_does(tmp_path):
    async def body():
        async with started(tmp_path, command=FAKE, servers=1, max_sessions=1) as gateway:
            client = GatewayClient(gateway.url, token=TOKEN)
            first = await client.open()
            with pytest.raises(SessionRefused) as refused:
                await client.open(within_s=0.5)
            assert (refused.value.status, refused.value.code) == (429, "no_room")
            assert 1.0 <= refused.value.retry_after <= 5.0

            waiting = asyncio.create_task(client.open(within_s=60.0))

            async def refused_twice():
                async with gateway.http.get(f"{gateway.url}/metrics") as answer:
                    return "palaestra_gateway_sessions_refused_total 2" in await answer.text()

            await _until(refused_twice)
            await first.close()
            second = await waiting
            await second.reset(BUTTON)
            await client.close()
            return await _names(gateway)

    assert asyncio.run(body()) == []


def test_a_notebook_solves_a_task_in_a_real_browser_through_the_gateway(tmp_path):
    try:
        find_chromium()
    except ConfigError as missing:
        pytest.skip(str(missing))

    def notebook(url):
        with BlockingSession.through_gateway(url, token=TOKEN) as session:
            spec = session.reset("click_target/button", seed=3, difficulty=1)
            before = session.progress()
            looked = session.screenshot()
            step = session.act(Click(Point(spec.screen.width // 2, 100)))
            return spec, before, looked, step

    async def body():
        command = GatewayConfig(allow_anonymous=True).server_command
        async with started(tmp_path, command=command, servers=1) as gateway:
            result = await asyncio.to_thread(notebook, gateway.url)
            return result, await _names(gateway)

    (spec, before, looked, step), left = asyncio.run(body())
    assert spec.instruction.startswith("Click the button")
    assert (before.done, looked.size) == (False, spec.screen)
    assert (step.number, step.screenshot.size) == (1, spec.screen)
    assert left == []


def test_a_wrong_token_is_reported_as_one(tmp_path):
    async def body():
        async with started(tmp_path, command=FAKE, servers=1) as gateway:
            client = GatewayClient(gateway.url, token="a-token-of-another-gateway")
            with pytest.raises(SessionRefused, match="wrong one") as refused:
                await client.open()
            await client.close()
            return refused.value.status

    assert asyncio.run(body()) == 401


def test_opening_waits_for_the_successor_of_a_gateway_that_shuts_down():
    async def body():
        async with serving() as served:
            service = served.gateway.service
            service.draining = True
            refusals = []
            asked_to_open, service.open = service.open, lambda *given: (refusals.append(1), asked_to_open(*given))[1]
            client = GatewayClient(served.url)
            opening = asyncio.create_task(client.open())

            async def is_refused():
                return bool(refusals)

            await _until(is_refused)
            service.draining = False
            assert (await opening).session_id in service.leases
            await client.close()

    asyncio.run(body())


def test_a_session_whose_caller_was_cancelled_while_it_was_opened_is_closed():
    async def body():
        async with serving() as served:
            client = GatewayClient(served.url)
            served.runtime.opening.clear()
            opening = asyncio.create_task(client.open())
            leases = served.gateway.service.leases

            async def is_opening():
                return len(leases) == 1

            await _until(is_opening)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            served.runtime.opening.set()
            await client.close()
            assert (len(leases), served.gateway.service.metrics.totals["closed"]) == (0, 1)

    asyncio.run(body())


def test_a_request_is_sent_once_a_gateway_listens_and_given_up_after_the_time_to_reconnect():
    async def body():
        with listen("127.0.0.1", 0, "gateway.port") as sock:
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        client = GatewayClient(url, retry=RetryPolicy(attempts=1, pause_s=0.01, reconnect_s=0.05))
        with pytest.raises(SessionFailed, match="unreachable"):
            await client.open()
        patient = GatewayClient(url, retry=RetryPolicy(attempts=1, pause_s=0.01, reconnect_s=60.0))
        opening = asyncio.create_task(patient.open())
        async with serving(sock=listen("127.0.0.1", int(url.rpartition(":")[2]), "gateway.port")):
            assert (await opening).session_id
            await patient.close()
        await client.close()

    asyncio.run(body())
