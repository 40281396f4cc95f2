"""`Browser`: a running Chromium, with each page in its own context. `SharedBrowser` restarts one that died.

A browser that draws on demand hangs forever if two frames are requested at once. Frames therefore share one lock, and a
page that hangs while it draws is closed before the next frame.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from typing import Any, Protocol

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.browser.cdp import CdpConnection, CdpError
from palaestra.sessions.browser.chromium import Chromium, ChromiumBinary, find_chromium
from palaestra.sessions.browser.spare_pages import SparePages
from palaestra.sessions.screen import Screenshot, Size

_log = logging.getLogger(__name__)

PAGE_START_S = 10.0
"""Seconds a page's process may take to start."""

HEALTH_CHECK_S = 10.0
"""Seconds a browser may take to return its version; beyond it a new one is started."""

MAX_LOADED_PAGES = 4
"""Pages with a task's document that a browser keeps in reserve. Each takes about 14 MB."""

FRAME_MS = 16.0
"""The interval between two frames that a page is given, in ms."""

_SCREENSHOT = {"screenshot": {"format": "png", "optimizeForSpeed": True}}


class PageTarget:
    """The ids of a page in the DevTools protocol: context, target and session."""

    def __init__(self, context: str, target: str, session: str) -> None:
        self.context, self.target, self.session = context, target, session
        self.closed = self.crashed = False
        self.is_spare = True
        """Whether no episode has used the page yet."""

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        """Handle events while the page is a spare."""
        if method == "Inspector.targetCrashed":
            self.crashed = True


class LoadedPage(Protocol):
    """A page with the document of a task, such as a `Page`."""

    @property
    def has_failed(self) -> bool:
        """Whether it has crashed or stopped responding."""

    async def close(self) -> None:
        """Close it and its context."""


