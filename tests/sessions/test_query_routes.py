"""The query-string dialect as our own session server speaks it: `GET /act?action_type=…`, retried without harm."""

import json
import subprocess
import sys
from urllib.parse import urlencode

import pytest
from tests.sessions.test_server_app import RESET, _talk

from palaestra.errors import SessionRefused
from palaestra.sessions.action import Click, Move, Point, PressKeys, Scroll, TypeText
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.query_language import parse_query, row_report, write_query
from palaestra.sessions.screen import Screenshot, Size
from palaestra.sessions.server.process import AutoResetSession
from palaestra.sessions.task import TaskRequest

HIT = "/act?action_type=left_click&x=40&y=60&step=1"
AT = Point(100, 200)


class _Counting(FakeSession):
    """Keeps what was really done."""

    done = ()

    async def act(self, action, *, step):
        before = self._episode.num_steps
        made = await super().act(action, step=step)
        if self._episode.num_steps > before:
            _Counting.done = (*_Counting.done, action)
        return made


def test_an_act_by_query_answers_with_the_picture_and_is_done_once_however_often_it_is_sent():
    async def play(ask):
        await ask("POST", "/reset", RESET)
        before = await ask("GET", "/act?action_type=screenshot")
        answers = [await ask("GET", HIT) for _ in range(3)]
        posted = await ask("POST", "/act", {"step": 1, "action": {"kind": "click", "at": [40, 60]}})
        return before, answers, posted, await ask("GET", HIT, Accept="application/json")

    _Counting.done = ()
    before, answers, posted, facts = _talk(play, make=_Counting)
    assert _Counting.done == (Click(Point(40, 60)),)
    assert {answer.body for answer in answers} == {answers[0].body} != {before.body}
    assert [(answer.status, answer.headers["Content-Type"]) for answer in answers] == [(200, "image/png")] * 3
    assert {answer.headers["Cache-Control"] for answer in answers} == {"no-store"}
    line = json.loads(answers[0].headers["X-Palaestra-Step"])
    assert line == posted.document == facts.document  # the same step by POST is the same act
    assert (line["step"], line["progress"]["success"]) == (1, True)
    assert Screenshot.of(before.body).size == Size(160, 210)


def test_an_act_without_a_step_is_refused_and_so_are_a_head_and_a_web_page():
    async def play(ask):
        await ask("POST", "/reset", RESET)
        return (
            await ask("GET", HIT.removesuffix("&step=1")), await ask("HEAD", HIT), await ask("GET", "/progress"),
            await ask("GET", HIT.replace("step=1", "step=2")), await ask("GET", HIT, Sec_Fetch_Site="cross-site"),
        )  # fmt: skip

    _Counting.done = ()
    unnumbered, head, progress, early, page = _talk(play, make=_Counting)
    assert (unnumbered.status, unnumbered.code) == (422, "step_required")
    assert (head.status, head.headers["Allow"]) == (405, "GET, POST")
    assert (page.status, page.code) == (403, "foreign_origin")
    assert progress.document["done"] is False
    assert (early.status, early.code) == (409, "step_out_of_order")
    assert _Counting.done == ()


@pytest.mark.parametrize(
    ("query", "action"),
    [
        ("action_type=mouse_move&x=100&y=200", Move(AT)),
        ("action_type=left_click&x=100&y=200&delay=1.0", Click(AT)),
        ("action_type=double_click&x=100&y=200", Click(AT, times=2)),
        ("action_type=triple_click&x=100&y=200", Click(AT, times=3)),
        ("action_type=right_click&x=100&y=200", Click(AT, "right")),
        ("action_type=type&text=a%2Bb+%26+c%3Dd%3F%0A", TypeText("a+b & c=d?\n")),
        ("action_type=type&text=Gr%C3%BC%C3%9Fe", TypeText("Grüße")),
        ("action_type=keys&keys=ctrl%2Bshift%2Bc", PressKeys(("Control", "Shift", "c"))),
        ("action_type=keys&keys=Return", PressKeys(("Enter",))),
        ("action_type=scroll&direction=down&x=100&y=200", Scroll(AT, 0, 360)),
        ("action_type=scroll&direction=up", Scroll(None, 0, -360)),
    ],
)
def test_every_word_of_the_dialect_is_read(query, action):
    asked = parse_query(f"{query}&step=7".encode())
    assert (asked.action, asked.step) == (action, 7)
    assert parse_query(query.encode()).step is None


