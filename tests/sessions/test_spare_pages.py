"""Pages that are loaded before an episode needs them: the same pixels as without, nothing shared, never too many."""

import asyncio
import os
import signal

import pytest
from tests.sessions.browsing import drawn_on_demand, session_in, with_browser

from palaestra.errors import SessionFailed
from palaestra.processes.procfs import list_descendants
from palaestra.sessions.action import Click, Point, TypeText
from palaestra.sessions.browser.browser import MAX_LOADED_PAGES, SharedBrowser
from palaestra.sessions.browser.page import Page
from palaestra.sessions.browser.session import BrowserSession
from palaestra.sessions.browser.spare_pages import SparePages
from palaestra.sessions.suite import PageResponse, Task
from palaestra.sessions.suites import suites
from palaestra.sessions.suites.miniwob import DRAWN_WHILE_LOADING
from palaestra.sessions.task import TaskRequest

NAMES = suites()["miniwob"].names()
needs_miniwob = pytest.mark.skipif(not NAMES, reason="the miniwob package is not installed")
pytestmark = drawn_on_demand  # only such browsers keep spare pages

ACTS = (Click(Point(60, 65)), Click(Point(70, 95)), Click(Point(80, 130)), TypeText("An"))


async def _play(browser, name, seed, *, acts=ACTS):
    """The instruction, and the pixels and rewards of an episode."""
    session = session_in(browser)
    spec = await session.reset(TaskRequest(f"miniwob/{name}", seed, {"step_limit": 100}))
    result = [spec.instruction, (await session.screenshot()).sha256]
    for number, act in enumerate(acts, start=1):
        step = await session.act(act, step=number)
        result += [step.screenshot.sha256, step.progress.reward]
        if step.progress.done:
            break
    await session.close()
    await browser.loaded_pages.settle()
    return result


async def _contexts(browser):
    return len((await browser.cdp.call("Target.getBrowserContexts"))["browserContextIds"])


def _differences(names, seeds):
    """Episodes that differ between a page that is loaded in advance and one that is not, and how many were compared."""

    async def play(browser):
        differing, compared = [], 0
        for name in names:
            for seed in seeds:
                cold = await _play(browser, name, seed)
                await _play(browser, name, seed + 1, acts=())  # the second request: a page is prepared
                compared += len(browser.loaded_pages)
                warm = await _play(browser, name, seed)
                differing += [(name, seed)] if cold != warm else []
                await browser.loaded_pages.close()
        return differing, compared

    return with_browser(play)


@needs_miniwob
def test_a_page_loaded_in_advance_plays_like_one_that_is_not():
    names = ("click-checkboxes", "book-flight", "email-inbox", "stock-market", "chase-circle", "drag-box")
    assert _differences(names, (31, 2**40 + 3)) == ([], 12)


@needs_miniwob
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_page_loaded_in_advance_plays_like_one_that_is_not():
    assert _differences(NAMES, (31,)) == ([], len(NAMES) - len(DRAWN_WHILE_LOADING))


class _Dice(Task):
    """A page that draws random numbers while it loads, and shows those it draws later."""

    preload_key = "dice"
    html = "<!doctype html><script>window.early = Math.random()</script><body>dice<iframe srcdoc=x></iframe>"
    begin = "[Math.random(), Math.random()]"

    def __init__(self, color="red"):
        self.color = color

    def serve(self, request):
        return PageResponse(self.color.encode()) if request.path == "/color" else super().serve(request)


async def _warm(browser, task, *, seed=0):
    """A page of this task that was loaded in advance."""
    for _ in range(2):  # pages are prepared from the second request on
        await (await Page.open_task(browser, task, seed=seed)).close()
    Page.prepare_spare(browser, task)
    await browser.loaded_pages.settle()
    assert len(browser.loaded_pages) == 1


def test_random_numbers_continue_from_the_seed_of_the_episode():
    async def play(browser):
        numbers = []
        for seed in (5, 2**32 - 7, 5):
            cold = await Page.open(browser, _Dice.screen, _Dice().serve, seed=seed)
            await _warm(browser, _Dice(), seed=9)
            warm = await Page.open_task(browser, _Dice(), seed=seed)
            after = (
                "setTimeout(() => location.reload(), 1)"  # a new document starts with the seed of the episode as well
            )
            for page in (cold, warm):
                drawn = [await page.evaluate(_Dice.begin)]
                await page.evaluate(after)
                await page.settle()
                drawn.append(await page.evaluate("[early, Math.random()]"))
                numbers.append(drawn)
                await page.close()
        return numbers

    numbers = with_browser(play)
    assert numbers[0::2] == numbers[1::2]
    assert numbers[0] != numbers[2]


def test_requests_of_the_page_reach_the_task_of_the_episode():
    async def play(browser):
        await _warm(browser, _Dice("red"))
        page = await Page.open_task(browser, _Dice("blue"), seed=1)
        return await page.evaluate("fetch('/color').then((response) => response.text())")

    assert with_browser(play) == "blue"


