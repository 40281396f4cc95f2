"""Plays scheduler and kubelet for a cluster without nodes: every pod becomes a real session server on this machine.

    python -m tests.kubernetes.kubelet_stand_in KUBECONFIG

Watches the pods of every namespace over the real API, binds each to a node, starts `palaestra.sessions.server --fake`
on a loopback address of its own, probes it and writes the status a kubelet would write; a process that ends becomes a
failed pod, a deleted pod ends its process. A pod can ask for trouble by an annotation (`TROUBLE`); what a kubelet says
then is reported here. Prints `ready` once it listens, and ends, with all its processes, when its standard input does.
"""

import asyncio
import contextlib
import itertools
import random
import signal
import sys
from pathlib import Path

import aiohttp

from palaestra.gateway.config import KubernetesConfig
from palaestra.gateway.pods.api import ApiError, ApiStatusError, ClusterApi

TROUBLE = "stand-in.palaestra.dev/trouble"
"""image, config, unschedulable, slow, crash: how the pod is to fail; oom: what a death by signal 9 is called."""
NODE = "stand-in"
MERGE = "application/merge-patch+json"
FINGERPRINT = "2026-01-01T00:00:00Z"


class NodeApi(ClusterApi):
    """The same API as a node sees it: all namespaces at once."""

    def _path(self, *parts):
        return "/".join(("/api/v1", *parts))


