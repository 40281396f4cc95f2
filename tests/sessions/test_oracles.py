"""The scripted oracles: they solve their tasks by acts that an agent could do, from any state, and only in process."""

import inspect

import pytest
from tests.sessions.browsing import page_in, session_in, with_browser

import palaestra
from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.action import Click, Point, PressKeys, Scroll, TypeText
from palaestra.sessions.clients.client import SessionClient
from palaestra.sessions.server.openapi import build_openapi
from palaestra.sessions.session import Session
from palaestra.sessions.suites import make_task, suites
from palaestra.sessions.suites.miniwob import ORACLE_PAGES
from palaestra.sessions.suites.oracles import build_oracle
from palaestra.sessions.task import TaskRequest

HAS_MINIWOB = bool(suites()["miniwob"].names())
needs_miniwob = pytest.mark.skipif(not HAS_MINIWOB, reason="the miniwob package is not installed")

OWN_TASKS = [
    ("data_entry/field", {}),
    ("data_entry/fields", {}),
    ("data_entry/field", {"distractors": 3}),
    ("data_entry/fields", {"distractors": 3, "font_px": 16}),
    ("data_entry/form", {}),
    ("click_target/button", {"difficulty": 1}),
    ("click_target/button", {"difficulty": 8}),
]
"""Every task of ours that has an oracle."""
ONE_OF_EACH_KIND = [
    "click-link",
    "click-tab-2",
    "click-option",
    "choose-list",
    "login-user",
    "enter-date",
    "copy-paste",
]


async def _solve(session, step=0):
    """Follow the oracle to the end; returns the last judgement and the actions."""
    actions, progress = [], await session.progress()
    while (action := await session.oracle_action()) is not None:
        actions.append(action)
        progress = (await session.act(action, step=step + len(actions))).progress
    return progress, actions


def _unsolved(tasks, seeds):
    """The tasks and seeds that the oracle did not solve within the step limit."""

    async def play(browser):
        session, unsolved = session_in(browser), []
        for task, params in tasks:
            for seed in seeds:
                await session.reset(TaskRequest(task, seed, params))
                progress, actions = await _solve(session)
                if not progress.success or progress.reward != 1.0:
                    unsolved.append((task, seed, actions, progress))
        return unsolved

    return with_browser(play)


def test_tasks_of_ours_are_solved():
    assert _unsolved(OWN_TASKS, [3]) == []


@needs_miniwob
def test_one_page_of_each_kind_is_solved():
    assert set(ONE_OF_EACH_KIND) <= set(ORACLE_PAGES)
    assert _unsolved([(f"miniwob/{page}", {}) for page in ONE_OF_EACH_KIND], [3]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("task", "params"), OWN_TASKS)
def test_tasks_of_ours_are_solved_on_other_seeds(task, params):
    assert _unsolved([(task, params)], range(100, 105)) == []


@needs_miniwob
@pytest.mark.slow
def test_a_name_at_the_end_of_a_long_list_is_scrolled_to():
    assert _unsolved([("miniwob/choose-list", {})], [15, 30]) == []


@needs_miniwob
@pytest.mark.slow
@pytest.mark.parametrize("page", ORACLE_PAGES)
def test_a_page_is_solved_on_five_seeds(page):
    assert _unsolved([(f"miniwob/{page}", {})], range(100, 105)) == []


@needs_miniwob
def test_every_oracle_belongs_to_a_page_and_other_pages_have_none():
    assert set(ORACLE_PAGES) <= set(suites()["miniwob"].names())
    assert len(set(ORACLE_PAGES)) == len(ORACLE_PAGES) == 31
    assert make_task("miniwob", "chase-circle", 3, {}).oracle is None


def test_the_actions_of_a_form_are_clicks_and_texts():
    async def play(browser):
        session = session_in(browser)
        await session.reset(TaskRequest("data_entry/fields", 3))
        return await _solve(session), await session.oracle_action()

    (progress, actions), after = with_browser(play)
    assert [action.kind for action in actions] == ["click", "type", "click", "type", "click"]
    assert (progress.reward, progress.success, after) == (1.0, True, None)


def test_an_oracle_goes_on_from_a_wrong_entry():
    async def play(browser):
        session = session_in(browser)
        await session.reset(TaskRequest("data_entry/field", 3))
        field = await session.oracle_action()
        await session.act(field, step=1)
        await session.act(TypeText("wrong"), step=2)
        return await _solve(session, step=2)

    progress, actions = with_browser(play)
    assert progress.success
    assert actions[0] == PressKeys(("Control", "a"))
    assert [action.kind for action in actions] == ["press", "type", "click"]


