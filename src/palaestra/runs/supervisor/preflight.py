"""Everything that can be known before a launch, and the command that would be executed: one look, shown and used.

The runner knows its trainer; what is the same for all of them (disk, GPUs, capabilities, secrets) is checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from palaestra.errors import ConfigError, ConsentRequired, LaunchRefused
from palaestra.redaction import Redactor, is_secret_key, redact_command
from palaestra.runs.runner import AttemptPaths, Finding, LaunchPlan, Machine, Runner
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.admission import plan_fault
from palaestra.runs.supervisor.queue import Slots, never_fits

__all__ = ["Preview", "preflight"]

_MB = 1 << 20


@dataclass(frozen=True)
class Preview:
    """What a preflight says."""

    findings: tuple[Finding, ...]
    plan: LaunchPlan | None
    """What would be executed; None when something is refused."""
    needs_consent: bool

    @property
    def refusal(self) -> Finding | None:
        """The first finding that forbids a launch."""
        return next((finding for finding in self.findings if finding.level == "refused"), None)

    def agreed(self, consent: str | None) -> LaunchPlan:
        """The plan, once nothing forbids it and somebody agreed to exactly it; `LaunchRefused`, `ConsentRequired`."""
        refusal = self.refusal
        if refusal is not None or self.plan is None:
            found = refusal or Finding("plan", "refused", "there is no command to execute")
            raise LaunchRefused("preflight", found.check, found.text.rstrip("."), found.remedy)
        digest = self.plan.digest()
        if self.needs_consent and consent != digest:
            changed = " The command has changed since it was agreed to." if consent else ""
            command = " ".join(redact_command(self.plan.argv))
            text = f"this runs code that is not ours: {command}.{changed} Agree to it to have it run."
            raise ConsentRequired(text, digest)
        return self.plan


def preflight(
    spec: RunSpec,
    runner: Runner,
    machine: Machine,
    place: AttemptPaths,
    *,
    slots: Slots,
    min_free_disk_mb: int,
    drift: Callable[[LaunchPlan], str] = lambda _: "",
) -> Preview:
    """Look before anything is launched or written. Blocks: a runner may probe other interpreters.

    `drift` says of a command what is not as when its agent last ran.
    """
    findings = [
        *_capabilities(spec, runner, place),
        *_disk(machine, min_free_disk_mb),
        *_gpus(spec, runner, slots),
        *_secrets(spec),
    ]
    if not any(finding.level == "refused" for finding in findings):
        findings += runner.preflight(spec, machine)
    plan: LaunchPlan | None = None
    if not any(finding.level == "refused" for finding in findings):
        try:
            plan = runner.plan(spec, place, machine)
        except ConfigError as error:
            text = f"{error.place} = {error.value!r}: {error.reason}"
            findings.append(Finding("plan", "refused", text, error.remedy))
        if plan is not None and (fault := plan_fault(plan)):
            findings.append(Finding("plan", "refused", fault, "Give a value that can be stored"))
            plan = None
    if plan is not None and spec.video:
        findings.append(_filming(plan))
    if plan is not None and (changed := drift(plan)):
        remedy = "Nothing to do when you changed it; `palaestra runs compare` shows both"
        findings.append(Finding("drift", "warning", changed, remedy))
    return Preview(tuple(findings), plan, runner.capabilities.runs_foreign_code)


def _capabilities(spec: RunSpec, runner: Runner, place: AttemptPaths) -> Iterator[Finding]:
    can = runner.capabilities
    asked = {
        "record video": (spec.video, can.video, "Leave --video out"),
        "be tracked with W&B": (spec.track != "off", can.tracking, "Leave --track out"),
        "begin with another's weights": (spec.warm_start is not None, can.warm_start, "Leave --warm-start out"),
        "go on from a checkpoint": (place.resume_from is not None, can.resume, "Start a new run"),
    }
    for what, (wanted, able, remedy) in asked.items():
        if wanted and not able:
            yield Finding("capability", "refused", f"runner {runner.name} cannot {what}", remedy)


def _filming(plan: LaunchPlan) -> Finding:
    if plan.film:
        text = "every new checkpoint is filmed beside the training, which takes what is idle of a core"
    else:
        text = "filming slows the trainer down; `palaestra runs videos` says by how much"
    return Finding("video", "warning", text, "Leave --video out and film a checkpoint: runs videos RUN --record")


def _disk(machine: Machine, min_free_disk_mb: int) -> Iterator[Finding]:
    free = machine.free_disk_bytes // _MB
    if free < min_free_disk_mb:
        text = f"{free} MB are free where runs are kept, and {min_free_disk_mb} are the least"
        yield Finding("disk", "refused", text, "palaestra runs gc, or set PALAESTRA_HOME to a larger disk")
    else:
        yield Finding("disk", "ok", f"{free:,} MB free")


def _gpus(spec: RunSpec, runner: Runner, slots: Slots) -> Iterator[Finding]:
    wanted = max(spec.gpus, 1 if runner.capabilities.needs_gpu else 0)
    why = never_fits(wanted, slots)
    if why:
        yield Finding("gpu", "refused", why, "Ask for fewer with --gpus, or run it on a machine that has them")
    elif runner.capabilities.needs_gpu and not spec.gpus:
        yield Finding("gpu", "refused", f"runner {runner.name} needs a GPU and asks for none", "Add --gpus 1")
    elif wanted:
        yield Finding("gpu", "ok", f"{wanted} of {len(slots.gpus)} GPUs")


def _secrets(spec: RunSpec) -> Iterator[Finding]:
    redact = Redactor()
    remedy = "Export it where the service starts, and leave it out here"
    for place, text in _texts(spec.config, "config"):
        if redact(text) != text or (text and is_secret_key(place)):
            yield Finding("secret", "refused", f"{place} looks like a token and would be stored", remedy)
            return
    if redact(spec.given) != spec.given:
        yield Finding("secret", "refused", "the configuration file holds a token and would be stored", remedy)


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _texts(item, f"{place}[{number}]")
