"""Sessions in a real browser: every rule of the kit, every kind of input, every way a page can break."""

import asyncio
import os
import signal
import socket

import pytest
from tests.sessions.browsing import SCREEN, drawn_on_demand, page_in, session_in, with_browser

from palaestra.errors import SessionFailed
from palaestra.sessions.action import Click, Drag, Move, Point, PressKeys, Scroll, TypeText, Wait
from palaestra.sessions.browser.chromium import _group_is_alive
from palaestra.sessions.browser.page import Page, PageResponse
from palaestra.sessions.conformance import check_session
from palaestra.sessions.suites import suites
from palaestra.sessions.task import TaskRequest


@pytest.mark.parametrize("task", ["click_target/button", "data_entry/field", "data_entry/form", "miniwob/click-button"])
def test_every_suite_passes_the_kit(task):
    if task.startswith("miniwob") and not suites()["miniwob"].names():
        pytest.skip("the miniwob package is not installed")

    async def play(browser):
        async def make():
            return session_in(browser)

        await check_session(make, task)
        return browser.num_pages

    assert with_browser(play) == 0  # nothing is left open


def test_the_data_entry_task_can_be_solved_and_counts_what_is_wrong():
    async def play(browser):
        session = session_in(browser)
        spec = await session.reset(TaskRequest("data_entry/form", 3, {"wanted": 1, "rows": 3}))
        row = int(spec.instruction.split()[2])
        page = session._page
        cells = f"document.querySelectorAll('tr')[{row}].querySelectorAll('td')"
        person = await page.evaluate(f"[...{cells}].slice(1).map((cell) => cell.textContent)")
        progress, step = [], 0
        for entered in (["Unknown", "Here", "at@all"], person):
            for number, text in enumerate(entered):
                for action in (Click(Point(450, 81 + 46 * number)), TypeText(text)):
                    step += 1
                    await session.act(action, step=step)
            step += 1
            await session.act(PressKeys(("Enter",)), step=step)
            progress.append(await session.progress())
        await session.close()
        return row, progress

    row, (wrong, right) = with_browser(play)
    assert (wrong.reward, wrong.done, wrong.detail["wrong_submissions"]) == (-0.1, False, 1)
    assert right.detail["submitted_rows"] == [row]
    assert (right.reward, right.done, right.success) == (0.9, True, False)  # in, but not without a mistake


def test_mouse_and_keyboard_reach_the_page_as_a_person_s_would():
    html = """<!doctype html><style>body{margin:0}*{font-size:10px}</style>
      <input id=i style="position:absolute;left:0;top:0;width:100px;height:20px">
      <div id=d style="position:absolute;left:0;top:40px;width:100px;height:40px;background:#ccc"></div>
      <div id=s style="position:absolute;left:0;top:100px;width:100px;height:50px;overflow:auto">
        <div style="height:900px">tall</div></div>
      <script>window.heard = [];
        for (const kind of ['click', 'dblclick', 'contextmenu', 'mousemove', 'mousedown', 'mouseup'])
          d.addEventListener(kind, (e) => heard.push([kind, e.clientX, e.clientY, e.shiftKey, e.isTrusted]));
      </script>"""

    async def play(browser):
        page = await page_in(browser, html)
        await page.screenshot()

        async def heard(action):
            await page.evaluate("heard.length = 0")
            await page.act(action)
            return await page.evaluate("heard")

        found = {
            "move": await heard(Move(Point(10, 50))),
            "click": await heard(Click(Point(20, 60), held=("Shift",))),
            "double": await heard(Click(Point(20, 60), times=2)),
            "right": await heard(Click(Point(20, 60), button="right")),
            "drag": await heard(Drag((Point(10, 50), Point(60, 70)))),
        }
        await page.act(Click(Point(50, 10)))
        await page.act(TypeText("Grüße, 漢字 & 🙂!"))
        found["typed"] = await page.evaluate("i.value")
        await page.act(PressKeys(("Control", "a")))
        await page.act(TypeText("x"))
        found["replaced"] = await page.evaluate("i.value")
        await page.act(Scroll(Point(50, 120), 0, 70))
        found["scrolled"] = await page.evaluate("s.scrollTop")
        return found

    found = with_browser(play)
    assert found["move"] == [["mousemove", 10, 50, False, True]]
    kinds = {name: [event[0] for event in events] for name, events in found.items() if isinstance(events, list)}
    assert kinds["click"] == ["mousemove", "mousedown", "mouseup", "click"]
    assert found["click"][-1] == ["click", 20, 60, True, True]
    assert kinds["double"].count("click") == 2
    assert kinds["double"][-1] == "dblclick"
    assert "contextmenu" in kinds["right"]
    assert kinds["drag"][0:2] == ["mousemove", "mousedown"]
    assert kinds["drag"].count("mousemove") >= 2
    assert found["typed"] == "Grüße, 漢字 & 🙂!"
    assert found["replaced"] == "x"
    assert found["scrolled"] == 70


