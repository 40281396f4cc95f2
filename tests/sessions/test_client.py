"""Clients: the kit over HTTP, errors that arrive as what they were, retries only where they are harmless."""

import asyncio
import dataclasses
import json
import random
import threading

import pytest
from tests.sessions.serving import listening, request_read, response, served

from palaestra.errors import ConfigError, InvalidAction, SessionFailed, SessionRefused
from palaestra.sessions.action import Click, Move, Point, TypeText, Wait
from palaestra.sessions.clients.blocking import BlockingSession
from palaestra.sessions.clients.client import GatewayClient, HttpClient, RetryPolicy, SessionClient, open_session
from palaestra.sessions.conformance import check_session
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.screen import Size
from palaestra.sessions.task import TaskRequest, TaskSpec
from palaestra.sessions.wire import encode_json, error_document, parse_error

QUICK = RetryPolicy(attempt_s=5.0, attempts=3, pause_s=0.001)
BUTTON = TaskRequest("fake/button", 1)  # the square's corner is at (37, 53)


def test_the_fake_passes_the_kit_over_http():
    async def run():
        async with served() as url:

            async def make():
                return await open_session(url)

            await check_session(make, "fake/button")
            caller = HttpClient(url)
            left = (await caller.request("GET", "/sessions")).body
            await caller.close()
            return json.loads(left)["sessions"]

    assert asyncio.run(run()) == []


def test_a_server_that_is_one_session_is_talked_to_at_its_root():
    async def run():
        async with served() as url:
            session = SessionClient(url)
            await session.reset(BUTTON)
            step = await session.act(Click(Point(37, 53)), step=1)
            await session.close()
            with pytest.raises(SessionRefused, match="closed"):
                await session.progress()
            return step

    step = asyncio.run(run())
    assert (step.number, step.progress.reward, step.progress.success) == (1, 1.0, True)


def test_what_comes_over_the_wire_is_what_the_session_gave():
    async def play(session):
        spec = await session.reset(TaskRequest("fake/button", 7, {"step_limit": 9}))
        steps = [await session.act(TypeText("漢" * 2000), step=1), await session.act(Wait(0.1), step=2)]
        return spec, steps, await session.screenshot(), await session.progress()

    async def run():
        async with served() as url:
            session = await open_session(url, session_id="seven")
            over_http = await play(session)
            await session.close()
        return over_http, await play(FakeSession())

    over_http, direct = asyncio.run(run())
    assert over_http == direct  # details of 12 KB do not fit into a header; they arrive all the same


@pytest.mark.parametrize(
    "error",
    [
        SessionRefused("step_conflict", "step 1 was done. Send step 2.", status=409),
        InvalidAction("click.at", [160, 0], "lies outside", "x runs from 0 to 159"),
        SessionFailed("hung", "the page did not answer"),
    ],
)
def test_an_error_arrives_as_what_it_was(error):
    status = getattr(error, "status", 500)
    parsed = parse_error(status, encode_json(error_document(error)))
    assert (str(parsed), getattr(parsed, "status", 500)) == (str(error), status)
    assert isinstance(parsed, type(error))


def test_a_response_of_another_server_is_reported_as_such():
    assert parse_error(502, b"<html>Bad Gateway</html>").reason == "bad_answer"
    assert parse_error(404, b"").code == "bad_answer"
    with pytest.raises(ConfigError, match="must begin with http"):
        SessionClient("localhost:80")


def test_errors_of_the_session_are_raised_by_the_client():
    async def run():
        async with served() as url:
            session = await open_session(url, retry=QUICK)
            with pytest.raises(SessionRefused, match="is open already"):
                await open_session(url, session_id=session.url.rpartition("/")[2])
            with pytest.raises(SessionRefused, match="JSON"):
                await session.reset(TaskRequest("fake/button", 0, {"fail_at": float("nan")}))
            await session.reset(TaskRequest("fake/button", 0, {"fail_at": 1}))
            with pytest.raises(InvalidAction, match="outside the screen of 160 x 210"):
                await session.act(Move(Point(160, 0)), step=1)
            for attempt in (lambda: session.act(Wait(0.1), step=1), session.progress):
                with pytest.raises(SessionFailed, match="page_crashed: asked to at step 1"):
                    await attempt()
            await session.close()

    asyncio.run(run())


