"""What happens to runs, told to whoever listens. Lives in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from palaestra.runs.record import LifeRecord

__all__ = ["News"]

_Hear = Callable[[str, LifeRecord], None]


class News:
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

    def tell(self, run_id: str, record: LifeRecord) -> None:
        """Something happened to a run."""
        for hear in list(self._listeners.values()):
            hear(run_id, record)

    async def all(self) -> AsyncIterator[tuple[str, LifeRecord]]:
        """Everything from now on, one after the other."""
        news: asyncio.Queue[tuple[str, LifeRecord]] = asyncio.Queue()
        deaf = self.listen(lambda run_id, record: news.put_nowait((run_id, record)))
        try:
            while True:
                yield await news.get()
        finally:
            deaf()
