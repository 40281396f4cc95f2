"""Routes that go on: events of a run, its output, and what happens to all runs."""

# Annotations are evaluated here: FastAPI reads them.
import asyncio
from typing import Annotated

from fastapi import FastAPI, Header, Query

from palaestra.errors import ConfigError
from palaestra.runs.ingest.stream import Position, replay
from palaestra.runs.reader import RunReader
from palaestra.runs.service.answers import RunId, streamed
from palaestra.runs.service.streaming import EventStream, happenings_of_all, log_of, stream_of
from palaestra.runs.supervisor.supervisor import Supervisor

__all__ = ["add_stream_routes"]

_LastId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=80)]
_DIGITS = 18
"""Of the longest output that can be."""


def add_stream_routes(app: FastAPI, supervisor: Supervisor, reading: RunReader, closing: asyncio.Event) -> None:
    """Add them."""

    @app.get(
        "/runs/{run_id}/events", operation_id="run_events", tags=["streams"], response_class=EventStream,
        responses=streamed(404),
    )  # fmt: skip
    async def run_events(
        run_id: RunId,
        after: Annotated[str, Query(max_length=80)] = "",
        follow: bool = True,
        last_event_id: _LastId = None,
    ) -> EventStream:
        """Everything that happened and was measured behind an id, then what comes; ends with `event: end`.

        `event: life` and `event: alarm` carry a happening, `event: event` one line of the journal. Without `follow` it
        ends with what there is by now.
        """
        position = last_event_id or after
        Position.parse(position)
        paths = await asyncio.to_thread(reading.paths, run_id)
        items = supervisor.subscribe(paths.run_id, position) if follow else replay(paths, position)
        return EventStream(stream_of(items, closing))

    @app.get(
        "/runs/{run_id}/log/stream", operation_id="log_stream", tags=["streams"], response_class=EventStream,
        responses=streamed(404),
    )  # fmt: skip
    async def log_stream(
        run_id: RunId,
        offset: Annotated[int, Query(ge=-(2**62), lt=2**62)] = 0,
        attempt: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
        last_event_id: _LastId = None,
    ) -> EventStream:
        """Lines of the output from a byte on, as they come. The id is the offset behind them."""
        if last_event_id is not None:
            offset = _offset(last_event_id)
        full = (await asyncio.to_thread(reading.paths, run_id)).run_id
        await asyncio.to_thread(reading.attempt, full, attempt)

        def ended() -> bool:
            return supervisor.ring(full) is None and reading.run(full).phase.has_ended

        return EventStream(log_of(reading, full, offset, attempt, ended, closing))

    @app.get("/stream", operation_id="stream", tags=["streams"], response_class=EventStream, responses=streamed())
    async def stream() -> EventStream:
        """What happens to any run, from now on. List the runs after connecting, and nothing is missed.

        It has no ids and cannot go on behind one: what happened meanwhile is in the list, and in each run's own stream.
        """
        return EventStream(happenings_of_all(supervisor.lives(), closing))


def _offset(last_event_id: str) -> int:
    if not (last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) <= _DIGITS):
        remedy = "Send the id of the last event, or none"
        raise ConfigError("Last-Event-ID", last_event_id, "is not a place in an output", remedy)
    return int(last_event_id)
