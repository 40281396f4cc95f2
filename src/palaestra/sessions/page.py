"""A page that a task lives on: loaded from memory, cut off from every network, acted on by mouse and keyboard.

Every request of the page comes here first: the task's own origin is answered by the task, everything else is refused.
The page's clock stands still except after loading and after each act, when it passes a fixed time (`VirtualTime`), so
that a picture shows the page settled, and the same acts give the same pictures. `prelude.js` runs before the page's own
scripts: it seeds chance, switches CSS animations off, keeps drop-down lists inside the page and gives the session a
clipboard of its own. Dialogs are dismissed, downloads and file choosers are refused.

A page that crashes, or does not answer within its deadline, is an `SessionFailed` from then on. Whether it still
answers is asked *before* it is made to draw, because a page that hangs while drawing would hold up its neighbours.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from palaestra.errors import SessionFailed
from palaestra.sessions.action import Move, Scroll, UiAction, Wait
from palaestra.sessions.browser import Browser, Target
from palaestra.sessions.cdp import Call, CdpError
from palaestra.sessions.input_events import InputEvents
from palaestra.sessions.screen import Screenshot, Size
from palaestra.sessions.virtual_time import SETTLE_MS, START_S, PageClock, RealTime, VirtualTime

__all__ = ["ORIGIN", "Page", "PageRequest", "PageResponse"]

ORIGIN = "http://task.localhost"
PROMISE_MS = 50.0
"""Page time that passes between two looks at a promise."""

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

_PRELUDE = resources.files("palaestra.sessions").joinpath("prelude.js").read_text("utf-8")
_REPORT = "palaestraClipboard"
"""The function by which the prelude reports what was copied; it is gone before the page's own scripts run."""


def _prelude(seed: int, clipboard: str, start_s: float | None) -> str:
    settings = json.dumps({"seed": seed % 2**32, "clipboard": clipboard, "start": start_s})
    head = f"const settings = {settings}; const report = window.{_REPORT}; delete window.{_REPORT};"
    return f"(() => {{ {head}\n{_PRELUDE}\n}})();"


