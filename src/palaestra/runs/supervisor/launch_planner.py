"""Plans launches: finds the runner, runs the preflight, and builds the command that would be executed.

One preview is both shown to the operator and used for the launch. The runner checks what concerns its trainer; disk,
GPUs, capabilities, secrets, the warm start and changes of the script are checked here for all runners.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from palaestra.errors import ConfigError, ConsentRequired, HostUnreachable, LaunchRefused, PalaestraError
from palaestra.files.home import Home
from palaestra.redaction import Redactor, is_secret_key, redact_command
from palaestra.runs.checkpoints.catalogue import get_checkpoint
from palaestra.runs.record import HERE, CheckpointRecord, RunRecord
from palaestra.runs.remote.machines import MachineFacts, Machines, Shipment, refusal
from palaestra.runs.runner import AttemptPaths, Finding, LaunchPlan, Machine, Runner
from palaestra.runs.runners.registry import runner_not_found
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.store.registry import Registry
from palaestra.runs.supervisor.queue import Slots, gpu_shortage
from palaestra.runs.supervisor.resume import ResumePoint, ResumeRequest, find_restart_point, find_resume_point
from palaestra.runs.supervisor.run_files import attempt_paths, find_plan_fault, free_disk_bytes

_MB = 1 << 20
_CHECKPOINT_ID = re.compile(r"[0-9a-f]{1,64}")
_MAX_RUNS_COMPARED = 100
"""Number of newest runs of a runner that are searched for an earlier version of the script."""
_RETRY_MACHINE_S = 15.0
"""Pause before a machine that did not answer is tried again for queued runs."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preview:
    """The result of a preflight."""

    findings: tuple[Finding, ...]
    plan: LaunchPlan | None
    """What would be executed; None if a finding refuses the launch."""
    needs_consent: bool
    machine: str = HERE
    """Where it would be executed."""
    unreachable: bool = False
    """Whether it is refused because the machine does not answer, so that a later try may succeed."""
    command: str = ""
    """The command of a program as it was given, for errors about it; empty for other requests."""

    @property
    def refusal(self) -> Finding | None:
        """The first finding that refuses the launch."""
        return next((finding for finding in self.findings if finding.level == "refused"), None)

    def require_plan(self, consent: str | None) -> LaunchPlan:
        """The plan, if nothing refuses it and `consent` is its digest.

        `HostUnreachable` if a later try may succeed, otherwise `LaunchRefused` or `ConsentRequired`.
        """
        refusal = self.refusal
        if refusal is not None or self.plan is None:
            refusal = refusal or Finding("plan", "refused", "there is no command to execute")
            error = HostUnreachable if self.unreachable else LaunchRefused
            place, value = "preflight", refusal.check
            if self.command and refusal.check == "command":
                place, value = "command", self.command
            raise error(place, value, refusal.text.rstrip("."), refusal.remedy)
        digest = self.plan.digest()
        if self.needs_consent and consent != digest:
            changed = " The command has changed since it was agreed to." if consent else ""
            command = " ".join(redact_command(self.plan.argv))
            text = (
                f"the command runs code that is not part of Palaestra: {command}.{changed} Confirm it to start the run."
            )
            raise ConsentRequired(text, digest)
        return self.plan