class Browser:
    """A running Chromium."""

    def __init__(self, installed: ChromiumBinary, chromium: Chromium, cdp: CdpConnection) -> None:
        self.installed, self._chromium, self.cdp = installed, chromium, cdp
        self._frame_lock = asyncio.Lock()
        self._targets: set[PageTarget] = set()
        self.blank_pages: SparePages[PageTarget] = SparePages(
            1, self.close_page, lambda page: not page.crashed, selective=False
        )
        self.loaded_pages: SparePages[LoadedPage] = SparePages(
            MAX_LOADED_PAGES, lambda page: page.close(), lambda page: not page.has_failed, selective=True
        )
        """Pages with a task's document, by what they show (`Page.open_task`)."""

    @classmethod
    async def start(cls, installed: ChromiumBinary | None = None) -> Browser:
        """Start a browser; `SessionFailed` when it does not start."""
        chosen = installed or find_chromium()
        chromium = await Chromium.start(chosen)
        cdp = CdpConnection(chromium.write_fd, chromium.read_fd)
        try:
            await cdp.open()
            await cdp.call("Browser.getVersion", timeout=20.0)
        except BaseException:
            await cdp.close()
            await chromium.stop()
            raise
        return cls(chosen, chromium, cdp)

    @property
    def pid(self) -> int:
        """The browser's process."""
        return self._chromium.process.pid

    @property
    def is_gone(self) -> bool:
        """Whether it has died or was closed."""
        return self.cdp.is_closed or self._chromium.process.returncode is not None

    @property
    def num_pages(self) -> int:
        """Pages in use, without spare ones."""
        return sum(not target.is_spare for target in self._targets)

    async def open(self, size: Size, *, spare: bool = False) -> PageTarget:
        """A blank page in a new context, which shares nothing with any other; `spare` if no episode uses it yet."""
        page = None if spare else await self.blank_pages.take(size)
        if page is None:
            page = await self._create_page(size)
        page.is_spare = spare
        return page

    def prepare_spare(self, size: Size) -> None:
        """Open a blank page of this size in advance, which halves the time of the next `open`.

        Only where pages draw on demand: elsewhere an unused page would draw all the time.
        """
        if self.installed.draws_on_demand and not self.is_gone:
            self.blank_pages.prepare(size, lambda: self._create_page(size))

    async def _create_page(self, size: Size) -> PageTarget:
        context = (await self.cdp.call("Target.createBrowserContext", {"disposeOnDetach": True}))["browserContextId"]
        self.cdp.send("Browser.setDownloadBehavior", {"behavior": "deny", "browserContextId": context})
        settings: dict[str, Any] = {
            "url": "about:blank",
            "browserContextId": context,
            "width": size.width,
            "height": size.height,
        }
        if self.installed.draws_on_demand:
            settings["enableBeginFrameControl"] = True
        try:
            target = (await self.cdp.call("Target.createTarget", settings))["targetId"]
            attached = await self.cdp.call("Target.attachToTarget", {"targetId": target, "flatten": True})
            page = PageTarget(context, target, attached["sessionId"])
            self.cdp.subscribe(page.session, page.on_event)
            # The response arrives once the page's process runs.
            async with asyncio.timeout(PAGE_START_S):
                await self.cdp.start_all([("Page.enable", {}), ("Inspector.enable", {})], session=page.session)
        except TimeoutError:
            self.cdp.send("Target.disposeBrowserContext", {"browserContextId": context})
            raise SessionFailed("hung", f"a page did not start within {PAGE_START_S:g} s") from None
        except BaseException:
            self.cdp.send("Target.disposeBrowserContext", {"browserContextId": context})
            raise
        self._targets.add(page)
        return page

    async def close_page(self, page: PageTarget) -> None:
        """Close the page's context and everything in it. Can be called repeatedly."""
        if page.closed:
            return
        page.closed = True
        self._targets.discard(page)
        self.cdp.unsubscribe(page.session)
        with contextlib.suppress(SessionFailed, CdpError):
            await self.cdp.call("Target.disposeBrowserContext", {"browserContextId": page.context}, timeout=5.0)

    async def draw(self, page: PageTarget, ticks: float, *, timeout: float) -> Screenshot:
        """Draw a frame with this time stamp and take a screenshot of it."""
        if not self.installed.draws_on_demand:
            shot = {"format": "png", "optimizeForSpeed": True, "captureBeyondViewport": False}
            answer = await self.cdp.call("Page.captureScreenshot", shot, session=page.session, timeout=timeout)
            return Screenshot.of(base64.b64decode(answer["data"]))
        for attempt in range(3):
            answer = await self._draw_frame(page, ticks + attempt * 0.01, timeout, **_SCREENSHOT)
            # A frame without changes may have no screenshot; the next one has it.
            if "screenshotData" in answer:
                return Screenshot.of(base64.b64decode(answer["screenshotData"]))
        raise SessionFailed("no_picture", "the page drew three frames without a screenshot")

    async def tick(self, page: PageTarget, ticks: float, *, timeout: float) -> None:
        """Draw a frame with this time stamp without a screenshot. Full browsers draw frames on their own."""
        if self.installed.draws_on_demand:
            await self._draw_frame(page, ticks, timeout)

    async def _draw_frame(self, page: PageTarget, ticks: float, timeout: float, **more: Any) -> dict[str, Any]:
        frame = {"frameTimeTicks": ticks, "interval": FRAME_MS, **more}
        async with self._frame_lock:
            answer = self.cdp.start_call("HeadlessExperimental.beginFrame", frame, session=page.session)
            try:
                async with asyncio.timeout(timeout):
                    return await asyncio.shield(answer)
            except TimeoutError:
                # Otherwise its frame would still be in progress when the next page draws.
                await self.close_page(page)
                raise SessionFailed("hung", f"the page did not draw within {timeout:g} s") from None
            except asyncio.CancelledError:
                await asyncio.wait((answer,), timeout=timeout)
                if not answer.done() or answer.exception() is not None:
                    await self.close_page(page)
                raise

    async def stop(self) -> None:
        """Kill it and remove its files."""
        await self.cdp.close()
        # The closed pipe has failed the pending calls; wait for them, so that asyncio does not warn.
        await self.loaded_pages.close()
        await self.blank_pages.close()
        await self._chromium.stop()


class SharedBrowser:
    """The browser of a session server: started when first needed, replaced when it has died or stopped answering.

    A replacement affects only the sessions whose page was in the dead browser. They have failed, and use the new one
    after their next reset.
    """

    def __init__(self, installed: ChromiumBinary | None = None) -> None:
        self._installed = installed
        self._lock = asyncio.Lock()
        self._browser: Browser | None = None
        self._stopped = False
        self.starts = 0
        """The number of browsers started."""

    async def get(self) -> Browser:
        """The current browser, or a new one; `SessionFailed` when none starts."""
        async with self._lock:
            if self._stopped:
                raise SessionRefused("stopping", "the server is shutting down.", status=503)
            if self._browser is not None and await _is_responsive(self._browser):
                return self._browser
            if self._browser is not None:
                _log.warning("the browser (process %d) is gone; starting another", self._browser.pid)
                old, self._browser = self._browser, None
                await old.stop()
            self._browser = await Browser.start(self._installed)
            self.starts += 1
            return self._browser

    async def stop(self) -> None:
        """Kill the browser and start no other."""
        async with self._lock:
            self._stopped = True
            browser, self._browser = self._browser, None
            if browser is not None:
                await browser.stop()


async def _is_responsive(browser: Browser) -> bool:
    if browser.is_gone:
        return False
    try:
        await browser.cdp.call("Browser.getVersion", timeout=HEALTH_CHECK_S)
    except (SessionFailed, CdpError):
        return False
    return True