def test_an_answer_with_a_key_twice_is_not_believed():
    progress = b'{"schema": 1, "reward": 0.0, "reward": 1.0, "done": true, "success": true}'
    document = b'{"step": 1, "screenshot": {"sha256": "0"}, "progress": {"reward": 0}, "progress": {"reward": 1}}'

    async def doubled(reader, writer):
        while True:
            _, path, _ = await request_read(reader)
            bodies = {"/progress": progress, "/sessions": b'{"session_id": "a", "session_id": "b"}', "/act": b"picture"}
            writer.write(response(bodies[path], X_Palaestra_Step=document.decode()))
            await writer.drain()

    async def run():
        async with listening(doubled) as url:
            session = SessionClient(url, retry=QUICK)
            for attempt in (session.progress, lambda: session.act(Wait(0.1), step=1), lambda: open_session(url)):
                with pytest.raises(SessionFailed, match=r"bad_answer.*given twice"):
                    await attempt()
            client = GatewayClient(url, retry=QUICK)
            with pytest.raises(SessionFailed, match="the key 'session_id' is given twice"):
                await client.open()
            await client.close()
            await session.close()

    asyncio.run(run())


def test_half_a_character_in_an_instruction_is_named_wherever_it_comes_from():
    class Broken(FakeSession):
        async def reset(self, request):
            spec = await super().reset(request)
            return dataclasses.replace(spec, instruction="Click \ud83d.")

    begun = {**TaskSpec("fake", "button", 1, {}, "", 5, Size(160, 210)).facts(), "instruction": "Click \ud83d."}

    async def other(reader, writer):
        await request_read(reader)
        writer.write(response(json.dumps(begun).encode()))
        await writer.drain()

    async def run():
        async with served(Broken) as ours, listening(other) as theirs:
            for url in (ours, theirs):
                session = SessionClient(url, retry=QUICK)
                with pytest.raises(SessionFailed, match=r"bad_instruction: .*'Click \\ud83d.'.*half of a surrogate"):
                    await session.reset(BUTTON)
                await session.close()

    asyncio.run(run())


class _Flaky:
    """A server in front of a session that drops connections on request: `before` it acts, or `after`."""

    def __init__(self, url, drops):
        self._client, self._drops, self.heard = HttpClient(url), list(drops), []

    async def __call__(self, reader, writer):
        while True:
            method, path, body = await request_read(reader)
            self.heard.append(path)
            drop = self._drops.pop(0) if self._drops else None
            if drop == "before":
                return
            headers = {"Accept": "image/png", "Content-Type": "application/json"}
            answer = await self._client.request(method, path, body or None, headers=headers)
            if drop == "after":
                return
            line = answer.headers.get("X-Palaestra-Step")
            kept = {"X_Palaestra_Step": line} if line else {}
            writer.write(response(answer.body, media=answer.headers["Content-Type"], **kept))
            await writer.drain()

    async def close(self):
        await self._client.close()


def _through(drops, play):
    async def run():
        async with served() as url:
            flaky = _Flaky(url, drops)
            async with listening(flaky) as front:
                session = SessionClient(front, retry=QUICK, rng=random.Random(0))
                try:
                    return await play(session), flaky.heard
                finally:
                    await session.close()
                    await flaky.close()

    return asyncio.run(run())


@pytest.mark.parametrize("drop", ["before", "after"])
def test_an_act_whose_answer_was_lost_is_asked_for_again_and_performed_once(drop):
    async def play(session):
        await session.reset(BUTTON)
        return [await session.act(TypeText("a"), step=1), await session.act(TypeText("b"), step=2)]

    steps, heard = _through([None, drop, None, drop], play)
    assert [step.progress.detail["typed"] for step in steps] == ["a", "ab"]
    assert heard == ["/reset", "/act", "/act", "/act", "/act"]


