"""The clock of a page: what passes when, that nothing a page does can stop it for good, and that it fails in time."""

import asyncio

import pytest
from tests.sessions.browsing import SCREEN, drawn_on_demand, page_in, with_browser

from palaestra.errors import SessionFailed
from palaestra.sessions.action import Click, Move, Point, Scroll, TypeText, Wait
from palaestra.sessions.browser.cdp import CdpError
from palaestra.sessions.browser.page_clock import MAX_ADVANCE_MS, SETTLE_MS, START_S, RealTime, VirtualTime

HERE = Point(20, 20)
NOW = "[Date.now() - 1705320000000, performance.now()]"


@drawn_on_demand
def test_time_passes_by_507_ms_after_loading_and_after_each_act_and_by_what_a_wait_says():
    async def play(browser):
        page = await page_in(browser, "<!doctype html><body style='height:900px'>")
        times = [await page.evaluate(NOW)]
        for action in (Click(HERE), TypeText("ab"), Move(HERE), Scroll(HERE, 0, 50), Wait(2.5), Wait(60.0)):
            await page.act(action)
            times.append(await page.evaluate(NOW))
        await page.screenshot()
        times.append(await page.evaluate(NOW))
        return times

    passed = [507, 507, 507, 507, 507, 2500, 60000, 0]
    assert with_browser(play) == [[sum(passed[:n]), sum(passed[:n])] for n in range(1, 9)]


@drawn_on_demand
def test_timers_run_in_the_order_they_are_due_and_no_real_time_passes_for_them():
    html = """<!doctype html><script>window.ran = [];
      setTimeout(() => ran.push(['late', performance.now()]), 30000);
      setTimeout(() => ran.push(['early', performance.now()]), 10000);
      const each = setInterval(() => { ran.push(['each', performance.now()]); }, 9000);</script>"""

    async def play(browser):
        page = await page_in(browser, html, deadline=5.0)
        await page.act(Wait(30.0))
        return await page.evaluate("ran")

    assert with_browser(play) == [["each", 9000], ["early", 10000], ["each", 18000], ["each", 27000], ["late", 30000]]


@drawn_on_demand
def test_an_animation_goes_on_between_two_pictures_and_its_frames_are_16_ms_apart():
    html = """<!doctype html><script>window.at = [];
      const dropped = requestAnimationFrame(() => at.push('dropped'));
      cancelAnimationFrame(dropped);
      requestAnimationFrame(() => { throw new Error('does not stop the others'); });
      const step = (now) => { at.push(now); if (at.length < 4) requestAnimationFrame(step); };
      requestAnimationFrame(step);</script>"""

    async def play(browser):
        return await (await page_in(browser, html)).evaluate("at")

    assert with_browser(play) == [16, 32, 48, 64]


@drawn_on_demand
def test_an_event_is_stamped_by_the_clock_that_the_page_reads():
    html = """<!doctype html><body style='height:200px'>
      <script>onmousedown = (event) => { window.stamp = [event.timeStamp, performance.now()]; }</script>"""

    async def play(browser):
        page = await page_in(browser, html)
        await page.act(Wait(3.0))
        await page.act(Click(HERE))
        return await page.evaluate("stamp")

    assert with_browser(play) == [3507, 3507]


def test_a_document_without_a_script_has_the_prelude_from_the_first_act_on():
    async def play(browser):
        page = await page_in(browser, "<!doctype html><body style='height:200px'>")
        await page.act(Click(HERE))
        return await page.evaluate("requestAnimationFrame.toString().includes('native code')")

    assert with_browser(play) is False


@drawn_on_demand
def test_a_promise_that_waits_for_a_timer_is_kept_and_a_value_takes_no_time():
    async def play(browser):
        page = await page_in(browser, "<!doctype html>")
        before = await page.evaluate("performance.now()")
        kept = await page.evaluate("new Promise((keep) => setTimeout(() => keep(performance.now()), 120))")
        return before, kept, await page.evaluate("performance.now()")

    assert with_browser(play) == (507, 627, 657)  # looked at after 50, 100 and 150 ms


FETCHING = """<!doctype html><body style='height:200px'><script>
  onclick = async () => { const answer = await fetch('/slow'); document.title = await answer.text(); };</script>"""


def test_what_a_page_fetches_after_an_act_is_there_when_the_act_is_over():
    async def play(browser):
        page = await page_in(browser, FETCHING, files={"/slow": "fetched"})
        await page.act(Click(HERE))
        return await page.evaluate("document.title")

    assert with_browser(play) == "fetched"


@drawn_on_demand
def test_a_request_that_is_never_answered_delays_an_act_and_does_not_fail_it(monkeypatch):
    async def play(browser):
        page = await page_in(browser, FETCHING, deadline=1.0)
        answer = page._serve_request
        monkeypatch.setattr(page, "_serve_request", lambda params: None)
        await page.act(Click(HERE))
        await page.act(Wait(1.0))
        monkeypatch.setattr(page, "_serve_request", answer)
        return await page.evaluate("[document.title, performance.now() >= 2014]"), (await page.screenshot()).size

    value, size = with_browser(play)
    assert value == ["", True]
    assert size == SCREEN


