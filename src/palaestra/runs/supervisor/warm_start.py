"""Which checkpoint a run begins with: an id, or how it begins, made the one checkpoint that is meant, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.runs.checkpoints.listing import get_checkpoint
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.runner import AttemptPaths, Finding, Runner
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.preflight import Preview

__all__ = ["looked_with_weights", "named_in_full"]

_ID = re.compile(r"[0-9a-f]{1,64}")


def named_in_full(home: Home, spec: RunSpec, runner: Runner) -> RunSpec:
    """A request with the whole id of the checkpoint it begins with, so that it means the same one for ever."""
    try:
        found = _meant(home, spec, runner)
    except ConfigError:
        return spec  # looking ahead refuses it
    return spec if found is None else spec.model_copy(update={"warm_start": found.checkpoint_id})


def looked_with_weights(
    home: Home, spec: RunSpec, runner: Runner, place: AttemptPaths, look: Callable[[RunSpec], Preview]
) -> Preview:
    """What a look says of a request with the path of its checkpoint in the place of an id; with which one that is."""
    if place.resume_from is not None:
        # It goes on from its own; what it began with may be gone.
        return look(spec.model_copy(update={"warm_start": None}))
    try:
        found = _meant(home, spec, runner)
    except ConfigError as error:
        refused = Finding("warm_start", "refused", f"checkpoint {error.value}: {error.reason}", error.remedy)
        return Preview((refused,), None, runner.capabilities.runs_foreign_code)
    if found is None:
        return look(spec)
    whose = f"run {found.run_id}" if found.run_id else "no run of ours"
    text = f"begins with {found.checkpoint_id}: {found.agent_id}, step {found.shown_step}, of {whose}"
    seen = look(spec.model_copy(update={"warm_start": found.path}))
    return replace(seen, findings=(Finding("warm_start", "ok", text), *seen.findings))


def _meant(home: Home, spec: RunSpec, runner: Runner) -> CheckpointRecord | None:
    """None when no id is meant: nothing, a path, or a runner that cannot begin with weights and says so."""
    name = spec.warm_start
    if name is None or not runner.capabilities.warm_start or not _ID.fullmatch(name):
        return None
    return None if (spec.invoked_from / name).exists() else get_checkpoint(home, name)
