"""What a stream holds for a client that does not read."""

import asyncio
import contextlib

from palaestra.runs.service.streaming import batches


def test_a_client_that_does_not_read_holds_a_bounded_number_of_bytes():
    given = []

    async def items():
        for number in range(100):
            given.append(number)
            yield bytes(1000)

    async def body():
        stream = batches(items(), asyncio.Event(), size=len, limit=4000)
        first = await anext(stream)
        for _ in range(200):
            await asyncio.sleep(0)
        held = len(given) - len(first)
        sizes = [len(first), *[len(batch) async for batch in stream]]
        await stream.aclose()
        return held, sizes

    held, sizes = asyncio.run(body())
    assert held <= 4
    assert (sum(sizes), max(sizes)) == (100, 4)


def test_whoever_leaves_closes_what_it_was_fed_from():
    left = []

    async def items():
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0)
        finally:
            left.append("closed")

    async def body():
        async with contextlib.aclosing(batches(items(), asyncio.Event(), size=len, limit=4)) as stream:
            await anext(stream)

    asyncio.run(body())
    assert left == ["closed"]
