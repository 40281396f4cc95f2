"""The part of a launch plan that outlives the service: where telemetry, checkpoints and videos will be.

It is written beside the command. A service that adopts an attempt reads it instead of asking the runner again, whose
answer may have changed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from palaestra.files.atomic import write_json
from palaestra.files.run_directory import Attempt
from palaestra.runs.runner import EventFiles, JournalFile, LaunchPlan, Source, StdoutLines
from palaestra.runs.state.attempt_status import read_versioned_json
from palaestra.runs.wire import JsonObject, upgrade_names

_SOURCES: dict[str, type[JournalFile] | type[StdoutLines] | type[EventFiles]] = {
    "journal": JournalFile,
    "stdout": StdoutLines,
    "tensorboard": EventFiles,
}


@dataclass(frozen=True)
class AttemptPlan:
    """The stored part of a `LaunchPlan`; holds no environment variables."""

    sources: tuple[Source, ...] = ()
    checkpoints: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    stop_grace_s: float = 10.0
    env_id: str = ""
    algorithm: str = ""
    total_steps: int | None = None
    env_signature: JsonObject = field(default_factory=dict)
    script_sha256: str = ""
    gpus: tuple[str, ...] = ()
    """GPUs leased to the attempt."""
    record_video: bool = False

    @classmethod
    def of(cls, plan: LaunchPlan, gpus: tuple[str, ...] = ()) -> AttemptPlan:
        """The part of a launch plan to store."""
        shared = {one.name: getattr(plan, one.name) for one in fields(cls) if one.name != "gpus"}
        return cls(**shared | {"env_signature": dict(plan.env_signature)}, gpus=gpus)

    @classmethod
    def read(cls, attempt: Attempt) -> AttemptPlan | None:
        """The stored plan of an attempt; None if there is none."""
        data = read_versioned_json(attempt.plan)
        if data is None:
            return None
        try:
            data.pop("schema", None)
            sources = tuple(_SOURCES[source["kind"]](**upgrade_names(source)) for source in data.pop("sources"))
            for name in ("checkpoints", "videos", "gpus"):
                data[name] = tuple(data[name])
            return cls(sources=sources, **data)
        except (KeyError, TypeError):
            return None

    def write(self, attempt: Attempt) -> None:
        """Store the plan in the directory of an attempt."""
        write_json(attempt.plan, {"schema": 1, **asdict(self)})
