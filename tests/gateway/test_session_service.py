"""The session service on a clock that a test sets: what is removed when, and what is never forgotten."""

import asyncio

import pytest
from tests.gateway.harness import MemoryRuntime

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.session_service import SessionService


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def with_service(test):
    """Runs an async test with a service, its runtime and its clock; ids are a, b, c and so on."""

    def run():
        async def body():
            runtime, clock, ids = MemoryRuntime(), Clock(), iter("abcdefgh")
            service = SessionService(runtime, limit=2, new_id=lambda: next(ids), clock=clock)
            await service.start()
            service.reaper.cancel()  # the test says when it comes by
            try:
                await test(service, runtime, clock)
            finally:
                await service.stop()

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


async def _reap(service):
    await service.remove_expired()
    while others := [task for task in service._tasks if task is not service.reaper]:
        await asyncio.gather(*others)


@with_service
async def test_an_unused_session_is_removed_when_its_lease_runs_out_and_not_before(service, runtime, clock):
    await service.open("browser", 60.0)

    clock.now += 59.9
    await _reap(service)
    assert list(runtime.sessions) == ["a"]
    clock.now += 0.1
    await _reap(service)

    assert runtime.sessions == {}
    assert service.list_sessions() == []
    assert service.metrics.totals["reaped"] == 1


@with_service
async def test_a_used_session_lives_for_as_long_as_it_is_used(service, runtime, clock):
    await service.open("browser", 60.0)

    for _ in range(10):
        clock.now += 59.0
        lease, _ = service.begin_request("a")
        service.end_request(lease)
        await _reap(service)

    assert list(runtime.sessions) == ["a"]


@with_service
async def test_a_session_that_cannot_be_removed_keeps_its_place_until_it_is(service, runtime, clock):
    await service.open("browser", 60.0)
    runtime.undeletable.add("a")
    clock.now += 60.0
    await _reap(service)
    assert service.leases.num_active == 1

    runtime.undeletable.clear()
    await _reap(service)

    assert (service.leases.num_active, runtime.sessions) == (0, {})
    assert service.metrics.totals["reaped"] == 1


@with_service
async def test_a_session_of_the_runtime_without_a_lease_is_removed(service, runtime, clock):
    await service.open("browser", 60.0)
    runtime.sessions["left by another"] = object()

    await service.reconcile()

    assert list(runtime.sessions) == ["a"]


@with_service
async def test_an_opening_that_failed_gives_its_place_back(service, runtime, clock):
    runtime.fail_next = SessionFailed("no_server", "asked to")
    with pytest.raises(SessionFailed):
        await service.open("browser", 60.0)

    await service.open("browser", 60.0)
    await service.open("browser", 60.0)

    assert sorted(runtime.sessions) == ["b", "c"]


@with_service
async def test_draining_ends_after_the_grace_whatever_is_still_open(service, runtime, clock):
    await service.open("browser", 60.0)

    await service.drain(0.01)

    assert service.leases.num_active == 1


@with_service
async def test_draining_with_nothing_open_ends_at_once(service, runtime, clock):
    await asyncio.wait_for(service.drain(3600.0), 5.0)


def test_the_reaper_comes_by_itself_when_a_lease_runs_out():
    async def body():
        runtime, removed = MemoryRuntime(), asyncio.Event()
        delete = runtime.delete

        async def noticed(session_id):
            await delete(session_id)
            removed.set()

        runtime.delete = noticed
        service = SessionService(runtime, limit=2, new_id=lambda: "a")
        await service.start()
        await service.open("browser", 0.05)
        await asyncio.wait_for(removed.wait(), 10.0)
        await service.stop()

    asyncio.run(body())


@with_service
async def test_the_specifications_name_for_a_data_entry_session_opens_a_browser(service, runtime, clock):
    made = []
    create = runtime.create

    async def created(session_id, session_type):
        made.append(session_type)
        return await create(session_id, session_type)

    runtime.create = created
    lease = await service.open("simple_data_entry", 60.0)
    assert (lease.session_type, made) == ("simple_data_entry", ["browser"])
    assert service.session_types == ("browser", "pod", "simple_data_entry")

    runtime.session_types = ("simple_data_entry",)  # such as a manifest of that name in a cluster
    await service.open("simple_data_entry", 60.0)
    assert (made[1], service.session_types) == ("simple_data_entry", ("simple_data_entry",))

    runtime.session_types = ("pod",)
    with pytest.raises(SessionRefused, match="there is no such type"):
        await service.open("simple_data_entry", 60.0)
