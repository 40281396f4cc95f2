"""Checkpoints of a run on screens: what was learned in the layout other programs read, and everything to go on exactly.

    update_00000120/
        policy/                 PEFT's layout when adapters are trained, transformers' otherwise
        learner.safetensors     the optimiser, the replay of successes, torch's random stream
        waiting.safetensors     episodes that were played and not yet learned from
        state.json              counters, random streams, the sampler of tasks, configuration
        manifest.json           size and SHA-256 of each of the above; written last

Built under a temporary name and renamed; verified when read; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from palaestra.errors import CheckpointError
from palaestra.experience.trajectory import Trajectory
from palaestra.policy.vlm import VLMPolicy

__all__ = ["POLICY", "UiCheckpoint", "read_ui_checkpoint", "write_ui_checkpoint"]

SCHEMA = 1
KIND = "ui"
POLICY, LEARNER, WAITING, STATE, MANIFEST = (
    "policy", "learner.safetensors", "waiting.safetensors", "state.json", "manifest.json",
)  # fmt: skip


@dataclass(frozen=True)
class UiCheckpoint:
    """A checkpoint that has been read and verified; the policy reads its own directory."""

    path: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    waiting: tuple[Trajectory, ...]

    @property
    def policy(self) -> Path:
        """What was learned."""
        return self.path / POLICY


def write_ui_checkpoint(
    path: Path, policy: VLMPolicy, tensors: dict[str, Tensor], state: dict[str, Any], waiting: Sequence[Trajectory]
) -> str:
    """Write a checkpoint to `path` (which must not exist) and return its SHA-256."""
    if path.exists():
        raise CheckpointError("checkpoint", str(path), "exists already and is never overwritten", "Choose another name")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        learned = policy.save(temporary / POLICY)
        held = {
            f"{number:06d}": torch.frombuffer(bytearray(one.to_bytes()), dtype=torch.uint8)
            for number, one in enumerate(waiting)
        }
        files = {
            LEARNER: save({name: tensor.contiguous() for name, tensor in tensors.items()}),
            WAITING: save(held), STATE: json.dumps(state, indent=1).encode(),
        }  # fmt: skip
        facts = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in files.items()}
        manifest = json.dumps({"schema": SCHEMA, "kind": KIND, "policy": learned, "files": facts}, indent=1).encode()
        for name, data in {**files, MANIFEST: manifest}.items():
            with open(temporary / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return _sha256(manifest)


def read_ui_checkpoint(path: Path) -> UiCheckpoint:
    """Read and verify everything but the policy, which verifies itself when it is loaded."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        kind, files = manifest.get("kind"), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("checkpoint", str(path), f"its manifest cannot be read ({error})") from None
    if kind != KIND:
        raise CheckpointError("checkpoint", str(path), "is not of a model that operates screens")
    if int(manifest["schema"]) > SCHEMA:
        raise CheckpointError("checkpoint", str(path), f"schema {manifest['schema']} is newer than {SCHEMA}")
    contents = {}
    for name in (LEARNER, WAITING, STATE):
        try:
            contents[name] = (path / name).read_bytes()
        except OSError as error:
            raise CheckpointError("checkpoint", str(path), f"{name} is missing ({error.strerror})") from None
        if _sha256(contents[name]) != files.get(name, {}).get("sha256"):
            raise CheckpointError("checkpoint", str(path), f"{name} is truncated or corrupt", "Use an earlier one")
    held = load(contents[WAITING])
    waiting = tuple(
        Trajectory.from_bytes(held[name].numpy().tobytes(), place=f"{path}/{name}") for name in sorted(held)
    )
    return UiCheckpoint(path, load(contents[LEARNER]), json.loads(contents[STATE]), waiting)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