class Page:
    """One page of one task."""

    def __init__(self, browser: Browser, target: Target, size: Size, serve: Serve, deadline: float) -> None:
        self._browser, self._target, self._size = browser, target, size
        self._serve, self._deadline = serve, deadline
        self._input = InputEvents()
        self._clock: PageClock = (
            VirtualTime(browser.cdp, target.session, deadline=deadline)
            if browser.installed.draws_on_demand
            else RealTime()
        )
        loop = asyncio.get_running_loop()
        self._committed: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._loaded: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._broken: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._failure: SessionFailed | None = None
        self._seed = 0
        self._prelude_id: asyncio.Future[dict[str, Any]] | None = None
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
        self._seed = seed
        calls: list[Call] = [
            # Without it a document that has no script of its own runs the prelude at the first evaluation only.
            ("Runtime.enable", {}),
            ("Runtime.addBinding", {"name": _REPORT}),
            ("Fetch.enable", {"patterns": [{"urlPattern": "*"}]}),
            ("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}),
            ("Page.setInterceptFileChooserDialog", {"enabled": True}),
        ]
        if not self._browser.installed.draws_on_demand:
            metrics = {"width": self._size.width, "height": self._size.height, "deviceScaleFactor": 1, "mobile": False}
            calls.append(("Emulation.setDeviceMetricsOverride", metrics))
        self._install_prelude("")
        await self._in_time(cdp.begin_all(calls, session=session), "the page could not be prepared")
        await self._guarded(self._clock.start())
        await self._load(entry)

    def _install_prelude(self, clipboard: str) -> None:
        """Have every new document begin with this clipboard, instead of the one it was installed with before."""
        cdp, session, old = self._browser.cdp, self._target.session, self._prelude_id
        if old is not None and old.done() and old.exception() is None:
            cdp.tell("Page.removeScriptToEvaluateOnNewDocument", old.result(), session=session)
        start_s = None if self._browser.installed.draws_on_demand else START_S
        script = {"source": _prelude(self._seed, clipboard, start_s)}
        self._prelude_id = cdp.begin("Page.addScriptToEvaluateOnNewDocument", script, session=session)

    async def _load(self, entry: str) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline
        answer = await self._call("Page.navigate", {"url": f"{ORIGIN}{entry}"})
        if answer.get("errorText"):
            raise SessionFailed("load_failed", f"the task's page did not load: {answer['errorText']}")
        # Time that is granted before the new document is there would never begin to pass.
        await self._in_time(self._committed, "the page did not begin to load")
        await self._guarded(self._clock.advance(SETTLE_MS))
        while not self._loaded.done() and loop.time() < end:
            await self._guarded(self._clock.advance(SETTLE_MS))
        await self._in_time(self._loaded, "the page did not load")

    # ------------------------------------------------------------------ what the page says

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Fetch.requestPaused":
            self._answer(params)
        elif method == "Page.frameNavigated":
            if "parentId" not in params["frame"]:
                _complete(self._committed)
        elif method == "Page.loadEventFired":
            _complete(self._loaded)
        elif method == "Page.javascriptDialogOpening":
            accept = {"accept": params.get("type") == "beforeunload"}
            self._browser.cdp.tell("Page.handleJavaScriptDialog", accept, session=self._target.session)
        elif method == "Runtime.bindingCalled":
            if params["name"] == _REPORT:
                self._install_prelude(params["payload"])
        elif method == "Inspector.targetCrashed":
            self._fail("page_crashed", "the page's process died")
        elif method == "Palaestra.gone":
            self._fail("browser_gone", "the browser is gone")
        else:
            self._clock.hear(method)

    def _fail(self, reason: str, detail: str) -> None:
        if self._failure is None:
            self._failure = SessionFailed(reason, detail)
        self._clock.fail(self._failure)
        _complete(self._broken)

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
        """The JSON value of a JavaScript expression.

        A promise is waited for. If it is not kept at once, page time passes until it is: it may wait for a timer.
        """
        settings = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        calls: list[Call] = [("Runtime.evaluate", settings), ("Runtime.evaluate", {"expression": "0"})]
        value, after = self._browser.cdp.begin_each(calls, session=self._target.session)
        await self._in_time(after, f"the page did not answer {expression[:80]!r}")
        end = asyncio.get_running_loop().time() + self._deadline
        # The second expression is evaluated after the first, so what has no value yet is a promise. Whether time passes
        # depends on the page alone and not on how fast it answers.
        while not value.done() and asyncio.get_running_loop().time() < end:
            await self._guarded(self._clock.advance(PROMISE_MS))
        await self._in_time(value, f"the page did not keep the promise of {expression[:80]!r}")
        answer = value.result()
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"].get("exception", {}).get("description", "an exception")
            raise SessionFailed("script_failed", f"{expression[:80]} threw {str(thrown).splitlines()[0]}")
        return answer["result"].get("value")

    async def screenshot(self) -> Screenshot:
        """What the page looks like."""
        await self.evaluate("1")
        return await self.draw()

    async def draw(self) -> Screenshot:
        """What the page looks like, for whoever has just heard from it."""
        ticks = self._clock.frame_ticks()
        picture: Screenshot = await self._guarded(self._browser.draw(self._target, ticks, timeout=self._deadline))
        return picture

    async def settle(self, milliseconds: float = SETTLE_MS) -> None:
        """Let page time pass, so that what an event has begun is over.

        The frame comes first: events and animations are only begun by it, and tasks that follow an input wait for it.
        """
        await self._frame()
        await self._guarded(self._clock.advance(milliseconds))

    async def act(self, action: UiAction) -> None:
        """Perform an action with real input events; `Terminate` and `Answer` do nothing to a page.

        Returns when the page has dealt with all of them and its time has passed, so that the next picture shows the
        result.
        """
        if isinstance(action, Wait):
            await self.evaluate("1")
            await self.settle(action.seconds * 1000)
            return
        events = list(self._input.of(action))
        if not events:
            await self.evaluate("1")
            return
        sent = self._browser.cdp.begin_all(events, session=self._target.session)
        await self._acknowledge(sent, at_once=isinstance(action, Move | Scroll))
        if isinstance(action, Scroll):
            # The wheel is acknowledged one frame before the content has moved.
            await self._frame()
        await self.settle()

    async def _acknowledge(self, sent: asyncio.Future[dict[str, Any]], *, at_once: bool) -> None:
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
            await self._frame()
            at_once = False
        await self._in_time(sent, "the page did not take notice of the action")

    async def _frame(self) -> None:
        """Let one frame pass without taking a picture."""
        ticks = self._clock.frame_ticks()
        await self._guarded(self._browser.tick(self._target, ticks, timeout=self._deadline))

    async def close(self) -> None:
        """Dispose of the page and its context."""
        await self._browser.close_page(self._target)

    # ------------------------------------------------------------------ calls and their failures

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        answer = self._browser.cdp.begin(method, params, session=self._target.session)
        await self._in_time(answer, f"the page did not answer {method}")
        return answer.result()

    async def _in_time(self, answer: asyncio.Future[dict[str, Any]], problem: str) -> None:
        """Wait for an answer; a page that breaks meanwhile, or that has no answer by its deadline, fails."""

        async def waited() -> None:
            both = (answer, self._broken)
            await asyncio.wait(both, timeout=self._deadline, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
            elif self._failure is not None:
                raise self._failure
            else:
                raise SessionFailed("hung", f"{problem} within {self._deadline:g} s")

        await self._guarded(waited())

    async def _guarded(self, doing: Any) -> Any:
        """Whatever breaks, the page is broken from then on, and by the first cause."""
        if self._failure is not None:
            doing.close()
            raise self._failure
        try:
            return await doing
        except SessionFailed as failure:
            self._fail(failure.reason, failure.detail)
        except CdpError as error:
            self._fail("page_gone", f"the browser said: {error}")
        assert self._failure is not None
        raise self._failure


def _complete(future: asyncio.Future[dict[str, Any]]) -> None:
    if not future.done():
        future.set_result({})
