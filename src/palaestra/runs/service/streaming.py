"""Server-sent events: what happens, as it happens, each with the id from which a client can go on.

A stream ends with `event: end` when nothing more will come; ended without it, the service went away and the client
asks again with the last id. Whoever reads slowly is fed from files and holds no memory of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from starlette.responses import StreamingResponse

from palaestra.runs.ingest.stream import StreamItem
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunEvent
from palaestra.runs.wire import to_json
from palaestra.telemetry.event import encode

__all__ = ["EventStream", "happenings_of_all", "log_of", "stream_of"]

_T = TypeVar("_T")
_AT_ONCE = 500
_BYTES_AT_ONCE = 1 << 19
_QUIET_S = 10.0
"""After this long without anything to say, a comment keeps the connection open and finds out who has left."""
_LOOK_EVERY_S = 0.2
_END = b"event: end\ndata: {}\n\n"


class EventStream(StreamingResponse):
    """An answer that goes on."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], status_code: int = 200) -> None:
        super().__init__(content, status_code, headers={"cache-control": "no-store"})


async def stream_of(items: AsyncIterator[StreamItem], closing: asyncio.Event) -> AsyncIterator[bytes]:
    """A run's happenings and records, then its end."""
    async for batch in batches(_frames(items), closing, size=len, most=_BYTES_AT_ONCE):
        yield b"".join(batch) if batch else b":\n\n"
    if not closing.is_set():
        yield _END


async def happenings_of_all(lives: AsyncIterator[tuple[str, RunEvent]], closing: asyncio.Event) -> AsyncIterator[bytes]:
    """What happens to any run, from now on."""
    yield b":\n\n"
    async for batch in batches(lives, closing):
        frames = [
            f"event: life\ndata: {json.dumps({'run_id': run_id, **to_json(record)})}\n\n" for run_id, record in batch
        ]
        yield "".join(frames).encode() if frames else b":\n\n"


async def log_of(
    reading: RunReader,
    run_id: str,
    offset: int,
    attempt: int | None,
    ended: Callable[[], bool],
    closing: asyncio.Event,
) -> AsyncIterator[bytes]:
    """Lines of a run's output, with the offset behind them, until the run is over."""
    quiet = 0.0
    while not closing.is_set():
        # Looked up before the reading: what was written before the end is then read.
        over = ended()
        piece = await asyncio.to_thread(reading.log, run_id, offset, 1 << 16, attempt)
        if piece.text:
            # As JSON, because output may hold carriage returns, which would end a line of the stream.
            yield f"id: {piece.offset}\nevent: log\ndata: {json.dumps({'text': piece.text})}\n\n".encode()
            quiet = 0.0
        if piece.offset > offset:
            offset = piece.offset
            continue
        if over:
            yield _END
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_EVERY_S):
                await closing.wait()
        quiet += _LOOK_EVERY_S
        if quiet >= _QUIET_S:
            quiet = 0.0
            yield b":\n\n"


async def _frames(items: AsyncIterator[StreamItem]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(items) as open_items:  # type: ignore[type-var]
        async for item in open_items:
            yield _framed(item)


async def batches(
    items: AsyncIterator[_T], closing: asyncio.Event, size: Callable[[_T], int] = lambda _: 1, most: int = _AT_ONCE
) -> AsyncIterator[list[_T]]:
    """Everything that is there at once, until its sizes add up to `most`; an empty list when nothing came for a while.

    A slow reader holds no more than that in memory.
    """
    ready: list[_T] = []
    filled = 0
    news, room = asyncio.Event(), asyncio.Event()
    room.set()

    async def take() -> None:
        nonlocal filled
        async for item in items:
            ready.append(item)
            filled += size(item)
            news.set()
            if filled >= most:
                room.clear()
                await room.wait()

    taking = asyncio.create_task(take())
    shut = asyncio.create_task(closing.wait())
    woken: asyncio.Task[bool] | None = None
    try:
        while not shut.done():
            if not ready and not taking.done():
                woken = asyncio.create_task(news.wait())
                await asyncio.wait((taking, shut, woken), timeout=_QUIET_S, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
            news.clear()
            if not ready and taking.done():
                taking.result()
                return
            batch, ready[:], filled = ready[:], [], 0
            room.set()
            yield batch
    finally:
        left = [task for task in (taking, shut, woken) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


def _framed(told: StreamItem) -> bytes:
    item = told.item
    if isinstance(item, RunEvent):
        kind = "alarm" if item.happening in ("alarm", "alarm_over") else "life"
        return f"id: {told.id}\nevent: {kind}\ndata: {json.dumps(to_json(item))}\n\n".encode()
    return f"id: {told.id}\nevent: event\ndata: {encode(item.event, item.seq, item.time)}\n\n".encode()
