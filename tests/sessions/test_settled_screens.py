"""The pages of MiniWoB: a picture shows the page settled, and the same seed and acts give the same pictures."""

import asyncio

import pytest
from tests.sessions.browsing import drawn_on_demand, session_in, with_browser

from palaestra.sessions.action import Click, Move, Point, TypeText, Wait
from palaestra.sessions.suites import suites
from palaestra.sessions.task import TaskRequest

NAMES = suites()["miniwob"].names()
if not NAMES:
    pytest.skip("the miniwob package is not installed", allow_module_level=True)

pytestmark = drawn_on_demand  # in real time pages settle too, but do not repeat themselves to the pixel

MOVING = {
    "chase-circle": "the circle moves all the time",
    "click-pie": "the menu takes a second to unfold",
    "hover-shape": "another shape is highlighted every two seconds",
    "moving-items": "the items move all the time",
    "simon-says": "the sequence is shown one light after the other",
    "stock-market": "the price changes all the time",
    "terminal": "the cursor blinks",
}
"""Pages that go on by themselves for more than half a second, and why."""

ACTS = (Click(Point(60, 65)), Click(Point(70, 95)), Click(Point(80, 130)), TypeText("An"))


async def _pictures(browser, name, seed, acts, *, look_again=False):
    """The picture after the reset and after each act; with `look_again` also the one 500 ms of page time later."""
    session = session_in(browser)
    await session.reset(TaskRequest(f"miniwob/{name}", seed, {"step_limit": 100}))
    pictures, done = [await session.screenshot()], False
    for number in range(len(acts) + 1):
        if look_again:
            await session._page.act(Wait(0.5))
            pictures.append(await session.screenshot())
        if number == len(acts) or done:
            break
        step = await session.act(acts[number], step=number + 1)
        done = step.progress.done
        pictures.append(step.screenshot)
    await session.close()
    return [picture.sha256 for picture in pictures]


PROBED = {
    "choose-date": (31, ACTS[:1]),
    "book-flight": (31, (ACTS[1], ACTS[3])),
    "click-collapsible": (31, ACTS[:1]),
    "click-collapsible-2": (31, ACTS[:1]),
    "click-menu": (31, (Move(Point(30, 98)),)),
    "email-inbox": (31, ACTS[1:2]),
    "use-autocomplete": (31, (Click(Point(60, 82)), TypeText("Do"))),
    "social-media": (31, ()),
}


def test_the_picture_after_an_act_is_the_one_half_a_second_later():
    async def play(browser):
        unsettled = []
        for name, (seed, acts) in PROBED.items():
            seen = await _pictures(browser, name, seed, acts, look_again=True)
            given, later = seen[::2], seen[1::2]
            assert len(set(given)) == len(acts) + 1, f"{name}: an act changed nothing, so there is nothing to settle"
            unsettled += [name] * (given != later)
        return unsettled

    assert with_browser(play) == []


def test_the_calendar_and_the_suggestions_are_in_the_picture_of_the_act_that_opened_them():
    async def play(browser):
        visible = []
        for name, selector in (("choose-date", "#ui-datepicker-div"), ("book-flight", ".ui-autocomplete li")):
            session = session_in(browser)
            seed, acts = PROBED[name]
            await session.reset(TaskRequest(f"miniwob/{name}", seed))
            for number, act in enumerate(acts, start=1):
                await session.act(act, step=number)
            box = f"document.querySelector('{selector}').getBoundingClientRect()"
            visible.append(await session._page.evaluate(f"{box}.width * {box}.height > 500"))
            await session.close()
        return visible

    assert with_browser(play) == [True, True]


def test_a_task_about_time_is_solved_in_page_time():
    async def play(browser):
        session = session_in(browser)
        spec = await session.reset(TaskRequest("miniwob/button-delay", 31))
        one, two = [
            Point(*await session._page.evaluate(f"(({{left, top}}) => [left + 20, top + 20].map(Math.round))"
                                                f"({button}.getBoundingClientRect())"))
            for button in ("subbtn", "subbtn2")
        ]  # fmt: skip
        seconds = int(spec.instruction.split("wait ")[1][0])
        await session.act(Click(one), step=1)
        await session.act(Wait(seconds - 0.5), step=2)  # the click itself takes half a second
        solved = (await session.act(Click(two), step=3)).progress.success

        spec = await session.reset(TaskRequest("miniwob/chase-circle", 31))  # ends 9.9 s after it began
        for number in range(1, spec.step_limit + 1):
            last = await session.act(Move(Point(80, 130)), step=number)
            if last.progress.done:
                break
        await session.close()
        return solved, number, last.progress.truncated

    assert with_browser(play) == (
        True,
        19,
        False,
    )  # 20 x 507 ms is the first to exceed it, and the reset is one of them


async def _differing_resets(browser, names, seeds):
    """The resets that three sessions, at the same time, do not all show with the same pixels."""
    differing = []
    for name in names:
        for seed in seeds:
            seen = await asyncio.gather(*(_pictures(browser, name, seed, ()) for _ in range(3)))
            if len({tuple(pictures) for pictures in seen}) > 1:
                differing.append((name, seed))
    return differing


def test_sessions_that_begin_with_the_same_seed_begin_with_the_same_pixels():
    names = ("social-media", "email-inbox", "stock-market", "chase-circle", "count-shape", "click-dialog")
    assert with_browser(lambda browser: _differing_resets(browser, names, (31,))) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_reset_of_any_page_differs_from_another_with_the_same_seed():
    async def play(browser):
        return len(NAMES), await _differing_resets(browser, NAMES, range(5))

    assert with_browser(play) == (130, [])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_page_repeats_itself_and_settles_unless_it_moves_by_itself():
    async def play(browser):
        unsettled, varying = set(), set()
        for name in NAMES:
            runs = [await _pictures(browser, name, 31, ACTS) for _ in range(3)]
            looked = [await _pictures(browser, name, 31, ACTS, look_again=True) for _ in range(2)]
            varying |= {name} if any(run != runs[0] for run in runs) or looked[0] != looked[1] else set()
            unsettled |= {name} if looked[0][::2] != looked[0][1::2] else set()
        return unsettled, varying

    unsettled, varying = with_browser(play)
    assert varying == set()
    assert unsettled == set(MOVING)
