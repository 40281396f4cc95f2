"""Session servers and other HTTP servers on loopback, in the test's own loop."""

import asyncio
import contextlib

from palaestra.http.server import listen
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.server.app import build_app
from palaestra.sessions.server.process import serve


@contextlib.asynccontextmanager
async def served(make=FakeSession, **settings):
    """The URL of a session server for the sessions that `make` gives."""
    async with serving(build_app(make, **settings)) as url:
        yield url


@contextlib.asynccontextmanager
async def serving(app):
    over, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    listening = listen("127.0.0.1", 0, "server.port")
    running = asyncio.create_task(serve(app, listening, on_ready=port.set_result, until=over))
    await asyncio.wait({running, port}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield f"http://127.0.0.1:{await port}"
    finally:
        over.set()
        await running


@contextlib.asynccontextmanager
async def listening(answer):
    """The URL of a bare server: `await answer(reader, writer)` for every connection, then it is closed."""
    talking = set()

    async def talk(reader, writer):
        talking.add(asyncio.current_task())
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await answer(reader, writer)
        finally:
            writer.close()
            talking.discard(asyncio.current_task())

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(talking):
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)


async def request_read(reader):
    """Method, path and body of one request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, path, _ = head.split("\r\n")[0].split(" ")
    length = next(
        (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0
    )
    return method, path, await reader.readexactly(length)


def response(body, *, status="200 OK", media="application/json", **headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {media}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
