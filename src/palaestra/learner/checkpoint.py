"""Checkpoints of a learner and its experience source. `files.checkpoint` defines the format on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from palaestra.files.checkpoint import (
    LEARNER,
    POLICY,
    SCHEMA_1_WAITING,
    SOURCE,
    STATE,
    Kind,
    open_checkpoint,
    write_checkpoint,
)
from palaestra.transport.source import SavedState


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A verified checkpoint in memory. The policy is loaded separately, from the path `policy`."""

    path: Path
    sha256: str
    kind: Kind
    learner: SavedState
    source: SavedState
    progress: dict[str, Any]
    about: dict[str, Any]

    @property
    def policy(self) -> Path:
        """The file or directory with the policy."""
        return self.path / POLICY[self.kind]


def save_checkpoint(
    path: Path,
    *,
    kind: Kind,
    policy: bytes | Callable[[Path], object],
    learner: SavedState,
    source: SavedState,
    progress: Mapping[str, Any],
    about: Mapping[str, Any],
) -> str:
    """Write a checkpoint to `path`, which must not exist, and return its SHA-256."""
    state = {"learner": learner.facts, "source": source.facts, "progress": dict(progress), "about": dict(about)}
    contents = {
        POLICY[kind]: policy,
        LEARNER: _to_bytes(learner.tensors),
        SOURCE: _to_bytes(source.tensors),
        STATE: json.dumps(state, indent=1).encode(),
    }
    return write_checkpoint(path, contents, kind=kind)


def load_checkpoint(path: Path, *, kind: Kind | None = None) -> TrainingCheckpoint:
    """Read and verify a checkpoint; `CheckpointError` if it is incomplete, altered, too new or of another kind."""
    from safetensors.torch import load

    stored = open_checkpoint(path, kind=kind)
    learner = load(stored.read(LEARNER))
    if stored.schema > 1:
        source = load(stored.read(SOURCE))
    elif stored.kind == "screens":
        source = {f"waiting.{name}": tensor for name, tensor in load(stored.read(SCHEMA_1_WAITING)).items()}
    else:
        # Schema 1 stored the state of the environments with the optimiser's moments.
        names = [name for name in learner if name.startswith("collector.")]
        source = {name.removeprefix("collector."): learner.pop(name) for name in names}
    state = stored.state
    return TrainingCheckpoint(
        path=path,
        sha256=stored.sha256,
        kind=stored.kind,
        learner=SavedState(learner, state["learner"]),
        source=SavedState(source, state["source"]),
        progress=state["progress"],
        about=state["about"],
    )


def _to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    data: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return data
