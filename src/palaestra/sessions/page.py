"""A page that a task lives on: loaded from memory, cut off from every network, acted on by mouse and keyboard.

Every request of the page comes here first: the task's own origin is answered by the task, everything else is refused.
Time starts at a fixed instant, chance is seeded, animations are off, dialogs are dismissed. A page that crashes, or
does not answer within its deadline, is an `EnvironmentFailed` from then on. Whether it still answers is asked *before*
it is made to draw, because a page that hangs while drawing would hold up its neighbours.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from palaestra.errors import EnvironmentFailed
from palaestra.sessions.action import Click, Drag, Move, Point, PressKeys, Scroll, TypeText, UiAction, Wait
from palaestra.sessions.browser import Browser, Target
from palaestra.sessions.cdp import Call, CdpError
from palaestra.sessions.keys import MODIFIERS, Key, key_named
from palaestra.sessions.screen import Screenshot, Size

__all__ = ["ORIGIN", "Page", "PageRequest", "PageResponse"]

ORIGIN = "http://task.localhost"
FRAME_S = 0.02
QUICK_S = 0.05
"""How long an event may take before a frame is drawn to help it along, if it is not known to need one."""


@dataclass(frozen=True)
class PageRequest:
    """Something the page asked its own origin for."""

    method: str
    path: str
    body: bytes


@dataclass(frozen=True)
class PageResponse:
    """The task's answer."""

    body: bytes
    media_type: str = "text/html; charset=utf-8"
    status: int = 200


Serve = Callable[[PageRequest], PageResponse | None]

_PRELUDE = """
(() => {
  let state = SEED >>> 0;
  Math.random = () => { state = (state + 0x6D2B79F5) | 0; let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t; return ((t ^ (t >>> 14)) >>> 0) / 4294967296; };
  const Real = Date, began = Real.now(), base = Real.UTC(2024, 0, 15, 12, 0, 0);
  const now = () => base + Real.now() - began;
  window.Date = new Proxy(Real, {
    construct: (target, given) => given.length ? new target(...given) : new target(now()),
    apply: () => new Real(now()).toString(),
    get: (target, name) => name === 'now' ? now : Reflect.get(target, name),
  });
  window.open = () => null;
  window.print = () => {};
  const still = () => {
    const style = document.createElement('style');
    style.textContent = '*,*::before,*::after{animation:none!important;transition:none!important;' +
      'caret-color:transparent!important;scroll-behavior:auto!important}';
    (document.head || document.documentElement).appendChild(style);
  };
  document.documentElement ? still() : document.addEventListener('readystatechange', still, {once: true});
})();
"""


