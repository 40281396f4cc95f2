"""The one browser of a session server: started when first needed, replaced when it has died or stopped answering.

Sessions hold on to the browser their page is in, so a replacement touches nobody else; whoever was in the dead one has
failed, and comes into the new one with the next reset.
"""

from __future__ import annotations

import asyncio
import logging

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.browser import Browser
from palaestra.sessions.cdp import CdpError
from palaestra.sessions.chromium import Installed

__all__ = ["SharedBrowser"]

_log = logging.getLogger(__name__)

ALIVE_S = 10.0
"""A browser that does not say its version within this time has no future."""


class SharedBrowser:
    """Gives a browser that works."""

    def __init__(self, installed: Installed | None = None) -> None:
        self._installed = installed
        self._one_at_a_time = asyncio.Lock()
        self._browser: Browser | None = None
        self._stopped = False
        self.starts = 0
        """How many browsers there have been."""

    async def get(self) -> Browser:
        """The browser, or its successor; `SessionFailed` when none comes up."""
        async with self._one_at_a_time:
            if self._stopped:
                raise SessionRefused("stopping", "the server is going down.", status=503)
            if self._browser is not None and await _answers(self._browser):
                return self._browser
            if self._browser is not None:
                _log.warning("the browser (process %d) is gone; starting another", self._browser.pid)
                old, self._browser = self._browser, None
                await old.stop()
            self._browser = await Browser.start(self._installed)
            self.starts += 1
            return self._browser

    async def stop(self) -> None:
        """Kill it, with everything that is open in it, and start no other."""
        async with self._one_at_a_time:
            self._stopped = True
            browser, self._browser = self._browser, None
            if browser is not None:
                await browser.stop()


async def _answers(browser: Browser) -> bool:
    if browser.gone:
        return False
    try:
        await browser.cdp.call("Browser.getVersion", timeout=ALIVE_S)
    except (SessionFailed, CdpError):
        return False
    return True
