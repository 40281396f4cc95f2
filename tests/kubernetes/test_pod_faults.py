"""Failing pods on a real API server: reported once, in the cluster's own words, and nothing is left behind."""

import asyncio
import os
import signal

import pytest
from tests.kubernetes.carried import answers, carried, until
from tests.kubernetes.conftest import manifest_document

from palaestra.errors import SessionFailed

pytestmark = pytest.mark.kubernetes


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("trouble", "reason", "message"),
    [
        ("image", "image_pull_failed", "image 'nowhere/session:1': ErrImagePull: pull access denied"),
        ("config", "start_failed", 'container session: CreateContainerConfigError: secret "token" not found'),
        ("unschedulable", "unschedulable", "within 0.2 s: 0/1 nodes are available: 1 Insufficient cpu."),
        ("slow", "ready_timeout", "Ready is False (ContainersNotReady: containers with unready status)"),
        ("crash", "crashed", "container session ended with exit code 3: no chromium was found"),
    ],
)
def test_a_pod_that_cannot_get_ready_is_given_up_with_the_reason_and_removed(place, trouble, reason, message):
    document = manifest_document(trouble=trouble, image="nowhere/session:1")

    async def body():
        ready_s = 8 if trouble == "slow" else 30
        async with carried(place, document=document, ready_s=ready_s, unschedulable_s=0.2) as (runtime, lost):
            with pytest.raises(SessionFailed) as caught:
                await runtime.create("one", "browser")
            assert caught.value.reason == reason
            assert message in caught.value.detail
            assert dict(await runtime.list()) == {}
            assert place.pods() == {}
            assert lost.empty

    asyncio.run(body())


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("trouble", "message"),
    [("", "container session ended with exit code 137"), ("oom", "container session was OOMKilled (exit code 137)")],
)
def test_a_killed_container_is_a_lost_session_with_its_exit_code_and_its_pod_is_removed(place, trouble, message):
    async def body():
        async with carried(place, document=manifest_document(trouble=trouble)) as (runtime, lost):
            await runtime.create("one", "browser")
            other = await runtime.create("two", "browser")
            os.kill(place.pid("one"), signal.SIGKILL)
            assert await lost.next() == ("one", message)
            assert set(await runtime.list()) == {"two"}
            await until(lambda: set(place.pods()) == {"session-two"})
            assert await answers(other)
            assert lost.empty
            assert runtime.counts()["lost"] == 1

    asyncio.run(body())


def test_a_pod_deleted_by_another_client_is_a_lost_session(place):
    async def body():
        async with carried(place) as (runtime, lost):
            await runtime.create("one", "browser")
            place.kubectl("delete", "pod", "session-one", "--wait=false")
            assert await lost.next() == ("one", "its pod was deleted by another client")
            assert dict(await runtime.list()) == {}
            place.kubectl("wait", "--for=delete", "pod/session-one", "--timeout=30s")
            assert lost.empty

    asyncio.run(body())


@pytest.mark.usefixtures("stand_in")
def test_a_session_that_is_not_waited_for_any_more_is_not_made(place):
    async def body():
        async with carried(place, document=manifest_document(trouble="slow")) as (runtime, _):
            opening = asyncio.create_task(runtime.create("one", "browser"))
            await until(lambda: place.pods())
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert place.pods() == {}

    asyncio.run(body())


@pytest.mark.usefixtures("stand_in")
def test_stopping_gives_up_what_is_half_made_and_leaves_nothing(place):
    async def body():
        async with carried(place, document=manifest_document(trouble="slow")) as (runtime, _):
            opening = asyncio.create_task(runtime.create("one", "browser"))
            await until(lambda: place.pods())
        with pytest.raises(SessionFailed):
            await opening
        assert place.pods() == {}

    asyncio.run(body())


def test_a_pod_whose_creation_was_given_up_is_removed(place):
    """As a request makes one whose answer was given up before it came."""

    async def body():
        async with carried(place) as (runtime, _):
            await runtime.create("one", "browser")
            stray = place.carrier("one")
            labels = {**stray["metadata"]["labels"], "palaestra.dev/session": "stray"}
            document = {**manifest_document(), "metadata": {"name": "session-stray", "labels": labels}}
            document["spec"]["automountServiceAccountToken"] = False
            place.apply(document)
            await until(lambda: set(place.pods()) == {"session-one"})

    asyncio.run(body())


@pytest.mark.usefixtures("stand_in")
def test_a_session_without_grace_is_gone_at_once(place):
    async def body():
        async with carried(place, document=manifest_document(grace_s=0)) as (runtime, _):
            await runtime.create("one", "browser")
            pid = place.pid("one")
            await runtime.delete("one")
            assert place.pods() == {}
            await until(lambda: not os.path.exists(f"/proc/{pid}"))

    asyncio.run(body())


def test_every_pod_is_labelled_owned_bounded_and_powerless(place):
    async def body():
        async with carried(place, name="lab", lifetime_s=600) as (runtime, _):
            await runtime.create("one", "browser")
            pod = place.carrier("one")
            labels = pod["metadata"]["labels"]
            instance = labels.pop("palaestra.dev/instance")
            assert labels == {
                "app.kubernetes.io/name": "palaestra-session",
                "app.kubernetes.io/managed-by": "palaestra-gateway",
                "palaestra.dev/gateway": "lab",
                "palaestra.dev/session": "one",
                "palaestra.dev/session-type": "browser",
            }
            (owner,) = pod["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["name"]) == ("ConfigMap", f"palaestra-lab-{instance}")
            spec = pod["spec"]
            assert (spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("Never", 600)
            assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)

    asyncio.run(body())