class Page:
    """One page of one task."""

    def __init__(self, browser: Browser, target: Target, size: Size, serve: Serve, deadline: float) -> None:
        self._browser, self._target, self._size = browser, target, size
        self._serve, self._deadline = serve, deadline
        self._pointer = Point(0, 0)
        self._failure: EnvironmentFailed | None = None
        self.blocked: list[str] = []
        """What the page asked the world for, and did not get."""

    @classmethod
    async def open(
        cls, browser: Browser, size: Size, serve: Serve, *, seed: int, entry: str = "/", deadline: float = 10.0
    ) -> Page:
        """A page that shows what the task serves at `entry`."""
        target = await browser.open(size)
        page = cls(browser, target, size, serve, deadline)
        try:
            await page._prepare(seed, entry)
        except BaseException:
            await page.close()
            raise
        return page

    async def _prepare(self, seed: int, entry: str) -> None:
        cdp, session = self._browser.cdp, self._target.session
        cdp.listen(session, self._hear)
        calls: list[Call] = [
            ("Fetch.enable", {"patterns": [{"urlPattern": "*"}]}),
            ("Page.addScriptToEvaluateOnNewDocument", {"source": _PRELUDE.replace("SEED", str(seed % 2**32))}),
            ("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}),
        ]
        if not self._browser.installed.draws_on_demand:
            metrics = {"width": self._size.width, "height": self._size.height, "deviceScaleFactor": 1, "mobile": False}
            calls.append(("Emulation.setDeviceMetricsOverride", metrics))
        await self._in_time(cdp.begin_all(calls, session=session), "the page was prepared")
        loaded = asyncio.get_running_loop().create_future()
        self._loaded = loaded
        answer = await self._call("Page.navigate", {"url": f"{ORIGIN}{entry}"})
        if answer.get("errorText"):
            raise EnvironmentFailed("load_failed", f"the task's page did not load: {answer['errorText']}")
        await self._in_time(loaded, "the page loaded")

    # ------------------------------------------------------------------ what the page says

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Fetch.requestPaused":
            self._answer(params)
        elif method == "Page.loadEventFired":
            loaded = getattr(self, "_loaded", None)
            if loaded is not None and not loaded.done():
                loaded.set_result({})
        elif method == "Page.javascriptDialogOpening":
            accept = {"accept": params.get("type") == "beforeunload"}
            self._browser.cdp.tell("Page.handleJavaScriptDialog", accept, session=self._target.session)
        elif method == "Inspector.targetCrashed":
            self._fail("page_crashed", "the page's process died")
        elif method == "Palaestra.gone":
            self._fail("browser_gone", "the browser is gone")

    def _fail(self, reason: str, detail: str) -> None:
        if self._failure is None:
            self._failure = EnvironmentFailed(reason, detail)
        loaded = getattr(self, "_loaded", None)
        if loaded is not None and not loaded.done():
            loaded.set_exception(self._failure)
            loaded.exception()  # looked at: whoever waits still gets it, and nobody is warned if none does

    def _answer(self, params: dict[str, Any]) -> None:
        request, number = params["request"], params["requestId"]
        parts = urlsplit(request["url"])
        cdp, session = self._browser.cdp, self._target.session
        response: PageResponse | None = None
        if f"{parts.scheme}://{parts.netloc}" == ORIGIN:
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            body = request.get("postData", "").encode()
            response = self._answer_of_task(PageRequest(request["method"], path, body))
        elif parts.scheme in ("data", "blob"):
            cdp.tell("Fetch.continueRequest", {"requestId": number}, session=session)
            return
        if response is None:
            self.blocked.append(request["url"][:200])
            refusal = {"requestId": number, "errorReason": "BlockedByClient"}
            cdp.tell("Fetch.failRequest", refusal, session=session)
            return
        fulfilment = {
            "requestId": number, "responseCode": response.status,
            "responseHeaders": [{"name": "Content-Type", "value": response.media_type}],
            "body": base64.b64encode(response.body).decode(),
        }  # fmt: skip
        cdp.tell("Fetch.fulfillRequest", fulfilment, session=session)

    def _answer_of_task(self, request: PageRequest) -> PageResponse:
        try:
            return self._serve(request) or PageResponse(b"", status=404)
        except Exception as error:  # noqa: BLE001  whatever a task's own code does, only its page is broken by it
            self._fail("task_failed", f"answering {request.path[:100]!r} raised {type(error).__name__}: {error}")
            return PageResponse(b"", status=500)

    # ------------------------------------------------------------------ what the page is asked

    async def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression; promises are waited for."""
        settings = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = await self._call("Runtime.evaluate", settings)
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"].get("exception", {}).get("description", "an exception")
            raise EnvironmentFailed("script_failed", f"{expression[:80]} threw {str(thrown).splitlines()[0]}")
        return answer["result"].get("value")

    async def screenshot(self) -> Screenshot:
        """What the page looks like."""
        await self.evaluate("1")
        return await self.draw()

    async def draw(self) -> Screenshot:
        """What the page looks like, for whoever has just heard from it."""
        picture: Screenshot = await self._guarded(self._browser.draw(self._target, timeout=self._deadline))
        return picture

    async def act(self, action: UiAction) -> None:
        """Perform an action with real input events; `Terminate` and `Answer` do nothing to a page.

        Returns when the page has dealt with all of them, so that what it draws next shows what came of them.
        """
        if isinstance(action, Wait):
            await self._wait(action.seconds)
            return
        events = list(self._events(action))
        if not events:
            await self.evaluate("1")
            return
        sent = self._browser.cdp.begin_all(events, session=self._target.session)
        await self._settle(sent, at_once=isinstance(action, Move | Scroll))
        if isinstance(action, Scroll):
            # The wheel is acknowledged one frame before the content has moved.
            await self._guarded(self._browser.tick(self._target, timeout=self._deadline))

    def _events(self, action: UiAction) -> Iterator[Call]:
        if isinstance(action, Click):
            yield from self._click(action)
        elif isinstance(action, Move):
            yield self._mouse("mouseMoved", action.at)
        elif isinstance(action, Drag):
            yield from self._drag(action)
        elif isinstance(action, TypeText):
            yield from _typed(action.text)
        elif isinstance(action, PressKeys):
            yield from _pressed(action.keys)
        elif isinstance(action, Scroll):
            at = action.at or self._pointer
            yield self._mouse("mouseWheel", at, deltaX=action.dx, deltaY=action.dy)

    async def _settle(self, sent: asyncio.Future[dict[str, Any]], *, at_once: bool) -> None:
        """Wait until every event was dealt with.

        A move and the wheel are dealt with in the next frame, which comes on demand: it is drawn `at_once`. A button
        that is pressed takes the moves before it along.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline
        while loop.time() < end:
            if not at_once:
                await asyncio.wait((sent,), timeout=QUICK_S)
            if sent.done():
                break
            # A page that hangs is found out here, before a frame is asked of it.
            await self.evaluate("1")
            await self._guarded(self._browser.tick(self._target, timeout=self._deadline))
            at_once = False
        await self._in_time(sent, "the page took notice of the action")

    async def close(self) -> None:
        """Dispose of the page and its context."""
        await self._browser.close_page(self._target)

    # ------------------------------------------------------------------ mouse and keyboard

    def _mouse(self, kind: str, at: Point, **more: Any) -> Call:
        self._pointer = at
        return "Input.dispatchMouseEvent", {"type": kind, "x": at.x, "y": at.y, **more}

    def _click(self, click: Click) -> Iterator[Call]:
        at = click.at or self._pointer
        bits = sum(MODIFIERS[name] for name in click.held)
        for name in click.held:
            yield _key("rawKeyDown", key_named(name), bits)
        yield self._mouse("mouseMoved", at, modifiers=bits)
        mask = _BUTTONS[click.button]
        for count in range(1, click.times + 1):
            shared = {"button": click.button, "clickCount": count, "modifiers": bits}
            yield self._mouse("mousePressed", at, buttons=mask, **shared)
            yield self._mouse("mouseReleased", at, buttons=0, **shared)
        for name in reversed(click.held):
            yield _key("keyUp", key_named(name), 0)

    def _drag(self, drag: Drag) -> Iterator[Call]:
        mask = _BUTTONS[drag.button]
        yield self._mouse("mouseMoved", drag.path[0])
        yield self._mouse("mousePressed", drag.path[0], button=drag.button, buttons=mask, clickCount=1)
        for start, end in pairwise(drag.path):
            # A drag that jumps is not recognised as one by pages that measure distances.
            for part in range(1, 6):
                x = round(start.x + (end.x - start.x) * part / 5)
                y = round(start.y + (end.y - start.y) * part / 5)
                yield self._mouse("mouseMoved", Point(x, y), button=drag.button, buttons=mask)
        yield self._mouse("mouseReleased", drag.path[-1], button=drag.button, buttons=0, clickCount=1)

    async def _wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(FRAME_S, left))
            await self.evaluate("1")
            await self._guarded(self._browser.tick(self._target, timeout=self._deadline))

    # ------------------------------------------------------------------ calls and their failures

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        call = self._browser.cdp.call(method, params, session=self._target.session, timeout=self._deadline)
        answer: dict[str, Any] = await self._guarded(call)
        return answer

    async def _in_time(self, answer: asyncio.Future[dict[str, Any]], what: str) -> None:
        async def waited() -> None:
            try:
                async with asyncio.timeout(self._deadline):
                    await answer
            except TimeoutError:
                raise EnvironmentFailed("hung", f"{self._deadline:g} s went by before {what}") from None

        await self._guarded(waited())

    async def _guarded(self, doing: Any) -> Any:
        """Whatever breaks, the page is broken from then on, and by the first cause."""
        if self._failure is not None:
            doing.close()
            raise self._failure
        try:
            return await doing
        except EnvironmentFailed as failure:
            self._fail(failure.reason, failure.detail)
        except CdpError as error:
            self._fail("page_gone", f"the browser said: {error}")
        assert self._failure is not None
        raise self._failure