WORST = {
    "timers without end": "const again = () => setTimeout(again, 0); again(); setInterval(() => { window.n = 1; }, 1);",
    "messages to itself": """const channel = new MessageChannel();
       channel.port1.onmessage = () => channel.port2.postMessage(0); channel.port2.postMessage(0);""",
    "animation frames without end": "const step = () => requestAnimationFrame(step); step();",
    "microtasks for a while": "const soon = (n) => n && Promise.resolve().then(() => soon(n - 1)); soon(10000);",
    "a socket": "new WebSocket('ws://task.localhost/socket'); new EventSource('/events');",
    "a worker": """new Worker(URL.createObjectURL(new Blob(['setInterval(() => postMessage(0), 1)'])))
       .onmessage = () => { window.n = 1; };""",
    "dialogs": "alert(1); confirm(2); prompt(3); setTimeout(() => alert(4), 100);",
    "a dialog before leaving": "onbeforeunload = () => 'stay'; location = '/next';",
    "a download": """const a = document.createElement('a'); a.href = 'data:text/plain,x'; a.download = 'x.txt';
       document.body.append(a); a.click();""",
    "printing": "print(); window.open('/next');",
    "a media stream": "navigator.mediaDevices.getUserMedia({audio: true}).catch(() => 0);",
    "the system's pickers": """for (const kind of ['file', 'color', 'date']) {
       const input = document.createElement('input'); input.type = kind; document.body.append(input);
       try { input.showPicker(); } catch {} input.click(); }""",
    "a place on earth": "navigator.geolocation.getCurrentPosition(() => 0); Notification.requestPermission();",
}


def test_nothing_that_a_page_does_after_a_click_stops_its_clock_or_its_picture():
    async def play(browser):
        ended = {}
        for name, script in WORST.items():
            html = f"""<!doctype html><body style='height:200px'>
              <script>addEventListener('click', () => {{ {script} }}, {{once: true}})</script>"""
            page = await page_in(browser, html, files={"/next": "<!doctype html>next"})
            await page.act(Click(HERE))
            await page.act(Wait(0.5))
            ended[name] = (await page.screenshot()).size, await page.evaluate("1 + 1")
            await page.close()
        return ended

    assert with_browser(play) == {name: (SCREEN, 2) for name in WORST}


@drawn_on_demand
def test_a_page_that_computes_without_end_fails_within_its_deadline():
    async def play(browser):
        failures = []
        for script in (
            "setTimeout(() => { while (true) {} }, 100)",
            "setInterval(() => { while (true) alert(1); }, 9)",
        ):
            page = await page_in(browser, "<!doctype html>", deadline=1.0)
            await page.evaluate(f"void {script}")
            with pytest.raises(SessionFailed, match="hung: 500 ms of page time did not pass within 1 s") as failed:
                await page.act(Wait(0.5))
            with pytest.raises(SessionFailed, match="hung"):
                await page.act(Wait(0.5))
            failures.append(failed.value.reason)
            await page.close()
        return failures

    assert with_browser(play) == ["hung", "hung"]


@drawn_on_demand
def test_a_page_that_crashes_while_its_time_passes_fails_at_once():
    async def play(browser):
        page = await page_in(browser, "<!doctype html>", deadline=60.0)
        await page.evaluate("void setTimeout(() => { while (true) {} }, 100)")
        waiting = asyncio.create_task(page.act(Wait(0.5)))
        while page._clock._expired is None or page._clock._expired.done():
            await asyncio.sleep(0)
        browser.cdp.send("Page.crash", session=page._target.session)
        with pytest.raises(SessionFailed, match="page_crashed"):
            async with asyncio.timeout(30):
                await waiting

    with_browser(play)


def test_a_page_that_crashes_before_it_answers_fails_at_once():
    async def play(browser):
        page = await page_in(browser, "<!doctype html>", deadline=60.0)
        asking = asyncio.create_task(page.evaluate("(() => { while (true) {} })()"))
        await asyncio.sleep(0)
        browser.cdp.send("Page.crash", session=page._target.session)
        with pytest.raises(SessionFailed, match="page_crashed"):
            async with asyncio.timeout(30):
                await asking

    with_browser(play)


@drawn_on_demand
def test_a_page_that_goes_on_to_another_is_settled_there_and_the_date_never_goes_back():
    first = """<!doctype html><a href='/second' style='position:absolute;left:0;top:0;width:99px;height:99px'>on</a>
      <script>setInterval(() => 0, 100)</script>"""
    second = """<!doctype html><div id=d></div><script>window.begun = Date.now();
      setInterval(() => { d.textContent = Math.floor(performance.now() / 100); }, 100);</script>"""

    async def play(browser):
        page = await page_in(browser, first, files={"/second": second})
        before = await page.evaluate("Date.now()")
        await page.act(Click(HERE))
        begun, shown = await page.evaluate("[begun, d.textContent]")
        await page.act(Wait(1.0))
        return begun >= before, shown, await page.evaluate("d.textContent"), (await page.screenshot()).size

    assert with_browser(play) == (True, "5", "15", SCREEN)


