"""`Page`: the page of a task, served from memory, without network access, operated by mouse and keyboard events.

Every request of the page is intercepted: the task answers requests to its own origin, all others are refused. The
page's clock stands still except after loading and after each act, when it advances by a fixed time (`VirtualTime`), so
that a screenshot shows a settled page and the same acts give the same screenshots. `prelude.js` runs before the page's
own scripts: it seeds the random numbers, disables CSS animations, keeps drop-down lists inside the page and gives each
session its own clipboard. Dialogs are dismissed, downloads and file choosers are refused.

A page that crashes, or does not respond within its deadline, raises `SessionFailed` from then on. It is checked
*before* it draws, because a page that hangs while drawing would block the others.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Callable, Coroutine, Hashable
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import urlsplit

from palaestra.errors import SessionFailed
from palaestra.sessions.action import Move, Scroll, UiAction, Wait
from palaestra.sessions.browser.browser import Browser, PageTarget
from palaestra.sessions.browser.cdp import Call, CdpError
from palaestra.sessions.browser.input_events import InputEvents
from palaestra.sessions.browser.page_clock import SETTLE_MS, START_S, PageClock, RealTime, VirtualTime
from palaestra.sessions.screen import Screenshot, Size
from palaestra.sessions.suite import PageRequest, PageResponse, Task

ORIGIN = "http://task.localhost"
PROMISE_MS = 50.0
"""Page time that passes between two checks of a promise."""

QUICK_S = 0.05
"""Seconds to wait for an input event before a frame is drawn, which some events need."""


T = TypeVar("T")
Serve = Callable[[PageRequest], PageResponse | None]

_PRELUDE = resources.files("palaestra.sessions.browser").joinpath("prelude.js").read_text("utf-8")
_CLIPBOARD_BINDING = "palaestraClipboard"
"""The function by which the prelude reports copied text; it is removed before the page's own scripts run."""


def _build_prelude(seed: int, clipboard: str, start_s: float | None, reseed: str | None) -> str:
    settings = json.dumps({"seed": seed % 2**32, "clipboard": clipboard, "start": start_s, "reseed": reseed})
    binding = f"window.{_CLIPBOARD_BINDING}"
    head = f"const settings = {settings}; const report = {binding}; delete {binding};"
    return f"(() => {{ {head}\n{_PRELUDE}\n}})();"


