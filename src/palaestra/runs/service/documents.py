"""What the routes take and answer, for validation and for the OpenAPI description."""

# Annotations are evaluated here: pydantic reads them.
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool

from palaestra.runs.phase import Phase
from palaestra.runs.spec import RunSpec, find_text_fault

__all__ = [
    "Agreement", "CheckpointDocument", "ClipDocument", "Comparison", "Deploying", "DeploymentDocument", "Doomed",
    "Drain", "DrainState", "Error", "Export", "Filming", "FindingDocument", "Gc", "GoingBack", "Health", "Importing",
    "Into", "LifeDocument", "LogDocument", "MetricDocument", "Points", "PreviewDocument", "RunDocument",
    "RunnerDocument", "SampleDocument", "Showing", "Start", "Stop", "Submission", "ToolDocument",
    "TrackingDocument", "VerdictDocument",
]  # fmt: skip

RUN_ID = r"^[a-z0-9][a-z0-9._-]*$"
"""What an id looks like."""
Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""As `telemetry.json_number` writes it."""
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def _stored(text: str) -> str:
    fault = find_text_fault(text)
    if fault:
        raise ValueError(fault)
    return text


_Text = Annotated[str, AfterValidator(_stored)]


class _Answer(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, ser_json_inf_nan="null")


class _Body(BaseModel):
    model_config = _STRICT


class ErrorFacts(_Answer):
    """What went wrong."""

    code: str
    """A word to sort by: `refused`, `unknown_run`, `bad_request`, `consent_needed`, `illegal_transition`, …"""
    text: str
    """One sentence for a person."""
    place: str = ""
    """What of the request it is about."""
    reason: str = ""
    remedy: str = ""
    """What makes it go away."""
    value: Any = None
    digest: str | None = None
    """With `consent_needed`: what to send as `consent` to agree to the command."""


class Error(_Answer):
    """Every answer that is not a success."""

    error: ErrorFacts


class Health(_Answer):
    """That the service answers, and which it is."""

    status: Literal["ok", "draining"]
    version: str
    pid: int


class Identity(_Answer):
    """One process of one boot of the machine."""

    pid: int
    started: int
    """In clock ticks since boot."""
    boot_id: str


class AlarmDocument(_Answer):
    """Something a person should look at while the run goes on."""

    code: str
    text: str
    since: float


class RunDocument(_Answer):
    """One run as it is at the moment. Times are unix times."""

    run_id: str
    runner: str
    agent_id: str
    env_id: str
    phase: Phase
    reason: str
    """Why it is in this phase."""
    code: str
    attempt: int
    """Which start of the run; 0 before the first."""
    supervised: bool
    """False for a run of `palaestra train` alone, which the service shows and never stops."""
    priority: int
    created: float
    started: float | None
    ended: float | None
    warden: Identity | None
    trainer: Identity | None
    env_step: int
    total_steps: int | None
    episodes: int
    episode_return: Number | None
    """Mean of the last 100 episodes."""
    seed: int | None
    tags: list[str]
    alarms: list[AlarmDocument]
    archived: bool
    tracking_url: str
    bytes_on_disk: int


class LifeDocument(_Answer):
    """Something that happened to a run."""

    seq: int
    time: float
    attempt: int
    happening: str
    phase: Phase
    """After it."""
    reason: str
    code: str
    facts: dict[str, Any]


class LogDocument(_Answer):
    """Whole lines of a run's output."""

    text: str
    offset: int
    """Ask from here on for more."""
    size: int
    ended: bool
    """Whether the run is over and nothing more will come."""


class MetricDocument(_Answer):
    """One metric of a run."""

    points: int
    source: str
    """Where its numbers come from."""


Point = Annotated[list[Number], Field(min_length=3, max_length=3)]
Points = dict[str, list[Point]]
"""Metrics by name: step, value and unix time of each point."""


class FindingDocument(_Answer):
    """One line of a preflight."""

    check: str
    level: Literal["ok", "warning", "refused"]
    text: str
    remedy: str


class PreviewDocument(_Answer):
    """What a start would find and execute."""

    findings: list[FindingDocument]
    command: dict[str, Any] | None
    """Exactly what would be executed, secrets hidden; null when something is refused."""
    environment: dict[str, str]
    """Variables that the trainer would get and the service has not, or has otherwise; secrets hidden."""
    run_id: str | None
    """The id in the command's paths; to be sent with the start, so that what was shown is what is executed."""
    digest: str | None
    """What to send as `consent`."""
    needs_consent: bool


class RunnerDocument(_Answer):
    """One runner and what it can do."""

    title: str
    offline_inference: bool
    warm_start: bool
    resume: bool
    needs_gpu: bool
    external_services: list[str]
    live_beliefs: bool
    video: bool
    tracking: bool
    runs_foreign_code: bool


class CheckpointDocument(_Answer):
    """One checkpoint."""

    checkpoint_id: str
    run_id: str
    agent_id: str
    env_id: str
    attempt: int
    env_step: int | None
    """Environment steps it learned from; null when unknown."""
    step_source: str
    """How the step is known: `file`, `announced`, `name`, `log` (a lower bound), `given` or `unknown`."""
    path: str
    sha256: str
    size_bytes: int
    format: str
    created: float
    best: bool
    metric: Number | None
    profile: str
    env_signature: dict[str, Any]
    metrics_digest: dict[str, Number]
    verified: float | None


