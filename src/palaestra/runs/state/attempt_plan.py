"""What of a plan must outlive the service: where telemetry and checkpoints will be. Written beside the command.

A service that adopts an attempt reads this instead of asking the runner again, whose answer may have changed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from palaestra.files.atomic import write_json
from palaestra.files.run_directory import Attempt
from palaestra.runs.runner import EventFiles, JournalFile, LaunchPlan, Source, StdoutLines
from palaestra.runs.state.facts import read_known

__all__ = ["AttemptPlan"]

_SOURCES: dict[str, type[JournalFile] | type[StdoutLines] | type[EventFiles]] = {
    "journal": JournalFile,
    "stdout": StdoutLines,
    "tensorboard": EventFiles,
}


@dataclass(frozen=True)
class AttemptPlan:
    """The lasting part of a `LaunchPlan`; holds no environment."""

    sources: tuple[Source, ...] = ()
    checkpoints: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    stop_grace_s: float = 10.0
    env_id: str = ""
    algorithm: str = ""
    total_steps: int | None = None
    env_signature: dict[str, Any] = field(default_factory=dict)
    script_sha256: str = ""
    gpus: tuple[str, ...] = ()
    """Those that the attempt has for itself."""
    film: bool = False

    @classmethod
    def of(cls, plan: LaunchPlan, gpus: tuple[str, ...] = ()) -> AttemptPlan:
        """Of a plan that is about to be executed."""
        return cls(
            sources=tuple(plan.sources),
            checkpoints=tuple(plan.checkpoints),
            videos=tuple(plan.videos),
            stop_grace_s=plan.stop_grace_s,
            env_id=plan.env_id,
            algorithm=plan.algorithm,
            total_steps=plan.total_steps,
            env_signature=dict(plan.env_signature),
            script_sha256=plan.script_sha256,
            gpus=gpus,
            film=plan.film,
        )

    @classmethod
    def read(cls, attempt: Attempt) -> AttemptPlan | None:
        """As it was written; None when it was not."""
        data = read_known(attempt.plan)
        if data is None:
            return None
        try:
            data.pop("schema", None)
            sources = tuple(_SOURCES[source["kind"]](**source) for source in data.pop("sources"))
            for name in ("checkpoints", "videos", "gpus"):
                data[name] = tuple(data[name])
            return cls(sources=sources, **data)
        except (KeyError, TypeError):
            return None

    def write(self, attempt: Attempt) -> None:
        """Put it on record."""
        write_json(attempt.plan, {"schema": 1, **asdict(self)})
