"""One browser with pages of its own: each page in a fresh context, drawn one at a time, all failing when it goes.

A browser that draws on demand must never be asked for two frames at once (it hangs for good), so frames go through one
lock, and a page that hangs while it draws is disposed of before the next may. What a page is told and shown is
`palaestra.sessions.page`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from dataclasses import dataclass
from typing import Any

from palaestra.errors import SessionFailed
from palaestra.sessions.cdp import Cdp, CdpError
from palaestra.sessions.chromium import Chromium, Installed, find_chromium
from palaestra.sessions.screen import Screenshot, Size

__all__ = ["Browser", "Target"]


UP_S = 10.0
"""How long a page's process may take to come up."""

FRAME_MS = 16.0
"""What a page is told of the time between two frames."""

_PICTURE = {"screenshot": {"format": "png", "optimizeForSpeed": True}}


class Target:
    """A page's handle: its context, its target and the session that talks to it."""

    def __init__(self, context: str, target: str, session: str) -> None:
        self.context, self.target, self.session = context, target, session
        self.closed = self.crashed = False

    def hear(self, method: str, params: dict[str, Any]) -> None:
        """What it says while it waits in reserve."""
        if method == "Inspector.targetCrashed":
            self.crashed = True


@dataclass(frozen=True)
class _Spare:
    """A page on its way, for whoever opens one of its size next."""

    size: Size
    page: asyncio.Task[Target]


class Browser:
    """A running Chromium."""

    def __init__(self, installed: Installed, chromium: Chromium, cdp: Cdp) -> None:
        self.installed, self._chromium, self.cdp = installed, chromium, cdp
        self._frame = asyncio.Lock()
        self._spare: _Spare | None = None
        self._discarding: asyncio.Task[None] | None = None
        self.num_pages = 0
        """Pages in use; one more may wait in reserve."""

    @classmethod
    async def start(cls, installed: Installed | None = None) -> Browser:
        """Start one; `SessionFailed` when it does not come up."""
        chosen = installed or find_chromium()
        chromium = await Chromium.start(chosen)
        cdp = Cdp(chromium.to_it, chromium.from_it)
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
    def gone(self) -> bool:
        """Whether it has died or was closed."""
        return self.cdp.gone or self._chromium.process.returncode is not None

    async def open(self, size: Size) -> Target:
        """A blank page in a context that shares nothing with any other, and that nobody has used."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.size == size:
            with contextlib.suppress(SessionFailed, CdpError):
                page = await spare.page
                if not page.crashed:
                    self.num_pages += 1
                    return page
        if spare is not None:
            self._discard(spare)
        page = await self._made(size)
        self.num_pages += 1
        return page

    def keep_spare(self, size: Size) -> None:
        """Have a page of this size ready for the next one who opens one: half of what opening takes is done ahead.

        Only where pages draw on demand: elsewhere one that nobody looks at would draw all the time.
        """
        if self.installed.draws_on_demand and self._spare is None and not self.gone:
            self._spare = _Spare(size, asyncio.create_task(self._made(size), name="palaestra-spare-page"))

    async def _made(self, size: Size) -> Target:
        context = (await self.cdp.call("Target.createBrowserContext", {"disposeOnDetach": True}))["browserContextId"]
        self.cdp.tell("Browser.setDownloadBehavior", {"behavior": "deny", "browserContextId": context})
        settings: dict[str, Any] = {
            "url": "about:blank", "browserContextId": context, "width": size.width, "height": size.height,
        }  # fmt: skip
        if self.installed.draws_on_demand:
            settings["enableBeginFrameControl"] = True
        try:
            target = (await self.cdp.call("Target.createTarget", settings))["targetId"]
            attached = await self.cdp.call("Target.attachToTarget", {"targetId": target, "flatten": True})
            page = Target(context, target, attached["sessionId"])
            self.cdp.listen(page.session, page.hear)
            # Answered once the page's process is up.
            async with asyncio.timeout(UP_S):
                await self.cdp.begin_all([("Page.enable", {}), ("Inspector.enable", {})], session=page.session)
        except TimeoutError:
            self.cdp.tell("Target.disposeBrowserContext", {"browserContextId": context})
            raise SessionFailed("hung", f"a page did not come up within {UP_S:g} s") from None
        except BaseException:
            self.cdp.tell("Target.disposeBrowserContext", {"browserContextId": context})
            raise
        return page

    def _discard(self, spare: _Spare) -> None:
        async def disposed() -> None:
            with contextlib.suppress(SessionFailed, CdpError):
                await self._dispose(await spare.page)

        self._discarding = asyncio.create_task(disposed(), name="palaestra-spare-discarded")

    async def close_page(self, page: Target) -> None:
        """Dispose of the page's context and everything in it. Harmless when repeated."""
        if page.closed:
            return
        page.closed = True
        self.num_pages -= 1
        await self._dispose(page)

    async def _dispose(self, page: Target) -> None:
        self.cdp.ignore(page.session)
        with contextlib.suppress(SessionFailed, CdpError):
            await self.cdp.call("Target.disposeBrowserContext", {"browserContextId": page.context}, timeout=5.0)

    async def draw(self, page: Target, ticks: float, *, timeout: float) -> Screenshot:
        """Let the page draw what it has in a frame of this time stamp, and take the picture."""
        if not self.installed.draws_on_demand:
            shot = {"format": "png", "optimizeForSpeed": True, "captureBeyondViewport": False}
            answer = await self.cdp.call("Page.captureScreenshot", shot, session=page.session, timeout=timeout)
            return Screenshot.of(base64.b64decode(answer["data"]))
        for attempt in range(3):
            answer = await self._next_frame(page, ticks + attempt * 0.01, timeout, **_PICTURE)
            # A frame without damage may come without a picture; the next one has it.
            if "screenshotData" in answer:
                return Screenshot.of(base64.b64decode(answer["screenshotData"]))
        raise SessionFailed("no_picture", "the page drew three frames and no picture came of them")

    async def tick(self, page: Target, ticks: float, *, timeout: float) -> None:
        """Let a frame of this time stamp pass without taking a picture. Full browsers draw frames by themselves."""
        if self.installed.draws_on_demand:
            await self._next_frame(page, ticks, timeout)

    async def _next_frame(self, page: Target, ticks: float, timeout: float, **more: Any) -> dict[str, Any]:
        frame = {"frameTimeTicks": ticks, "interval": FRAME_MS, **more}
        async with self._frame:
            answer = self.cdp.begin("HeadlessExperimental.beginFrame", frame, session=page.session)
            try:
                async with asyncio.timeout(timeout):
                    return await asyncio.shield(answer)
            except TimeoutError:
                # Its frame would still be under way when the next page's begins.
                await self.close_page(page)
                raise SessionFailed("hung", f"the page did not draw within {timeout:g} s") from None
            except asyncio.CancelledError:
                await asyncio.wait((answer,), timeout=timeout)
                if not answer.done() or answer.exception() is not None:
                    await self.close_page(page)
                raise

    async def stop(self) -> None:
        """Kill it and clean up after it."""
        spare, self._spare = self._spare, None
        await self.cdp.close()
        # The closed pipe has ended what was under way; it is waited for, so that nobody is warned of it.
        if spare is not None:
            await asyncio.gather(spare.page, return_exceptions=True)
        if self._discarding is not None:
            await asyncio.gather(self._discarding, return_exceptions=True)
        await self._chromium.stop()
