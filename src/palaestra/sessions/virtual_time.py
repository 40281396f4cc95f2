"""The clock of a page under Chromium's virtual time: it stands still until it is advanced.

While it is advanced, the page's timers run as fast as the machine allows and in the order of their due times, and the
clock waits for requests that are under way. What a page shows after an act therefore follows from its own scripts and
not from the speed of the machine. Between two advances scripts still answer input and evaluations, at a standing time.

Frames are drawn at the clock's time. A frame drawn at the machine's time would lie before or after everything the page
has seen, and later frames might never complete. A browser that draws by itself knows the machine's time only: one
picture in ten never came. Its pages have a `RealTime` instead, whose advances take as long as they say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Protocol

from palaestra.errors import SessionFailed
from palaestra.sessions.cdp import Cdp

__all__ = ["SETTLE_MS", "START_S", "PageClock", "RealTime", "VirtualTime"]

_log = logging.getLogger(__name__)

START_S = 1705320000
"""The instant at which every page begins, in seconds since 1970: 15 January 2024, 12:00 UTC."""

SETTLE_MS = 507.0
"""How much page time passes after loading and after each act.

Long enough for usual animations (400 ms in jQuery) and debounced widgets (300 ms). It is no round number because a
timer that is due at the very end of an advance may run before or after it.
"""

MAX_ADVANCE_MS = 1007.0
"""The longest advance in one piece; a longer one is split, so that each piece has a deadline of its own."""

MAX_TASKS_AT_ONE_INSTANT = 1000
"""Tasks a page may run before its time moves on regardless. Without it a page that posts itself messages stops it."""

_SET_POLICY = "Emulation.setVirtualTimePolicy"


class PageClock(Protocol):
    """What a page needs of its clock."""

    elapsed_ms: float

    async def start(self) -> None:
        """Start it; to be called before the page is navigated to its task."""

    async def advance(self, milliseconds: float) -> None:
        """Return when this much page time has passed."""

    def frame_ticks(self) -> float:
        """The time stamp of the next frame."""

    def hear(self, method: str) -> None:
        """Take notice of one of the page's events."""

    def fail(self, failure: SessionFailed) -> None:
        """Fail the advance under way and every later one."""


class VirtualTime:
    """The clock of one page; `deadline` is how many real seconds one advance may take."""

    def __init__(self, cdp: Cdp, session: str, *, deadline: float) -> None:
        self._cdp, self._session, self._deadline = cdp, session, deadline
        self._ticks_base = self._last_frame = 0.0
        self._expired: asyncio.Future[None] | None = None
        self._granted: asyncio.Future[dict[str, Any]] | None = None
        self._failure: SessionFailed | None = None
        self.elapsed_ms = 0.0
        """Page time that has passed since the clock was started."""

    async def start(self) -> None:
        """Set the clock to `START_S` and stop it there. To be called before the page is navigated to its task."""
        policy = {"policy": "pause", "initialVirtualTime": START_S}
        answer = await self._cdp.call(_SET_POLICY, policy, session=self._session, timeout=self._deadline)
        self._ticks_base = answer["virtualTimeTicksBase"]

    async def advance(self, milliseconds: float) -> None:
        """Let this much page time pass; `SessionFailed` when the page breaks or does not get there in time."""
        left = milliseconds
        while left > 0:
            piece = min(left, MAX_ADVANCE_MS)
            await self._advance_in_one_piece(piece)
            left -= piece

    def frame_ticks(self) -> float:
        """The time stamp of the next frame: the clock's time, and always later than the frame before."""
        self._last_frame = max(self._last_frame + 0.1, self._ticks_base + self.elapsed_ms)
        return self._last_frame

    def hear(self, method: str) -> None:
        """Take notice of one of the page's events."""
        if method != "Emulation.virtualTimeBudgetExpired" or self._expired is None or self._granted is None:
            return
        if self._granted.done():  # otherwise it is the end of an earlier grant
            _complete(self._expired)

    def fail(self, failure: SessionFailed) -> None:
        """Fail the advance under way and every later one: the page will not report their end."""
        self._failure = failure
        if self._expired is not None:
            _complete(self._expired, failure)

    async def _advance_in_one_piece(self, milliseconds: float) -> None:
        begin = asyncio.get_running_loop().time()
        # A request that is never answered stops the clock. Half of the deadline is left to advance regardless of it,
        # which shows what a person would see: the page with its request still under way.
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
            "maxVirtualTimeTaskStarvationCount": MAX_TASKS_AT_ONE_INSTANT,
            # Where a navigation starts a new process, its clock goes on from here instead of from the beginning.
            "initialVirtualTime": START_S + (self.elapsed_ms + milliseconds) / 1000,
        }
        expired = self._expired = asyncio.get_running_loop().create_future()
        granted = self._granted = self._cdp.begin(_SET_POLICY, settings, session=self._session)
        granted.add_done_callback(lambda answer: _pass_error_on(answer, expired))
        await expired
        self._ticks_base = granted.result()["virtualTimeTicksBase"]


class RealTime:
    """The clock of a page in a browser that draws by itself: page time is the machine's."""

    def __init__(self) -> None:
        self._failure: SessionFailed | None = None
        self._failed = asyncio.Event()
        self.elapsed_ms = 0.0

    async def start(self) -> None:
        """Nothing is to be done: it runs."""

    async def advance(self, milliseconds: float) -> None:
        """Wait as long, unless the page breaks meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(milliseconds / 1000):
                await self._failed.wait()
        if self._failure is not None:
            raise self._failure
        self.elapsed_ms += milliseconds

    def frame_ticks(self) -> float:
        """Not used: such a browser stamps its frames itself."""
        return 0.0

    def hear(self, method: str) -> None:
        """No event concerns it."""

    def fail(self, failure: SessionFailed) -> None:
        """Fail the advance under way and every later one."""
        self._failure = failure
        self._failed.set()


def _pass_error_on(answer: asyncio.Future[dict[str, Any]], expired: asyncio.Future[None]) -> None:
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