def test_nothing_but_the_task_s_own_origin_can_be_reached():
    html = "<!doctype html><img src='https://example.org/pixel.png'><script src='http://127.0.0.1:9/x.js'></script>"
    reach = """Promise.all([
      fetch('http://example.org/').then(() => 'reached', () => 'blocked'),
      fetch('/missing').then((answer) => answer.status),
      new Promise((end) => { const s = new WebSocket('ws://127.0.0.1:22/');
        s.onopen = () => end('reached'); s.onerror = () => end('blocked'); }),
      new Promise((end) => { try { end(window.open('http://example.org') === null ? 'blocked' : 'reached') }
        catch { end('blocked') } }),
    ])"""

    async def play(browser):
        page = await page_in(browser, html)
        return await page.evaluate(reach), page.blocked

    answers, blocked = with_browser(play)
    assert answers == ["blocked", 404, "blocked", "blocked"]
    assert "https://example.org/pixel.png" in blocked


def test_a_page_cannot_send_datagrams_past_its_origin():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.setblocking(False)
        # Candidates are gathered by asking a server about oneself; without the rule it hears of it within milliseconds.
        gather = """new Promise((end) => {
          const peer = new RTCPeerConnection({iceServers: [{urls: 'stun:127.0.0.1:PORT'}]});
          peer.onicegatheringstatechange = () => { if (peer.iceGatheringState === 'complete') end('gathered'); };
          setTimeout(() => end('asked'), 2000);
          peer.createDataChannel('out');
          peer.createOffer().then((offer) => peer.setLocalDescription(offer));
        })""".replace("PORT", str(listening.getsockname()[1]))

        async def play(browser):
            return await (await page_in(browser, "<!doctype html>")).evaluate(gather)

        assert with_browser(play) in ("gathered", "asked")
        with pytest.raises(BlockingIOError):
            listening.recv(100)


def test_time_and_chance_are_the_same_every_time():
    async def play(browser):
        pages = [await page_in(browser, "<!doctype html>") for _ in range(2)]
        return [
            await page.evaluate("[Math.random(), Math.random(), new Date().toISOString().slice(0, 16)]")
            for page in pages
        ]

    first, second = with_browser(play)
    assert first == second
    assert first[2] == "2024-01-15T12:00"


def test_storage_does_not_leak_from_one_episode_to_the_next():
    async def play(browser):
        page = await page_in(browser, "<!doctype html>")
        await page.evaluate("localStorage.setItem('a', 1); document.cookie = 'b=2'")
        await page.close()
        other = await page_in(browser, "<!doctype html>")
        return await other.evaluate("[localStorage.length, document.cookie]")

    assert with_browser(play) == [0, ""]


async def _contexts(browser):
    return len((await browser.cdp.call("Target.getBrowserContexts"))["browserContextIds"])


@drawn_on_demand
def test_one_unused_page_is_kept_in_reserve_and_never_more():
    async def play(browser):
        session, counts = session_in(browser), []
        for size in (1, 2, 3, 3, 3):
            task = TaskRequest("data_entry/form", 1) if size == 2 else TaskRequest("click_target/button", size)
            await session.reset(task)
            assert await session._page.evaluate("[localStorage.length, document.cookie, history.length]") == [0, "", 2]
            await session._page.evaluate("localStorage.setItem('a', 1); document.cookie = 'b=2'")
            await browser.blank_pages.settle()
            counts.append((browser.num_pages, await _contexts(browser)))
        await session.close()
        return counts, (browser.num_pages, await _contexts(browser))

    counts, left = with_browser(play)
    assert counts == [(1, 2)] * 5  # the page in use, and the one in reserve; of another size it is thrown away
    assert left == (0, 1)


@drawn_on_demand
def test_a_page_in_reserve_whose_process_died_is_not_handed_out():
    async def play(browser):
        session = session_in(browser)
        await session.reset(TaskRequest("click_target/button", 1))
        await browser.blank_pages.settle()
        (spare,) = (target for target in browser._targets if target.is_spare)
        browser.cdp.send("Page.crash", session=spare.session)
        with pytest.raises(SessionFailed, match="hung"):
            await browser.cdp.call("Runtime.evaluate", {"expression": "1"}, session=spare.session, timeout=0.5)
        return (await session.reset(TaskRequest("click_target/button", 2))).seed

    assert with_browser(play) == 2


def test_a_dialog_does_not_stop_the_world():
    async def play(browser):
        page = await page_in(
            browser, "<!doctype html><body onclick='window.answer = confirm(1); window.after = 1'>" + "x" * 99
        )
        await page.act(Click(Point(20, 10)))
        return await page.evaluate("[window.answer, window.after]")

    assert with_browser(play) == [False, 1]


def test_a_page_that_hangs_fails_by_itself_and_its_neighbour_lives_on():
    async def play(browser):
        neighbour = await page_in(browser, "<!doctype html>here")
        page = await page_in(browser, "<!doctype html>", deadline=1.0)
        await page.evaluate("void (document.onmousedown = () => { while (true) {} })")
        with pytest.raises(SessionFailed, match=r"hung: .* within 1 s"):
            await page.act(Click(Point(5, 5)))
        with pytest.raises(SessionFailed, match="hung"):
            await page.screenshot()
        await page.close()
        return (await neighbour.screenshot()).size

    assert with_browser(play) == SCREEN


