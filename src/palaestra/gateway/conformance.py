"""The kit every `Runtime` has to pass, on this machine or in a cluster: its promises, tried one by one.

`await check_runtime(make, kill)` raises `AssertionError` with the promise that was broken. `make` gives a runtime that
was not started; `kill` ends whatever carries a session without telling the runtime, as a crash would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from palaestra.gateway.runtime import Address, Runtime

__all__ = ["check_runtime"]

MakeRuntime = Callable[[], Runtime]
Kill = Callable[[Runtime, str, Address], Awaitable[None]]


async def check_runtime(make: MakeRuntime, kill: Kill, *, patience_s: float = 60.0) -> None:
    """Try every promise on runtimes that `make` gives; each is stopped before the next one is started."""
    async with asyncio.timeout(patience_s):
        await _sessions_answer_apart_and_go_when_deleted(make)
        await _a_death_is_reported_once_and_with_a_reason(make, kill)
        await _a_deletion_is_not_a_death(make)
        await _stopping_leaves_nothing(make)


class _Reports:
    """What was reported lost, and a way to wait for it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def __call__(self, session_id: str, reason: str) -> None:
        self._queue.put_nowait((session_id, reason))

    async def next(self) -> tuple[str, str]:
        return await self._queue.get()

    @property
    def empty(self) -> bool:
        return self._queue.empty()


async def _sessions_answer_apart_and_go_when_deleted(make: MakeRuntime) -> None:
    runtime = make()
    await runtime.start(_Reports())
    try:
        assert runtime.session_types, "a runtime offers at least one type of session"
        kind = runtime.session_types[0]
        assert dict(await runtime.list()) == {}, "a runtime that was just started carries nothing"
        first, second = await runtime.create("kit-a", kind), await runtime.create("kit-b", kind)
        assert first != second, "two sessions have two addresses"
        for address in (first, second):
            assert await _answers(address), f"create returned before {address.url} answered"
        assert dict(await runtime.list()) == {"kit-a": first, "kit-b": second}, "list names what was made, and no more"
        assert runtime.facts()["ready"] >= 1, "what carries a session counts as ready"
        await runtime.delete("kit-a")
        assert set(await runtime.list()) == {"kit-b"}, "a deleted session is listed no more"
        await runtime.delete("kit-a")
        await runtime.delete("kit-unknown")
        assert await _answers(second), "deleting one session leaves the others alone"
    finally:
        await runtime.stop()


async def _a_death_is_reported_once_and_with_a_reason(make: MakeRuntime, kill: Kill) -> None:
    runtime, reports = make(), _Reports()
    await runtime.start(reports)
    try:
        address = await runtime.create("kit-c", runtime.session_types[0])
        await kill(runtime, "kit-c", address)
        session_id, reason = await reports.next()
        assert session_id == "kit-c", f"kit-c was killed and {session_id} reported"
        assert reason, "a death has a reason"
        assert "kit-c" not in await runtime.list(), "a dead session is listed no more"
        await runtime.delete("kit-c")
        again = await runtime.create("kit-d", runtime.session_types[0])
        assert await _answers(again), "after a death, sessions can be made as before"
        assert reports.empty, "a death is reported once"
    finally:
        await runtime.stop()


async def _a_deletion_is_not_a_death(make: MakeRuntime) -> None:
    runtime, reports = make(), _Reports()
    await runtime.start(reports)
    try:
        await runtime.create("kit-e", runtime.session_types[0])
        await runtime.delete("kit-e")
        await runtime.create("kit-f", runtime.session_types[0])
    finally:
        await runtime.stop()
    assert reports.empty, "what was deleted, or stopped with the runtime, is not reported lost"


async def _stopping_leaves_nothing(make: MakeRuntime) -> None:
    runtime = make()
    await runtime.start(_Reports())
    address = await runtime.create("kit-g", runtime.session_types[0])
    await runtime.stop()
    assert not await _answers(address), "a session answers although its runtime was stopped"
    following = make()
    await following.start(_Reports())
    try:
        assert dict(await following.list()) == {}, "the next runtime finds what the stopped one should have removed"
    finally:
        await following.stop()


async def _answers(address: Address) -> bool:
    """Whether the session says anything at all over HTTP."""
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:
        return False
    try:
        asked = f"GET {address.prefix}/health HTTP/1.1\r\nHost: {address.host}\r\nConnection: close\r\n\r\n"
        writer.write(asked.encode())
        return (await reader.readline()).startswith(b"HTTP/1.1 2")
    except OSError:
        return False
    finally:
        writer.close()
