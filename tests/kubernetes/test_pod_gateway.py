"""The gateway as a process in front of a cluster: served, killed with -9, started again, refused."""

import asyncio
import contextlib
import json
import os
import signal
import sys

import aiohttp
import pytest
import yaml
from tests.kubernetes.carried import until
from tests.kubernetes.conftest import manifest_document

from palaestra.gateway.config import TOKEN_VARIABLE
from palaestra.sessions.clients.client import GatewayClient
from palaestra.sessions.conformance import check_session

pytestmark = pytest.mark.kubernetes

TOKEN = "0123456789abcdef"


def written(place, directory, **settings):
    """The configuration file of a gateway for this place."""
    manifest, file = directory / "session.yaml", directory / "gateway.yaml"
    manifest.write_text(yaml.safe_dump(manifest_document()))
    kubernetes = {
        "namespace": place.namespace, "kubeconfig": str(place.kubeconfig), "manifests": {"browser": str(manifest)},
        "ready_s": 60, **settings.pop("kubernetes", {}),
    }  # fmt: skip
    file.write_text(yaml.safe_dump({"port": 0, "runtime": "kubernetes", "kubernetes": kubernetes, **settings}))
    return file


def command(file):
    return (sys.executable, "-m", "palaestra", "gateway", "--config", str(file))


@contextlib.asynccontextmanager
async def gateway(file):
    """A process that has printed where it listens: the process and its address."""
    process = await asyncio.create_subprocess_exec(
        *command(file), env={**os.environ, TOKEN_VARIABLE: TOKEN}, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process, json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["url"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 60)
        process._transport.close()


async def ask(url, method, path, **how):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        aiohttp.ClientSession(headers=headers, trust_env=False) as http,
        http.request(method, url + path, **how) as response,
    ):
        return response.status, await response.json(content_type=None)


@pytest.mark.usefixtures("stand_in")
def test_a_session_in_a_pod_through_the_gateway_keeps_every_rule_of_the_kit(place, tmp_path):
    async def body():
        async with gateway(written(place, tmp_path, warm=1)) as (process, url):
            assert await ask(url, "GET", "/health") == (200, {"status": "ok"})
            client = GatewayClient(url, token=TOKEN)
            try:
                await check_session(client.open, "fake/button")
            finally:
                await client.close()
            assert await ask(url, "GET", "/sessions") == (200, {"sessions": []})
            status, document = await ask(url, "POST", "/sessions", json={"session_type": "desktop"})
            assert (status, document["error"]["code"]) == (422, "unknown_session_type")
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60) == 0
        assert place.pods() == {}

    asyncio.run(body())


def test_what_a_gateway_killed_with_9_left_is_gone_when_the_next_one_serves(place, tmp_path):
    async def body():
        file = written(place, tmp_path, warm=1)
        async with gateway(file) as (process, url):
            opened = [await ask(url, "POST", "/sessions", json={}) for _ in range(3)]
            assert [status for status, _ in opened] == [201, 201, 201]
            before = {one["metadata"]["uid"] for one in place.pods().values()}
            process.kill()
            await process.wait()
            assert len(before) >= 3
        async with gateway(file) as (process, url):
            assert not before & {one["metadata"]["uid"] for one in place.pods().values()}
            assert len([one for one in place.objects("configmaps") if "palaestra" in one["metadata"]["name"]]) == 1
            assert (await ask(url, "POST", "/sessions", json={}))[0] == 201

    asyncio.run(body())


@pytest.mark.usefixtures("stand_in")
def test_a_lost_pod_is_an_environment_failure_to_the_user_of_the_session(place, tmp_path):
    async def body():
        async with gateway(written(place, tmp_path, warm=0)) as (_, url):
            opened = (await ask(url, "POST", "/sessions", json={}))[1]
            name, owned = opened["session_id"], {"X-Palaestra-Session-Token": opened["session_token"]}
            os.kill(place.pid(name), signal.SIGKILL)
            await until(lambda: place.pods() == {})
            status, document = await ask(url, "GET", f"/proxy/{name}/health", headers=owned)
            assert (status, document["error"]["code"]) == (502, "environment_failed")
            assert "exit code 137" in document["error"]["message"]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"namespace": "nowhere"}, b"namespace_missing"),
        ({"kubeconfig": "/nowhere/kubeconfig"}, b"gateway.kubernetes.kubeconfig = '/nowhere/kubeconfig'"),
        ({"context": "elsewhere"}, b"elsewhere"),
        ({"manifests": {"browser": "/nowhere/session.yaml"}}, b"gateway.kubernetes.manifests.browser"),
        ({"namespce": "x"}, b"Did you mean 'namespace'?"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_with_exit_code_2(place, tmp_path, settings, message):
    async def body():
        process = await asyncio.create_subprocess_exec(
            *command(written(place, tmp_path, kubernetes=settings)), env={**os.environ, TOKEN_VARIABLE: TOKEN},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2, errors
        assert errors.count(b"\n") == 1, errors
        assert message in errors

    asyncio.run(body())
