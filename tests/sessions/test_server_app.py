"""The session server over real sockets, with the fake behind it: the contract, bad input, and steps done once."""

import asyncio
import dataclasses
import json

import aiohttp
import pytest
from tests.sessions.serving import served

from palaestra.errors import SessionFailed
from palaestra.sessions.action import KINDS
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.server.app import build_app
from palaestra.sessions.server.openapi import build_openapi
from palaestra.sessions.task import TaskRequest

RESET = {"task": "fake/button", "seed": 1}  # the square's corner is at (37, 53)
HIT = {"step": 1, "action": {"kind": "click", "at": [40, 60]}}
MOVE = {"step": 1, "action": {"kind": "move", "at": [1, 1]}}


class _Asked:
    """One answer, for looking at."""

    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def document(self):
        return json.loads(self.body)

    @property
    def code(self):
        return self.document["error"]["code"]


def _talk(play, make=FakeSession, **settings):
    """Run `play(ask)` against a server; `ask(method, path, document_or_bytes)` gives the answer."""

    async def run():
        async with served(make, **settings) as url, aiohttp.ClientSession() as http:

            async def ask(method, path, body=None, **headers):
                data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                async with http.request(method, url + path, data=data, headers=named) as response:
                    return _Asked(response.status, response.headers, await response.read())

            return await play(ask)

    return asyncio.run(run())


def test_a_session_is_opened_reset_acted_on_looked_at_judged_and_deleted():
    async def play(ask):
        return [
            await ask("GET", "/health"),
            await ask("POST", "/sessions", {"session_id": "one"}),
            await ask("GET", "/sessions"),
            await ask("POST", "/sessions/one/reset", RESET),
            await ask("POST", "/sessions/one/act", HIT),
            await ask("GET", "/sessions/one/progress"),
            await ask("GET", "/sessions/one/health"),
            await ask("DELETE", "/sessions/one"),
            await ask("DELETE", "/sessions/one"),
        ]

    health, opened, listed, begun, acted, progress, there, deleted, gone = _talk(play)
    assert (health.status, health.document) == (200, {"schema": 1, "ready": True, "sessions": 0})
    assert (opened.status, opened.document) == (201, {"session_id": "one"})
    assert listed.document == {"schema": 1, "sessions": ["one"]}
    fresh = {"schema": 1, "reward": 0.0, "done": False, "success": False, "truncated": False, "detail": {"typed": ""}}
    assert begun.document == {
        "schema": 1, "task": "fake/button", "seed": 1, "params": {}, "instruction": "Click the square.",
        "step_limit": 5, "width": 160, "height": 210, "step": 0, "progress": fresh,
        "reward_range": [0.0, 1.0],
    }  # fmt: skip
    assert acted.document["step"] == 1
    assert acted.document["progress"] == {**fresh, "reward": 1.0, "done": True, "success": True}
    assert acted.document["screenshot"].keys() == {"sha256", "width", "height", "media_type", "bytes"}
    assert progress.document == acted.document["progress"]
    assert there.document == {"schema": 1, "ready": True, "session_id": "one"}
    assert (deleted.status, deleted.document) == (200, {"deleted": "one"})
    assert (gone.status, gone.code) == (404, "no_session")


def test_an_act_can_be_answered_with_the_picture_and_the_facts_beside_it():
    async def play(ask):
        await ask("POST", "/reset", RESET)
        return await ask("POST", "/act", HIT, Accept="image/png"), await ask("POST", "/act", HIT)

    picture, facts = _talk(play)
    assert picture.headers["Content-Type"] == "image/png"
    assert json.loads(picture.headers["X-Palaestra-Step"]) == facts.document
    assert Screenshot.of(picture.body).facts() == facts.document["screenshot"]


def test_details_too_long_for_a_header_are_left_out_and_marked_as_left_out():
    typed = {"step": 1, "action": {"kind": "type", "text": "漢" * 1000}}

    async def play(ask):
        await ask("POST", "/reset", RESET)
        return await ask("POST", "/act", typed, Accept="image/png"), await ask("POST", "/act", typed)

    picture, facts = _talk(play)
    line = json.loads(picture.headers["X-Palaestra-Step"])
    assert "detail" not in line["progress"]
    assert line["progress"]["detail_left_out"] is True
    assert facts.document["progress"]["detail"] == {"typed": "漢" * 1000}


