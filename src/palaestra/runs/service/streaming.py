"""Routes that stream server-sent events: the events and output of a run, the events of all runs, and new metrics.

Every event has an id from which a client can continue. A stream that is complete ends with `event: end`; when it ends
without that event, the service went away and the client reconnects with the last id. A slow reader is served from
files, so it does not take up memory of the service.
"""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, TypeVar

from fastapi import FastAPI, Header, Query
from starlette.responses import StreamingResponse

from palaestra.errors import ConfigError
from palaestra.runs.ingest.live_metrics import Curve, JournalTail, MetricBatch
from palaestra.runs.ingest.stream import Position, StreamItem, notify, replay
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunEvent, RunRecord
from palaestra.runs.service.schemas import AttemptNumber, LogOffset, RunId, RunIdText, describe_stream, new_router
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.wire import to_json
from palaestra.strict_json import json_number
from palaestra.telemetry.event import encode

_T = TypeVar("_T")
_LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=80)]
_MAX_OFFSET_DIGITS = 18
_BATCH_ITEMS = 500
_BATCH_BYTES = 1 << 19
_LOG_CHUNK_BYTES = 1 << 16
_KEEP_ALIVE_S = 10.0
"""After this time without an event, a comment keeps the connection open and detects clients that disconnected."""
_POLL_S = 0.2
_MAX_RUNS = 64
_METRICS_EVERY_S = 0.1
"""Pause between two batches of metrics."""
_TAIL_EVERY_S = 0.5
"""Pause between two looks at the journals of runs that no pump ingests."""
_KEEP_ALIVE = b":\n\n"
_END = b"event: end\ndata: {}\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], status_code: int = 200) -> None:
        super().__init__(content, status_code, headers={"cache-control": "no-store"})


def add_stream_routes(app: FastAPI, supervisor: Supervisor, reader: RunReader, closing: asyncio.Event) -> None:
    """Add the routes to the application. Streams end when `closing` is set."""
    streams_router = new_router("streams")

    @streams_router.get("/runs/{run_id}/events", response_class=EventStream, responses=describe_stream(404))
    async def run_events(
        run_id: RunId,
        after: Annotated[str, Query(max_length=80)] = "",
        follow: bool = True,
        last_event_id: _LastEventId = None,
    ) -> EventStream:
        """All events of a run after an id, then new ones as they occur; ends with `event: end`.

        `event: run` and `event: alarm` carry a run event, `event: event` one line of the journal. Without `follow`
        the stream ends after the events so far.
        """
        position = last_event_id or after
        Position.parse(position)
        run = await asyncio.to_thread(reader.paths, run_id)
        items = supervisor.subscribe(run.run_id, position) if follow else replay(run, position)
        return EventStream(_stream_run(items, closing))

    @streams_router.get("/runs/{run_id}/log/stream", response_class=EventStream, responses=describe_stream(404))
    async def log_stream(
        run_id: RunId, offset: LogOffset = 0, attempt: AttemptNumber = None, last_event_id: _LastEventId = None
    ) -> EventStream:
        """Lines of the output from a byte offset, as they are written. The id is the offset of the next line."""
        if last_event_id is not None:
            offset = _parse_offset(last_event_id)
        full_id = (await asyncio.to_thread(reader.paths, run_id)).run_id
        await asyncio.to_thread(reader.attempt, full_id, attempt)

        def has_ended() -> bool:
            return supervisor.ring(full_id) is None and reader.run(full_id).phase.has_ended

        return EventStream(_stream_log(reader, full_id, offset, attempt, has_ended, closing))

    @streams_router.get("/stream", response_class=EventStream, responses=describe_stream())
    async def stream() -> EventStream:
        """The events of all runs from now on. List the runs after connecting, so that nothing is missed.

        The events have no ids, and the stream cannot be continued: list the runs, or read the stream of each run.
        """
        return EventStream(_stream_all_runs(supervisor.stream_events(), closing))

    @streams_router.get("/stream/metrics", response_class=EventStream, responses=describe_stream(404))
    async def metric_stream(run: Annotated[list[RunIdText], Query(min_length=1, max_length=_MAX_RUNS)]) -> EventStream:
        """New points of up to 64 runs under the names of their stored series, at most about ten batches a second each.

        `event: history` with `run_id` says that the stored series has everything up to now: load it with
        `/runs/{run_id}/metrics/series`. It comes first for every run, and again when a resumed attempt replaces points.
        `event: points` carries `run_id` and `points`, lists of step, value and time by metric. `event: run_end` with
        `run_id` says that a run has ended; the stream stays open, because the run may be resumed. Points that wait for
        a client that does not read are thinned; the extremes stay.
        """
        records = await asyncio.to_thread(lambda: [reader.run(run_id) for run_id in dict.fromkeys(run)])
        return EventStream(_stream_metrics(supervisor, reader, records, closing))

    app.include_router(streams_router)


async def _stream_run(items: AsyncGenerator[StreamItem, None], closing: asyncio.Event) -> AsyncIterator[bytes]:
    async def frames() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(items) as open_items:
            async for item in open_items:
                yield _frame(item)

    async for batch in batches(frames(), closing, size=len, limit=_BATCH_BYTES):
        yield b"".join(batch) if batch else _KEEP_ALIVE
    if not closing.is_set():
        yield _END


async def _stream_all_runs(events: AsyncIterator[tuple[str, RunEvent]], closing: asyncio.Event) -> AsyncIterator[bytes]:
    yield _KEEP_ALIVE
    async for batch in batches(events, closing):
        frames = [
            f"event: run\ndata: {json.dumps({'run_id': run_id, **to_json(event)})}\n\n" for run_id, event in batch
        ]
        yield "".join(frames).encode() if frames else _KEEP_ALIVE


