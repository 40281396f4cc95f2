"""The interface of runners: their capabilities, the findings of a preflight, and the command that they plan.

A runner starts no training: it turns a spec into findings and one `LaunchPlan`. The plan is what the user sees and
confirms and what the service executes; its digest proves that they are the same. `runs.runners.conformance` checks an
implementation. External packages register theirs under the entry point group `palaestra.runners`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from palaestra.errors import ConfigError
from palaestra.redaction import redact_command, redact_environment
from palaestra.runs.wire import API_SCHEMA, JsonObject

if TYPE_CHECKING:
    from palaestra.runs.record import CheckpointRecord
    from palaestra.runs.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class RunnerCapabilities:
    """Capabilities of a runner. A request for a missing capability is refused."""

    __pydantic_config__ = API_SCHEMA

    title: str
    offline_inference: bool = False
    """Its checkpoints can act in plays. Some scripts of the runner may save none; see `ScriptInfo.plays`."""
    warm_start: bool = False
    resume: bool = False
    """Resumes from its own checkpoints, counters included."""
    restarts: bool = False
    """A resume runs the command again, because only the program knows its checkpoints."""
    needs_gpu: bool = False
    external_services: tuple[str, ...] = ()
    """External services that it may contact, such as `wandb`."""
    live_beliefs: bool = False
    """Reports what its agents believe and intend while it trains."""
    video: bool = False
    """Videos can be recorded while it trains."""
    tracking: bool = False
    runs_foreign_code: bool = False
    """Executes files that are not part of palaestra or an installed package; the user must confirm the command."""


@dataclass(frozen=True)
class Finding:
    """One result of a preflight."""

    __pydantic_config__ = API_SCHEMA

    check: str
    """Short stable name: `python`, `dependency:tyro`, `env`, `disk`, `gpu`, `flag`, `script`, …"""
    level: Literal["ok", "warning", "refused"]
    text: str
    remedy: str = ""
    """The command or change that solves it."""

    @classmethod
    def from_error(cls, check: str, error: ConfigError) -> Finding:
        """A refusal that names the place, the value, the reason and the remedy of an error."""
        return cls(check, "refused", f"{error.place} = {error.value!r}: {error.reason}", error.remedy)


@dataclass(frozen=True, kw_only=True)
class LaunchPreview:
    """The findings of a preflight, and the command that a start would execute."""

    __pydantic_config__ = API_SCHEMA

    findings: tuple[Finding, ...]
    command: JsonObject | None
    """The exact command, with secrets redacted; null when a finding refuses the launch."""
    digest: str | None
    """Send it as `consent` to agree to the command."""
    needs_consent: bool
    run_id: str | None = None
    """The run id in the command's paths. Send it with the start to execute exactly this command."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the trainer that differ from those of the service, with secrets redacted."""


@dataclass(frozen=True)
class JournalFile:
    """The trainer writes the journal, `metrics.jsonl` of the attempt."""

    kind: Literal["journal"] = "journal"


@dataclass(frozen=True)
class StdoutLines:
    """Events are parsed from stdout.log in a format of `runs.ingest.trainer_formats.OUTPUT_FORMATS`."""

    format: str
    kind: Literal["stdout"] = "stdout"


@dataclass(frozen=True)
class EventFiles:
    """Events are read from TensorBoard files in the working directory.

    `tags` names a table of `runs.ingest.trainer_formats.TAGS`.
    """

    pattern: str
    tags: str
    kind: Literal["tensorboard"] = "tensorboard"


@dataclass(frozen=True)
class LogFile:
    """Events that any program appends to log.jsonl of the attempt, with `palaestra.log` or without it."""

    kind: Literal["log"] = "log"


@dataclass(frozen=True)
class NewEventFiles:
    """TensorBoard files that the processes of the attempt create below a directory, or hold open elsewhere."""

    root: str
    kind: Literal["new_event_files"] = "new_event_files"


@dataclass(frozen=True)
class ProgramOutput:
    """Metrics are searched in whatever a program prints; `runs.ingest.printed_metrics.RULES` says how."""

    kind: Literal["program_output"] = "program_output"


Source: TypeAlias = JournalFile | StdoutLines | EventFiles | LogFile | NewEventFiles | ProgramOutput


@dataclass(frozen=True)
class Injection:
    """Our code that runs inside a foreign trainer; the user sees it before confirming the command."""

    path: str
    sha256: str
    why: str


