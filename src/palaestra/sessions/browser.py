"""One browser with pages of its own: each page in a fresh context, drawn one at a time, all failing when it goes.

A browser that draws on demand must never be asked for two frames at once (it hangs for good), so frames go through one
lock, and a page that hangs while it draws is disposed of before the next may. What a page is told and shown is
`palaestra.sessions.page`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import Any

from palaestra.errors import EnvironmentFailed
from palaestra.sessions.cdp import Cdp, CdpError
from palaestra.sessions.chromium import Chromium, Installed, find_chromium
from palaestra.sessions.screen import Screenshot, Size

__all__ = ["Browser", "Target"]


_PICTURE = {"screenshot": {"format": "png", "optimizeForSpeed": True}}


class Target:
    """A page's handle: its context, its target and the session that talks to it."""

    def __init__(self, context: str, target: str, session: str) -> None:
        self.context, self.target, self.session = context, target, session
        self.closed = False


class Browser:
    """A running Chromium."""

    def __init__(self, installed: Installed, chromium: Chromium, cdp: Cdp) -> None:
        self.installed, self._chromium, self.cdp = installed, chromium, cdp
        self._frame = asyncio.Lock()
        self.num_pages = 0

    @classmethod
    async def start(cls, installed: Installed | None = None) -> Browser:
        """Start one; `EnvironmentFailed` when it does not come up."""
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
        """A blank page in a context that shares nothing with any other."""
        context = (await self.cdp.call("Target.createBrowserContext", {"disposeOnDetach": True}))["browserContextId"]
        settings: dict[str, Any] = {
            "url": "about:blank", "browserContextId": context, "width": size.width, "height": size.height,
        }  # fmt: skip
        if self.installed.draws_on_demand:
            settings["enableBeginFrameControl"] = True
        target = (await self.cdp.call("Target.createTarget", settings))["targetId"]
        attached = await self.cdp.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self.num_pages += 1
        return Target(context, target, attached["sessionId"])

    async def close_page(self, page: Target) -> None:
        """Dispose of the page's context and everything in it. Harmless when repeated."""
        if page.closed:
            return
        page.closed = True
        self.num_pages -= 1
        self.cdp.ignore(page.session)
        with contextlib.suppress(EnvironmentFailed, CdpError):
            await self.cdp.call("Target.disposeBrowserContext", {"browserContextId": page.context}, timeout=5.0)

    async def draw(self, page: Target, *, timeout: float) -> Screenshot:
        """Let the page draw what it has, and take the picture."""
        if not self.installed.draws_on_demand:
            shot = {"format": "png", "optimizeForSpeed": True, "captureBeyondViewport": False}
            answer = await self.cdp.call("Page.captureScreenshot", shot, session=page.session, timeout=timeout)
            return Screenshot.of(base64.b64decode(answer["data"]))
        for _ in range(3):
            answer = await self._next_frame(page, _PICTURE, timeout)
            # A frame without damage may come without a picture; the next one has it.
            if "screenshotData" in answer:
                return Screenshot.of(base64.b64decode(answer["screenshotData"]))
        raise EnvironmentFailed("no_picture", "the page drew three frames and no picture came of them")

    async def tick(self, page: Target, *, timeout: float) -> None:
        """Let one frame pass without taking a picture, so that the page's own clockwork goes on."""
        if self.installed.draws_on_demand:
            await self._next_frame(page, {}, timeout)

    async def _next_frame(self, page: Target, frame: dict[str, Any], timeout: float) -> dict[str, Any]:
        async with self._frame:
            answer = self.cdp.begin("HeadlessExperimental.beginFrame", frame, session=page.session)
            try:
                async with asyncio.timeout(timeout):
                    return await asyncio.shield(answer)
            except TimeoutError:
                # Its frame would still be under way when the next page's begins.
                await self.close_page(page)
                raise EnvironmentFailed("hung", f"the page did not draw within {timeout:g} s") from None
            except asyncio.CancelledError:
                await asyncio.wait((answer,), timeout=timeout)
                if not answer.done() or answer.exception() is not None:
                    await self.close_page(page)
                raise

    async def stop(self) -> None:
        """Kill it and clean up after it."""
        await self.cdp.close()
        await self._chromium.stop()