@needs_miniwob
def test_nothing_of_an_episode_is_there_in_the_next():
    async def play(browser):
        session, seen, contexts = session_in(browser), [], set()
        for seed in range(5):
            await session.reset(TaskRequest("miniwob/click-button", seed))
            page = session._page
            contexts.add(page._target.context)
            seen.append(await page.evaluate("[localStorage.length, document.cookie, window.name, typeof left_behind]"))
            await page.evaluate(
                "localStorage.setItem('a', 1); document.cookie = 'b=2'; window.name = 'c'; window.left_behind = 1;"
                "navigator.clipboard.writeText('d')"
            )
            await browser.loaded_pages.settle()
        await session.close()
        return seen, len(contexts)

    assert with_browser(play) == ([[0, "", "", "undefined"]] * 5, 5)


@needs_miniwob
def test_no_more_pages_are_kept_than_allowed_and_none_for_a_task_played_once():
    async def play(browser):
        session, counts = session_in(browser), []
        names = [name for name in NAMES if name not in DRAWN_WHILE_LOADING][: MAX_LOADED_PAGES + 2]
        for name in (*names, *names):
            await session.reset(TaskRequest(f"miniwob/{name}", 1))
            await browser.blank_pages.settle()
            await browser.loaded_pages.settle()
            counts.append((len(browser.loaded_pages), browser.num_pages, await _contexts(browser)))
        await session.close()
        await browser.loaded_pages.close()
        return counts, browser.num_pages, await _contexts(browser)

    counts, pages, contexts = with_browser(play)
    # The page in use, a blank one in reserve, and the loaded ones.
    kept = [0] * (MAX_LOADED_PAGES + 2) + [*range(1, MAX_LOADED_PAGES + 1), MAX_LOADED_PAGES, MAX_LOADED_PAGES]
    assert counts == [(number, 1, 2 + number) for number in kept]
    assert (pages, contexts) == (0, 1)


def test_the_least_recently_used_page_is_closed_first():
    closed = []

    async def play():
        async def close(page):
            closed.append(page)

        async def create(name):
            if name == "broken":
                raise SessionFailed("hung", "it did not load")
            return name

        pages = SparePages(2, close, lambda page: page != "dead", selective=False)
        for name in ("a", "b", "a", "c"):
            pages.prepare(name, lambda name=name: create(name))
        await pages.settle()
        taken = [await pages.take(name) for name in ("a", "b", "c", "c")]
        for name in ("broken", "dead"):
            pages.prepare(name, lambda name=name: create(name))
            taken.append(await pages.take(name))
        pages.prepare("left", lambda: create("left"))
        await pages.close()
        return taken, len(pages)

    assert asyncio.run(play()) == (["a", None, "c", None, None, None], 0)
    assert closed == ["b", "dead", "left"]


@needs_miniwob
def test_a_spare_page_whose_process_died_is_replaced():
    async def play(browser):
        session = session_in(browser)
        request = TaskRequest("miniwob/click-button", 1)
        before = set(list_descendants(browser.pid))
        for _ in range(2):
            await session.reset(request)
        await browser.loaded_pages.settle()
        await session.close()
        assert len(browser.loaded_pages) == 1
        for pid in set(list_descendants(browser.pid)) - before:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        session = session_in(browser)
        spec = await session.reset(request)
        await session.close()
        await browser.loaded_pages.close()
        return spec.seed, browser.num_pages, await _contexts(browser)

    seed, pages, contexts = with_browser(play)
    assert (seed, pages) == (1, 0)
    assert contexts <= 1  # the blank page in reserve


@needs_miniwob
def test_a_browser_that_is_replaced_takes_its_spare_pages_with_it():
    async def play():
        shared = SharedBrowser()
        try:
            session = BrowserSession(shared.get)
            for seed in range(2):
                await session.reset(TaskRequest("miniwob/click-button", seed))
            os.killpg((await shared.get()).pid, signal.SIGKILL)
            await asyncio.sleep(0.2)
            spec = await session.reset(TaskRequest("miniwob/click-button", 7))
            await session.close()
            return spec.seed, shared.starts
        finally:
            await shared.stop()

    assert asyncio.run(play()) == (7, 2)


def test_a_page_that_is_ready_when_its_request_is_cancelled_is_closed():
    closed = []

    async def close(page):
        closed.append(page)

    async def create():
        return "page"

    async def cancel_in_time():
        pages = SparePages(1, close, lambda page: True, selective=False)
        pages.prepare("task", create)
        spare = pages._pages["task"].page
        request = asyncio.create_task(pages.take("task"))
        spare.add_done_callback(lambda _: request.cancel())  # before the request is resumed with the page
        with pytest.raises(asyncio.CancelledError):
            await request
        await pages.settle()

    asyncio.run(cancel_in_time())
    assert closed == ["page"]