class LaunchPlanner:
    """Previews launches and keeps the table of runners."""

    def __init__(
        self,
        home: Home,
        registry: Registry,
        runners: Mapping[str, Runner],
        slots: Slots,
        *,
        min_free_disk_mb: int = 0,
        add_installed: Callable[[dict[str, Runner]], dict[str, str]] = lambda _: {},
        machines: Machines | None = None,
    ) -> None:
        self.runners = dict(runners)
        self.slots = slots
        self.machines = machines or Machines({})
        self._unreachable: dict[str, tuple[str, float]] = {}
        self._home, self._registry = home, registry
        self._min_free_disk_mb, self._add_installed = min_free_disk_mb, add_installed

    async def get_runner(self, name: str) -> Runner:
        """The runner of this name, even if its package was installed meanwhile. `LaunchRefused` without it."""
        broken = await self.refresh_runners() if name not in self.runners else {}
        if name not in self.runners:
            raise runner_not_found(name, self.runners, broken)
        return self.runners[name]

    async def refresh_runners(self) -> dict[str, str]:
        """Load runners installed meanwhile. Returns why some cannot be loaded, by name."""
        runners = dict(self.runners)
        broken = await asyncio.to_thread(self._add_installed, runners)
        self.runners |= runners
        return broken

    async def pin_warm_start(self, spec: RunSpec) -> RunSpec:
        """The spec with the full id of its warm-start checkpoint, so that a prefix keeps its meaning."""
        runner = await self.get_runner(spec.runner)
        try:
            checkpoint = await asyncio.to_thread(self._find_warm_start, spec, runner)
        except ConfigError:
            return spec  # the preview refuses it
        return spec if checkpoint is None else spec.model_copy(update={"warm_start": checkpoint.checkpoint_id})

    def list_machines(self, spec: RunSpec) -> tuple[str, ...]:
        """Where a run may be launched; nowhere if the settings no longer have its host."""
        try:
            return self.machines.table.candidates(spec.on)
        except ConfigError:
            return ()

    def slots_of(self, machine: str) -> Slots:
        """How many runs fit on a machine, and why none can be launched there now."""
        if machine == HERE:
            return self.slots
        capacity = self.machines.capacity(machine)
        problem, until = self._unreachable.get(machine, ("", 0.0))
        if problem and time.monotonic() >= until:
            problem = ""
            del self._unreachable[machine]
        return Slots(capacity.max_running, capacity.gpus, problem)

    def mark_unreachable(self, machine: str, reason: str) -> None:
        """Launch nothing on a machine that does not answer, for a while."""
        self._unreachable[machine] = (reason, time.monotonic() + _RETRY_MACHINE_S)

    @property
    def waits_for_machines(self) -> bool:
        """Whether a machine did not answer lately, so that runs wait for it."""
        return bool(self._unreachable)

    async def preview(
        self,
        spec: RunSpec,
        paths: AttemptPaths,
        gpus: tuple[str, ...] | None = None,
        machine: str | None = None,
    ) -> Preview:
        """Run the preflight and plan the command. Writes nothing. `gpus`: those leased to the attempt.

        Without a machine, it is the first on which the run may be launched and that refuses nothing.
        """
        runner = await self.get_runner(spec.runner)
        candidates = self.machines.table.candidates(spec.on) if machine is None else (machine,)
        first: Preview | None = None
        for name in candidates:
            try:
                preview = await self._preview_on(name, spec, runner, paths, gpus)
            except HostUnreachable as error:
                if machine is not None:
                    raise
                foreign = runner.capabilities.runs_foreign_code
                preview = Preview((refusal(error),), None, foreign, name, unreachable=not error.permanent)
            if preview.refusal is None:
                return preview
            first = first or preview
        assert first is not None
        return first

    async def _preview_on(
        self, machine: str, spec: RunSpec, runner: Runner, paths: AttemptPaths, gpus: tuple[str, ...] | None
    ) -> Preview:
        try:
            if machine == HERE:
                return await asyncio.to_thread(
                    self._preview, spec, runner, paths, self.slots.gpus if gpus is None else gpus
                )
            return await self._preview_elsewhere(machine, spec, runner, paths, gpus)
        except PalaestraError:
            raise
        except Exception as error:
            _log.exception("runner %s failed in a preview", runner.name)
            reason = f"failed in a preview ({type(error).__name__}: {error})"
            raise LaunchRefused("runner", runner.name, reason, "This is a fault of the runner; see the log") from error

    async def _preview_elsewhere(
        self, machine: str, spec: RunSpec, runner: Runner, paths: AttemptPaths, gpus: tuple[str, ...] | None
    ) -> Preview:
        """The configuration is checked here; the machine says what it has."""
        # Its interpreter and its GPUs are of the other machine.
        spec_here = spec.model_copy(update={"python": None, "gpus": 0, "video": False})
        here = await asyncio.to_thread(self._preview, spec_here, runner, paths, (), elsewhere=True)
        if here.plan is None:
            return replace(here, machine=machine)
        checkpoint = paths.resume_from or await asyncio.to_thread(self._warm_start_path, spec, runner)
        try:
            shipment = await asyncio.to_thread(self.machines.collect, spec, checkpoint)
            facts = await self.machines.check(machine, spec, shipment)
        except HostUnreachable:
            raise
        except ConfigError as error:
            return replace(here, findings=(*here.findings, refusal(error)), plan=None, machine=machine)
        return await asyncio.to_thread(
            self._translate,
            here,
            machine,
            spec,
            runner,
            shipment,
            facts,
            self.slots_of(machine).gpus if gpus is None else gpus,
        )

    def _translate(
        self,
        here: Preview,
        machine: str,
        spec: RunSpec,
        runner: Runner,
        shipment: Shipment,
        facts: MachineFacts,
        gpus: tuple[str, ...],
    ) -> Preview:
        findings = [one for one in here.findings if one.check not in ("disk", "python", "gpu")]
        findings += self.machines.findings(machine, facts, spec, shipment)
        if self.machines.table.get(machine).address.kind == "ssh":
            findings += _check_gpus(spec, runner, self.slots_of(machine), machine)
        plan = here.plan
        if plan is not None and not _is_refused(findings):
            plan = replace(plan, begins_with="" if shipment.checkpoint is None else str(shipment.checkpoint))
            leased = gpus[: spec.gpus]
            plan, warnings = self.machines.translate(machine, facts, plan, spec, shipment, leased, os.environ)
            findings += warnings
        return Preview(tuple(findings), None if _is_refused(findings) else plan, here.needs_consent, machine)

    def _warm_start_path(self, spec: RunSpec, runner: Runner) -> str | None:
        checkpoint = self._find_warm_start(spec, runner)
        return spec.warm_start if checkpoint is None else checkpoint.path

    def plan_attempt_paths(self, record: RunRecord, number: int) -> AttemptPaths:
        """The paths of an attempt, with the checkpoint that a resume continues from."""
        run = self._home.run(record.run_id)
        if number == 1:
            return attempt_paths(run, number)
        wanted = ResumeRequest.pending(RunEventLog(run).read()).checkpoint
        return attempt_paths(run, number, self.find_resume_point(record, wanted).path)

    def find_resume_point(self, record: RunRecord, wanted: str | None) -> ResumePoint:
        """The checkpoint that a resume continues from, or none for a program. `LaunchRefused` if it is impossible."""
        runner = self.runners.get(record.runner)
        if runner is not None and runner.capabilities.restarts:
            return find_restart_point(record, wanted)
        return find_resume_point(self._home, self._registry, record, wanted)

    def _preview(
        self, spec: RunSpec, runner: Runner, paths: AttemptPaths, gpus: tuple[str, ...], *, elsewhere: bool = False
    ) -> Preview:
        """Blocks: a runner may probe other interpreters. `elsewhere`: the GPUs are those of another machine."""
        findings: list[Finding] = []
        foreign_code = runner.capabilities.runs_foreign_code
        if paths.resume_from is not None:
            # A resume uses the checkpoint of the run; the one of its warm start may be gone.
            spec = spec.model_copy(update={"warm_start": None})
        try:
            checkpoint = self._find_warm_start(spec, runner)
        except ConfigError as error:
            text = f"checkpoint {error.value}: {error.reason}"
            return Preview((Finding("warm_start", "refused", text, error.remedy),), None, foreign_code)
        if checkpoint is not None:
            source = f"run {checkpoint.run_id}" if checkpoint.run_id else "no run of ours"
            step = f"step {checkpoint.step_text}, of {source}"
            text = f"begins with {checkpoint.checkpoint_id}: {checkpoint.agent_id}, {step}"
            findings.append(Finding("warm_start", "ok", text))
            spec = spec.model_copy(update={"warm_start": checkpoint.path})
        machine = Machine(environment=dict(os.environ), free_disk_bytes=free_disk_bytes(self._home), gpus=gpus)
        findings += _check_capabilities(spec, runner, paths)
        findings += _check_disk(machine, self._min_free_disk_mb)
        findings += [] if elsewhere else _check_gpus(spec, runner, self.slots)
        findings += _check_secrets(spec)
        if not _is_refused(findings):
            findings += runner.preflight(spec, machine)
        plan: LaunchPlan | None = None
        if not _is_refused(findings):
            try:
                plan = runner.plan(spec, paths, machine)
            except ConfigError as error:
                findings.append(Finding.from_error("plan", error))
        if plan is not None and (fault := find_plan_fault(plan)):
            findings.append(Finding("plan", "refused", fault, "Give a value that can be stored"))
            plan = None
        if plan is not None and spec.video:
            findings.append(_video_cost(plan))
        if plan is not None:
            agent_id = f"{runner.name}/{plan.algorithm}" if plan.algorithm else runner.name
            changed = find_script_change(self._home, self._registry, agent_id, paths.run_id, plan.script_sha256)
            if changed:
                remedy = "Nothing to do if you changed it; `palaestra runs compare` shows both"
                findings.append(Finding("drift", "warning", changed, remedy))
        return Preview(tuple(findings), plan, foreign_code, command=_format_program(spec))

    def _find_warm_start(self, spec: RunSpec, runner: Runner) -> CheckpointRecord | None:
        """The checkpoint whose id the spec gives; None without a warm start, for a path, or an incapable runner."""
        name = spec.warm_start
        if name is None or not runner.capabilities.warm_start or not _CHECKPOINT_ID.fullmatch(name):
            return None
        return None if (spec.invoked_from / name).exists() else get_checkpoint(self._home, name)