def test_a_look_is_repeated_and_a_reset_is_not():
    async def play(session):
        await session.reset(BUTTON)
        picture = await session.screenshot()
        with pytest.raises(SessionFailed, match=r"unreachable: POST .*/reset: the connection broke"):
            await session.reset(BUTTON)
        return picture.size.width

    width, heard = _through([None, "before", "after", None, "after"], play)
    assert width == 160
    assert heard == ["/reset", "/screenshot", "/screenshot", "/screenshot", "/reset"]


def test_attempts_are_bounded_and_the_failure_is_the_environment_s():
    async def play(session):
        for attempt in (lambda: session.act(Wait(0.1), step=1), session.progress):
            with pytest.raises(SessionFailed, match="unreachable"):
                await attempt()

    _, heard = _through(["before"] * 9, play)
    assert heard == ["/act"] * 3 + ["/progress"] * 3


def _answering(*answers):
    """Play through a server that gives these answers in turn, None for silence; the requests it heard come back."""
    heard, left = [], list(answers)

    async def answer(reader, writer):
        while True:
            heard.append((await request_read(reader))[:2])
            data = left.pop(0)
            if data is None:
                await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()

    return heard, listening(answer)


def _failed(code, status, **more):
    return response(json.dumps({"error": {"code": code, "message": "so it is", **more}}).encode(), status=status)


def test_a_failed_environment_is_never_asked_again_and_a_busy_way_there_is():
    async def run():
        broken = _failed("environment_failed", "502 Bad Gateway", reason="session_lost")
        fine = response(b'{"schema": 1, "reward": 2, "done": false, "success": false}')
        busy = _failed("starting", "503 Service Unavailable")
        heard, server = _answering(broken, busy, response(b"nginx", status="502 Bad Gateway"), fine)
        async with server as url:
            session = SessionClient(url, retry=QUICK)
            with pytest.raises(SessionFailed, match="session_lost"):
                await session.progress()
            alone = len(heard)
            progress = await session.progress()
            await session.close()
        return alone, len(heard), progress.reward

    assert asyncio.run(run()) == (1, 4, 2.0)


def test_a_call_has_a_deadline():
    async def run():
        heard, server = _answering(None, None)
        async with server as url:
            session = SessionClient(url, retry=RetryPolicy(attempt_s=0.2, attempts=2, pause_s=0.0))
            with pytest.raises(SessionFailed, match=r"timeout: GET .*/progress: no response within 0.2 s"):
                await session.progress()
            await session.close()
        return len(heard)

    assert asyncio.run(run()) == 2


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"schema": 1}', b"\xff"])
def test_an_answer_that_makes_no_sense_is_a_failed_environment(body):
    async def run():
        _, server = _answering(response(body), response(body), response(body))
        async with server as url:
            session = SessionClient(url, retry=QUICK)
            for attempt in (lambda: session.act(Wait(0.1), step=1), lambda: session.reset(BUTTON), session.screenshot):
                with pytest.raises(SessionFailed, match=r"bad_answer|bad_screenshot"):
                    await attempt()
            await session.close()

    asyncio.run(run())


