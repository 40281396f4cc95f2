"""The seam for trainers: what a runner declares, what it plans, and where its telemetry will be.

A runner decides and never acts: it turns a spec into findings and one `LaunchPlan`. The plan is what is shown, what
is agreed to and what is executed; its digest proves that the three are the same. `runs.runners.conformance` checks an
implementation; external packages announce theirs under the entry point group `palaestra.runners`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from palaestra.redaction import redact_command, redact_environment
from palaestra.runs.spec import RunSpec

__all__ = [
    "EventFiles", "Finding", "Injection", "JournalFile", "LaunchPlan", "Machine", "Place", "Runner",
    "RunnerCapabilities", "Source", "StdoutLines",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunnerCapabilities:
    """What a runner can do. Whatever it does not claim is hidden from people and refused when asked for."""

    title: str
    offline_inference: bool = False
    """Its checkpoints can be played here without the trainer: deployed, and filmed."""
    warm_start: bool = False
    resume: bool = False
    """Goes on from its own checkpoint, counters included."""
    needs_gpu: bool = False
    external_services: tuple[str, ...] = ()
    """What it may speak to over the network, such as `wandb`."""
    live_beliefs: bool = False
    video: bool = False
    """Clips can be had of it while it trains."""
    tracking: bool = False
    runs_foreign_code: bool = False
    """Executes files that neither we nor an installed package brought: the operator must agree to the command."""


@dataclass(frozen=True)
class Finding:
    """One line of a preflight."""

    check: str
    """A short stable name: `python`, `dependency:tyro`, `env`, `disk`, `gpu`, `flag`, `script`, …"""
    level: Literal["ok", "warning", "refused"]
    text: str
    remedy: str = ""
    """The command or the change that makes it go away."""


@dataclass(frozen=True)
class JournalFile:
    """The trainer writes our journal itself, to `metrics.jsonl` of the attempt."""

    kind: Literal["journal"] = "journal"


@dataclass(frozen=True)
class StdoutLines:
    """Lines of stdout.log are events by a grammar of `runs.ingest.grammar.GRAMMARS`."""

    grammar: str
    kind: Literal["stdout"] = "stdout"


@dataclass(frozen=True)
class EventFiles:
    """TensorBoard event files below the working directory are events by a tag table of `runs.ingest.tags.TAGS`."""

    pattern: str
    tags: str
    kind: Literal["tensorboard"] = "tensorboard"


Source: TypeAlias = JournalFile | StdoutLines | EventFiles


@dataclass(frozen=True)
class Injection:
    """Code of ours that runs inside somebody else's trainer, declared to whoever agrees to the command."""

    path: str
    sha256: str
    why: str


@dataclass(frozen=True)
class Place:
    """Where an attempt will live; given to `plan` before it exists."""

    run_id: str
    attempt: int
    run_dir: Path
    attempt_dir: Path
    work_dir: Path
    """`attempt_dir / "work"`: the trainer's current directory."""
    resume_from: str | None = None
    """A checkpoint of an earlier attempt, when this is a resume."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Exactly what will be executed. There is no shell in it."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """The whole environment, secrets included: lives in memory only; `shown` is what may be stored."""
    cwd: Path
    place: Place
    sources: tuple[Source, ...]
    checkpoints: tuple[str, ...] = ()
    """Patterns below the working directory where checkpoints appear, for trainers that do not announce them."""
    videos: tuple[str, ...] = ()
    film: bool = False
    """Whether its checkpoints are filmed beside it, for trainers that do not film themselves."""
    stop_grace_s: float = 10.0
    env_id: str = ""
    algorithm: str = ""
    total_steps: int | None = None
    steps_key: str = ""
    """The key of the runner's configuration that holds the number of steps; errors name it to train further."""
    env_signature: Mapping[str, Any] = field(default_factory=dict)
    """Spaces and environment spec as the probe found them."""
    resolved: Mapping[str, Any] = field(default_factory=dict)
    """Every value of the run, defaults included; becomes resolved.json."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text files to write below the attempt before it starts, by relative path."""
    injected: tuple[Injection, ...] = ()
    script_sha256: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """As it is previewed and stored in command.json: everything, secrets hidden."""
        return {
            "schema": 1,
            "argv": redact_command(self.argv),
            "cwd": str(self.cwd),
            "environment": redact_environment(self.environment),
            "injected": [asdict(injection) for injection in self.injected],
            "script_sha256": self.script_sha256,
            "versions": dict(self.versions),
            "digest": self.digest(),
        }

    def own_environment(self, surrounding: Mapping[str, str]) -> dict[str, str]:
        """What of its environment is not as around it, secrets hidden."""
        shown = redact_environment(self.environment)
        return {name: text for name, text in shown.items() if surrounding.get(name) != self.environment[name]}

    def digest(self) -> str:
        """Names the command wherever and under whatever id it runs, so that what was agreed to can be recognised."""
        place = self.place
        names = {str(place.attempt_dir): "@attempt", str(place.run_dir): "@run", place.run_id: "@id"}

        def anywhere(text: str) -> str:
            for here, name in names.items():
                text = text.replace(here, name)
            return text

        # The GPUs are leased at the moment of launch; which ones they are changes nothing that was agreed to.
        environment = {k: v for k, v in self.environment.items() if k != "CUDA_VISIBLE_DEVICES"}
        visible = [
            [anywhere(word) for word in self.argv],
            {name: anywhere(value) for name, value in redact_environment(environment).items()},
            [injection.sha256 for injection in self.injected],
            self.script_sha256,
        ]
        return hashlib.sha256(json.dumps(visible, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Machine:
    """What a runner may know of the machine; found once per preflight, so that tests can say what is there."""

    environment: Mapping[str, str]
    free_disk_bytes: int
    gpus: tuple[str, ...] = ()
    """Indices that can be leased, as CUDA_VISIBLE_DEVICES wants them."""


class Runner(Protocol):
    """One kind of trainer. Both methods may start short-lived probes of other interpreters, and nothing else."""

    @property
    def name(self) -> str:
        """Its word on the command line."""

    @property
    def capabilities(self) -> RunnerCapabilities:
        """What it can do."""

    def config_schema(self, spec: RunSpec) -> dict[str, Any]:
        """JSON Schema of `spec.config`, for forms; may depend on `spec.script`."""

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Everything that can be known before a launch. One `refused` and nothing is launched."""

    def plan(self, spec: RunSpec, place: Place, machine: Machine) -> LaunchPlan:
        """The command. Called after a preflight without refusal; `ConfigError` when it finds one after all."""