class Page:
    """One page of one task."""

    def __init__(self, browser: Browser, target: PageTarget, size: Size, serve: Serve, deadline: float) -> None:
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
        self._seed, self._clipboard = 0, ""
        self._reseed_event: str | None = None
        self._prelude_id: asyncio.Future[dict[str, Any]] | None = None
        self.blocked: list[str] = []
        """URLs that the page requested and that were refused."""

    @classmethod
    async def open(
        cls, browser: Browser, size: Size, serve: Serve, *, seed: int, entry: str = "/", deadline: float = 10.0
    ) -> Page:
        """Open a page that shows what the task serves at `entry`."""
        target = await browser.open(size)
        page = cls(browser, target, size, serve, deadline)
        try:
            await page._prepare(seed, entry)
        except BaseException:
            await page.close()
            raise
        return page

    @classmethod
    async def open_task(cls, browser: Browser, task: Task, *, seed: int, deadline: float = 10.0) -> Page:
        """Open the page of a task, or use one that was loaded in advance."""
        key = _spare_key(task, deadline)
        page = None if key is None else await browser.loaded_pages.take(key)
        if page is None:
            return await cls.open(browser, task.screen, task.serve, seed=seed, entry=task.entry, deadline=deadline)
        assert isinstance(page, cls)
        page._begin_episode(task.serve, seed)
        return page

    @classmethod
    def prepare_spare(cls, browser: Browser, task: Task, *, deadline: float = 10.0) -> None:
        """Prepare for the next episode: a page that has loaded this task, if it may be, otherwise a blank one."""
        browser.prepare_spare(task.screen)
        key = _spare_key(task, deadline)
        if key is None or not browser.installed.draws_on_demand or browser.is_gone:
            return

        async def load() -> Page:
            target = await browser.open(task.screen, spare=True)
            page = cls(browser, target, task.screen, task.serve, deadline)
            page._reseed_event = f"palaestra-{secrets.token_hex(8)}"
            try:
                await page._prepare(0, task.entry)
            except BaseException:
                await page.close()
                raise
            return page

        browser.loaded_pages.prepare(key, load)

    def _begin_episode(self, serve: Serve, seed: int) -> None:
        """Make a page that was loaded in advance what it would be if it had been loaded with this seed."""
        self._target.is_spare = False
        self._serve = serve
        event, self._reseed_event = self._reseed_event, None
        dispatch = f"dispatchEvent(new CustomEvent('{event}', {{detail: {seed % 2**32}}})), 0"
        self._browser.cdp.send("Runtime.evaluate", {"expression": dispatch}, session=self._target.session)
        self._seed = seed
        self._install_prelude()

    @property
    def has_failed(self) -> bool:
        """Whether the page has crashed or stopped responding."""
        return self._failure is not None

    async def _prepare(self, seed: int, entry: str) -> None:
        cdp, session = self._browser.cdp, self._target.session
        cdp.subscribe(session, self._on_event)
        self._seed = seed
        calls: list[Call] = [
            # Without it, a document without scripts runs the prelude only at the first evaluation.
            ("Runtime.enable", {}),
            ("Runtime.addBinding", {"name": _CLIPBOARD_BINDING}),
            ("Fetch.enable", {"patterns": [{"urlPattern": "*"}]}),
            ("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}),
            ("Page.setInterceptFileChooserDialog", {"enabled": True}),
        ]
        if not self._browser.installed.draws_on_demand:
            metrics = {"width": self._size.width, "height": self._size.height, "deviceScaleFactor": 1, "mobile": False}
            calls.append(("Emulation.setDeviceMetricsOverride", metrics))
        self._install_prelude()
        await self._wait_for(cdp.start_all(calls, session=session), "the page could not be prepared")
        await self._fail_on_error(self._clock.start())
        await self._load(entry)

    def _install_prelude(self) -> None:
        """Make every new document start with the current seed and clipboard."""
        cdp, session, old = self._browser.cdp, self._target.session, self._prelude_id
        if old is not None and old.done() and old.exception() is None:
            cdp.send("Page.removeScriptToEvaluateOnNewDocument", old.result(), session=session)
        start_s = None if self._browser.installed.draws_on_demand else START_S
        script = {"source": _build_prelude(self._seed, self._clipboard, start_s, self._reseed_event)}
        self._prelude_id = cdp.start_call("Page.addScriptToEvaluateOnNewDocument", script, session=session)

    async def _load(self, entry: str) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline
        response = await self._call("Page.navigate", {"url": f"{ORIGIN}{entry}"})
        if response.get("errorText"):
            raise SessionFailed("load_failed", f"the task's page did not load: {response['errorText']}")
        # Page time granted before the new document is committed would never pass.
        await self._wait_for(self._committed, "the page did not begin to load")
        await self._fail_on_error(self._clock.advance(SETTLE_MS))
        while not self._loaded.done() and loop.time() < end:
            await self._fail_on_error(self._clock.advance(SETTLE_MS))
        await self._wait_for(self._loaded, "the page did not load")

    # ------------------------------------------------------------------ events of the page

    def _on_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Fetch.requestPaused":
            self._serve_request(params)
        elif method == "Page.frameNavigated":
            if "parentId" not in params["frame"]:
                _complete(self._committed)
        elif method == "Page.loadEventFired":
            _complete(self._loaded)
        elif method == "Page.javascriptDialogOpening":
            accept = {"accept": params.get("type") == "beforeunload"}
            self._browser.cdp.send("Page.handleJavaScriptDialog", accept, session=self._target.session)
        elif method == "Runtime.bindingCalled":
            if params["name"] == _CLIPBOARD_BINDING:
                self._clipboard = params["payload"]
                self._install_prelude()
        elif method == "Inspector.targetCrashed":
            self._fail("page_crashed", "the page's process died")
        elif method == "Palaestra.gone":
            self._fail("browser_gone", "the browser is gone")
        else:
            self._clock.on_event(method)

    def _fail(self, reason: str, detail: str) -> None:
        if self._failure is None:
            self._failure = SessionFailed(reason, detail)
        self._clock.fail(self._failure)
        _complete(self._broken)

    def _serve_request(self, params: dict[str, Any]) -> None:
        request, number = params["request"], params["requestId"]
        parts = urlsplit(request["url"])
        cdp, session = self._browser.cdp, self._target.session
        reply: PageResponse | None = None
        if f"{parts.scheme}://{parts.netloc}" == ORIGIN:
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            body = request.get("postData", "").encode()
            reply = self._ask_task(PageRequest(request["method"], path, body))
        elif parts.scheme in ("data", "blob"):
            cdp.send("Fetch.continueRequest", {"requestId": number}, session=session)
            return
        if reply is None:
            self.blocked.append(request["url"][:200])
            refusal = {"requestId": number, "errorReason": "BlockedByClient"}
            cdp.send("Fetch.failRequest", refusal, session=session)
            return
        fulfilment = {
            "requestId": number,
            "responseCode": reply.status,
            "responseHeaders": [{"name": "Content-Type", "value": reply.media_type}],
            "body": base64.b64encode(reply.body).decode(),
        }
        cdp.send("Fetch.fulfillRequest", fulfilment, session=session)

    def _ask_task(self, request: PageRequest) -> PageResponse:
        try:
            return self._serve(request) or PageResponse(b"", status=404)
        except Exception as error:  # noqa: BLE001  an error in the task's own code fails its page only
            self._fail("task_failed", f"answering {request.path[:100]!r} raised {type(error).__name__}: {error}")
            return PageResponse(b"", status=500)

    # ------------------------------------------------------------------ operating the page

    async def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression.

        A promise is awaited. While it is pending, page time passes, because it may wait for a timer.
        """
        settings = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        calls: list[Call] = [("Runtime.evaluate", settings), ("Runtime.evaluate", {"expression": "0"})]
        value, after = self._browser.cdp.start_calls(calls, session=self._target.session)
        await self._wait_for(after, f"the page did not respond to {expression[:80]!r}")
        end = asyncio.get_running_loop().time() + self._deadline
        # The second expression is evaluated after the first, so a missing value is a pending promise. Whether time
        # passes depends on the page alone and not on its speed.
        while not value.done() and asyncio.get_running_loop().time() < end:
            await self._fail_on_error(self._clock.advance(PROMISE_MS))
        await self._wait_for(value, f"the page did not resolve the promise of {expression[:80]!r}")
        response = value.result()
        if "exceptionDetails" in response:
            thrown = response["exceptionDetails"].get("exception", {}).get("description", "an exception")
            raise SessionFailed("script_failed", f"{expression[:80]} threw {str(thrown).splitlines()[0]}")
        return response["result"].get("value")

    async def screenshot(self) -> Screenshot:
        """A screenshot of the page, after checking that it responds."""
        await self.evaluate("1")
        return await self.draw()

    async def draw(self) -> Screenshot:
        """A screenshot of a page that has just responded."""
        ticks = self._clock.frame_ticks()
        return await self._fail_on_error(self._browser.draw(self._target, ticks, timeout=self._deadline))

    async def settle(self, milliseconds: float = SETTLE_MS) -> None:
        """Let page time pass, so that the page finishes handling an event.

        A frame is drawn first: it starts events and animations, and tasks after an input wait for it.
        """
        await self._frame()
        await self._fail_on_error(self._clock.advance(milliseconds))

    async def act(self, action: UiAction) -> None:
        """Perform an action with input events; `Terminate` and `Answer` do nothing to a page.

        Returns when the page has handled them and its time has passed, so that the next screenshot shows the result.
        """
        if isinstance(action, Wait):
            await self.evaluate("1")
            await self.settle(action.seconds * 1000)
            return
        events = list(self._input.build_calls(action))
        if not events:
            await self.evaluate("1")
            return
        sent = self._browser.cdp.start_all(events, session=self._target.session)
        await self._wait_for_events(sent, needs_frame=isinstance(action, Move | Scroll))
        if isinstance(action, Scroll):
            # The wheel event is acknowledged one frame before the content moves.
            await self._frame()
        await self.settle()

    async def _wait_for_events(self, sent: asyncio.Future[Any], *, needs_frame: bool) -> None:
        """Wait until the page has handled every event.

        Moves and the wheel are handled in the next frame, which is drawn first with `needs_frame`. Pressing a button
        also handles the moves before it.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline
        while loop.time() < end:
            if not needs_frame:
                await asyncio.wait((sent,), timeout=QUICK_S)
            if sent.done():
                break
            # A page that hangs must be detected before a frame is requested.
            await self.evaluate("1")
            await self._frame()
            needs_frame = False
        await self._wait_for(sent, "the page did not handle the action")

    async def _frame(self) -> None:
        """Draw one frame without a screenshot."""
        ticks = self._clock.frame_ticks()
        await self._fail_on_error(self._browser.tick(self._target, ticks, timeout=self._deadline))

    async def close(self) -> None:
        """Close the page and its context."""
        await self._browser.close_page(self._target)

    # ------------------------------------------------------------------ calls and failures

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        response = self._browser.cdp.start_call(method, params, session=self._target.session)
        await self._wait_for(response, f"the page did not respond to {method}")
        return response.result()

    async def _wait_for(self, response: asyncio.Future[Any], problem: str) -> None:
        """Wait for a response; the page fails if it breaks meanwhile or the deadline passes."""

        async def wait() -> None:
            both = (response, self._broken)
            await asyncio.wait(both, timeout=self._deadline, return_when=asyncio.FIRST_COMPLETED)
            if response.done():
                response.result()
            elif self._failure is not None:
                raise self._failure
            else:
                raise SessionFailed("hung", f"{problem} within {self._deadline:g} s")

        await self._fail_on_error(wait())

    async def _fail_on_error(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine; its first error is the failure of the page from then on."""
        if self._failure is not None:
            coroutine.close()
            raise self._failure
        try:
            return await coroutine
        except SessionFailed as failure:
            self._fail(failure.reason, failure.detail)
        except CdpError as error:
            self._fail("page_gone", f"the browser returned an error: {error}")
        assert self._failure is not None
        raise self._failure


def _spare_key(task: Task, deadline: float) -> Hashable:
    """What a page that is loaded in advance depends on; None if the task's page cannot be."""
    return None if task.preload_key is None else (type(task), task.preload_key, task.screen, deadline)


def _complete(future: asyncio.Future[dict[str, Any]]) -> None:
    if not future.done():
        future.set_result({})