def test_the_screenshot_has_a_name_and_is_not_sent_twice():
    async def play(ask):
        await ask("POST", "/reset", RESET)
        first = await ask("GET", "/screenshot")
        again = await ask("GET", "/screenshot", If_None_Match=first.headers["ETag"])
        facts = await ask("GET", "/screenshot", Accept="application/json")
        await ask("POST", "/act", HIT)
        return first, again, facts, await ask("GET", "/screenshot", If_None_Match=first.headers["ETag"])

    first, again, facts, changed = _talk(play)
    assert first.headers["ETag"] == f'"{Screenshot.of(first.body).sha256}"'
    assert (again.status, again.body) == (304, b"")
    assert facts.document == Screenshot.of(first.body).facts()
    assert changed.status == 200


def test_the_routes_at_the_root_are_one_session_of_their_own():
    async def play(ask):
        early = await ask("GET", "/screenshot")
        await ask("POST", "/sessions", {"session_id": "other"})
        await ask("POST", "/reset", RESET)
        await ask("POST", "/act", HIT)
        return early, await ask("GET", "/progress"), await ask("GET", "/sessions/other/progress")

    early, mine, other = _talk(play)
    assert (early.status, early.code) == (409, "not_reset")
    assert mine.document["success"] is True
    assert (other.status, other.code) == (409, "not_reset")


BAD = [
    ("/sessions", b"{", 400, "bad_json"),
    ("/sessions", b'"word"', 422, "bad_request"),
    ("/sessions", {"session_id": "Upper"}, 422, "bad_request"),
    ("/sessions", {"session_id": ""}, 422, "bad_request"),
    ("/sessions", {"session_id": "x" * 65}, 422, "bad_request"),
    ("/sessions", {"session_id": "../x"}, 422, "bad_request"),
    ("/sessions", {"session_id": 1}, 422, "bad_request"),
    ("/sessions", {"session_id": None}, 422, "bad_request"),
    ("/sessions", {"name": "x"}, 422, "bad_request"),
    ("/sessions", {"session_id": "default"}, 409, "session_exists"),
    ("/sessions/missing/act", MOVE, 404, "no_session"),
    ("/sessions/missing/reset", RESET, 404, "no_session"),
    ("/reset", b"", 400, "bad_json"),
    ("/reset", b"\xff\xfe{", 400, "bad_json"),
    ("/reset", b"[" * 100_000, 400, "bad_json"),
    # As deep as can just be read: too deep to be shown in a refusal.
    *(("/act", b'{"step": 1, "action": ' + b"[" * n + b"]" * n + b"}", 400, "bad_json") for n in range(850, 1000, 2)),
    ("/act", b'{"step": 1, "action": ' + b"[" * 63 + b"]" * 63 + b"}", 422, "invalid_action"),
    ("/act", b'{"step": 1, "action": ' + b"[" * 64 + b"]" * 64 + b"}", 400, "bad_json"),
    ("/reset", b'{"task": "fake/button", "params": {"fail_at": NaN}}', 400, "bad_json"),
    ("/reset", b'{"task": "fake/button", "params": {"fail_at": 1e999}}', 400, "bad_json"),
    ("/reset", b'{"task": "fake/button", "seed": 1, "seed": 2}', 400, "bad_json"),
    ("/reset", b'{"task": "fake/button", "params": {"fail_at": 1, "fail_at": 2}}', 400, "bad_json"),
    ("/act", b'{"step": 1, "action": {"kind": "move", "at": [1, 1], "at": [2, 2]}}', 400, "bad_json"),
    ("/sessions", b'{"session_id": "a", "session_id": "b"}', 400, "bad_json"),
    ("/reset", b'{"task": "fake/\\ud800"}', 422, "bad_request"),
    ("/reset", b'{"task": "fake/button", "params": {"a": ["\\udc00"]}}', 422, "bad_request"),
    ("/reset", b'{"task": "fake/button", "params": {"\\udc00": 1}}', 422, "bad_request"),
    ("/reset", b" " * 1_000_001, 413, "too_large"),
    ("/reset", {}, 422, "bad_request"),
    ("/reset", {"task": "fake/bottom"}, 404, "unknown_task"),
    ("/reset", {"task": "fake"}, 422, "bad_request"),
    ("/reset", {"task": "fake/button", "seed": "3"}, 422, "bad_request"),
    ("/reset", {"task": "fake/button", "seed": 1.0}, 422, "bad_request"),
    ("/reset", {"task": "fake/button", "seed": True}, 422, "bad_request"),
    ("/reset", {"task": "fake/button", "seed": -1}, 422, "bad_request"),
    ("/reset", {"task": "fake/button", "params": []}, 422, "bad_request"),
    ("/reset", {"task": "fake/button", "params": {"other": 1}}, 422, "bad_params"),
    ("/reset", {"task": "fake/button", "sead": 1}, 422, "bad_request"),
    ("/act", {"action": MOVE["action"]}, 422, "bad_request"),
    ("/act", {"step": 1}, 422, "invalid_action"),
    ("/act", {"step": 0, "action": MOVE["action"]}, 422, "bad_request"),
    ("/act", {"step": "1", "action": MOVE["action"]}, 422, "bad_request"),
    ("/act", {"step": 2, "action": MOVE["action"]}, 409, "step_out_of_order"),
    ("/act", {"step": 1, "action": {"kind": "click", "at": [160, 0]}}, 422, "invalid_action"),
    ("/act", {"step": 1, "action": {"kind": "click", "at": [-1, 0]}}, 422, "invalid_action"),
    ("/act", {"step": 1, "action": {"kind": "click", "at": [10**400, 0]}}, 422, "invalid_action"),
    ("/act", {"step": 1, "action": {"kind": "click", "held": [[1]]}}, 422, "invalid_action"),
    ("/act", {"step": 1, "action": {"kind": "wait", "seconds": 10**400}}, 422, "invalid_action"),
    ("/act", {"step": 1, "action": {"kind": "press", "keys": ["Retrun"]}}, 422, "invalid_action"),
    ("/act", {"step": 1, "action": {"kind": "type", "text": "\ud800"}}, 422, "invalid_action"),
    ("/act", {"step": 1, "action": {"kind": "move", "at": None}}, 422, "invalid_action"),
    ("/act", {"step": 1, "action": {"kind": "wiggle"}}, 422, "invalid_action"),
]


