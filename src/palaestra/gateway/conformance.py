"""The conformance tests of a `Runtime`, on this machine or in a cluster.

`await check_runtime(make, kill)` raises `AssertionError` with the rule that was broken. `make` returns a runtime that
was not started; `kill` kills the process or pod of a session without telling the runtime, as a crash would.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from palaestra.gateway.runtime import Address, Runtime

MakeRuntime = Callable[[], Runtime]
Kill = Callable[[Runtime, str, Address], Awaitable[None]]


async def check_runtime(make: MakeRuntime, kill: Kill, *, timeout_s: float = 60.0) -> None:
    """Test every rule on runtimes from `make`; each is stopped before the next one is started."""
    async with asyncio.timeout(timeout_s):
        await _check_create_and_delete(make)
        await _check_death_is_reported_once(make, kill)
        await _check_deletion_is_not_reported(make)
        await _check_stop_removes_everything(make)


@contextlib.asynccontextmanager
async def _start(make: MakeRuntime) -> AsyncIterator[tuple[Runtime, asyncio.Queue[tuple[str, str]]]]:
    """A running runtime and the queue of the losses that it reports; it is stopped when the block ends."""
    runtime, reports = make(), asyncio.Queue[tuple[str, str]]()
    await runtime.start(lambda session_id, reason: reports.put_nowait((session_id, reason)))
    try:
        yield runtime, reports
    finally:
        await runtime.stop()


async def _check_create_and_delete(make: MakeRuntime) -> None:
    async with _start(make) as (runtime, _):
        assert runtime.session_types, "a runtime has at least one session type"
        session_type = runtime.session_types[0]
        assert dict(await runtime.list()) == {}, "a runtime that was just started has no sessions"
        first, second = await runtime.create("kit-a", session_type), await runtime.create("kit-b", session_type)
        assert first != second, "two sessions have two addresses"
        for address in (first, second):
            assert await _answers(address), f"create returned before {address.url} answered"
        assert dict(await runtime.list()) == {"kit-a": first, "kit-b": second}, (
            "list returns exactly the sessions that exist"
        )
        assert runtime.counts()["ready"] >= 1, "a server or pod with a session counts as ready"
        await runtime.delete("kit-a")
        assert set(await runtime.list()) == {"kit-b"}, "a deleted session is no longer listed"
        await runtime.delete("kit-a")
        await runtime.delete("kit-unknown")
        assert await _answers(second), "deleting one session does not affect the others"


async def _check_death_is_reported_once(make: MakeRuntime, kill: Kill) -> None:
    async with _start(make) as (runtime, reports):
        address = await runtime.create("kit-c", runtime.session_types[0])
        await kill(runtime, "kit-c", address)
        session_id, reason = await reports.get()
        assert session_id == "kit-c", f"kit-c was killed and {session_id} reported"
        assert reason, "a death has a reason"
        assert "kit-c" not in await runtime.list(), "a dead session is no longer listed"
        await runtime.delete("kit-c")
        again = await runtime.create("kit-d", runtime.session_types[0])
        assert await _answers(again), "after a death, sessions can be created as before"
        assert reports.empty(), "a death is reported once"


async def _check_deletion_is_not_reported(make: MakeRuntime) -> None:
    async with _start(make) as (runtime, reports):
        await runtime.create("kit-e", runtime.session_types[0])
        await runtime.delete("kit-e")
        await runtime.create("kit-f", runtime.session_types[0])
    assert reports.empty(), "sessions that were deleted, or stopped with the runtime, are not reported lost"


async def _check_stop_removes_everything(make: MakeRuntime) -> None:
    async with _start(make) as (runtime, _):
        address = await runtime.create("kit-g", runtime.session_types[0])
    assert not await _answers(address), "a session still answers after its runtime was stopped"
    async with _start(make) as (following, _):
        assert dict(await following.list()) == {}, "the stopped runtime left sessions behind"


async def _answers(address: Address) -> bool:
    """Whether the session answers HTTP requests."""
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:
        return False
    try:
        request = f"GET {address.prefix}/health HTTP/1.1\r\nHost: {address.host}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        return (await reader.readline()).startswith(b"HTTP/1.1 2")
    except OSError:
        return False
    finally:
        writer.close()
