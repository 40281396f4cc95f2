"""Browser sessions over HTTP: the kit, and a browser that dies between two acts."""

import asyncio
import os
import signal

import pytest
from tests.sessions.serving import served

from palaestra.errors import ConfigError, SessionFailed, SessionRefused
from palaestra.sessions.action import Click, Move, Point, PressKeys, TypeText
from palaestra.sessions.browser.browser import SharedBrowser
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.browser.session import BrowserSession
from palaestra.sessions.clients.client import open_session
from palaestra.sessions.clients.query_dialect import Assignment, QueryDialectSession, rows_entered
from palaestra.sessions.conformance import check_session
from palaestra.sessions.server.process import AutoResetSession
from palaestra.sessions.suites.data_entry import DataEntry
from palaestra.sessions.task import TaskRequest

try:
    find_chromium()
except ConfigError as missing:
    pytest.skip(str(missing), allow_module_level=True)

BUTTON = TaskRequest("click_target/button", 3)


def _with_server(play):
    async def run():
        shared = SharedBrowser()
        async with served(lambda: BrowserSession(shared.get), stop=shared.stop) as url:
            return await play(url, shared)

    return asyncio.run(run())


def test_a_browser_passes_the_kit_over_http_and_keeps_no_page_open():
    async def play(url, shared):
        async def make():
            return await open_session(url)

        await check_session(make, "click_target/button")
        browser = await shared.get()
        return browser.num_pages, shared.starts

    assert _with_server(play) == (0, 1)


def test_duplicates_of_one_click_reach_the_page_once():
    async def play(url, shared):
        session = await open_session(url)
        await session.reset(TaskRequest("data_entry/form", 3))
        click = Click(Point(450, 81))
        steps = await asyncio.gather(*(session.act(click, step=1) for _ in range(8)))
        with pytest.raises(SessionRefused, match="does not follow"):
            await session.act(click, step=3)
        again = await session.act(click, step=1)
        await session.close()
        return steps, again

    steps, again = _with_server(play)
    assert all(step == again for step in steps)
    assert again.number == 1


def test_a_form_is_filled_in_by_the_query_dialect_alone_and_the_rows_are_reported_in_its_words():
    """Both ends of the dialect: our client, which knows no reset, and our server, which begins the task by itself."""
    request = TaskRequest("data_entry/form", 3, {"rows": 4, "wanted": 1})
    form = DataEntry().make(request.name, request.seed, request.params)
    (row,) = form._wanted
    task = Assignment(f"Enter row {row}.", 20, rows_entered({row - 1}))

    async def run():
        shared = SharedBrowser()
        make = lambda: AutoResetSession(BrowserSession(shared.get), request)  # noqa: E731
        async with served(make, stop=shared.stop) as url:
            session = QueryDialectSession(url, lambda asked: task, screen=None, delay_s=0.0)
            await session.reset(TaskRequest("simple_data_entry/rows"))
            first, last, email = form._people[row - 1]
            typed = TypeText(f"{first}\t{last}\t{email}")
            for number, action in enumerate((Click(Point(450, 81)), typed, PressKeys(("Enter",))), 1):
                step = await session.act(action, step=number)
            async with asyncio.timeout(20):
                while not (await session.progress()).done:  # the page sends the form on its own time
                    await asyncio.sleep(0.02)
            progress = await session.progress()
            await session.close()
            return step.number, progress

    number, progress = asyncio.run(run())
    assert (number, progress.reward, progress.success) == (3, 1.0, True)
    assert progress.detail == {"submitted_rows": [row - 1], "correct_submissions": 1, "wrong_submissions": 0}


def test_a_killed_browser_fails_its_own_sessions_and_the_next_reset_finds_another():
    async def play(url, shared):
        broken, idle = await open_session(url), await open_session(url)
        await broken.reset(BUTTON)
        await broken.act(Move(Point(1, 1)), step=1)
        first = (await shared.get()).pid
        os.killpg(first, signal.SIGKILL)
        with pytest.raises(SessionFailed, match="browser_gone"):
            await broken.act(Move(Point(2, 2)), step=2)
        await idle.reset(BUTTON)  # had no page in the dead one
        with pytest.raises(SessionFailed, match="browser_gone"):
            await broken.progress()
        moved = await idle.act(Move(Point(1, 1)), step=1)
        await broken.reset(BUTTON)
        again = await broken.act(Move(Point(1, 1)), step=1)
        second = await shared.get()
        pages = second.num_pages
        await broken.close()
        await idle.close()
        return moved.screenshot == again.screenshot, pages, shared.starts, second.pid != first

    assert _with_server(play) == (True, 2, 2, True)


def test_a_browser_that_stops_answering_is_replaced(monkeypatch):
    monkeypatch.setattr("palaestra.sessions.browser.browser.HEALTH_CHECK_S", 0.3)

    async def play(url, shared):
        first = await shared.get()
        os.killpg(first.pid, signal.SIGSTOP)
        session = await open_session(url)
        await session.reset(BUTTON)
        await session.close()
        return shared.starts, first.is_gone

    assert _with_server(play) == (2, True)


def test_a_server_that_is_going_down_starts_no_other_browser():
    async def run():
        shared = SharedBrowser()
        await shared.stop()
        with pytest.raises(SessionRefused, match="shutting down"):
            await shared.get()
        return shared.starts

    assert asyncio.run(run()) == 0