def test_pauses_double_and_are_shortened_by_up_to_half():
    patience, rng = RetryPolicy(pause_s=0.1), random.Random(0)
    for attempt, longest in enumerate((0.1, 0.2, 0.4)):
        pauses = [patience.pause(attempt, rng) for _ in range(100)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
    with pytest.raises(ConfigError, match="attempts"):
        RetryPolicy(attempts=0)


class _Gateway:
    """As much of a gateway as its client needs: places, leases, and the way through to a session server."""

    def __init__(self, server, *, full_for=0):
        self._to, self._full_for = HttpClient(server), full_for
        self.heard, self.tokens = [], set()
        self.renewed = asyncio.Event()

    async def __call__(self, reader, writer):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split("\r\n")[0].split(" ")
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            self.heard.append((method, path, body))
            self.tokens.add(fields.get("authorization"))
            writer.write(await self._answer(method, path, body, fields.get("accept", "*/*")))
            await writer.drain()

    async def _answer(self, method, path, body, accept):
        if path == "/sessions" and self._full_for:
            self._full_for -= 1
            refusal = {"error": {"code": "no_room", "message": "all 1 places are taken."}}
            return response(json.dumps(refusal).encode(), status="429 Too Many Requests", Retry_After="0")
        if path.endswith("/renew"):
            self.renewed.set()
            return response(b"{}")
        inside = "/sessions" + path.removeprefix("/proxy") if path.startswith("/proxy/") else path
        body = b'{"session_id": "a"}' if path == "/sessions" else body
        headers = {"Accept": accept, "Content-Type": "application/json"}
        answer = await self._to.request(method, inside, body or None, headers=headers)
        line = answer.headers.get("X-Palaestra-Step")
        kept = {"X_Palaestra_Step": line} if line else {}
        return response(answer.body, media=answer.headers["Content-Type"], **kept)

    async def close(self):
        await self._to.close()


def test_a_gateway_s_session_is_waited_for_renewed_used_and_given_back():
    async def run():
        async with served() as server:
            gateway = _Gateway(server, full_for=2)
            async with listening(gateway) as url:
                client = GatewayClient(url, token="word", retry=QUICK)
                session = await client.open("browser", ttl_s=0.03)
                await session.reset(BUTTON)
                step = await session.act(Click(Point(37, 53)), step=1)
                await gateway.renewed.wait()
                await session.close()
                left = [task for task in asyncio.all_tasks() if task.get_name().startswith("palaestra-lease")]
                await client.close()
            await gateway.close()
            return gateway, step, left

    gateway, step, left = asyncio.run(run())
    assert left == []
    assert step.progress.success
    assert gateway.tokens == {"bearer word"}
    calls = [(method, path) for method, path, _ in gateway.heard if not path.endswith("/renew")]
    assert calls == [
        ("POST", "/sessions"), ("POST", "/sessions"), ("POST", "/sessions"), ("POST", "/proxy/a/reset"),
        ("POST", "/proxy/a/act"), ("DELETE", "/sessions/a"),
    ]  # fmt: skip
    assert json.loads(gateway.heard[0][2]) == {"session_type": "browser", "ttl_s": 0.03}


def test_a_full_gateway_is_not_waited_for_longer_than_one_wants_to():
    async def run():
        refusal = {"error": {"code": "no_room", "message": "all 1 places are taken."}}
        full = response(json.dumps(refusal).encode(), status="429 Too Many Requests", Retry_After="60")
        heard, server = _answering(full)
        async with server as url:
            client = GatewayClient(url)
            with pytest.raises(SessionRefused, match="all 1 places") as refused:
                await client.open(within_s=5.0)
            await client.close()
        return refused.value.code, refused.value.retry_after, len(heard)

    assert asyncio.run(run()) == ("no_room", 60.0, 1)


def test_closing_the_client_gives_back_what_is_still_held():
    async def run():
        async with served() as server:
            gateway = _Gateway(server)
            async with listening(gateway) as url:
                client = GatewayClient(url)
                await client.open()
                await client.close()
            await gateway.close()
            return gateway.heard[-1][:2]

    assert asyncio.run(run()) == ("DELETE", "/sessions/a")


def test_a_blocking_session_plays_an_episode_without_await():
    async def make():
        return FakeSession()

    with BlockingSession(make) as session:
        spec = session.reset("fake/button", seed=1, step_limit=3)
        first, second = session.act(Wait(0.01)), session.act(Click(Point(37, 53)))
        assert session.screenshot() == second.screenshot
        assert session.progress().success
        with pytest.raises(SessionRefused, match="over"):
            session.act(Wait(0.01))
        session.reset("fake/button")
        assert session.act(Wait(0.01)).number == 1
    session.close()
    assert (spec.step_limit, first.number, second.number) == (3, 1, 2)
    assert not session._thread.is_alive()


def test_a_blocking_session_that_cannot_be_opened_leaves_no_thread_behind():
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConfigError, match="must begin with http"):
        BlockingSession.on_server("nowhere")
    assert {thread.name for thread in threading.enumerate()} == before