def _typed(text: str) -> Iterator[Call]:
    for character in text:
        key = key_named({"\n": "Enter", "\t": "Tab"}.get(character, character))
        if not key.code:
            yield "Input.insertText", {"text": character}
            continue
        bits = MODIFIERS["Shift"] if character.isupper() else 0
        yield _key("keyDown" if key.text else "rawKeyDown", key, bits)
        yield _key("keyUp", key, bits)


def _pressed(names: tuple[str, ...]) -> Iterator[Call]:
    bits = 0
    keys = [key_named(name) for name in names]
    for name, key in zip(names, keys, strict=True):
        bits |= MODIFIERS.get(name, 0)
        # With Control or Meta held a letter is a command, not text.
        types = key.text and not bits & (MODIFIERS["Control"] | MODIFIERS["Meta"])
        yield _key("keyDown" if types else "rawKeyDown", key, bits)
    for name, key in zip(reversed(names), reversed(keys), strict=True):
        bits &= ~MODIFIERS.get(name, 0)
        yield _key("keyUp", key, bits)


def _key(kind: str, key: Key, bits: int) -> Call:
    event: dict[str, Any] = {
        "type": kind, "key": key.name, "code": key.code, "windowsVirtualKeyCode": key.number, "modifiers": bits,
    }  # fmt: skip
    if kind == "keyDown":
        event["text"] = event["unmodifiedText"] = key.text
    if kind == "rawKeyDown" and bits & MODIFIERS["Control"] and key.name.lower() in _EDITING:
        event["commands"] = [_EDITING[key.name.lower()]]
    return "Input.dispatchKeyEvent", event


_BUTTONS = {"left": 1, "right": 2, "middle": 4}
_EDITING = {"a": "SelectAll", "c": "Copy", "v": "Paste", "x": "Cut", "z": "Undo", "y": "Redo"}
