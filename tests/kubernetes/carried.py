"""A started runtime of pods and what it reports, for the tests of one namespace."""

import asyncio
import contextlib

import aiohttp


class Reports:
    """Sessions that were reported lost, in order."""

    def __init__(self):
        self._queue = asyncio.Queue()

    def __call__(self, session_id, reason):
        self._queue.put_nowait((session_id, reason))

    async def next(self, within_s=60):
        return await asyncio.wait_for(self._queue.get(), within_s)

    @property
    def empty(self):
        return self._queue.empty()


@contextlib.asynccontextmanager
async def carried(place, **settings):
    """A runtime that is stopped at the end."""
    runtime, lost = place.runtime(**settings), Reports()
    try:
        await runtime.start(lost)
        yield runtime, lost
    finally:
        await runtime.stop()


async def answers(address):
    """Whether a session says that it is well."""
    try:
        async with aiohttp.ClientSession(trust_env=False) as client, client.get(f"{address.url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def until(holds, within_s=60.0):
    """Wait for what another process has to do; the answer that was waited for."""
    async with asyncio.timeout(within_s):
        while not (found := await asyncio.to_thread(holds)):
            await asyncio.sleep(0.05)
    return found