@dataclass(frozen=True)
class AttemptPaths:
    """Identity and directories of an attempt that does not exist yet."""

    run_id: str
    attempt: int
    run_dir: Path
    attempt_dir: Path
    work_dir: Path
    """`attempt_dir / "work"`: working directory of the trainer."""
    resume_from: str | None = None
    """Checkpoint of an earlier attempt to resume from."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The command that the service executes, without a shell."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """The complete environment with secrets; only `redacted` may be stored."""
    cwd: Path
    paths: AttemptPaths
    sources: tuple[Source, ...]
    checkpoints: tuple[str, ...] = ()
    """Glob patterns of checkpoints in the working directory, for trainers that do not report them."""
    videos: tuple[str, ...] = ()
    record_video: bool = False
    """Whether the service records its checkpoints, for trainers that record no videos themselves."""
    stop_grace_s: float = 10.0
    env_id: str = ""
    algorithm: str = ""
    total_steps: int | None = None
    steps_key: str = ""
    """Configuration key of the number of steps; errors name it."""
    env_signature: JsonObject = field(default_factory=dict)
    """Spaces and environment spec as reported by the probe."""
    offline_dataset: JsonObject = field(default_factory=dict)
    """Id, hash and environment of the dataset that the run learns from; empty for a run that learns in its
    environment. Its checkpoints remember it."""
    has_episodes: bool = True
    """Whether it reports episodes. A run that learns only from a dataset has none, which raises no alarm."""
    resolved: JsonObject = field(default_factory=dict)
    """All values of the run, defaults included; stored as resolved.json."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text files to write into the attempt before it starts, by relative path."""
    injected: tuple[Injection, ...] = ()
    script_sha256: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    begins_with: str = ""
    """Checkpoint of this machine that a run on another machine begins with or resumes from."""
    planned_digest: str = ""
    """Digest of the command as it was planned, if it was translated for another machine afterwards."""

    def to_redacted_dict(self) -> JsonObject:
        """The plan without secrets, as shown in previews and stored in command.json."""
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

    def environment_changes(self, base: Mapping[str, str]) -> dict[str, str]:
        """Variables that differ from a base environment, without secrets."""
        redacted = redact_environment(self.environment)
        return {name: text for name, text in redacted.items() if base.get(name) != self.environment[name]}

    def digest(self) -> str:
        """Hash of the command, independent of the run id and its directories, to recognise a confirmed command."""
        if self.planned_digest:
            return self.planned_digest
        paths = self.paths
        placeholders = {str(paths.attempt_dir): "@attempt", str(paths.run_dir): "@run", paths.run_id: "@id"}

        def normalize(text: str) -> str:
            for value, placeholder in placeholders.items():
                text = text.replace(value, placeholder)
            return text

        # GPUs are leased at launch; their indices are not part of what the user confirmed.
        environment = {k: v for k, v in self.environment.items() if k != "CUDA_VISIBLE_DEVICES"}
        content = [
            [normalize(word) for word in self.argv],
            {name: normalize(value) for name, value in redact_environment(environment).items()},
            [injection.sha256 for injection in self.injected],
            self.script_sha256,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class PolicyRequest:
    """A checkpoint that is to act in a play."""

    checkpoint: CheckpointRecord
    spec: RunSpec | None
    """The spec of the run that saved it; None for an imported checkpoint."""
    command: JsonObject
    """The command of that run; empty for an imported checkpoint."""
    deterministic: bool
    env_id: str = ""
    """The environment of the play; empty on a screen."""
    parameters: JsonObject = field(default_factory=dict)
    """Arguments of that environment's constructor."""
    unsafe: str = ""
    """Why its file may hold code; empty if it holds only weights, and for formats that are not scanned."""


@dataclass(frozen=True, kw_only=True)
class PolicyPlan:
    """The process in which a policy acts; `train.play.policies` describes how a play talks to it."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the play."""
    cwd: str = ""
    foreign_code: str = ""
    """What it would execute that the user has not agreed to; empty when there is nothing of that kind."""
    alternative: PolicyPlan | None = None
    """The same policy with foreign code that makes it act better, for users who agree to that code."""

    def digest(self) -> str:
        """Hash of the command, to recognise the one that the user agreed to."""
        return hashlib.sha256(json.dumps([self.argv, dict(self.environment), self.cwd]).encode()).hexdigest()


@dataclass(frozen=True)
class Machine:
    """Facts about the machine, determined once per preflight."""

    environment: Mapping[str, str]
    free_disk_bytes: int
    gpus: tuple[str, ...] = ()
    """Indices that can be leased, as in CUDA_VISIBLE_DEVICES."""


class Runner(Protocol):
    """One kind of trainer. `preflight` and `plan` may start short-lived probes of interpreters, but nothing else."""

    @property
    def name(self) -> str:
        """Value of `--runner`."""

    @property
    def capabilities(self) -> RunnerCapabilities:
        """Its capabilities."""

    def config_schema(self, spec: RunSpec) -> JsonObject:
        """JSON Schema of `spec.config`; may depend on `spec.script`."""

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Checks before a launch. A `refused` finding prevents it."""

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """The command, after a preflight without refusals. Raises `ConfigError` if it cannot run."""


class PlayableRunner(Runner, Protocol):
    """A runner whose checkpoints can act in a play; its capabilities say `offline_inference`."""

    def plan_policy(self, request: PolicyRequest, machine: Machine) -> PolicyPlan:
        """The process of a policy. Raises `ConfigError` if the checkpoint cannot act."""
