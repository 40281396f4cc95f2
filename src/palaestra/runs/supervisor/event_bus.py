"""What happens to runs, told to whoever listens. Lives in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from palaestra.runs.record import RunEvent

__all__ = ["EventBus"]

_Hear = Callable[[str, RunEvent], None]


class EventBus:
    """Who listens."""

    def __init__(self) -> None:
        self._listeners: dict[object, _Hear] = {}

    def listen(self, hear: _Hear) -> Callable[[], None]:
        """Tell somebody of everything from now on, until the answer is called."""
        key = object()
        self._listeners[key] = hear

        def deaf() -> None:
            self._listeners.pop(key, None)

        return deaf

    def tell(self, run_id: str, record: RunEvent) -> None:
        """Something happened to a run."""
        for hear in list(self._listeners.values()):
            hear(run_id, record)

    async def all(self) -> AsyncIterator[tuple[str, RunEvent]]:
        """Everything from now on, one after the other."""
        news: asyncio.Queue[tuple[str, RunEvent]] = asyncio.Queue()
        deaf = self.listen(lambda run_id, record: news.put_nowait((run_id, record)))
        try:
            while True:
                yield await news.get()
        finally:
            deaf()