async def _stream_metrics(
    supervisor: Supervisor, reader: RunReader, records: Sequence[RunRecord], closing: asyncio.Event
) -> AsyncIterator[bytes]:
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    subscription = supervisor.subscribe_metrics(records, lambda: notify(loop, changed))
    tails = [JournalTail(reader.home.run(row.run_id), subscription) for row in records if not row.supervised]
    polling = asyncio.create_task(_poll_tails(tails)) if tails else None
    try:
        while not closing.is_set():
            changed.clear()
            batches = subscription.take()
            for batch in batches:
                if batch.needs_history:
                    await asyncio.to_thread(supervisor.flush_series, batch.run_id)
            yield await asyncio.to_thread(_encode_batches, batches) if batches else _KEEP_ALIVE
            # Points that arrive during the pause are one batch.
            if batches:
                await _wait(closing, _METRICS_EVERY_S)
            await _wait_for_either(changed, closing, _KEEP_ALIVE_S)
    finally:
        supervisor.unsubscribe_metrics(subscription)
        if polling is not None:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)


async def _poll_tails(tails: Sequence[JournalTail]) -> None:
    def poll() -> None:
        for tail in tails:
            # A run may be deleted while it is watched.
            with contextlib.suppress(OSError):
                tail.poll()

    try:
        while True:
            await asyncio.to_thread(poll)
            await asyncio.sleep(_TAIL_EVERY_S)
    finally:
        for tail in tails:
            tail.close()


def _encode_batches(batches: Sequence[MetricBatch]) -> bytes:
    frames = []
    for run_id, points, needs_history, has_ended in batches:
        about = json.dumps({"run_id": run_id})
        if needs_history:
            frames.append(f"event: history\ndata: {about}\n\n")
        if points:
            frames.append(f'event: points\ndata: {{"run_id":"{run_id}","points":{_encode_points(points)}}}\n\n')
        if has_ended:
            frames.append(f"event: run_end\ndata: {about}\n\n")
    return "".join(frames).encode()


def _encode_points(points: Mapping[str, Curve]) -> str:
    try:
        return json.dumps(points, separators=(",", ":"), allow_nan=False)
    except ValueError:
        strict = {
            name: [(step, json_number(value), time) for step, value, time in curve] for name, curve in points.items()
        }
        return json.dumps(strict, separators=(",", ":"), allow_nan=False)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def _wait_for_either(one: asyncio.Event, other: asyncio.Event, timeout_s: float) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _stream_log(
    reader: RunReader,
    run_id: str,
    offset: int,
    attempt: int | None,
    has_ended: Callable[[], bool],
    closing: asyncio.Event,
) -> AsyncIterator[bytes]:
    quiet_s = 0.0
    while not closing.is_set():
        # Checked before reading, so that output written before the end is read.
        ended = has_ended()
        chunk = await asyncio.to_thread(reader.log, run_id, offset, _LOG_CHUNK_BYTES, attempt)
        if chunk.text:
            # As JSON, because output may hold carriage returns, which would end a line of the stream.
            yield f"id: {chunk.offset}\nevent: log\ndata: {json.dumps({'text': chunk.text})}\n\n".encode()
            quiet_s = 0.0
        if chunk.offset > offset:
            offset = chunk.offset
            continue
        if ended:
            yield _END
            return
        await _wait(closing, _POLL_S)
        quiet_s += _POLL_S
        if quiet_s >= _KEEP_ALIVE_S:
            quiet_s = 0.0
            yield _KEEP_ALIVE


async def batches(
    items: AsyncIterator[_T], closing: asyncio.Event, size: Callable[[_T], int] = lambda _: 1, limit: int = _BATCH_ITEMS
) -> AsyncIterator[list[_T]]:
    """Batches of the items available, until their sizes reach `limit`; an empty list after `_KEEP_ALIVE_S` without one.

    Reading pauses at the limit, so a slow consumer holds at most one batch in memory.
    """
    ready: list[_T] = []
    ready_size = 0
    has_items, has_room = asyncio.Event(), asyncio.Event()
    has_room.set()

    async def read_items() -> None:
        nonlocal ready_size
        async for item in items:
            ready.append(item)
            ready_size += size(item)
            has_items.set()
            if ready_size >= limit:
                has_room.clear()
                await has_room.wait()

    reading = asyncio.create_task(read_items())
    closed = asyncio.create_task(closing.wait())
    woken: asyncio.Task[bool] | None = None
    try:
        while not closed.done():
            if not ready and not reading.done():
                woken = asyncio.create_task(has_items.wait())
                await asyncio.wait((reading, closed, woken), timeout=_KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
            has_items.clear()
            if not ready and reading.done():
                reading.result()
                return
            batch, ready[:], ready_size = ready[:], [], 0
            has_room.set()
            yield batch
    finally:
        tasks = [task for task in (reading, closed, woken) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


def _frame(item: StreamItem) -> bytes:
    content = item.item
    if isinstance(content, RunEvent):
        kind = "alarm" if content.kind in ("alarm", "alarm_over") else "run"
        return f"id: {item.id}\nevent: {kind}\ndata: {json.dumps(to_json(content))}\n\n".encode()
    return f"id: {item.id}\nevent: event\ndata: {encode(content.event, content.seq, content.time)}\n\n".encode()


def _parse_offset(last_event_id: str) -> int:
    if not (last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) <= _MAX_OFFSET_DIGITS):
        remedy = "Send the id of the last event, or none"
        raise ConfigError("Last-Event-ID", last_event_id, "is not an offset in an output", remedy)
    return int(last_event_id)