def test_bad_input_is_refused_with_a_reason_and_changes_nothing():
    async def play(ask):
        await ask("POST", "/reset", RESET)
        before = await ask("GET", "/screenshot")
        answers = [await ask("POST", path, body) for path, body, _, _ in BAD]
        after = await ask("GET", "/screenshot")
        return before, answers, after, await ask("GET", "/sessions"), await ask("POST", "/act", MOVE)

    before, answers, after, listed, acted = _talk(play)
    for (path, body, status, code), answer in zip(BAD, answers, strict=True):
        assert (answer.status, answer.code) == (status, code), (path, body, answer.body)
        assert answer.document["error"]["message"]
    assert before.body == after.body
    assert listed.document["sessions"] == ["default"]
    assert acted.document["step"] == 1


def test_an_unknown_route_is_answered_with_an_error_of_the_same_shape():
    async def play(ask):
        return await ask("GET", "/nothing"), await ask("GET", "/sessions/a/b/c"), await ask("PATCH", "/sessions")

    nothing, deep, patch = _talk(play)
    assert (nothing.status, nothing.code) == (404, "not_found")
    assert (deep.status, deep.code) == (404, "not_found")
    assert (patch.status, patch.code) == (405, "method_not_allowed")
    assert set(patch.headers["Allow"].split(", ")) == {"GET", "HEAD", "POST"}


def test_a_repeated_step_is_answered_from_memory_and_another_action_is_a_conflict():
    async def play(ask):
        await ask("POST", "/reset", RESET)
        first = await ask("POST", "/act", MOVE)
        again = await ask("POST", "/act", MOVE)
        return first, again, await ask("POST", "/act", HIT)

    first, again, other = _talk(play)
    assert first.body == again.body
    assert (other.status, other.code) == (409, "step_conflict")


class _Slow(FakeSession):
    """Takes a turn at a time, and long enough for others to come in; counts what it performs."""

    def __init__(self):
        super().__init__()
        self._turn, self.begun, self.go = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self.performed, self.cut_short = 0, False

    async def act(self, action, *, step):
        async with self._turn:
            before = self._episode.num_steps
            self.begun.set()
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cut_short = True  # where a browser would be left with half a click
                raise
            made = await super().act(action, step=step)
            self.performed += self._episode.num_steps - before
            return made

    async def close(self):
        async with self._turn:
            await super().close()


