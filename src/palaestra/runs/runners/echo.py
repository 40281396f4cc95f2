"""The runner `echo`: a process that reports predictable metrics and fails on demand.

For tests, and to try the service without training: `palaestra runs start --runner echo steps=1000 rate=20`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from palaestra.config import Section, parse_section
from palaestra.errors import ConfigError
from palaestra.runs.catalogue import EnvironmentInfo
from palaestra.runs.process.interpreter import choose_python, probe, python_findings, trainer_environment
from palaestra.runs.process.parameter_schema import object_schema
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
from palaestra.runs.wire import JsonObject

PROGRAM = Path(__file__).with_name("programs") / "echo_program.py"
ENV_STEPS = 10
_SOURCES: dict[str, tuple[Source, ...]] = {
    "journal": (JournalFile(),),
    "stdout": (StdoutLines("events"),),
    "tensorboard": (EventFiles("runs/**/events.out.tfevents.*", "cleanrl"),),
}


class EchoConfig(Section):
    """Behaviour of an echo run. Metric `m<i>` at update u is u + i, an update is 10 steps, episode e returns e."""

    speak: Literal["journal", "stdout", "tensorboard"] = "journal"
    """Format of its telemetry."""
    steps: int = Field(100, ge=0)
    """Number of updates."""
    rate: float = Field(0.0, ge=0)
    """Updates per second (0: as fast as possible)."""
    metrics: int = Field(2, ge=0, le=20_000)
    """Number of metrics per update."""
    episodes_every: int = Field(10, ge=0)
    """Updates per episode (0: no episodes)."""
    checkpoint_every: int = Field(0, ge=0)
    """Updates between checkpoints (0: none). A stop also saves one."""
    wait_for: str = ""
    """Wait for this file before the first update."""
    until: str = ""
    """Wait for this file after the last update."""
    then: str = Field("exit:0", pattern=r"^(exit:\d{1,3}|traceback|hang|abort|signal:[A-Z0-9]+|oom(:cgroup)?)$")
    """How it ends: exit:N, traceback, hang, abort, signal:KILL, oom, oom:cgroup."""
    ignore_term: bool = False
    """Ignore SIGTERM."""
    fork: str = Field("", pattern=r"^(\d{1,3}(:setsid)?)?$")
    """Number of child processes that never exit; `3:setsid` orphans them in new sessions."""
    flood: int = Field(0, ge=0, le=10_000)
    """Megabytes of text to print first."""
    fill_disk: bool = False
    """Fill the disk after half of the updates."""
    traceback_alive: bool = False
    """Print a traceback after half of the updates, and continue."""
    corrupt_line: Literal["", "middle", "end"] = ""
    """Write a damaged record after half of the updates, or an incomplete one at the end."""
    spike_every: int = Field(0, ge=0)
    """Updates between spikes of one million in all metrics (0: never)."""
    nan_from: int = Field(0, ge=0)
    """First update with NaN in all metrics, as after divergence (0: never)."""


class EchoRunner:
    """A trainer for tests that learns nothing."""

    name = "echo"
    capabilities = RunnerCapabilities(title="Echo, for trials and tests", resume=True)

    def config_schema(self, spec: RunSpec) -> JsonObject:
        """The keys of `EchoConfig`."""
        return EchoConfig.model_json_schema()

    def environments(self, spec: RunSpec, machine: Machine, *, refresh: bool = False) -> list[EnvironmentInfo]:
        """None: it only counts."""
        return []

    def environment_parameters(self, env_id: str, spec: RunSpec, machine: Machine) -> JsonObject:
        """None: any name is an environment without parameters."""
        return object_schema({})

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Check the configuration and the interpreter."""
        try:
            parse_section(EchoConfig, spec.config)
            python = choose_python(spec)
        except ConfigError as error:
            check = "python" if error.place == "python" else "flag"
            return [Finding.from_error(check, error)]
        if spec.python is None:
            return [Finding("python", "ok", f"{sys.version.split()[0]} at {python.path}")]
        return python_findings(python, probe(python, machine), {}, oldest=(3, 8))

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """`echo_program.py`, with one flag per key that is not at its default."""
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
