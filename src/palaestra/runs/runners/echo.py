"""The runner `echo`: a real process that says computable numbers and misbehaves on demand.

For tests of everything that watches runs, and to try the service without training: `palaestra runs start --runner echo
steps=1000 rate=20`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from palaestra.config import Section, parse_section
from palaestra.errors import ConfigError
from palaestra.runs.process.interpreter import choose_python, probe, python_findings, trainer_environment
from palaestra.runs.runner import (
    AttemptPaths,
    EventFiles,
    Finding,
    JournalFile,
    LaunchPlan,
    Machine,
    RunnerCapabilities,
    Source,
    StdoutLines,
)
from palaestra.runs.spec import RunSpec

__all__ = ["EchoConfig", "EchoRunner"]

PROGRAM = Path(__file__).with_name("programs") / "echo_program.py"
ENV_STEPS = 10
_SOURCES: dict[str, tuple[Source, ...]] = {
    "journal": (JournalFile(),),
    "stdout": (StdoutLines("events"),),
    "tensorboard": (EventFiles("runs/**/events.out.tfevents.*", "cleanrl"),),
}


class EchoConfig(Section):
    """What it shall do. Metric `m<i>` at update u is u + i, an update is 10 environment steps, episode e returns e."""

    speak: Literal["journal", "stdout", "tensorboard"] = "journal"
    """In which of the languages of trainers."""
    steps: int = Field(100, ge=0)
    """Updates to report."""
    rate: float = Field(0.0, ge=0)
    """Updates per second; 0 is as fast as it goes."""
    metrics: int = Field(2, ge=0, le=20_000)
    """Numbers per update."""
    episodes_every: int = Field(10, ge=0)
    """An episode ends every so many updates; 0 is never."""
    checkpoint_every: int = Field(0, ge=0)
    """Updates between checkpoints; 0 is none. A stop saves one, too."""
    wait_for: str = ""
    """Say nothing before this file exists."""
    until: str = ""
    """After the updates, wait until this file exists."""
    then: str = Field("exit:0", pattern=r"^(exit:\d{1,3}|traceback|hang|abort|signal:[A-Z0-9]+|oom(:cgroup)?)$")
    """How it ends: exit:N, traceback, hang, abort, signal:KILL, oom, oom:cgroup."""
    ignore_term: bool = False
    """Do not react to SIGTERM."""
    fork: str = Field("", pattern=r"^(\d{1,3}(:setsid)?)?$")
    """Start so many children that wait for ever; `3:setsid` leaves them orphaned in sessions of their own."""
    flood: int = Field(0, ge=0, le=10_000)
    """Print so many MB first."""
    fill_disk: bool = False
    """Half way, write until nothing fits any more."""
    traceback_alive: bool = False
    """Half way, print a traceback and go on."""
    corrupt_line: Literal["", "middle", "end"] = ""
    """Write a damaged record half way, or leave one unfinished at the end."""
    spike_every: int = Field(0, ge=0)
    """Every so many updates the metrics jump by a million; 0 is never."""
    nan_from: int = Field(0, ge=0)
    """From this update on all metrics are NaN, as those of a diverged trainer; 0 is never."""


class EchoRunner:
    """A trainer that learns nothing."""

    name = "echo"
    capabilities = RunnerCapabilities(title="Echo, for trials and tests", resume=True)

    def config_schema(self, spec: RunSpec) -> dict[str, Any]:
        """The keys of `EchoConfig`."""
        return EchoConfig.model_json_schema()

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Only the configuration can be wrong, and an interpreter that was asked for."""
        try:
            parse_section(EchoConfig, spec.config)
            python = choose_python(spec)
        except ConfigError as error:
            check = "python" if error.place == "python" else "flag"
            return [Finding(check, "refused", f"{error.place} = {error.value!r}: {error.reason}", error.remedy)]
        if spec.python is None:
            return [Finding("python", "ok", f"{sys.version.split()[0]} at {python.path}")]
        return python_findings(python, probe(python, machine), {}, oldest=(3, 8))

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """One flag per key that differs from its default."""
        config = parse_section(EchoConfig, spec.config)
        argv = [choose_python(spec).path, str(PROGRAM), "--journal", str(paths.attempt_dir / "metrics.jsonl")]
        if paths.resume_from:
            argv.append(f"--resume-from={paths.resume_from}")
        for key, value in config.model_dump(exclude_defaults=True).items():
            flag = f"--{key.replace('_', '-')}"
            argv.append(flag if value is True else f"{flag}={value}")
        return LaunchPlan(
            argv=tuple(argv),
            environment=trainer_environment(spec, paths, machine),
            cwd=paths.work_dir,
            paths=paths,
            sources=_SOURCES[config.speak],
            stop_grace_s=5.0,
            env_id=spec.env_id or "Echo-v0",
            algorithm="echo",
            total_steps=config.steps * ENV_STEPS,
            steps_key="steps",
            resolved=config.model_dump(),
        )