def _format_program(spec: RunSpec) -> str:
    """The command of a request for any program, as it was given, without secrets; empty for other requests."""
    words = spec.config.get("command")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return ""
    return shlex.join(redact_command(words))


def find_script_change(home: Home, registry: Registry, agent_id: str, run_id: str, sha256: str) -> str:
    """A warning if the last run of the same agent used another version of the script; else empty."""
    if not sha256:
        return ""
    for other in registry.runs(runner=agent_id.partition("/")[0], limit=_MAX_RUNS_COMPARED):
        if other.run_id == run_id or other.agent_id != agent_id:
            continue
        attempts = home.run(other.run_id).attempts()
        earlier = AttemptPlan.read(attempts[-1]).script_sha256 if attempts else ""
        if earlier:
            return "" if earlier == sha256 else f"its script is not the one that {other.run_id} ran"
    return ""


def _is_refused(findings: list[Finding]) -> bool:
    return any(finding.level == "refused" for finding in findings)


def _check_capabilities(spec: RunSpec, runner: Runner, paths: AttemptPaths) -> Iterator[Finding]:
    can = runner.capabilities
    checks = (
        ("record video", spec.video, can.video, "Leave --video out"),
        ("be tracked with W&B", spec.track != "off", can.tracking, "Leave --track out"),
        ("begin with another's weights", spec.warm_start is not None, can.warm_start, "Leave --warm-start out"),
        ("resume from a checkpoint", paths.resume_from is not None, can.resume, "Start a new run"),
    )
    for what, wanted, able, remedy in checks:
        if wanted and not able:
            yield Finding("capability", "refused", f"runner {runner.name} cannot {what}", remedy)


