"""What a session in a cluster costs: pods opened, used and removed through a gateway, beside the pods asked directly.

    KUBECONFIG=… python -m benchmarks.kubernetes --image localhost/palaestra-session:dev [--inside http://10.88.200.7:8700]

A gateway is started here for each setting (no spare, one spare); with --inside, one that runs in the cluster is
measured as well (its token in PALAESTRA_GATEWAY_TOKEN). Needs kubectl, and a machine that reaches pods by their
address, such as a node. Episodes of three tasks are solved on the way. Writes benchmarks/results/kubernetes.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import html
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway import TOKEN, Connection, child, request
from benchmarks.kubernetes_report import markdown
from benchmarks.machine import facts, load
from palaestra.gateway.config import TOKEN_VARIABLE
from palaestra.sessions.action import Click, Point, PressKeys, TypeText, UiAction
from palaestra.sessions.clients.client import GatewayClient, SessionClient
from palaestra.sessions.suites.click_target import ClickTarget
from palaestra.sessions.suites.data_entry import DataEntry
from palaestra.sessions.task import TaskProgress, TaskRequest
from palaestra.sessions.wire import SESSION_TOKEN_HEADER

RESULTS = Path(__file__).parent / "results"
BOX = Point(15, 63)
"""The first box of miniwob/click-checkboxes with seed 3: every click on it must change the picture."""
NO = Point(18, 62)
"""The button "no" of miniwob/click-button with seed 3."""


def kubectl(*arguments: str) -> Any:
    """What the cluster says, read as JSON."""
    return json.loads(subprocess.run(["kubectl", *arguments], check=True, capture_output=True).stdout)


class Gateway:
    """A gateway and what opening, closing and asking through it took."""

    def __init__(self, url: str, token: str, namespace: str) -> None:
        self.url, self._token, self._namespace = url, token, namespace
        self._client: aiohttp.ClientSession | None = None
        self._session_tokens: dict[str, str] = {}

    async def __aenter__(self) -> Gateway:
        self._client = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"})
        return self

    async def __aexit__(self, *failure: object) -> None:
        assert self._client is not None
        await self._client.close()

    async def open(self) -> tuple[str, float]:
        """A session, and the seconds until it could be used."""
        assert self._client is not None
        begin = time.perf_counter()
        async with self._client.post(f"{self.url}/sessions", json={"ttl_s": 120}) as response:
            document = await response.json()
            assert response.status == 201, document
        self._session_tokens[document["session_id"]] = document["session_token"]
        return document["session_id"], time.perf_counter() - begin

    async def close(self, session_id: str) -> float:
        """Give one back; the seconds until its pod was gone."""
        assert self._client is not None
        begin = time.perf_counter()
        owned = {SESSION_TOKEN_HEADER: self._session_tokens[session_id]}
        async with self._client.delete(f"{self.url}/sessions/{session_id}", headers=owned) as response:
            assert response.status == 200, await response.text()
        return time.perf_counter() - begin

    async def spares(self, wanted: int) -> None:
        """Wait until this many spare pods are ready."""
        assert self._client is not None
        while True:
            async with self._client.get(f"{self.url}/metrics") as response:
                if f'servers{{state="spare"}} {wanted}' in await response.text():
                    return
            await asyncio.sleep(0.1)

    def pod(self, session_id: str) -> Any:
        """The pod of a session."""
        label = f"palaestra.dev/session={session_id}"
        return kubectl("--namespace", self._namespace, "get", "pods", "--selector", label, "--output", "json")["items"][
            0
        ]

    async def openings(self, number: int, *, spares: int) -> dict[str, list[float]]:
        """Sessions opened and closed one after the other, each when the spares are back."""
        opened, closed, silent = [], [], []
        for _ in range(number):
            await self.spares(spares)
            session_id, seconds = await self.open()
            opened.append(seconds)
            address = self.pod(session_id)["status"]["podIP"]
            begin = time.perf_counter()
            closed.append(await self.close(session_id))
            await _silent(address)
            silent.append(time.perf_counter() - begin)
        return {"open_s": _round_all(opened), "close_s": _round_all(closed), "silent_s": _round_all(silent)}

    async def parallel(self, number: int) -> dict[str, Any]:
        """Sessions opened at once and closed at once, and what each pod holds while all are open on a page."""
        begin = time.perf_counter()
        opened = await asyncio.gather(*(self.open() for _ in range(number)))
        all_s = time.perf_counter() - begin
        for session_id, _ in opened:
            await self._reset(session_id, {"task": "data_entry/form", "seed": 3})
        memory = await self._memory([self.pod(session_id)["metadata"]["name"] for session_id, _ in opened])
        begin = time.perf_counter()
        await asyncio.gather(*(self.close(session_id) for session_id, _ in opened))
        return {
            "number": number, "open_s": _round_all([seconds for _, seconds in opened]), "all_open_s": round(all_s, 3),
            "all_closed_s": round(time.perf_counter() - begin, 3), "memory_mb": memory,
        }  # fmt: skip

    async def _reset(self, session_id: str, document: Any) -> None:
        assert self._client is not None
        owned = {SESSION_TOKEN_HEADER: self._session_tokens[session_id]}
        url = f"{self.url}/proxy/{session_id}/reset"
        async with self._client.post(url, json=document, headers=owned) as response:
            assert response.status == 200, await response.text()

    async def _memory(self, names: list[str]) -> list[float]:
        """Working sets by the kubelet's account, as soon as it has one of every pod."""
        for _ in range(120):
            found = {}
            for node in kubectl("get", "nodes", "--output", "json")["items"]:
                summary = kubectl("get", "--raw", f"/api/v1/nodes/{node['metadata']['name']}/proxy/stats/summary")
                for pod in summary["pods"]:
                    container = (pod.get("containers") or [{}])[0]
                    found[pod["podRef"]["name"]] = container.get("memory", {}).get("workingSetBytes", 0)
            if all(found.get(name) for name in names):
                return [round(found[name] / 2**20, 1) for name in names]
            await asyncio.sleep(1)
        return []

    async def compare(self, steps: int) -> dict[str, list[float]]:
        """Acts that answer with a picture, through the gateway and straight to the pod in turns, in one session."""
        session_id, _ = await self.open()
        task = {"task": "miniwob/click-checkboxes", "seed": 3, "params": {"step_limit": 1_000_000}}
        await self._reset(session_id, task)
        host, _, port = self.url.removeprefix("http://").partition(":")
        pod = (self.pod(session_id)["status"]["podIP"], 8000)
        ways = {
            "through": (
                await _connect(host, int(port)),
                f"/proxy/{session_id}/act",
                {"token": self._token, "session_token": self._session_tokens[session_id]},
            ),
            "straight": (await _connect(*pod), "/act", {}),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        number, before = 0, b""
        for turn in range(steps + 20):
            for name, (connection, path, tokens) in ways.items():
                number += 1
                act = {"step": number, "action": {"kind": "click", "at": list(BOX)}}
                asked = request("POST", path, act, accept="image/png", **tokens)
                begin = time.perf_counter()
                status, picture = await connection.ask(asked)
                took = time.perf_counter() - begin
                assert status == 200, picture
                assert picture != before, f"step {number}: a stale picture"
                before = picture
                if turn >= 20:
                    seconds[name].append(took)
        for connection, _, _ in ways.values():
            await connection.close()
        await self.close(session_id)
        return {f"{name}_ms": _round_all([1000 * one for one in found]) for name, found in seconds.items()}

    async def episodes(self) -> list[dict[str, Any]]:
        """One solved episode of each task, played through the gateway's client."""
        client = GatewayClient(self.url, token=self._token)
        found = []
        try:
            for task, params in (
                ("data_entry/form", {"rows": 5, "wanted": 2}), ("click_target/button", {"difficulty": 5}),
                ("miniwob/click-button", {}),
            ):  # fmt: skip
                session = await client.open()
                progress, steps = await _solve_task(session, TaskRequest(task, 3, params))
                await session.close()
                assert progress.success, (task, progress)
                found.append({"task": task, "steps": steps, "reward": progress.reward, "success": progress.success})
        finally:
            await client.close()
        return found


async def _connect(host: str, port: int) -> Connection:
    return Connection(*await asyncio.open_connection(host, port, limit=1 << 20))


async def _silent(address: str) -> None:
    """Wait until nothing listens there: the cluster forgets a pod before the node ends it."""
    while True:
        try:
            async with asyncio.timeout(0.2):
                connection = await _connect(address, 8000)
            await connection.close()
        except OSError:
            return
        await asyncio.sleep(0.02)


async def _solve_task(session: SessionClient, task: TaskRequest) -> tuple[TaskProgress, int]:
    spec = await session.reset(task)
    actions = _actions(task, spec.instruction)
    for number, action in enumerate(actions, start=1):
        await session.act(action, step=number)
    return await session.progress(), len(actions)


def _actions(task: TaskRequest, told: str) -> list[UiAction]:
    """What solves a task, from what its page holds."""
    if task.suite == "miniwob":
        return [Click(NO)]
    suite = ClickTarget() if task.suite == "click_target" else DataEntry()
    page = suite.make(task.name, task.seed, task.params).html
    if task.suite == "click_target":
        label = told.split('"')[1]
        place = re.search(rf"left:(\d+)px;top:(\d+)px;width:(\d+)px;height:(\d+)px[^>]*>{label}<", page)
        assert place is not None
        left, top, width, height = map(int, place.groups())
        return [Click(Point(left + width // 2, top + height // 2))]
    people = [re.findall(r"<td>([^<]*)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", page)]
    actions: list[UiAction] = []
    for row in map(int, re.findall(r"\d+", told)):
        for field, text in enumerate(people[row - 1][1:]):
            actions += [Click(Point(450, 81 + 46 * field)), TypeText(html.unescape(text))]
        actions.append(PressKeys(("Enter",)))
    return actions


def _round_all(seconds: list[float]) -> list[float]:
    return [round(one, 3) for one in seconds]


@contextlib.asynccontextmanager
async def _outside(options: argparse.Namespace, *, warm: int) -> AsyncIterator[Gateway]:
    settings = [
        "port=0", "runtime=kubernetes", f"warm={warm}", f"kubernetes.namespace={options.namespace}",
        "kubernetes.name=benchmark", f"kubernetes.image={options.image}",
    ]  # fmt: skip
    command = (sys.executable, "-m", "palaestra.gateway", *settings)
    async with (
        child(*command, **{TOKEN_VARIABLE: TOKEN}) as told,
        Gateway(told["url"], TOKEN, options.namespace) as gateway,
    ):
        yield gateway


async def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements, one after the other."""
    node = kubectl("get", "nodes", "--output", "json")["items"][0]["status"]
    result: dict[str, Any] = {
        "machine": facts(),
        "cluster": {key: node["nodeInfo"][key] for key in ("kubeletVersion", "containerRuntimeVersion")},
        "images_mb": {
            name: round(image["sizeBytes"] / 1e6, 1) for image in node["images"]
            for name in (image["names"] or ())[-1:] if "palaestra" in name
        },
    }  # fmt: skip
    async with _outside(options, warm=0) as gateway:
        result["episodes"] = await gateway.episodes()
        result["no_spare"] = await gateway.openings(options.openings, spares=0)
        result["parallel"] = await gateway.parallel(options.parallel)
        result["steps"] = await gateway.compare(options.steps)
    async with _outside(options, warm=1) as gateway:
        result["one_spare"] = await gateway.openings(options.openings, spares=1)
    if options.inside:
        async with Gateway(options.inside, os.environ[TOKEN_VARIABLE], options.namespace) as gateway:
            result["inside"] = {
                "episodes": await gateway.episodes(), "one_spare": await gateway.openings(options.openings, spares=1),
                "steps": await gateway.compare(options.steps),
            }  # fmt: skip
    result["load_at_end"] = load()
    return result


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True, help="the session image, as the nodes know it")
    parser.add_argument("--namespace", default="palaestra")
    parser.add_argument("--inside", default="", help="the address of a gateway in the cluster with one spare")
    parser.add_argument("--openings", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dry", action="store_true", help="print the tables and write nothing")
    options = parser.parse_args()
    result = asyncio.run(run_benchmark(options))
    if not options.dry:
        (RESULTS / "kubernetes.json").write_text(json.dumps(result) + "\n")
        (RESULTS / "kubernetes.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