@needs_miniwob
def test_an_oracle_goes_on_from_a_wrong_choice():
    async def play(browser):
        session = session_in(browser)
        spec = await session.reset(TaskRequest("miniwob/click-checkboxes", 8))
        wanted = spec.instruction.removeprefix("Select ").removesuffix(" and click Submit.").split(", ")
        boxes = await session._page.evaluate("""[...document.querySelectorAll('#boxes label')].map((label) => {
          const box = label.getBoundingClientRect();
          return [label.textContent, Math.round(box.left + 8), Math.round(box.top + box.height / 2)]; })""")
        _, x, y = next(box for box in boxes if box[0] not in wanted)
        await session.act(Click(Point(x, y)), step=1)
        checked = await session._page.evaluate("document.querySelectorAll('input:checked').length")
        progress, actions = await _solve(session, step=1)
        return checked, len(wanted), progress.success, len(actions)

    assert with_browser(play) == (1, 2, True, 4)


STYLE = "<!doctype html><style>body{margin:0} div{position:absolute;left:20px;top:50px;width:50px;height:40px}</style>"
COVERED = f"{STYLE}<button style='position:absolute;left:20px;top:50px;width:100px;height:40px'>B</button><div></div>"
BELOW = f"{STYLE}<button style='display:block;margin-top:500px;height:20px'>B</button>"
OUTSIDE = f"{STYLE}<button style='position:absolute;left:-90px;width:50px'>B</button>"


def test_a_click_aims_at_the_middle_of_the_visible_part():
    async def play(browser):
        pages = [await page_in(browser, html) for html in (COVERED, BELOW, OUTSIDE)]
        return [await page.evaluate(build_oracle("return click(all('button')[0]);")) for page in pages]

    covered, below, outside = with_browser(play)
    # Columns 70 to 119 are visible, and rows 50 to 89.
    assert covered["kind"] == "click"
    assert covered["at"][0] in (94, 95)
    assert covered["at"][1] in (69, 70)
    # The page has 520 rows, of which the screen shows 200.
    assert below == {"kind": "scroll", "at": [100, 100], "dx": 0, "dy": 320}
    assert outside is None


def test_a_button_below_the_screen_is_scrolled_to_and_clicked():
    async def play(browser):
        session = session_in(browser)
        await session.reset(TaskRequest("click_target/button", 3))
        await session._page.evaluate("""(() => { const button = document.querySelector('button');
          button.style.top = '600px'; })()""")
        return await _solve(session)

    progress, (first, second) = with_browser(play)
    assert (type(first), type(second), progress.success) == (Scroll, Click, True)


def test_asking_an_oracle_changes_nothing():
    async def play(browser):
        session = session_in(browser)
        await session.reset(TaskRequest("data_entry/fields", 3))
        before = await session.screenshot()
        asked = [await session.oracle_action() for _ in range(3)]
        return before.sha256 == (await session.screenshot()).sha256, len(set(asked))

    assert with_browser(play) == (True, 1)


@needs_miniwob
def test_a_task_without_an_oracle_refuses():
    async def play(browser):
        session = session_in(browser)
        with pytest.raises(SessionRefused, match="has no task"):
            await session.oracle_action()
        await session.reset(TaskRequest("miniwob/chase-circle", 3))
        with pytest.raises(SessionRefused, match="has no oracle") as refused:
            await session.oracle_action()
        await session.screenshot()  # the session goes on
        return refused.value.code

    assert with_browser(play) == "no_oracle"


def test_an_oracle_that_returns_no_action_fails_the_session():
    async def play(browser):
        reasons = []
        for value in ("({kind: 'fly'})", "({kind: 'click', at: [500, 5]})", "[1]", "nothing.here"):
            session = session_in(browser)
            await session.reset(TaskRequest("click_target/button", 3))
            session._task.oracle = value
            with pytest.raises(SessionFailed) as failed:
                await session.oracle_action()
            reasons.append(failed.value.reason)
        return reasons

    assert with_browser(play) == ["oracle_failed", "oracle_failed", "oracle_failed", "script_failed"]


def test_no_agent_can_reach_an_oracle():
    assert not hasattr(Session, "oracle_action")
    assert not any("oracle" in name for name, _ in inspect.getmembers(SessionClient))
    assert "oracle" not in str(build_openapi(palaestra.__version__))
