"""Checkpoints on disk: a directory of safetensors and JSON, written whole or not at all, and verified when read.

    update_00000120/
        policy.safetensors    weights and normaliser; loadable alone with `policy.load_policy`
        learner.safetensors   Adam's moments, and arrays of the environments' position
        state.json            counters, random streams, configuration
        manifest.json         size and SHA-256 of each of the above; written last

A checkpoint is built under a temporary name, fsynced, and renamed. Reading checks every hash first and never
unpickles. Knows names and tensors, nothing of training.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from palaestra.errors import CheckpointError
from palaestra.files.atomic import sync
from palaestra.files.checkpoint import MANIFEST

__all__ = ["Checkpoint", "read_checkpoint", "write_checkpoint"]

SCHEMA = 1
POLICY, LEARNER, STATE = "policy.safetensors", "learner.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read and verified."""

    path: Path
    sha256: str
    """Of the manifest, hence of everything."""
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def policy_file(self) -> Path:
        """The policy alone."""
        return self.path / POLICY


def write_checkpoint(path: Path, policy: bytes, tensors: dict[str, Tensor], state: dict[str, Any]) -> str:
    """Write a checkpoint to `path` (which must not exist) and return its SHA-256."""
    from safetensors.torch import save

    if path.exists():
        raise CheckpointError("checkpoint", str(path), "exists already and is never overwritten", "Choose another name")
    files = {
        POLICY: policy,
        LEARNER: save({name: tensor.contiguous() for name, tensor in tensors.items()}),
        STATE: json.dumps(state, indent=1).encode(),
    }
    manifest = {
        "schema": SCHEMA,
        "files": {n: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items()},
    }
    files[MANIFEST] = json.dumps(manifest, indent=1).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name, content in files.items():
            with open(temporary / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        # A disk that is full stays full as long as half a checkpoint lies on it.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(temporary)
    os.rename(temporary, path)
    sync(path.parent)
    return hashlib.sha256(files[MANIFEST]).hexdigest()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint; anything missing, altered or newer than we know is refused."""
    from safetensors.torch import load

    if not path.is_dir():
        raise CheckpointError("checkpoint", str(path), "there is no such checkpoint directory")
    try:
        raw = (path / MANIFEST).read_bytes()
        manifest = json.loads(raw)
        files = {name: dict(facts) for name, facts in manifest["files"].items()}
        schema = int(manifest["schema"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "checkpoint", str(path), f"its manifest cannot be read ({error})", "Use an earlier checkpoint"
        ) from None
    if schema > SCHEMA:
        raise CheckpointError("checkpoint", str(path), f"schema {schema} is newer than {SCHEMA}", "Upgrade palaestra")
    contents: dict[str, bytes] = {}
    for name in (POLICY, LEARNER, STATE):
        try:
            contents[name] = (path / name).read_bytes()
        except OSError as error:
            raise CheckpointError("checkpoint", str(path), f"{name} is missing ({error.strerror})") from None
        if hashlib.sha256(contents[name]).hexdigest() != files.get(name, {}).get("sha256"):
            got, wanted = len(contents[name]), files.get(name, {}).get("bytes")
            how = f"truncated ({got} of {wanted} bytes)" if got != wanted else "corrupt (its SHA-256 differs)"
            raise CheckpointError("checkpoint", str(path), f"{name} is {how}", "Use an earlier checkpoint")
    return Checkpoint(
        path=path,
        sha256=hashlib.sha256(raw).hexdigest(),
        tensors=load(contents[LEARNER]),
        state=json.loads(contents[STATE]),
    )
