"""The query-string dialect against a small server: what it can express, what is refused, nothing twice."""

import asyncio
import json
from urllib.parse import parse_qsl, urlsplit

import pytest
from tests.sessions.serving import listening, request_read, response

from palaestra.errors import InvalidAction, SessionFailed, SessionRefused
from palaestra.sessions.action import (
    Answer,
    Click,
    Drag,
    Move,
    Point,
    PressKeys,
    Scroll,
    Terminate,
    TypeText,
    Wait,
)
from palaestra.sessions.clients.query_dialect import (
    ROWS_TASK,
    Assignment,
    QueryDialectSession,
    assign_rows,
    rows_entered,
)
from palaestra.sessions.fake import encode_png
from palaestra.sessions.screen import Size
from palaestra.sessions.task import TaskProgress, TaskRequest

SCREEN = Size(1280, 800)
TASK = TaskRequest("simple_data_entry/rows", 0, {"rows": [3, 7]})
AT = Point(100, 200)


class _Desktop:
    """One session of the dialect: keeps what was asked of it, and draws a line as long as that is."""

    def __init__(self, *, progress=None, size=SCREEN):
        self.asked, self.size = [], size
        self.reported = progress or {"submitted_row_indices": [], "num_incorrect_submissions": 0}
        self.drop = None

    async def __call__(self, reader, writer):
        while True:
            _, path, _ = await request_read(reader)
            parts = urlsplit(path)
            if parts.path == "/progress":
                writer.write(response(json.dumps(self.reported).encode()))
            else:
                query = dict(parse_qsl(parts.query, strict_parsing=True))
                if query["action_type"] != "screenshot":
                    self.asked.append(query)
                if query["action_type"] == self.drop:
                    return
                writer.write(response(self._picture(), media="image/png"))
            await writer.drain()

    def _picture(self):
        white, black = b"\xff\xff\xff", b"\0\0\0"
        line = black * len(self.asked) + white * (self.size.width - len(self.asked))
        return encode_png(self.size, [line, *[white * self.size.width] * (self.size.height - 1)])


def _assign(request):
    rows = {row - 2 for row in request.params["rows"]}  # row 2 of the sheet is the first after its heading
    return Assignment(f"Enter rows {sorted(request.params['rows'])}.", 20, rows_entered(rows))


def _play(play, desktop=None, **settings):
    desktop = desktop or _Desktop()

    async def run():
        async with listening(desktop) as url:
            session = QueryDialectSession(url, _assign, delay_s=0.0, **settings)
            try:
                return await play(session)
            finally:
                await session.close()

    return asyncio.run(run()), desktop


QUERIES = [
    (Move(AT), "action_type=mouse_move&x=100&y=200"),
    (Click(AT), "action_type=left_click&x=100&y=200"),
    (Click(None, times=2), "action_type=double_click&x=100&y=200"),  # where the pointer is
    (Click(AT, times=3), "action_type=triple_click&x=100&y=200"),
    (Click(AT, "right"), "action_type=right_click&x=100&y=200"),
    (TypeText("a+b & c=d?\n"), "action_type=type&text=a%2Bb+%26+c%3Dd%3F%0A"),
    (PressKeys(("Control", "Shift", "c")), "action_type=keys&keys=ctrl%2Bshift%2Bc"),
    (PressKeys(("PageDown",)), "action_type=keys&keys=pagedown"),
    (Scroll(AT, 0, 360), "action_type=scroll&direction=down&x=100&y=200"),
    (Scroll(None, 0, -360), "action_type=scroll&direction=up"),
]


def test_every_action_of_the_dialect_is_written_as_its_query():
    async def play(session):
        spec = await session.reset(TASK)
        steps = [await session.act(action, step=n) for n, (action, _) in enumerate(QUERIES, 1)]
        return spec, steps

    (spec, steps), desktop = _play(play)
    assert (spec.instruction, spec.screen) == ("Enter rows [3, 7].", SCREEN)
    assert desktop.asked == [
        {**dict(parse_qsl(query)), "step": str(number), "delay": "0"} for number, (_, query) in enumerate(QUERIES, 1)
    ]
    assert len({step.screenshot.sha256 for step in steps}) == len(QUERIES)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Drag((AT, Point(1, 1))), "has no drag"),
        (Wait(1.0), "has no wait"),
        (Click(AT, "middle"), "without held keys"),
        (Click(AT, "right", times=2), "a single right click"),
        (Click(AT, held=("Shift",)), "without held keys"),
        (Click(None), "the pointer has none yet"),
        (Click(Point(0, 0)), "in the corners"),
        (Move(Point(1279, 799)), "in the corners"),
        (TypeText("Grüße"), "only types ASCII"),
        (PressKeys(("A",)), "has no key 'A'"),
        (PressKeys(("Control", "+")), r"has no key '\+'"),
        (PressKeys(("ß",)), "has no key 'ß'"),
        (Scroll(AT, 0, 100), "by 360 pixels"),
        (Scroll(AT, 1, 360), "up or down"),
        (Move(Point(1280, 5)), "outside the screen"),
    ],
)
def test_what_it_cannot_say_is_refused_with_the_reason_and_not_sent(action, reason):
    async def play(session):
        await session.reset(TASK)
        with pytest.raises(InvalidAction, match=reason):
            await session.act(action, step=1)
        return (await session.act(Move(AT), step=1)).number

    number, desktop = _play(play)
    assert number == 1
    assert [query["action_type"] for query in desktop.asked] == ["mouse_move"]


