"""All checkpoints of a state directory, with or without a service: rows of the registry, and what only files know."""

from __future__ import annotations

from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.runs.checkpoints.catalogue import attempts_with_checkpoints, checkpoints_of
from palaestra.runs.checkpoints.importing import imported
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.store.database import RegistryCorrupt
from palaestra.runs.store.rebuild import read_run
from palaestra.runs.store.registry import open_registry_read_only

__all__ = ["all_checkpoints", "get_checkpoint"]


def all_checkpoints(
    home: Home, *, run_id: str | None = None, agent_id: str | None = None, env_id: str | None = None
) -> list[CheckpointRecord]:
    """Those that fit, newest first. Changes nothing."""
    # What was packed or removed meanwhile is not there to be used.
    rows = {row.path: row for row in _rows(home) if Path(row.path).exists()}
    listed = {row.run_id for row in rows.values()}
    found = [*rows.values(), *(row for row in imported(home) if row.path not in rows)]
    for directory in sorted(home.runs.iterdir()) if home.runs.is_dir() else []:
        if directory.name.startswith(".") or run_id not in (None, directory.name):
            continue
        # Nobody announces those of a run that `palaestra train` makes alone: rows are what a service found one day.
        if directory.name in listed and home.run(directory.name).spec.exists():
            continue
        attempts = attempts_with_checkpoints(home.run(directory.name))
        run = read_run(home.run(directory.name)) if attempts else None
        if run is not None:
            lying = (row for attempt in attempts for row in checkpoints_of(run, attempt))
            found += [row for row in lying if row.path not in rows]
    wanted = {"run_id": run_id, "agent_id": agent_id, "env_id": env_id}
    fitting = [row for row in found if all(v is None or getattr(row, name) == v for name, v in wanted.items())]
    return sorted(fitting, key=lambda row: (row.created, row.path), reverse=True)


def get_checkpoint(home: Home, name: str) -> CheckpointRecord:
    """The one checkpoint whose id begins so, or that lies there; `ConfigError` when there is none, or several."""
    # Of the same bytes in several places, those of a run tell more than a copy that was kept; the newest of them is it.
    ordered = sorted(reversed(all_checkpoints(home)), key=lambda row: bool(row.run_id))
    matches = {row.sha256: row for row in ordered if row.checkpoint_id.startswith(name) or row.path == name}
    if len(matches) == 1 and name:
        return next(iter(matches.values()))
    if len(matches) > 1:
        few = ", ".join(sorted(row.checkpoint_id for row in matches.values())[:4])
        raise ConfigError("checkpoint", name, f"several begin so ({few})", "Write more of the id")
    raise ConfigError("checkpoint", name, "no such checkpoint", "palaestra checkpoints list shows those that there are")


def _rows(home: Home) -> list[CheckpointRecord]:
    try:
        registry = open_registry_read_only(home)
        if registry is None:
            return []
        try:
            return registry.checkpoints()
        finally:
            registry.close()
    except RegistryCorrupt:
        return []  # the files are the truth
