"""An API server that dies, comes back, and forgets: sessions go on, and what happened meanwhile is reported."""

import asyncio
import os
import signal

import pytest
from tests.kubernetes.carried import answers, carried, until

from palaestra.errors import SessionFailed
from palaestra.gateway.pods import controller

pytestmark = pytest.mark.kubernetes


@pytest.fixture
def plane(cluster):
    if cluster.plane is None:
        pytest.skip("only an API server of our own may be killed")
    return cluster.plane


def test_an_api_server_killed_and_started_again_loses_no_session_and_a_death_meanwhile_is_reported(
    place, plane, monkeypatch
):
    # On a loaded machine it takes longer to come back than requests are retried elsewhere.
    monkeypatch.setattr(controller, "OUTAGE_S", 120.0)

    async def body():
        async with carried(place) as (runtime, lost):
            names = ("one", "two", "three")
            addresses = dict(
                zip(names, await asyncio.gather(*(runtime.create(n, "browser") for n in names)), strict=True)
            )
            pid = place.pid("two")
            plane.kill_api()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: runtime.counts()["watched"] == 0)
            opening = asyncio.create_task(runtime.create("four", "browser"))
            closing = asyncio.create_task(runtime.delete("three"))
            assert await answers(addresses["one"])
            assert set(await runtime.list()) == set(names)
            assert lost.empty

            await asyncio.to_thread(plane.start_api)

            assert await lost.next() == ("two", "container session ended with exit code 137")
            assert await answers(await opening)
            await closing
            assert set(await runtime.list()) == {"one", "four"}
            assert await answers(addresses["one"])
            assert runtime.counts()["watched"] == 1
            assert lost.empty

    asyncio.run(body())


def test_a_moment_the_cluster_has_forgotten_is_made_up_for_by_a_list(place, plane):
    async def body():
        async with carried(place) as (runtime, lost):
            addresses = [await runtime.create(name, "browser") for name in ("one", "two")]
            # Writes that are none of our pods', so that what we saw last is in the past.
            for number in range(3):
                place.kubectl("create", "configmap", f"filler-{number}")
            place.kubectl("delete", "configmap", "filler-0", "filler-1", "filler-2")
            pid = place.pid("two")
            plane.kill_api()
            os.kill(pid, signal.SIGKILL)
            plane.compact()
            await asyncio.to_thread(plane.start_api)

            assert await lost.next() == ("two", "container session ended with exit code 137")
            assert runtime._controller.informer.relists == 1
            assert set(await runtime.list()) == {"one"}
            assert await answers(addresses[0])
            await runtime.create("three", "browser")
            assert lost.empty

    asyncio.run(body())


def test_a_session_that_vanished_during_an_outage_is_reported(place, plane):
    """Its pod is deleted and collected before our watch is back: only the list shows that it is not there."""

    async def body():
        async with carried(place) as (runtime, lost):
            await runtime.create("one", "browser")
            await runtime.create("two", "browser")
            following = runtime._controller._informing
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            place.kubectl("delete", "pod", "session-one")
            runtime._controller.informer._version = None
            runtime._controller._informing = asyncio.create_task(runtime._controller.informer.run())

            assert await lost.next() == ("one", "its pod was deleted by another client")
            assert set(await runtime.list()) == {"two"}

    asyncio.run(body())


def test_while_the_api_server_is_away_opening_and_closing_fail_and_nothing_is_forgotten(place, plane, monkeypatch):
    monkeypatch.setattr(controller, "OUTAGE_S", 0.5)

    async def body():
        async with carried(place) as (runtime, lost):
            address = await runtime.create("one", "browser")
            plane.kill_api()
            try:
                for doing in (runtime.create("two", "browser"), runtime.delete("one")):
                    with pytest.raises(SessionFailed) as caught:
                        await doing
                    assert caught.value.reason == "api_unreachable"
                assert set(await runtime.list()) == {"one"}
                assert await answers(address)
            finally:
                await asyncio.to_thread(plane.start_api)
            await until(lambda: runtime.counts()["watched"] == 1)
            await runtime.delete("one")
            assert lost.empty

    asyncio.run(body())
