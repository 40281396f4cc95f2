"""`SparePages`: pages that a browser prepares in advance, by key. Each is handed out once and never comes back.

A spare page costs memory while it waits, so their number is bounded and the least recently used one is closed first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from palaestra.errors import SessionFailed
from palaestra.sessions.browser.cdp import CdpError

P = TypeVar("P")

RECENT_PER_PAGE = 8
"""Requests that `SparePages` remembers per page it may hold, to tell which keys are requested again."""

PREPARE_DELAY_S = 0.05
"""Seconds before a page is prepared, so that it does not compete with the first screenshot of a new episode."""


@dataclass(frozen=True)
class _Spare(Generic[P]):
    """A page that is being prepared or ready; `requested` ends the delay before its preparation."""

    page: asyncio.Task[P]
    requested: asyncio.Event


class SparePages(Generic[P]):
    """Up to `capacity` spare pages; `close` closes one, `is_usable` tells whether it still works."""

    def __init__(
        self, capacity: int, close: Callable[[P], Awaitable[None]], is_usable: Callable[[P], bool], *, selective: bool
    ) -> None:
        """`selective`: prepare a page only for a key that was requested at least twice recently.

        A task that is not played again soon would evict the page of one that is, and its own page would be wasted.
        """
        self._capacity, self._close, self._is_usable, self._selective = capacity, close, is_usable, selective
        self._pages: OrderedDict[Hashable, _Spare[P]] = OrderedDict()
        self._recent: deque[Hashable] = deque(maxlen=capacity * RECENT_PER_PAGE)
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._pages)

    async def take(self, key: Hashable) -> P | None:
        """The spare page of this key, once it is ready; None if there is none or it broke."""
        self._recent.append(key)
        spare = self._pages.pop(key, None)
        if spare is None:
            return None
        spare.requested.set()
        try:
            page = await spare.page
        except (SessionFailed, CdpError):
            return None
        except asyncio.CancelledError:
            # It may have been ready already, and no one else has it.
            self._start_closing(spare)
            raise
        if self._is_usable(page):
            return page
        self._start_closing(spare)
        return None

    def prepare(self, key: Hashable, create: Callable[[], Coroutine[Any, Any, P]]) -> None:
        """Create a page for this key in the background, unless there is one."""
        if key in self._pages:
            self._pages.move_to_end(key)
            return
        if self._selective and self._recent.count(key) < 2:
            return
        requested = asyncio.Event()

        async def wait_and_create() -> P:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PREPARE_DELAY_S):
                    await requested.wait()
            return await create()

        page = asyncio.create_task(wait_and_create(), name="palaestra-spare-page")
        self._pages[key] = _Spare(page, requested)
        while len(self._pages) > self._capacity:
            self._start_closing(self._pages.popitem(last=False)[1])

    def _start_closing(self, spare: _Spare[P]) -> None:
        async def close() -> None:
            spare.requested.set()
            with contextlib.suppress(SessionFailed, CdpError):
                await self._close(await spare.page)

        closing = asyncio.create_task(close(), name="palaestra-spare-page-closing")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def settle(self) -> None:
        """Wait until no page is being prepared or closed."""
        await asyncio.gather(*(spare.page for spare in self._pages.values()), *self._closing, return_exceptions=True)

    async def close(self) -> None:
        """Close all pages."""
        while self._pages:
            self._start_closing(self._pages.popitem()[1])
        await self.settle()