def test_rows_that_were_entered_earn_their_share_and_wrong_ones_cost():
    async def play(session):
        await session.reset(TASK)
        made = []
        for rows, wrong in (([], 0), ([1], 0), ([1, 4], 2), ([1, 4, 5], 2)):
            desktop.reported = {"submitted_row_indices": [*rows], "num_incorrect_submissions": wrong}
            made.append(await session.progress())
        desktop.reported = {"submitted_row_indices": [], "num_incorrect_submissions": 0}
        await session.act(Move(AT), step=1)
        desktop.reported = {"submitted_row_indices": [5, 1], "num_incorrect_submissions": 0}
        return made, await session.act(Click(AT), step=2)

    desktop = _Desktop()
    (made, last), _ = _play(play, desktop)
    found = [(round(progress.reward, 9), progress.done, progress.success) for progress in made]
    # 1/2; then 1/2 minus three wrong ones (row 4 was not asked for); then both, minus three
    assert found == [(0.0, False, False), (0.5, False, False), (0.2, False, False), (0.7, True, False)]
    assert (last.progress.reward, last.progress.success) == (1.0, True)
    assert last.progress.detail == {"submitted_rows": [5, 1], "correct_submissions": 2, "wrong_submissions": 0}


def test_the_older_report_counts_only_and_a_rule_may_be_content_with_that():
    counted = _Desktop(progress={"num_correct_submissions": 1})

    async def run():
        async with listening(counted) as url:
            rule = Assignment("Enter all.", 5, lambda detail: TaskProgress(detail["correct_submissions"], False, False))
            session = QueryDialectSession(url, lambda request: rule)
            await session.reset(TASK)
            counted.reported = {"num_correct_submissions": 4}
            progress = await session.progress()
            await session.close()
            return progress

    assert asyncio.run(run()).reward == 3  # the first was there before the episode

    async def play(session):
        await session.reset(TASK)
        with pytest.raises(SessionFailed, match="does not say which rows"):
            await session.progress()

    _play(play, counted)


@pytest.mark.parametrize("report", [{"correct": 1}, [], {"submitted_row_indices": "many"}])
def test_a_report_of_another_shape_is_a_failure_and_not_a_reward_of_nothing(report):
    async def play(session):
        await session.reset(TASK)
        desktop.reported = report
        with pytest.raises(SessionFailed, match="bad_progress"):
            await session.progress()

    async def begin(session):
        with pytest.raises(SessionFailed, match="bad_progress"):
            await session.reset(TASK)

    desktop = _Desktop()
    _play(play, desktop)
    _play(begin, desktop)


def test_only_what_is_reported_after_the_episode_began_counts_and_a_report_that_shrinks_is_a_failure():
    async def play(session):
        await session.reset(TASK)
        before = await session.progress()
        desktop.reported = {"submitted_row_indices": [1, 5, 1], "num_incorrect_submissions": 4}
        after = await session.progress()
        desktop.reported = {"submitted_row_indices": [9, 5, 1, 1], "num_incorrect_submissions": 4}
        with pytest.raises(SessionFailed, match="contradicts"):
            await session.progress()
        desktop.reported = {"submitted_row_indices": [1, 5], "num_incorrect_submissions": 0}
        with pytest.raises(SessionFailed, match="contradicts"):
            await session.progress()
        return before, after

    desktop = _Desktop(progress={"submitted_row_indices": [1, 5], "num_incorrect_submissions": 3})
    (before, after), _ = _play(play, desktop)
    assert (before.reward, before.done) == (0.0, False)
    assert (after.reward, after.detail["submitted_rows"]) == (0.4, [1])  # a half, less one wrong submission


def test_an_act_whose_answer_is_lost_is_not_sent_again_and_ends_the_session():
    async def play(session):
        await session.reset(TASK)
        await session.act(Move(AT), step=1)
        for attempt in (
            lambda: session.act(Click(AT), step=2),
            lambda: session.act(Click(AT), step=2),
            session.progress,
        ):
            with pytest.raises(SessionFailed, match="unreachable"):
                await attempt()

    desktop = _Desktop()
    desktop.drop = "left_click"
    _play(play, desktop)
    assert [query["action_type"] for query in desktop.asked] == ["mouse_move", "left_click"]


