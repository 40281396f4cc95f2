"""The other machines as the supervisor uses them: what they have, what they lack, and code that is put there.

Facts about a machine are asked for over its connection before a run is accepted and again before it is launched; they
also say how many runs fit there.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra.errors import ConfigError, HostUnreachable, LaunchRefused
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.remote.connection import Connection, connect
from palaestra.runs.remote.frames import CODE, NODE_HOME
from palaestra.runs.remote.hosts import Host, HostConfig, HostTable
from palaestra.runs.remote.remote_process import RemotePlace, RemoteProcess, Spawn
from palaestra.runs.remote.snapshot import CodeSnapshot, package_snapshot, project_snapshot
from palaestra.runs.remote.translation import RemoteLayout, find_local_paths, start_request, translate_plan
from palaestra.runs.runner import Finding, LaunchPlan
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

PYTHON = (3, 11)
MAX_CLOCK_SKEW_S = 60.0
RAY_MAX_RUNNING = 16
_PACKAGES = {
    "palaestra": ("torch", "tensordict", "numpy", "numba", "gymnasium", "pydantic", "PyYAML", "safetensors"),
    "sb3": ("torch", "stable_baselines3", "gymnasium"),
    "cleanrl": ("torch",),
    "corl": ("torch",),
}
"""Packages that a machine needs for a runner, besides what its script imports."""
_MB = 1 << 20
_ANSWER_HOLDS_S = 5.0
"""A request, its preview and its launch follow each other closely and ask the same."""


@dataclass(frozen=True)
class Capacity:
    """How many runs fit on a machine."""

    max_running: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shipment:
    """Everything that has to be on the other machine before a run can start there."""

    package: CodeSnapshot
    project: CodeSnapshot | None
    checkpoint: Path | None
    """A checkpoint of this machine that the run begins with."""


@dataclass(frozen=True)
class MachineFacts:
    """What a machine answered."""

    data: JsonObject
    skew_s: float
    """How far its clock is ahead of ours."""


class Machines:
    """The machines beyond this one."""

    def __init__(self, hosts: Mapping[str, HostConfig], clock: Callable[[], float] = time.time) -> None:
        self.table = HostTable(hosts)
        self._clock = clock
        self._connections: dict[tuple[str, str], Connection] = {}
        self._facts: dict[str, MachineFacts] = {}
        self._answers: dict[str, tuple[JsonObject, MachineFacts, float]] = {}

    def capacity(self, name: str) -> Capacity:
        """How many runs fit on a machine, by its settings or by what it last answered; one before its first answer."""
        host, facts = self.table.get(name), self._facts.get(name)
        default = RAY_MAX_RUNNING if host.address.kind == "ray" else int(facts.data.get("cpus") or 1) if facts else 1
        detected = tuple(facts.data.get("gpus") or ()) if facts else ()
        gpus = detected if host.config.gpus is None else host.config.gpus
        return Capacity(host.config.max_running or default, gpus)

    def collect(self, spec: RunSpec, checkpoint: str | None) -> Shipment:
        """What a run needs there. Blocks: it reads all of it. `ConfigError` if it is too large."""
        path = None if checkpoint is None else spec.invoked_from / Path(checkpoint).expanduser()
        return Shipment(package_snapshot(), project_snapshot(spec), path)

    async def check(self, name: str, spec: RunSpec, shipment: Shipment) -> MachineFacts:
        """Ask a machine about itself. `HostUnreachable` without an answer."""
        host = self.table.get(name, spec.python)
        request = {
            "directory": host.config.directory,
            "places": await asyncio.to_thread(_list_places, shipment),
            "packages": list(_PACKAGES.get(spec.runner, ())),
            "python": spec.python,
        }
        known = self._answers.get(name)
        if known is not None and known[0] == request and time.monotonic() - known[2] < _ANSWER_HOLDS_S:
            return known[1]
        asked = self._clock()
        answer = await self._connection(host).check(request)
        now = self._clock()
        # The answer was written somewhere between the question and now.
        there = float(answer.get("time") or now)
        skew = max(0.0, there - now) or min(0.0, there - asked)
        facts = self._facts[name] = MachineFacts(answer, skew)
        self._answers[name] = (request, facts, time.monotonic())
        return facts

    def findings(self, name: str, facts: MachineFacts, spec: RunSpec, shipment: Shipment) -> Iterator[Finding]:
        """What speaks for and against a run on a machine that has answered."""
        host, data = self.table.get(name, spec.python), facts.data
        if host.address.kind == "ray":
            yield Finding("host", "ok", f"{host.describe()}: Ray {data['ray_version']}")
        else:
            yield from _check_ssh_machine(host, facts, spec)
        if spec.video:
            yield Finding("video", "refused", "videos are recorded on this machine only", "Leave --video out")
        size = shipment.package.size() + (shipment.project.size() if shipment.project else 0)
        about = "" if shipment.project is None else f" and {shipment.project.about}"
        yield Finding("snapshot", "ok", f"sends the package palaestra{about} ({size / _MB:.1f} MB)")

    def translate(
        self,
        name: str,
        facts: MachineFacts,
        plan: LaunchPlan,
        spec: RunSpec,
        shipment: Shipment,
        gpus: tuple[str, ...],
        inherited: Mapping[str, str],
    ) -> tuple[LaunchPlan, list[Finding]]:
        """The plan for a machine, and warnings about files that are not sent. Blocks."""
        host = self.table.get(name, spec.python)
        layout = _layout(host, facts, spec, shipment)
        there = translate_plan(plan, spec, host, layout, shipment.project, gpus, inherited)
        there = replace(there, planned_digest=plan.digest())
        return there, list(find_local_paths(there, host))

    async def launch(
        self, name: str, plan: LaunchPlan, attempt: Attempt, spec: RunSpec, gpus: tuple[str, ...], spawn: Spawn
    ) -> RemoteProcess:
        """Put everything there and start a translated plan. `HostUnreachable`, `LaunchRefused`."""
        host = self.table.get(name, spec.python)
        shipment = await asyncio.to_thread(self.collect, spec, plan.begins_with or None)
        facts = await self.check(name, spec, shipment)
        layout = await asyncio.to_thread(_layout, host, facts, spec, shipment)
        start = await asyncio.to_thread(start_request, RunDirectory(attempt.path.parent), plan, spec, layout)
        if host.address.kind == "ray":
            start |= await asyncio.to_thread(_pack_job, shipment, host, spec)
        else:
            await self._put_missing(host, facts, shipment, layout)
        grace_s = plan.stop_grace_s if spec.stop_grace_s is None else spec.stop_grace_s
        place = RemotePlace(name, layout.directory, layout.package, gpus, grace_s, python=host.config.python)
        process = RemoteProcess(attempt, host, self._connection(host), place, start)
        await process.launch(spawn)
        return process

    def adopt(self, attempt: Attempt, place: RemotePlace, spawn: Spawn) -> RemoteProcess:
        """Link again to an attempt that an earlier service started."""
        host = self.table.get(place.host, place.python)
        process = RemoteProcess(attempt, host, self._connection(host), place)
        process.connect(spawn)
        return process

    async def _put_missing(self, host: Host, facts: MachineFacts, shipment: Shipment, layout: RemoteLayout) -> None:
        missing, directory = set(facts.data["missing"]), str(facts.data["directory"])
        snapshots = {f"code/{shipment.package.digest}": shipment.package}
        if shipment.project is not None:
            snapshots[f"code/{shipment.project.digest}"] = shipment.project
        if shipment.checkpoint is not None:
            snapshot = _checkpoint_snapshot(shipment.checkpoint)
            place = f"uploads/{snapshot.digest}"
            if any(there.startswith(f"{directory}/{place}") for there in layout.moved.values()):
                snapshots[place] = snapshot
                missing.add(place)
        for place, snapshot in snapshots.items():
            if place not in missing:
                continue
            archive = await asyncio.to_thread(snapshot.pack)
            digest = hashlib.sha256(archive).hexdigest()
            request = {"directory": directory, "place": place, "size": len(archive), "sha256": digest}
            self._answers.pop(host.name, None)
            answer = await self._connection(host).put(request, archive)
            if "error" in answer:
                reason = f"{snapshot.about} cannot be stored there ({answer['error']})"
                remedy = str(answer.get("remedy") or "Free space there, or set another directory of the host")
                raise LaunchRefused("on", host.name, reason, remedy)

    def _connection(self, host: Host) -> Connection:
        key = (host.name, host.config.python)
        if key not in self._connections:
            self._connections[key] = connect(host)
        return self._connections[key]


def _check_ssh_machine(host: Host, facts: MachineFacts, spec: RunSpec) -> Iterator[Finding]:
    data, name = facts.data, host.describe()
    yield Finding("host", "ok", f"{name}: {data['cpus']} processors, {len(data['gpus'])} GPUs")
    version, wanted = tuple(data["version"][:2]), ".".join(map(str, PYTHON))
    if version < PYTHON:
        text = f"{data['executable']} on {name} is Python {'.'.join(map(str, data['version']))}, and {wanted} is needed"
        yield Finding("python", "refused", text, "Name a newer one as python of the host's settings")
    trainer, python = data["trainer"], spec.python or data["executable"]
    if "error" in trainer:
        text = f"{python} on {name} cannot be used ({trainer['error']})"
        yield Finding("python", "refused", text, "Give an interpreter of that machine with --python")
    else:
        yield Finding("python", "ok", f"{python} on {name}, {'.'.join(map(str, trainer['version']))}")
        for package, installed in trainer["packages"].items():
            if installed is None:
                text = f"{python} on {name} has no {package}"
                yield Finding(f"dependency:{package}", "refused", text, f"There: {python} -m pip install palaestra")
    free = int(data["free_bytes"]) // _MB
    if not data["writable"]:
        text = f"{data['directory']} on {name} cannot be written"
        yield Finding("disk", "refused", text, "Set another directory of the host")
    elif free < host.config.min_free_disk_mb:
        text = f"{free} MB are free on {name}, and at least {host.config.min_free_disk_mb} MB are required"
        yield Finding("disk", "refused", text, "Free space there, or set another directory of the host")
    else:
        yield Finding("disk", "ok", f"{free:,} MB free on {name}")
    if abs(facts.skew_s) > MAX_CLOCK_SKEW_S:
        text = f"the clock of {name} differs by {facts.skew_s:+.0f} s: times of its metrics are shifted"
        yield Finding("clock", "warning", text, "Synchronise its clock, for example with chrony")


def _layout(host: Host, facts: MachineFacts, spec: RunSpec, shipment: Shipment) -> RemoteLayout:
    checkpoint, moved = shipment.checkpoint, dict[str, str]()
    if host.address.kind == "ray":
        # The node is not known yet: the agent there fills in both.
        if checkpoint is not None:
            moved[str(checkpoint)] = f"{CODE}/checkpoint/{checkpoint.name}"
        project = None if shipment.project is None else f"{CODE}/project"
        return RemoteLayout(NODE_HOME, f"{CODE}/package", project, spec.python or host.config.python, moved)
    directory = str(facts.data["directory"])
    project = None if shipment.project is None else f"{directory}/code/{shipment.project.digest}"
    if checkpoint is not None:
        natural = _natural_place(checkpoint)
        if natural is None or natural in facts.data["missing"]:
            place = f"uploads/{_checkpoint_snapshot(checkpoint).digest}"
            moved[str(checkpoint)] = f"{directory}/{place}/{checkpoint.name}"
    python = spec.python or str(facts.data["executable"])
    return RemoteLayout(directory, f"{directory}/code/{shipment.package.digest}", project, python, moved)


def _list_places(shipment: Shipment) -> list[str]:
    places = [f"code/{shipment.package.digest}"]
    if shipment.project is not None:
        places.append(f"code/{shipment.project.digest}")
    natural = None if shipment.checkpoint is None else _natural_place(shipment.checkpoint)
    return [*places, *([] if natural is None else [natural])]


def _natural_place(checkpoint: Path) -> str | None:
    """Where the machine that trained a checkpoint has it: below runs/, as here."""
    parts = checkpoint.parts
    if "runs" not in parts:
        return None
    return "/".join(("var", "training", *parts[len(parts) - 1 - parts[::-1].index("runs") :]))


def _checkpoint_snapshot(path: Path) -> CodeSnapshot:
    names = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return CodeSnapshot(
        path.parent, tuple(str(one.relative_to(path.parent)) for one in names), f"checkpoint {path.name}"
    )


def _pack_job(shipment: Shipment, host: Host, spec: RunSpec) -> JsonObject:
    """The code of a Ray job as a list of files, and what its node has to fill in."""
    parts = {"package": shipment.package}
    if shipment.project is not None:
        parts["project"] = shipment.project
    if shipment.checkpoint is not None:
        parts["checkpoint"] = _checkpoint_snapshot(shipment.checkpoint)
    return {
        "job": {
            "parts": {name: {"root": str(part.root), "names": list(part.names)} for name, part in parts.items()},
            "home": host.config.directory,
            "python": host.config.python,
            "gpus": spec.gpus,
        }
    }


def refusal(error: ConfigError) -> Finding:
    """A machine that does not answer, or code that cannot be sent, as a finding."""
    check = "host" if isinstance(error, HostUnreachable) else "snapshot"
    return Finding(check, "refused", f"{error.value}: {error.reason}", error.remedy)
