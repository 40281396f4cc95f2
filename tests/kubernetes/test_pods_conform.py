"""The runtime of pods on a real API server: the kit, and where pods differ from processes."""

import asyncio
import os
import signal

import pytest

from palaestra.gateway import check_runtime

pytestmark = pytest.mark.kubernetes


@pytest.mark.parametrize("warm", [0, 1])
def test_the_kubernetes_runtime_keeps_every_promise_of_the_kit(place, warm):
    async def kill(runtime, session_id, address):
        if place.cluster.plane is None:
            name = place.carrier(session_id)["metadata"]["name"]
            place.kubectl("delete", "pod", name, "--force", "--grace-period=0")
        else:
            os.kill(await asyncio.to_thread(place.pid, session_id), signal.SIGKILL)

    asyncio.run(check_runtime(lambda: place.runtime(warm=warm), kill, timeout_s=120))