def test_a_cancelled_act_ends_the_session_too():
    class Stuck(_Desktop):
        async def __call__(self, reader, writer):
            while True:
                _, path, _ = await request_read(reader)
                if "left_click" in path:
                    self.asked.append(path)
                    stuck.set()
                    await asyncio.Event().wait()
                looks = path.startswith("/act")
                writer.write(response(self._picture() if looks else json.dumps(self.reported).encode()))
                await writer.drain()

    async def play(session):
        await session.reset(TASK)
        acting = asyncio.create_task(session.act(Click(AT), step=1))
        await stuck.wait()
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)
        with pytest.raises(SessionFailed, match="interrupted: step 1 was not waited for"):
            await session.act(Click(AT), step=1)

    stuck = asyncio.Event()
    _, desktop = _play(play, Stuck())
    assert len(desktop.asked) == 1


def test_steps_are_counted_here_and_repeated_from_memory():
    async def play(session):
        with pytest.raises(SessionRefused, match="has no task"):
            await session.progress()
        await session.reset(TASK)
        first = await session.act(Click(AT), step=1)
        assert await session.act(Click(AT), step=1) == first
        with pytest.raises(SessionRefused, match="another action"):
            await session.act(Move(AT), step=1)
        with pytest.raises(SessionRefused, match="cannot be reset"):
            await session.reset(TASK)
        over = await session.act(Terminate(success=True), step=2)
        with pytest.raises(SessionRefused, match="over"):
            await session.act(Answer("done"), step=3)
        assert (await session.progress()).done
        await session.close()
        with pytest.raises(SessionRefused, match="closed"):
            await session.screenshot()
        return over.progress

    progress, desktop = _play(play)
    assert (progress.done, progress.success, progress.truncated) == (True, False, False)
    assert len(desktop.asked) == 1


def test_a_screen_of_another_size_is_noticed_before_anything_is_clicked():
    async def play(session):
        with pytest.raises(SessionFailed, match="width=64"):
            await session.reset(TASK)

    _play(play, _Desktop(size=Size(64, 48)))


def test_a_refusal_by_the_server_is_a_failed_environment():
    async def refuse(reader, writer):
        while True:
            _, path, _ = await request_read(reader)
            fine = {"/progress": b'{"submitted_row_indices": []}'}
            fine["/act?action_type=screenshot"] = _Desktop()._picture()
            refusal = response(b'{"detail": "no"}', status="422 Unprocessable")
            writer.write(response(fine[path]) if path in fine else refusal)
            await writer.drain()

    async def run():
        async with listening(refuse) as url:
            session = QueryDialectSession(url, _assign)
            await session.reset(TASK)
            for _ in range(2):
                with pytest.raises(SessionFailed, match="refused: status 422"):
                    await session.act(Click(AT), step=1)
            await session.close()

    asyncio.run(run())


def test_the_screen_may_be_of_any_size_and_closing_gives_the_session_up_once():
    given_up = []

    async def give_up():
        given_up.append(True)

    async def play(session):
        spec = await session.reset(TASK)
        await session.close()
        return spec.screen

    screen, _ = _play(play, _Desktop(size=Size(640, 480)), screen=None, release=give_up)
    assert (screen, given_up) == (Size(640, 480), [True])


@pytest.mark.parametrize(
    ("params", "instruction", "rows"),
    [
        ({"rows": [7, 3]}, "Enter rows 3 and 7 of the sheet into the form, one at a time, and submit each.", {1, 5}),
        ({"rows": [2], "instruction": "Do {rows}."}, "Do row 2.", {0}),
        ({"wanted": 2, "last_row": 3, "step_limit": 9}, "Enter rows 2 and 3 of the sheet into the form", {0, 1}),
    ],
)
def test_the_task_of_the_dialect_says_which_rows_and_judges_them(params, instruction, rows):
    assignment = assign_rows(TaskRequest(ROWS_TASK, 3, params))
    assert assignment.instruction.startswith(instruction)
    assert assignment.step_limit == params.get("step_limit", 50)
    done = {"submitted_rows": sorted(rows), "correct_submissions": len(rows), "wrong_submissions": 0}
    assert assignment.judge(done).success
    assert not assignment.judge({**done, "submitted_rows": []}).done
    assert assignment.judge({**done, "wrong_submissions": 50}).reward == -1.0


def test_rows_that_are_not_named_follow_from_the_seed():
    drawn = [assign_rows(TaskRequest(ROWS_TASK, seed, {"wanted": 3})).instruction for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("task", "params", "reason"),
    [
        ("data_entry/form", {}, "only has the task simple_data_entry/rows"),
        (ROWS_TASK, {"row": 3}, "Did you mean 'rows'"),
        (ROWS_TASK, {"rows": [1]}, "from 2 to 101"),
        (ROWS_TASK, {"rows": [3, 3]}, "names a row twice"),
        (ROWS_TASK, {"wanted": 0}, "between 1 and the 100 rows"),
        (ROWS_TASK, {"step_limit": 0}, "at least 1"),
    ],
)
def test_a_request_that_makes_no_sense_there_is_refused(task, params, reason):
    with pytest.raises(SessionRefused, match=reason):
        assign_rows(TaskRequest(task, 0, params))