def test_ten_copies_of_one_act_at_once_are_performed_once_and_answered_alike():
    session = []

    def make():
        session.append(_Slow())
        return session[0]

    async def play(ask):
        await ask("POST", "/reset", RESET)
        asking = [asyncio.create_task(ask("POST", "/act", HIT)) for _ in range(10)]
        await session[0].begun.wait()
        session[0].go.set()
        return await asyncio.gather(*asking)

    answers = _talk(play, make)
    assert {(answer.status, answer.body) for answer in answers} == {(200, answers[0].body)}
    assert session[0].performed == 1


def test_a_client_that_leaves_in_the_middle_of_an_act_finds_its_answer_when_it_comes_back():
    session = _Slow()

    async def play(ask):
        await ask("POST", "/reset", RESET)
        leaving = asyncio.create_task(ask("POST", "/act", HIT))
        await session.begun.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        session.go.set()
        return await ask("POST", "/act", HIT)

    answer = _talk(play, lambda: session)
    assert answer.document["step"] == 1
    assert session.performed == 1


def test_an_act_is_carried_to_its_end_even_when_the_server_cancels_the_request():
    session = _Slow()

    async def run():
        app = build_app(lambda: session)
        await session.reset(TaskRequest("fake/button", 1))
        body = json.dumps(HIT).encode()
        sent = []

        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/act", "raw_path": b"/act", "query_string": b"", "headers": [],
            "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
        }  # fmt: skip
        request = asyncio.create_task(app(dict(scope), receive, send))
        await session.begun.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        session.go.set()
        await app(dict(scope), receive, send)
        return [message["status"] for message in sent if message["type"] == "http.response.start"]

    assert asyncio.run(run()) == [200]
    assert (session.performed, session.cut_short) == (1, False)


def test_a_session_can_be_deleted_in_the_middle_of_a_long_act_which_is_answered_all_the_same(monkeypatch):
    monkeypatch.setattr("palaestra.sessions.server.app.CLOSE_WAIT_S", 0.01)
    session = _Slow()

    async def play(ask):
        await ask("POST", "/sessions", {"session_id": "a"})
        await ask("POST", "/sessions/a/reset", RESET)
        acting = asyncio.create_task(ask("POST", "/sessions/a/act", HIT))
        await session.begun.wait()
        deleted, gone = await ask("DELETE", "/sessions/a"), await ask("GET", "/sessions/a/progress")
        session.go.set()
        return deleted, gone, await acting

    deleted, gone, acted = _talk(play, lambda: session)
    assert (deleted.document, gone.code) == ({"deleted": "a"}, "no_session")
    assert acted.document["progress"]["success"] is True
    assert session._closed


def test_a_failed_environment_is_status_500_with_a_reason_and_no_reward():
    async def play(ask):
        await ask("POST", "/reset", {**RESET, "params": {"fail_at": 1}})
        return await ask("POST", "/act", HIT), await ask("GET", "/progress"), await ask("GET", "/screenshot")

    for answer in _talk(play):
        assert answer.status == 500
        assert answer.document == {
            "error": {"code": "environment_failed", "reason": "page_crashed", "message": "asked to at step 1"}
        }


class _Buggy(FakeSession):
    async def progress(self):
        raise ZeroDivisionError("secret of the house")


def test_a_bug_is_logged_and_not_shown(caplog):
    async def play(ask):
        return await ask("GET", "/progress")

    answer = _talk(play, _Buggy)
    assert (answer.status, answer.code) == (500, "internal")
    assert b"secret" not in answer.body
    assert "secret of the house" in caplog.text


class _Stubborn(FakeSession):
    closed = 0

    async def close(self):
        type(self).closed += 1
        raise SessionFailed("hung", "does not want to go")


def test_when_the_server_ends_what_is_shared_goes_first_and_every_session_is_closed():
    order = []

    async def stop():
        order.append(("shared", _Stubborn.closed))

    async def play(ask):
        for _ in range(3):
            await ask("POST", "/sessions")

    _talk(play, _Stubborn, stop=stop)
    assert order == [("shared", 0)]
    assert _Stubborn.closed == 3


def test_the_schema_knows_every_action_and_every_field_of_it():
    schemas = build_openapi("0")["components"]["schemas"]
    known = {
        schemas[name]["properties"]["kind"]["const"]: set(schemas[name]["properties"]) - {"kind"}
        for name in (option["$ref"].rpartition("/")[2] for option in schemas["UiAction"]["oneOf"])
    }
    assert known == {kind: {field.name for field in dataclasses.fields(cls)} for kind, cls in KINDS.items()}