def _check_disk(machine: Machine, min_free_disk_mb: int) -> Iterator[Finding]:
    free = machine.free_disk_bytes // _MB
    if free < min_free_disk_mb:
        text = f"{free} MB are free where runs are stored, and at least {min_free_disk_mb} MB are required"
        yield Finding("disk", "refused", text, "palaestra runs gc, or set PALAESTRA_HOME to a larger disk")
    else:
        yield Finding("disk", "ok", f"{free:,} MB free")


def _check_gpus(spec: RunSpec, runner: Runner, slots: Slots, machine: str = HERE) -> Iterator[Finding]:
    wanted = max(spec.gpus, 1 if runner.capabilities.needs_gpu else 0)
    shortage = gpu_shortage(wanted, slots, machine)
    if shortage:
        yield Finding("gpu", "refused", shortage, "Request fewer with --gpus, or use a machine that has them")
    elif runner.capabilities.needs_gpu and not spec.gpus:
        yield Finding("gpu", "refused", f"runner {runner.name} needs a GPU and none is requested", "Add --gpus 1")
    elif wanted:
        yield Finding("gpu", "ok", f"{wanted} of {len(slots.gpus)} GPUs")


def _check_secrets(spec: RunSpec) -> Iterator[Finding]:
    redact = Redactor()
    remedy = "Export it where the service starts, and leave it out here"
    for place, text in _list_texts(spec.config, "config"):
        if redact(text) != text or (text and is_secret_key(place)):
            yield Finding("secret", "refused", f"{place} looks like a token and would be stored", remedy)
            return
    if redact(spec.config_text) != spec.config_text:
        yield Finding("secret", "refused", "the configuration file holds a token and would be stored", remedy)


def _list_texts(value: object, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _list_texts(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _list_texts(item, f"{place}[{number}]")


def _video_cost(plan: LaunchPlan) -> Finding:
    if plan.record_video:
        text = "every new checkpoint is recorded beside the training, on idle CPU time"
    else:
        text = "recording slows the trainer down; `palaestra runs videos` shows by how much"
    return Finding("video", "warning", text, "Leave --video out and record a checkpoint: runs videos RUN --record")