def test_what_scrolls_smoothly_or_is_animated_by_script_has_arrived_in_the_picture():
    html = """<!doctype html><body style='margin:0;height:3000px'>
      <div id=d style='position:fixed;left:0;top:100px;width:50px;height:50px;background:#00f'></div>
      <script>onclick = () => { scrollTo({top: 700, behavior: 'smooth'});
        d.animate([{left: '0px'}, {left: '100px'}], {duration: 300, fill: 'forwards'}); };</script>"""

    async def play(browser):
        page = await page_in(browser, html)
        await page.act(Click(HERE))
        picture = await page.draw()
        place = await page.evaluate("[scrollY, d.getBoundingClientRect().left]")
        await page.act(Wait(0.5))
        return place, picture == await page.draw()

    assert with_browser(play) == ([700, 100], True)


def test_in_a_browser_that_draws_by_itself_time_is_real_and_a_failure_ends_the_waiting():
    async def run():
        clock = RealTime()
        await clock.advance(1.0)
        waiting = asyncio.create_task(clock.advance(60_000.0))
        await asyncio.sleep(0)
        clock.fail(SessionFailed("page_crashed", "gone"))
        with pytest.raises(SessionFailed, match="page_crashed"):
            await waiting
        return clock.elapsed_ms

    assert asyncio.run(run()) == 1.0


class _Cdp:
    """A browser that answers grants when the test sets the answer."""

    def __init__(self):
        self.calls, self.answers = [], []

    def start_call(self, method, params, *, session):
        self.calls.append(params)
        answer = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        return answer


def _with_clock(play, deadline=60.0):
    async def run():
        cdp = _Cdp()
        return await play(VirtualTime(cdp, "s", deadline=deadline), cdp)

    return asyncio.run(run())


async def _granted(cdp, number):
    while len(cdp.answers) < number:
        await asyncio.sleep(0)


def test_a_long_time_is_granted_in_pieces_and_frames_follow_it():
    async def play(clock, cdp):
        waiting = asyncio.create_task(clock.advance(2 * MAX_ADVANCE_MS + 10))
        for number in (1, 2, 3):
            await _granted(cdp, number)
            cdp.answers[-1].set_result({"virtualTimeTicksBase": 5000.0})
            clock.on_event("Emulation.virtualTimeBudgetExpired")
        await waiting
        return [call["budget"] for call in cdp.calls], clock.elapsed_ms, [clock.frame_ticks() for _ in range(2)]

    budgets, elapsed, frames = _with_clock(play)
    assert budgets == [1007.0, 1007.0, 10.0]
    assert elapsed == 2024.0
    assert frames == [7024.0, 7024.1]


def test_the_end_of_an_earlier_grant_is_not_taken_for_the_end_of_the_next():
    async def play(clock, cdp):
        waiting = asyncio.create_task(clock.advance(SETTLE_MS))
        await _granted(cdp, 1)
        clock.on_event("Emulation.virtualTimeBudgetExpired")
        await asyncio.sleep(0)
        early = waiting.done()
        cdp.answers[-1].set_result({"virtualTimeTicksBase": 0.0})
        clock.on_event("Page.loadEventFired")
        clock.on_event("Emulation.virtualTimeBudgetExpired")
        await waiting
        return early

    assert _with_clock(play) is False


def test_a_refused_grant_and_a_failed_page_end_the_waiting():
    async def play(clock, cdp):
        waiting = asyncio.create_task(clock.advance(SETTLE_MS))
        await _granted(cdp, 1)
        cdp.answers[-1].set_exception(CdpError("no such session"))
        with pytest.raises(CdpError, match="no such session"):
            await waiting
        waiting = asyncio.create_task(clock.advance(SETTLE_MS))
        await _granted(cdp, 2)
        clock.fail(SessionFailed("page_crashed", "gone"))
        for attempt in (waiting, clock.advance(SETTLE_MS)):
            with pytest.raises(SessionFailed, match="page_crashed"):
                await attempt
        return len(cdp.calls)

    assert _with_clock(play) == 2


def test_a_grant_that_stalls_is_repeated_without_waiting_for_requests_and_then_fails():
    async def play(clock, cdp):
        with pytest.raises(SessionFailed, match=r"hung: 507 ms of page time did not pass within 0.02 s"):
            await clock.advance(SETTLE_MS)
        return [(call["policy"], call["initialVirtualTime"]) for call in cdp.calls]

    at = START_S + SETTLE_MS / 1000
    assert _with_clock(play, 0.02) == [("pauseIfNetworkFetchesPending", at), ("advance", at)]
