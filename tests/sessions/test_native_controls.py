"""Controls that a desktop browser draws in windows of their own: lists, pickers and choosers."""

import io

import pytest
from PIL import Image
from tests.sessions.browsing import SCREEN, page_in, session_in, with_browser

from palaestra.sessions.action import Click, Point, PressKeys, TypeText
from palaestra.sessions.suites import suites
from palaestra.sessions.task import TaskRequest

FORM = """<!doctype html><style>body{margin:0} select{position:absolute;left:10px;width:120px}</style>
  <form><select id=fruit name=fruit style='top:10px'><option>Apple<option>Banana<option disabled>Coconut
    <optgroup label=Late><option>Date<option>Elderberry</optgroup></select>
  <select id=size name=size style='top:40px'><option value=s>small<option value=m selected>medium<option value=l>large
  </select></form>
  <script>window.heard = []; for (const kind of ['input', 'change'])
    addEventListener(kind, (event) => heard.push([kind, event.target.id, event.target.value]));</script>"""
VALUES = "[fruit.value, size.value]"


def _colors(picture, box):
    image = Image.open(io.BytesIO(picture.data)).convert("RGB").crop(box)
    return {color for _, color in image.getcolors(1 << 16)}


def test_a_list_opens_in_the_picture_and_an_item_is_chosen_with_the_mouse():
    async def play(browser):
        page = await page_in(browser, FORM)
        closed = await page.screenshot()
        await page.act(Click(Point(70, 20)))
        opened = await page.screenshot()
        rows = await page.evaluate("[...fruit.options].map((one) => one.getBoundingClientRect().top)")
        await page.act(Click(Point(40, round(rows[3]) + 8)))
        chosen = await page.evaluate(VALUES), await page.evaluate("heard")
        await page.act(Click(Point(70, 20)))
        await page.act(Click(Point(190, 190)))  # beside it: it closes, and nothing is chosen
        return closed, opened, chosen, await page.evaluate(VALUES), await page.screenshot()

    closed, opened, chosen, after, last = with_browser(play)
    below = (15, 62, 120, 100)
    assert _colors(closed, below) == {(255, 255, 255)}
    assert len(_colors(opened, below)) > 2
    assert chosen == (["Date", "m"], [["input", "fruit", "Date"], ["change", "fruit", "Date"]])
    assert after == ["Date", "m"]
    assert _colors(last, below) == {(255, 255, 255)}


def test_a_list_is_worked_with_the_keyboard():
    async def play(browser):
        page = await page_in(browser, FORM)
        await page.act(PressKeys(("Tab",)))
        await page.act(PressKeys((" ",)))
        opened = await page.evaluate("fruit.matches(':open')")
        for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "Enter"):
            await page.act(PressKeys((key,)))
        by_arrows = await page.evaluate(VALUES)
        await page.act(PressKeys(("Tab",)))
        await page.act(PressKeys((" ",)))
        await page.act(TypeText("lar"))
        await page.act(PressKeys(("Enter",)))
        by_letters = await page.evaluate(VALUES)
        await page.act(PressKeys((" ",)))
        await page.act(PressKeys(("ArrowUp",)))
        await page.act(PressKeys(("Escape",)))
        return opened, by_arrows, by_letters, await page.evaluate(VALUES)

    assert with_browser(play) == (True, ["Date", "m"], ["Date", "l"], ["Date", "l"])


def test_a_list_in_a_shadow_tree_or_a_frame_or_with_a_style_of_its_own_opens_too():
    options = "<option>One<option>Two<option>Three"
    pages = {
        "shadow": f"""<div id=host></div><script>const root = host.attachShadow({{mode: 'open'}});
          root.innerHTML = "<select style='position:absolute;left:10px;top:10px'>{options}</select>";
          root.adoptedStyleSheets = [new CSSStyleSheet()]; window.list = root.querySelector('select');</script>""",
        "frame": f"""<iframe style='position:absolute;left:0;top:0;border:0' srcdoc="<style>body{{margin:0}}</style>
          <select style='position:absolute;left:10px;top:10px'>{options}</select>"></iframe>""",
        "styled": f"""<style>select{{appearance:none;background:#eee;padding:9px;position:absolute;left:10px;top:10px}}
          </style><select>{options}</select>""",
    }
    find = "window.list || (frames[0] || window).document.querySelector('select')"

    async def play(browser):
        chosen = {}
        for name, body in pages.items():
            page = await page_in(browser, f"<!doctype html><body style='margin:0'>{body}")
            await page.act(Click(Point(25, 20)))
            row = await page.evaluate(f"(() => {{ const box = ({find}).options[2].getBoundingClientRect();"
                                      "return [box.left + 5, box.top + 5].map(Math.round); })()")  # fmt: skip
            await page.act(Click(Point(*row)))
            chosen[name] = await page.evaluate(f"({find}).value"), (await page.screenshot()).size
        return chosen

    assert with_browser(play) == {name: ("Three", SCREEN) for name in pages}


def test_a_list_box_stays_as_it_is():
    html = """<!doctype html><body style='margin:0'>
      <select id=s size=3 style='position:absolute;left:0;top:0;width:90px'>
        <option>One<option>Two<option>Three</select>"""

    async def play(browser):
        page = await page_in(browser, html)
        await page.act(Click(Point(20, 28)))
        return await page.evaluate("[s.value, getComputedStyle(s).appearance]")

    assert with_browser(play) == ["Two", "auto"]


