"""Spare pods: ready before a session is requested, claimed once, replaced; and the owner of every pod."""

import asyncio
import os
import signal

import pytest
from tests.kubernetes.carried import answers, carried, until
from tests.kubernetes.conftest import manifest_document

from palaestra.errors import ConfigError

pytestmark = pytest.mark.kubernetes


def test_a_spare_is_no_session_until_it_is_claimed_and_then_it_is_replaced(place):
    async def body():
        async with carried(place, warm=1, lifetime_s=600) as (runtime, lost):
            await until(lambda: runtime.counts()["spare"] == 1)
            assert dict(await runtime.list()) == {}
            (spare,) = place.pods().values()
            assert spare["spec"]["activeDeadlineSeconds"] == 1200

            address = await runtime.create("one", "browser")

            assert dict(await runtime.list()) == {"one": address}
            assert address.host == spare["status"]["podIP"]
            assert await answers(address)
            claimed = place.carrier("one")
            assert claimed["metadata"]["uid"] == spare["metadata"]["uid"]
            assert 600 < claimed["spec"]["activeDeadlineSeconds"] < 700
            await until(lambda: runtime.counts()["spare"] == 1)
            await runtime.delete("one")
            assert len(place.pods()) == 1
            assert lost.empty

    asyncio.run(body())


def test_sessions_opened_at_once_share_no_spare(place):
    async def body():
        async with carried(place, warm=1) as (runtime, _):
            await until(lambda: runtime.counts()["spare"] == 1)
            addresses = await asyncio.gather(*(runtime.create(name, "browser") for name in ("one", "two", "three")))
            assert len(set(addresses)) == 3
            assert set(await runtime.list()) == {"one", "two", "three"}

    asyncio.run(body())


def test_a_spare_that_was_written_to_since_is_claimed_all_the_same_and_two_claims_are_one(place):
    async def body():
        async with carried(place, warm=1) as (runtime, _):
            await until(lambda: runtime.counts()["spare"] == 1)
            spare = runtime._warm_pool.take("browser")
            manifest = runtime._manifests["browser"]
            place.kubectl("annotate", "pod", spare.pod.name, "written=since")
            claims = await asyncio.gather(*(runtime._claim(spare, manifest, name) for name in ("one", "two")))
            assert sorted(claims) == [False, True]
            winner = ("one", "two")[claims.index(True)]
            assert place.carrier(winner)["metadata"]["name"] == spare.pod.name

    asyncio.run(body())


@pytest.mark.usefixtures("stand_in")
def test_a_spare_that_dies_is_replaced_and_no_loss_is_reported(place):
    async def body():
        async with carried(place, warm=1) as (runtime, lost):
            await until(lambda: runtime.counts()["spare"] == 1)
            (spare,) = place.pods().values()
            pid = int(spare["status"]["containerStatuses"][0]["containerID"].removeprefix("process://"))
            os.kill(pid, signal.SIGKILL)
            await until(lambda: runtime.counts()["restarted"] == 1)
            await until(lambda: runtime.counts()["spare"] == 1)
            assert spare["metadata"]["name"] not in place.pods()
            assert lost.empty

    asyncio.run(body())


def test_deleting_the_owner_of_a_gateway_outside_deletes_its_pods(place):
    async def body():
        async with carried(place) as (runtime, lost):
            await runtime.create("one", "browser")
            (owner,) = place.carrier("one")["metadata"]["ownerReferences"]
            place.kubectl("delete", "configmap", owner["name"])
            assert await lost.next() == ("one", "its pod was deleted by another client")
            await until(lambda: place.pods() == {})

    asyncio.run(body())


def test_a_gateway_in_the_cluster_owns_its_pods_itself_and_they_go_with_it(place):
    document = {**manifest_document(), "metadata": {"name": "gateway-0"}}
    document["spec"]["automountServiceAccountToken"] = False

    async def body():
        place.apply(document)
        uid = place.pods()["gateway-0"]["metadata"]["uid"]
        environment = {"POD_NAME": "gateway-0", "POD_UID": uid, "POD_NAMESPACE": place.namespace}
        async with carried(place, environment=environment) as (runtime, lost):
            await runtime.create("one", "browser")
            (owner,) = place.carrier("one")["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "gateway-0", uid)
            assert [one for one in place.objects("configmaps") if one["metadata"]["name"] != "kube-root-ca.crt"] == []
            place.kubectl("delete", "pod", "gateway-0")
            assert (await lost.next())[0] == "one"
            await until(lambda: place.pods() == {})

    asyncio.run(body())


def test_an_owner_that_does_not_exist_is_refused_because_every_pod_would_go_at_once(place):
    async def body():
        with pytest.raises(ConfigError, match="POD_UID = 'wrong'"):
            async with carried(place, environment={"POD_NAME": "gateway-0", "POD_UID": "wrong"}):
                pass

    asyncio.run(body())