@drawn_on_demand
def test_a_page_that_hangs_while_it_draws_is_removed_before_its_neighbour_draws():
    async def play(browser):
        neighbour = await page_in(browser, "<!doctype html>here")
        page = await page_in(browser, "<!doctype html>", deadline=1.0)
        await page.evaluate("void new ResizeObserver(() => { while (true) {} }).observe(document.documentElement)")
        drawing = asyncio.create_task(page.draw())
        await asyncio.sleep(0)
        size = (await neighbour.screenshot()).size  # waits for its turn
        with pytest.raises(SessionFailed, match="hung: the page did not draw within 1 s"):
            await drawing
        return size, browser.num_pages

    assert with_browser(play) == (SCREEN, 1)


def test_a_cancelled_screenshot_leaves_the_next_one_in_order():
    async def play(browser):
        pages = [await page_in(browser, f"<!doctype html>{name}") for name in "ab"]
        whole = [await page.draw() for page in pages]
        for _ in range(20):
            for turn in range(4):
                drawing = asyncio.create_task(pages[0].draw())
                for _ in range(turn):
                    await asyncio.sleep(0)
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)
            assert [await page.draw() for page in pages] == whole
        return browser.num_pages

    assert with_browser(play) == 2


def test_a_task_whose_own_code_raises_breaks_its_page_and_no_other():
    async def play(browser):
        neighbour = await page_in(browser, "<!doctype html>here")
        page = await Page.open(browser, SCREEN, lambda request: PageResponse(b"<!doctype html>"), seed=3)
        page._serve = lambda request: 1 / 0
        for attempt in (lambda: page.evaluate("fetch('/x').then((answer) => answer.status)"), page.draw):
            with pytest.raises(SessionFailed, match=r"task_failed: answering '/x' raised ZeroDivisionError"):
                await attempt()
        return (await neighbour.screenshot()).size

    assert with_browser(play) == SCREEN


def test_a_page_that_crashes_says_so_from_then_on():
    async def play(browser):
        session = session_in(browser)
        await session.reset(TaskRequest("click_target/button", 3))
        browser.cdp.send("Page.crash", session=session._page._target.session)
        for attempt in (lambda: session.act(Wait(0.05), step=1), session.progress, session.screenshot):
            with pytest.raises(SessionFailed, match="page_crashed"):
                await attempt()
        await session.reset(TaskRequest("click_target/button", 3))  # a fresh page in the same browser
        return (await session.progress()).done

    assert with_browser(play) is False


def test_a_verifier_that_raises_is_a_failed_environment_and_never_a_reward(monkeypatch):
    async def play(browser):
        session = session_in(browser)
        await session.reset(TaskRequest("click_target/button", 3))
        monkeypatch.setattr(session._task, "judge", lambda probed: 1 / 0)
        for _ in range(2):
            with pytest.raises(SessionFailed, match=r"verifier_failed: .*ZeroDivisionError"):
                await session.act(Wait(0.01), step=1)

        await session.reset(TaskRequest("click_target/button", 3))
        monkeypatch.setattr(session._task, "judge", lambda probed: 1 / 0)
        with pytest.raises(SessionFailed, match=r"verifier_failed: .*ZeroDivisionError"):
            await session.progress()

        monkeypatch.setattr(
            "palaestra.sessions.suites.click_target._Button.instruction", lambda self, begun: begun["no"]
        )
        with pytest.raises(SessionFailed, match=r"verifier_failed: .*TypeError"):
            await session.reset(TaskRequest("click_target/button", 3))
        assert browser.num_pages == 0

    with_browser(play)


def test_a_browser_that_is_killed_fails_its_pages_at_once():
    async def play(browser):
        page = await page_in(browser, "<!doctype html>")
        os.killpg(browser.pid, signal.SIGKILL)
        with pytest.raises(SessionFailed, match="browser_gone"):
            await page.act(Wait(5.0))
        return browser.is_gone

    assert with_browser(play) is True


def test_a_stopped_browser_leaves_no_process_and_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def play(browser):
        await page_in(browser, "<!doctype html>")
        assert len(list(tmp_path.iterdir())) == 1
        return browser.pid

    group = with_browser(play)
    assert list(tmp_path.iterdir()) == []
    assert not _group_is_alive(group)


@pytest.mark.slow
def test_every_page_of_miniwob_loads_and_says_what_to_do():
    names = suites()["miniwob"].names()

    async def play(browser):
        instructions = {}
        for name in names:
            session = session_in(browser)
            instructions[name] = (await session.reset(TaskRequest(f"miniwob/{name}", 3))).instruction
            assert not (await session.progress()).done
            await session.close()
        return instructions

    instructions = with_browser(play)
    assert len(instructions) == 130
    assert all(instructions.values())
