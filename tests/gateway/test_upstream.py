"""Connections to sessions: every way an answer can be framed, and every way it can break."""

import asyncio
import contextlib

import pytest

from palaestra.gateway.upstream import ConnectionPool, UpstreamError

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def _asked(*answers, times=1, method_head=False):
    """What comes of asking a server that gives one canned answer per connection; and how many connections it took."""

    async def body():
        connections, ended = 0, asyncio.Semaphore(0)

        async def serve(reader, writer):
            nonlocal connections
            canned = answers[min(connections, len(answers) - 1)]
            connections += 1
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await reader.readuntil(b"\r\n\r\n") and canned:
                    writer.write(canned)
                    if b"keep-alive" not in canned:
                        break
            writer.close()
            ended.release()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool, found = ConnectionPool(), []
        try:
            for _ in range(times):
                answer = await pool.send_request("127.0.0.1", port, HEAD, b"", chunked=False, is_head=method_head)
                body, more = b"", True
                while more:
                    piece, more = await answer.read_chunk()
                    body += piece
                found.append((answer.status, body))
                pool.release(answer, "127.0.0.1", port)
        finally:
            pool.close()
            for _ in range(connections):
                await ended.acquire()
            server.close()
            await server.wait_closed()
        return found, connections

    async def limited():
        async with asyncio.timeout(10):
            return await body()

    return asyncio.run(limited())


KEPT = b"HTTP/1.1 200 OK\r\nconnection: keep-alive\r\ncontent-length: 3\r\n\r\nabc"


def test_a_connection_is_used_again_when_its_answer_was_complete():
    assert _asked(KEPT, times=3) == ([(200, b"abc")] * 3, 1)


def test_an_answer_to_head_has_no_body_whatever_its_length_says():
    head = b"HTTP/1.1 200 OK\r\nconnection: keep-alive\r\ncontent-length: 3\r\n\r\n"

    assert _asked(head, times=2, method_head=True) == ([(200, b"")] * 2, 2)


@pytest.mark.parametrize(
    ("canned", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", 200, b"abcde"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end", 200, b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok", 201, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", 304, b""),
    ],
)
def test_an_answer_is_read_to_its_end_however_that_is_marked(canned, status, body):
    assert _asked(canned)[0] == [(status, body)]


@pytest.mark.parametrize(
    "canned",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
def test_an_answer_that_breaks_off_is_a_loss_and_never_a_short_answer(canned):
    with pytest.raises(UpstreamError):
        _asked(canned)


def test_a_refused_connection_is_a_loss():
    async def body():
        await ConnectionPool().send_request("127.0.0.1", 1, HEAD, b"", chunked=False, is_head=False)

    with pytest.raises(UpstreamError, match="no connection"):
        asyncio.run(body())


def _within_10_s(doing):
    async def limited():
        async with asyncio.timeout(10):
            return await doing()

    return asyncio.run(limited())


def test_a_connection_is_not_used_again_while_a_request_is_still_being_sent_on_it():
    async def body():
        heard, ended = [], asyncio.Semaphore(0)

        async def serve(reader, writer):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(KEPT)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            ended.release()

        async def upload():
            yield b"the first half"
            await asyncio.Event().wait()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        where = server.sockets[0].getsockname()
        pool = ConnectionPool()
        for request in (upload(), b""):
            answer = await pool.send_request(*where, HEAD, request, chunked=True, is_head=False)
            assert await answer.read_chunk() == (b"abc", False)
            pool.release(answer, *where)
        pool.close()
        for _ in heard:
            await ended.acquire()
        server.close()
        await server.wait_closed()
        return heard

    assert _within_10_s(body) == [HEAD, HEAD]


def test_a_connection_that_the_session_hung_up_is_forgotten():
    async def body():
        over, hung_up = asyncio.Event(), asyncio.Event()

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(KEPT)
            await over.wait()
            writer.close()
            await writer.wait_closed()
            hung_up.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        where = server.sockets[0].getsockname()
        pool = ConnectionPool()
        answer = await pool.send_request(*where, HEAD, b"", chunked=False, is_head=False)
        await answer.read_chunk()
        pool.release(answer, *where)
        assert list(pool._idle) == [where]
        over.set()
        await hung_up.wait()
        while answer.is_reusable:
            await asyncio.sleep(0)
        server.close()
        await server.wait_closed()
        return pool._idle

    assert _within_10_s(body) == {}
