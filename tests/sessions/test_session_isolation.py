"""Sessions in one browser: what one copies, stores, asks for or is refused is no business of another."""

import asyncio

import pytest
from tests.sessions.browsing import page_in, with_browser
from tests.sessions.serving import served

from palaestra.sessions.action import Click, Point, PressKeys, TypeText
from palaestra.sessions.browser.browser import SharedBrowser
from palaestra.sessions.browser.session import BrowserSession
from palaestra.sessions.clients.client import open_session
from palaestra.sessions.suites import suites
from palaestra.sessions.task import TaskRequest

ALL, COPY, CUT, PASTE = (("Control", key) for key in "acxv")
FIELDS = """<!doctype html><style>body{margin:0} *{position:absolute;left:0;width:150px;height:24px}</style>
  <input id=a style='top:0' value='TEXT'><input id=b style='top:40px'>
  <div id=c contenteditable style='top:80px'></div>"""
A, B, C = Point(60, 12), Point(60, 52), Point(60, 92)


async def _do(page, *actions):
    for action in actions:
        await page.act(Click(action) if isinstance(action, Point) else PressKeys(action))


def test_each_page_pastes_what_it_copied_itself():
    async def play(browser):
        pages = [await page_in(browser, FIELDS.replace("TEXT", name)) for name in ("one", "two")]
        nothing = await page_in(browser, FIELDS)
        for page in pages:
            await _do(page, A, ALL, COPY)
        for page in (*pages, nothing):
            await _do(page, B, PASTE, ("Shift", "Insert"), C, PASTE)
        return [await page.evaluate("[b.value, c.textContent]") for page in (*pages, nothing)]

    assert with_browser(play) == [["oneone", "one"], ["twotwo", "two"], ["", ""]]


def test_what_is_cut_is_gone_and_what_is_pasted_replaces_the_selection():
    async def play(browser):
        page = await page_in(browser, FIELDS)
        values = []
        for actions in ((A, ALL, CUT), (B, PASTE), (ALL, PASTE), (PASTE,)):
            await _do(page, *actions)
            values.append(await page.evaluate("[a.value, b.value]"))
        return values

    assert with_browser(play) == [["", ""], ["", "TEXT"], ["", "TEXT"], ["", "TEXTTEXT"]]


def test_a_page_s_own_copying_and_pasting_goes_to_the_same_clipboard():
    script = """<script>
      addEventListener('copy', (event) => {
        if (window.own) { event.clipboardData.setData('text/plain', own); event.preventDefault(); } });
      addEventListener('paste', (event) => { window.pasted = event.clipboardData.getData('text/plain'); });
    </script>"""

    async def play(browser):
        page, other = [await page_in(browser, FIELDS + script) for _ in range(2)]
        texts = []
        await page.evaluate("navigator.clipboard.writeText('written')")
        await _do(page, B, PASTE)
        texts.append(await page.evaluate("[b.value, pasted]"))
        await page.evaluate("window.own = 'by the handler'")
        await _do(page, A, ALL, COPY)
        texts.append(await page.evaluate("navigator.clipboard.readText()"))
        await page.evaluate("delete window.own; a.focus(); a.select(); document.execCommand('copy')")
        texts.append(
            await page.evaluate("navigator.clipboard.read().then(([one]) => one.getType('text/plain'))"
                                ".then((blob) => blob.text())")
        )  # fmt: skip
        await page.evaluate(
            "navigator.clipboard.write([new ClipboardItem({'text/plain': new Blob(['item'], {type: 'text/plain'})})])"
        )
        texts.append(await page.evaluate("navigator.clipboard.readText()"))
        return texts, await other.evaluate("navigator.clipboard.readText()")

    assert with_browser(play) == ([["written", "written"], "by the handler", "TEXT", "item"], "")


def test_the_clipboard_is_kept_when_the_page_goes_on_to_another_and_shared_with_its_frames():
    frame = "<input id=f style='position:absolute;left:0;top:0;width:99px;height:24px'>"
    second = f"""<!doctype html><body style='margin:0'><input id=b style='width:150px;height:24px'>
      <iframe srcdoc="{frame}" style='position:absolute;left:0;top:60px;border:0'></iframe>"""

    async def play(browser):
        page = await page_in(browser, FIELDS, files={"/second": second})
        await _do(page, A, ALL, COPY)
        await page.evaluate("void (location = '/second')")
        await page.settle()
        await page.draw()  # what was never drawn cannot be clicked
        await _do(page, A, PASTE, Point(40, 72), PASTE)
        return await page.evaluate("[location.pathname, b.value, frames[0].f.value]")

    assert with_browser(play) == ["/second", "TEXT", "TEXT"]


def test_a_frame_that_may_not_see_its_page_cannot_paste_what_another_session_copied():
    frame = "<body style='margin:0'><input style='width:99px;height:24px'><script>onmessage = () => parent.postMessage("
    frame += "document.querySelector('input').value, '*')</script>"
    html = f"""<!doctype html><body style='margin:0'>
      <iframe sandbox='allow-scripts' srcdoc="{frame}" style='border:0;position:absolute;left:0;top:0'></iframe>"""
    ask = "new Promise((keep) => { onmessage = (event) => keep(event.data); frames[0].postMessage(0, '*'); })"

    async def play(browser):
        one, two = await page_in(browser, FIELDS), await page_in(browser, html)
        await two.draw()
        await _do(one, A, ALL, COPY)
        await _do(two, Point(40, 12))
        await two.act(TypeText("own"))
        await _do(two, PASTE)
        return await two.evaluate(ask)

    assert with_browser(play) == "own"