class StandIn:
    """One node's worth of pods."""

    def __init__(self, api):
        self._api = api
        self._tasks, self._processes, self._endings = {}, {}, []
        # Addresses are not used again soon, so that no connection is answered by the next pod.
        numbers = itertools.count(random.randrange(10_000_000))
        self._addresses = (f"127.{16 + n // 62500 % 200}.{n // 250 % 250}.{1 + n % 250}" for n in numbers)
        self._gone = set()

    async def run(self, ready):
        """List, watch, and begin again whenever that breaks."""
        while True:
            with contextlib.suppress(ApiError):
                documents, version = await self._api.list_pods("")
                for uid in set(self._tasks) - {document["metadata"]["uid"] for document in documents}:
                    self._forced(uid)
                for document in documents:
                    self._see(document)
                ready()
                async with self._api.watch_pods("", version) as events:
                    async for kind, document in events:
                        if kind == "DELETED":
                            self._forced(document["metadata"]["uid"])
                        elif kind != "BOOKMARK":
                            self._see(document)
            await asyncio.sleep(0.05)

    async def stop(self):
        for uid in list(self._processes):
            self._forced(uid)
        tasks = [*self._tasks.values(), *self._endings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _see(self, document):
        metadata = document["metadata"]
        if metadata["uid"] not in self._tasks:
            self._tasks[metadata["uid"]] = asyncio.create_task(self._live(document))
        elif "deletionTimestamp" in metadata:
            self._endings.append(asyncio.create_task(self._terminate(metadata)))

    def _forced(self, uid):
        self._gone.add(uid)
        process = self._processes.get(uid)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _terminate(self, metadata):
        process = self._processes.get(metadata["uid"])
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), metadata.get("deletionGracePeriodSeconds") or 0)
            self._forced(metadata["uid"])
            await process.wait()
        await self._delete(metadata)

    async def _delete(self, metadata):
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        await self._insist("DELETE", metadata, "", body)

    async def _live(self, document):
        """From Pending to its end."""
        metadata, spec = document["metadata"], document["spec"]
        trouble = metadata.get("annotations", {}).get(TROUBLE, "")
        status = {"phase": "Pending", "startTime": document["metadata"]["creationTimestamp"]}
        if "deletionTimestamp" in metadata:
            return await self._delete(metadata)
        if trouble == "unschedulable":
            words = {"reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient cpu."}
            return await self._say(metadata, {**status, "conditions": [_condition("PodScheduled", False, **words)]})
        if "nodeName" not in spec:
            target = {
                "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
                "metadata": {"name": metadata["name"]},
            }
            await self._insist("POST", metadata, "/binding", target)
        container = spec["containers"][0]
        waiting = {
            "image": {"reason": "ErrImagePull", "message": f'pull access denied for "{container["image"]}"'},
            "config": {"reason": "CreateContainerConfigError", "message": 'secret "token" not found'},
        }.get(trouble)
        scheduled = _condition("PodScheduled", True)
        if waiting:
            return await self._say(
                metadata,
                {**status, "conditions": [scheduled], "containerStatuses": [_container(container, waiting=waiting)]},
            )
        address, port = next(self._addresses), container["ports"][0]["containerPort"]
        status |= {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "hostIP": "127.0.0.1"}
        unready = _condition("Ready", False, reason="ContainersNotReady", message="containers with unready status")
        if trouble == "slow":
            running = _container(container, running={"startedAt": FINGERPRINT})
            return await self._say(
                metadata, {**status, "conditions": [scheduled, unready], "containerStatuses": [running]}
            )
        process = await self._started(trouble, address, port)
        self._processes[metadata["uid"]] = process
        if metadata["uid"] in self._gone:
            self._forced(metadata["uid"])
        running = _container(container, pid=process.pid, running={"startedAt": FINGERPRINT})
        await self._say(metadata, {**status, "conditions": [scheduled, unready], "containerStatuses": [running]})
        if await self._probed(process, address, port):
            running["ready"] = True
            ready = [scheduled, _condition("Ready", True)]
            await self._say(metadata, {**status, "conditions": ready, "containerStatuses": [running]})
        code = await process.wait()
        code = code if code >= 0 else 128 - code
        reason = "OOMKilled" if trouble == "oom" and code == 137 else "Error" if code else "Completed"
        ended = _container(container, terminated={"exitCode": code, "reason": reason})
        if trouble == "crash":
            ended["state"]["terminated"]["message"] = "no chromium was found"
        phase = "Failed" if code else "Succeeded"
        await self._say(
            metadata, {**status, "phase": phase, "conditions": [scheduled, unready], "containerStatuses": [ended]}
        )
        return None

    async def _started(self, trouble, address, port):
        command = [sys.executable, "-m", "palaestra.sessions.server", "--fake", "--host", address, "--port", str(port)]
        if trouble == "crash":
            command = [sys.executable, "-c", "raise SystemExit(3)"]
        return await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )

    async def _probed(self, process, address, port):
        """Ask for /health as a readiness probe does, until it answers; False when its process has ended."""
        async with aiohttp.ClientSession(trust_env=False) as client:
            while process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with client.get(
                        f"http://{address}:{port}/health", timeout=aiohttp.ClientTimeout(2)
                    ) as answer:
                        if answer.status == 200:
                            return True
                await asyncio.sleep(0.02)
        return False

    async def _say(self, metadata, status):
        await self._insist("PATCH", metadata, "/status", {"metadata": {"uid": metadata["uid"]}, "status": status})

    async def _insist(self, method, metadata, part, body):
        """Until the API server has answered; that the pod is gone is an answer, too."""
        path = self._api._path("namespaces", metadata["namespace"], "pods", metadata["name"]) + part
        while True:
            try:
                content = MERGE if method == "PATCH" else "application/json"
                return await self._api._call(method, path, body=body, content_type=content)
            except ApiStatusError as refused:
                if refused.status in (404, 409):
                    return None
                if refused.status not in (429, 500, 503, 504):
                    raise
            except ApiError:
                pass
            await asyncio.sleep(0.05)


def _condition(kind, holds, **words):
    return {"type": kind, "status": "True" if holds else "False", **words}


def _container(container, *, pid=0, **state):
    name = container["name"]
    identity = {"containerID": f"process://{pid}"} if pid else {}
    return {
        "name": name,
        "image": container["image"],
        "imageID": "",
        "restartCount": 0,
        "ready": False,
        "state": state,
        **identity,
    }


async def main(kubeconfig):
    api = NodeApi(KubernetesConfig(kubeconfig=Path(kubeconfig)))
    await api.open()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(0, over.set)
    loop.add_signal_handler(signal.SIGTERM, over.set)
    reported = []

    def ready():
        if not reported:
            reported.append(True)
            sys.stdout.write("ready\n")
            sys.stdout.flush()

    node = StandIn(api)
    running = asyncio.create_task(node.run(ready))
    stopping = asyncio.create_task(over.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await node.stop()
    await api.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