@pytest.mark.parametrize(
    "action",
    [
        Move(AT),
        Click(AT, times=3),
        TypeText("a+b & c=d?\n\t'\""),
        PressKeys(("Meta", "PageDown")),
        PressKeys((" ", "z")),
        Scroll(AT, 0, -360),
    ],
)
def test_what_is_written_is_read_back(action):
    written = write_query(action, None, Size(1280, 800), 360)
    expected = PressKeys(("Space", "z")) if action == PressKeys((" ", "z")) else action
    assert parse_query(urlencode(written).encode()).action == expected


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("", "action_type: required"),
        ("action_type=click&x=1&y=1", "no such action. Did you mean 'left_click'?"),
        ("action_type=left_click&x=1", "without the other"),
        ("action_type=left_click", "left_click needs both"),
        ("action_type=left_click&x=1.5&y=1", "x = '1.5': is not a whole number"),
        ("action_type=left_click&x=1&y=1&x=2", "x = '2': is given twice"),
        ("action_type=left_click&x=1&y=1&step=one", "step = 'one': is not a whole number"),
        ("action_type=left_click&x=1&y=1&text=a", "left_click takes no such parameter. It takes x, y, step, delay"),
        ("action_type=type", "type needs it"),
        ("action_type=type&text=%ff", "is not a query string in UTF-8"),
        ("action_type=keys&keys=ctrl%2Bnone", "no key has this name"),
        ("action_type=scroll&direction=left", "is neither up nor down"),
        ("action_type=screenshot&step=1", "a screenshot is not an act"),
        ("action_type=left_click&x=1&y=1&delay=nan", "must lie between 0 and 60"),
        ("action_type=left_click&x=1&y=1&delay=x", "is not a number of seconds"),
        ("action_type", "is not a query string"),
    ],
)
def test_what_is_not_in_the_dialect_is_refused_with_the_reason(query, reason):
    with pytest.raises(SessionRefused) as refusal:
        parse_query(query.encode())
    assert refusal.value.status == 422
    assert reason in str(refusal.value)


def test_a_server_given_a_task_begins_it_for_clients_that_know_no_reset():
    first = TaskRequest("fake/button", 1)

    async def play(ask):
        ready = await ask("GET", "/")
        looked = await ask("GET", "/act?action_type=screenshot")
        hit = await ask("GET", HIT)
        await ask("POST", "/reset", {"task": "fake/button", "seed": 2})
        return ready, looked, hit, await ask("GET", "/progress"), await ask("DELETE", "/sessions/default")

    ready, looked, hit, after, deleted = _talk(play, make=lambda: AutoResetSession(FakeSession(), first))
    assert (ready.status, ready.headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert (looked.status, hit.status, deleted.status) == (200, 200, 200)
    assert json.loads(hit.headers["X-Palaestra-Step"])["progress"]["success"] is True
    assert after.document["done"] is False


def test_submitted_rows_are_reported_in_the_words_of_the_dialect_too():
    detail = {"submitted_rows": [3, 7], "wrong_submissions": 1, "wanted": [3, 7, 9]}
    assert row_report(detail) == {"submitted_row_indices": [2, 6], "num_incorrect_submissions": 1}
    assert row_report({"typed": ""}) == {}


def test_a_first_task_that_makes_no_sense_is_refused_before_the_server_listens():
    command = [sys.executable, "-m", "palaestra.sessions.server", "--fake", "--task", "data_entry"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "is not of the form suite/name" in done.stderr.splitlines()[-1]