def test_a_middle_click_does_not_paste_what_another_page_has_selected():
    async def play(browser):
        one, two = [await page_in(browser, FIELDS) for _ in range(2)]
        await _do(one, A, ALL)
        await one.act(Click(A, times=3))
        await two.act(Click(B, button="middle"))
        return await two.evaluate("b.value")

    assert with_browser(play) == ""


async def _copy_and_paste(session, page, task, seed):
    spec = await session.reset(TaskRequest(task, seed))
    source = "#to-copy" if task.endswith("copy-paste") else f"#text-{spec.instruction.split()[5][0]}"

    async def middle(selector):
        box = f"document.querySelector('{selector}').getBoundingClientRect()"
        return Point(*await page().evaluate(f"[{box}.left + 20, {box}.top + {box}.height / 2].map(Math.round)"))

    actions = [Click(await middle(source)), PressKeys(ALL), PressKeys(COPY), Click(await middle("#answer-input"))]
    actions += [PressKeys(PASTE), Click(await middle("#subbtn"))]
    for number, action in enumerate(actions, start=1):
        step = await session.act(action, step=number)
    await session.close()
    return step.progress.success


@pytest.mark.parametrize("task", ["miniwob/copy-paste", "miniwob/copy-paste-2"])
def test_twelve_sessions_of_one_server_copy_and_paste_at_the_same_time(task):
    if not suites()["miniwob"].names():
        pytest.skip("the miniwob package is not installed")

    async def run():
        shared, made = SharedBrowser(), []

        def make():
            made.append(BrowserSession(shared.get))
            return made[-1]

        async with served(make, stop=shared.stop) as url:
            sessions = [await open_session(url) for _ in range(12)]
            return await asyncio.gather(
                *(
                    _copy_and_paste(session, lambda n=n: made[n]._page, task, 40 + n)
                    for n, session in enumerate(sessions)
                )
            )

    assert asyncio.run(run()) == [True] * 12


STATES = {
    "local storage": ("localStorage.setItem('a', 1)", "localStorage.length", 0),
    "session storage": ("sessionStorage.setItem('a', 1)", "sessionStorage.length", 0),
    "cookies": ("document.cookie = 'a=1'", "document.cookie", ""),
    "databases": (
        "new Promise((keep) => { indexedDB.open('a').onsuccess = keep; }).then(() => 0)",
        "indexedDB.databases().then((all) => all.length)",
        0,
    ),
    "caches": ("caches.open('a').then(() => 0)", "caches.keys()", []),
    "storage buckets": ("navigator.storageBuckets.open('a').then(() => 0)", "navigator.storageBuckets.keys()", []),
    "private files": (
        "navigator.storage.getDirectory().then((all) => all.getFileHandle('a', {create: true})).then(() => 0)",
        "navigator.storage.getDirectory().then((all) => all.getFileHandle('a')).then(() => 1, () => 0)",
        0,
    ),
    "locks": (
        "new Promise((keep) => { navigator.locks.request('a', () => { keep(0); return new Promise(() => 0); }); })",
        "navigator.locks.request('a', {ifAvailable: true}, (lock) => lock !== null)",
        True,
    ),
    "channels": (
        "new BroadcastChannel('a').postMessage(1)",
        """new Promise((keep) => { new BroadcastChannel('a').onmessage = () => keep(1);
           setTimeout(() => keep(0), 99); })""",
        0,
    ),
    "shared workers": (
        """new Promise((keep) => { const port = new SharedWorker('/worker').port;
           port.onmessage = (event) => keep(event.data); port.postMessage(0); })""",
        """new Promise((keep) => { const port = new SharedWorker('/worker').port;
           port.onmessage = (event) => keep(event.data); port.postMessage(0); })""",
        1,
    ),
    "window names": ("window.name = 'a'", "window.name", ""),
    "focus": ("window.focus()", "document.hasFocus()", True),
}
WORKER = "let n = 0; onconnect = (event) => { event.ports[0].onmessage = () => event.ports[0].postMessage(++n); };"


def test_what_one_session_stores_or_holds_is_not_there_for_another():
    async def play(browser):
        one, two = [await page_in(browser, "<!doctype html>", files={"/worker": WORKER}) for _ in range(2)]
        seen = {}
        for name, (write, read, _) in STATES.items():
            await one.evaluate(write)
            seen[name] = await two.evaluate(read)
        return seen

    assert with_browser(play) == {name: nothing for name, (_, _, nothing) in STATES.items()}


REFUSED = {
    "place": "new Promise((keep) => navigator.geolocation.getCurrentPosition(() => keep('given'), () => keep('no')))",
    "notifications": "Notification.requestPermission().then((answer) => answer === 'granted' ? 'given' : 'no')",
    "camera": "navigator.mediaDevices.getUserMedia({video: true}).then(() => 'given', () => 'no')",
    "files": "showOpenFilePicker().then(() => 'given', () => 'no')",
    "screen": "navigator.mediaDevices.getDisplayMedia().then(() => 'given', () => 'no')",
}


def test_a_page_is_given_no_permission_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    html = """<!doctype html><body style='margin:0'>
      <a download='kept.txt' href='data:text/plain,x' style='position:absolute;left:0;top:0;width:99px'>get it</a>
      <input id=i type=file style='position:absolute;left:0;top:40px;width:99px;height:24px'>"""

    async def play(browser):
        page = await page_in(browser, html)
        await _do(page, Point(20, 12), Point(20, 52))
        await page.act(TypeText("x"))
        answers = {name: await page.evaluate(ask) for name, ask in REFUSED.items()}
        files = [path.name for path in tmp_path.rglob("*") if "kept" in path.name]
        return answers, files, await page.evaluate("i.files.length")

    assert with_browser(play) == (dict.fromkeys(REFUSED, "no"), [], 0)