class VerdictDocument(_Answer):
    """Whether a checkpoint's bytes are those that were saved."""

    checkpoint: CheckpointDocument
    fits: bool
    problem: str


class DeploymentDocument(_Answer):
    """What acts in an environment."""

    env_id: str
    checkpoint_id: str
    path: str
    sha256: str
    agent_id: str
    deployed: float
    command: list[str]
    """Plays it."""
    evaluation: dict[str, Any]
    """How its first episode went."""
    previous: dict[str, Any] | None
    """What it replaced."""


class TrackingDocument(_Answer):
    """What W&B has of a run."""

    state: Literal["off", "online", "offline", "uploaded"]
    url: str
    sync_command: str
    """Uploads what is not uploaded yet."""
    pending: list[str]
    remedy: str


class ClipReportDocument(_Answer):
    """What filming cost."""

    frames: int
    seconds: float
    encode_s: float
    sps_with: Number
    sps_without: Number
    slowdown: Number
    checkpoint: str
    episode_return: Number | None


class ClipDocument(_Answer):
    """One video file of a run."""

    name: str
    """What to ask for to get its bytes."""
    path: str
    attempt: int
    size_bytes: int
    created: float
    report: ClipReportDocument | None
    """Null for one that the trainer wrote."""


class ToolDocument(_Answer):
    """A tool that was started, or is used again."""

    url: str
    run_ids: list[str]
    """What it shows."""


class SampleDocument(_Answer):
    """One look at what a run takes of its machine."""

    time: float
    cpu_percent: float
    rss_mb: float
    processes: int
    gpus: list[Annotated[list[str | float], Field(min_length=3, max_length=3)]]
    """Index, utilisation in percent and memory in MB of each."""


class ComparedRun(_Answer):
    """One column of a comparison."""

    run: RunDocument
    elapsed_s: float
    script_sha256: str
    versions: dict[str, str]


class Comparison(_Answer):
    """Runs side by side: only what differs of their configurations, and the last value of every metric."""

    runs: list[ComparedRun]
    configuration: dict[str, list[Any]]
    """Keys whose values differ, one value for every run; null where a run has no such key."""
    metrics: dict[str, list[Number | None]]
    """The mean of the last 100 episodes or 10 updates of each metric, one for every run."""


class Doomed(_Answer):
    """What the retention policy does to a run."""

    run_id: str
    action: Literal["archive", "delete", "prune", "clips", "shorten", "purge"]
    """`prune` removes checkpoints, `clips` clips, `shorten` the middle of outputs, `purge` what lies in the trash."""
    why: str
    bytes: int
    paths: tuple[str, ...] = ()
    """What is removed for good."""
    failed: str = ""
    """Why it could not be done; empty when it was, or was not tried."""


class DrainState(_Answer):
    """Whether the service starts anything new."""

    draining: bool


class Export(_Answer):
    """Event files that were written."""

    directory: str
    points: int


class Submission(_Body):
    """A run to be looked at."""

    spec: RunSpec


class Start(_Body):
    """A run to be started."""

    spec: RunSpec
    consent: Annotated[str | None, Field(max_length=64)] = None
    """The digest of the command, for runners that execute foreign code."""
    run_id: Annotated[str | None, Field(pattern=RUN_ID, max_length=90)] = None
    """That of the preview; null takes a new one."""


class Stop(_Body):
    """How to stop."""

    grace_s: Annotated[float | None, Field(ge=0, le=3600)] = None
    """How long it may take to end by itself; null is the runner's own."""


class Agreement(_Body):
    """Consent to a command, when it needs one."""

    consent: Annotated[str | None, Field(max_length=64)] = None


class Resume(Agreement):
    """The arguments of a resume."""

    checkpoint: Annotated[_Text | None, Field(min_length=1, max_length=4096)] = None
    """Id of the checkpoint, a prefix of the id, its file name or its path; null: the newest undamaged one."""
    changes: Annotated[dict[str, Any], Field(max_length=100)] = {}
    """Values by dotted key of the runner's configuration, such as `trainer.total_timesteps`."""


class Drain(_Body):
    """Start nothing new, or start again."""

    on: StrictBool


class Gc(_Body):
    """What to do with the runs that the retention policy lets go."""

    dry_run: StrictBool = True


class Into(_Body):
    """Where to write."""

    into: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    """A directory on the service's machine; null is the run's own."""


class Importing(_Body):
    """A checkpoint from elsewhere."""

    path: Annotated[_Text, Field(min_length=1, max_length=4096)]
    """On the service's machine."""
    agent_id: Annotated[_Text, Field(max_length=200)] = ""
    env_id: Annotated[_Text, Field(max_length=200)] = ""
    env_step: Annotated[int | None, Field(ge=0, lt=2**63)] = None


class Deploying(_Body):
    """Where a checkpoint is to act."""

    env_id: Annotated[_Text | None, Field(max_length=200)] = None
    """Null is where it was trained."""


class GoingBack(_Body):
    """Where what acted before is to act again."""

    env_id: Annotated[_Text, Field(min_length=1, max_length=200)]


class Filming(_Body):
    """How to film."""

    checkpoint_id: Annotated[str | None, Field(pattern=r"^[0-9a-f]+$", max_length=64)] = None
    """Null is the run's newest."""
    frames: Annotated[int, Field(ge=1, le=200)] = 200


class Showing(_Body):
    """Runs to be shown together."""

    run_ids: Annotated[list[Annotated[str, Field(max_length=90)]], Field(min_length=1, max_length=50)]
