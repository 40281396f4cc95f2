"""The clock of a page: `VirtualTime` stands still until it is advanced, `RealTime` runs with the machine.

While virtual time advances, the page's timers run as fast as the machine allows, in the order of their due times, and
the clock waits for pending requests. The screen after an act therefore depends on the page's scripts and not on the
speed of the machine. Between two advances, scripts still handle input and evaluations, at a constant time.

Frames have the clock's time. A frame with the machine's time would lie before or after everything the page has seen,
and later frames might never complete. Browsers that do not draw on demand only use the machine's time (one screenshot
in ten never arrived); their pages have `RealTime`, which waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, TypeAlias

from palaestra.errors import SessionFailed
from palaestra.sessions.browser.cdp import CdpConnection

_log = logging.getLogger(__name__)

START_S = 1705320000
"""Start time of every page, in seconds since 1970: 15 January 2024, 12:00 UTC."""

SETTLE_MS = 507.0
"""Page time that passes after loading and after each act.

Long enough for usual animations (400 ms in jQuery) and debounced widgets (300 ms). It is not a round number, because a
timer that is due exactly at the end of an advance may run before or after it.
"""

MAX_ADVANCE_MS = 1007.0
"""Longest single advance; a longer one is split, so that each part has its own deadline."""

MAX_TASKS_PER_INSTANT = 1000
"""Tasks that may run before page time advances. Without a limit, a page that posts itself messages stops it."""

_SET_POLICY = "Emulation.setVirtualTimePolicy"


class VirtualTime:
    """Chromium's virtual time for one page; `deadline` is the maximum duration of an advance in real seconds."""

    def __init__(self, cdp: CdpConnection, session: str, *, deadline: float) -> None:
        self._cdp, self._session, self._deadline = cdp, session, deadline
        self._ticks_base = self._last_frame = 0.0
        self._expired: asyncio.Future[None] | None = None
        self._granted: asyncio.Future[dict[str, Any]] | None = None
        self._failure: SessionFailed | None = None
        self.elapsed_ms = 0.0
        """Page time that has passed since the clock was started."""

    async def start(self) -> None:
        """Set the clock to `START_S` and stop it there, before the page is navigated to its task."""
        policy = {"policy": "pause", "initialVirtualTime": START_S}
        answer = await self._cdp.call(_SET_POLICY, policy, session=self._session, timeout=self._deadline)
        self._ticks_base = answer["virtualTimeTicksBase"]

    async def advance(self, milliseconds: float) -> None:
        """Let this much page time pass; `SessionFailed` when the page breaks or the deadline passes."""
        left = milliseconds
        while left > 0:
            part = min(left, MAX_ADVANCE_MS)
            await self._advance_once(part)
            left -= part

    def frame_ticks(self) -> float:
        """The time stamp of the next frame: the clock's time, and always later than the previous frame."""
        self._last_frame = max(self._last_frame + 0.1, self._ticks_base + self.elapsed_ms)
        return self._last_frame

    def on_event(self, method: str) -> None:
        """Handle an event of the page."""
        if method != "Emulation.virtualTimeBudgetExpired" or self._expired is None or self._granted is None:
            return
        if self._granted.done():  # otherwise the event belongs to an earlier grant
            _complete(self._expired)

    def fail(self, failure: SessionFailed) -> None:
        """Fail the current advance and every later one, because the page will not report their end."""
        self._failure = failure
        if self._expired is not None:
            _complete(self._expired, failure)

    async def _advance_once(self, milliseconds: float) -> None:
        begin = asyncio.get_running_loop().time()
        # A request that is never answered stops the clock. After half of the deadline the clock advances regardless,
        # which shows what a person would see: the page with a pending request.
        for policy, until_s in (("pauseIfNetworkFetchesPending", self._deadline / 2), ("advance", self._deadline)):
            try:
                async with asyncio.timeout_at(begin + until_s):
                    await self._grant(policy, milliseconds)
            except TimeoutError:
                _log.info("%g ms of page time did not pass within %g s (%s)", milliseconds, until_s, policy)
            else:
                self.elapsed_ms += milliseconds
                return
        raise SessionFailed("hung", f"{milliseconds:g} ms of page time did not pass within {self._deadline:g} s")

    async def _grant(self, policy: str, milliseconds: float) -> None:
        if self._failure is not None:
            raise self._failure
        settings = {
            "policy": policy,
            "budget": milliseconds,
            "maxVirtualTimeTaskStarvationCount": MAX_TASKS_PER_INSTANT,
            # If a navigation starts a new process, its clock continues from here.
            "initialVirtualTime": START_S + (self.elapsed_ms + milliseconds) / 1000,
        }
        expired = self._expired = asyncio.get_running_loop().create_future()
        granted = self._granted = self._cdp.start_call(_SET_POLICY, settings, session=self._session)
        granted.add_done_callback(lambda answer: _propagate_error(answer, expired))
        await expired
        self._ticks_base = granted.result()["virtualTimeTicksBase"]


class RealTime:
    """The clock of a page in a browser that does not draw on demand: page time is the machine's."""

    def __init__(self) -> None:
        self._failure: SessionFailed | None = None
        self._failed = asyncio.Event()
        self.elapsed_ms = 0.0

    async def start(self) -> None:
        """Nothing to do: it is running."""

    async def advance(self, milliseconds: float) -> None:
        """Wait this long, unless the page breaks meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(milliseconds / 1000):
                await self._failed.wait()
        if self._failure is not None:
            raise self._failure
        self.elapsed_ms += milliseconds

    def frame_ticks(self) -> float:
        """Not used: the browser stamps its own frames."""
        return 0.0

    def on_event(self, method: str) -> None:
        """Nothing to do."""

    def fail(self, failure: SessionFailed) -> None:
        """Fail the current advance and every later one."""
        self._failure = failure
        self._failed.set()


PageClock: TypeAlias = VirtualTime | RealTime


def _propagate_error(answer: asyncio.Future[dict[str, Any]], expired: asyncio.Future[None]) -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        _complete(expired, error)


def _complete(future: asyncio.Future[None], error: BaseException | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # retrieved, so that no warning appears when the waiting task was cancelled