PICKERS = ("date", "time", "datetime-local", "month", "week", "color", "file")


def test_a_field_whose_picker_is_a_window_is_typed_into_and_never_stops_the_picture():
    html = """<!doctype html><body style='margin:0'>
      <input id=i type=KIND style='position:absolute;left:0;top:0;width:150px;height:24px'>"""

    async def play(browser):
        sizes = {}
        for kind in PICKERS:
            page = await page_in(browser, html.replace("KIND", kind))
            await page.act(Click(Point(140, 12)))
            await page.act(Click(Point(10, 12)))
            for keys in ((" ",), ("F4",), ("Alt", "ArrowDown"), ("Enter",)):
                await page.act(PressKeys(keys))
            await page.evaluate("try { i.showPicker() } catch { 0 }")
            sizes[kind] = (await page.screenshot()).size
            if kind == "date":
                await page.act(Click(Point(10, 12)))
                await page.act(TypeText("03142025"))
                typed = await page.evaluate("i.value")
            await page.close()
        return sizes, typed

    sizes, typed = with_browser(play)
    assert sizes == dict.fromkeys(PICKERS, SCREEN)
    assert typed == "2025-03-14"


@pytest.mark.parametrize("seed", [3, 8])
def test_a_country_is_chosen_from_the_list_of_miniwob(seed):
    if not suites()["miniwob"].names():
        pytest.skip("the miniwob package is not installed")

    async def play(browser):
        session = session_in(browser)
        spec = await session.reset(TaskRequest("miniwob/choose-list", seed))
        wanted = spec.instruction.removeprefix("Select ").removesuffix(" from the list and click Submit.")
        opened = await session.act(Click(Point(75, 66)), step=1)
        options = "[...document.querySelector('select').options]"
        row = await session._page.evaluate(f"""(() => {{ const all = {options};
          const box = all.find((one) => one.text === {wanted!r}).getBoundingClientRect();
          return [20, Math.round(box.top + box.height / 2)]; }})()""")
        await session.act(Click(Point(*row)), step=2)
        last = await session.act(Click(Point(50, 97)), step=3)
        await session.close()
        return opened.screenshot.size.width, last.progress.success

    assert with_browser(play) == (160, True)


WINDOWS = {
    "a full screen": "document.documentElement.requestFullscreen()",
    "another size": "resizeTo(500, 500); moveTo(9, 9); throw 0",
    "the pointer": "document.body.requestPointerLock()",
    "a small window": "documentPictureInPicture.requestWindow()",
    "a place to save": "showSaveFilePicker()",
    "a device": "navigator.usb.requestDevice({filters: []})",
    "a payment": "new PaymentRequest([{supportedMethods: 'https://a.example/pay'}],"
    " {total: {label: 'a', amount: {currency: 'EUR', value: '1'}}}).show()",
    "a key": "navigator.credentials.get({password: true})",
}


def test_a_page_does_not_get_another_window_nor_another_size_of_its_own():
    async def play(browser):
        seen = {}
        for name, ask in WINDOWS.items():
            script = f"onclick = async () => {{ try {{ await {ask}; document.title = 'given'; }} catch {{ }} }}"
            script = script.replace("await resizeTo", "resizeTo")
            page = await page_in(browser, f"<!doctype html><body style='height:150px'><script>{script}</script>")
            await page.act(Click(Point(30, 30)))
            seen[name] = (await page.screenshot()).size, await page.evaluate("document.title")
            await page.close()
        return seen

    assert with_browser(play) == dict.fromkeys(WINDOWS, (SCREEN, ""))


LINK = "style='position:absolute;left:0;top:0;width:99px;height:99px'"
LEAVING = {
    "a link": (f"<a href=/next target=_blank {LINK}>on</a>", "/next"),
    "a form": (f"<form action=/next target=other><button {LINK}>on</button></form>", "/next?"),
    "a button": (f"<form action=/no><button formaction=/next formtarget=_blank {LINK}>on</button></form>", "/next?"),
    "a script": (
        f"<form action=/next target=_blank><p {LINK} onclick='this.parentNode.submit()'>on</p></form>",
        "/next?",
    ),
    "a frame": (f"<iframe name=inside></iframe><a href=/next target=inside {LINK}>on</a>", "/"),
}


def test_what_would_open_in_a_new_window_opens_in_the_only_one():
    async def play(browser):
        places = {}
        for name, (body, _) in LEAVING.items():
            files = {"/next": "<!doctype html>next", "/next?": "<!doctype html>next"}
            page = await page_in(browser, f"<!doctype html><body>{body}", files=files)
            before = await _windows(browser)
            await page.act(Click(Point(30, 30)))
            places[name] = await page.evaluate("location.pathname + (location.href.endsWith('?') ? '?' : '')")
            assert await _windows(browser) == before
            await page.close()
        return places

    assert with_browser(play) == {name: place for name, (_, place) in LEAVING.items()}


async def _windows(browser):
    targets = (await browser.cdp.call("Target.getTargets"))["targetInfos"]
    return sum(target["type"] == "page" for target in targets)
