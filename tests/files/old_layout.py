"""Checkpoints of screens as schema 1 wrote them."""

import hashlib
import json
import shutil

from safetensors.torch import save

from palaestra.learner.checkpoint import load_checkpoint


def write_as_schema_1(new, old):
    """A checkpoint of screens as schema 1 wrote it, from one of schema 2."""
    found = load_checkpoint(new)
    shutil.copytree(new / "policy", old / "policy")
    progress = found.progress
    state = {
        "trainer": found.learner.facts, "orders": found.source.facts.get("orders"), "episodes": progress["steps"],
        "turns": 17, "rounds": progress["updates"], "ready": found.source.facts["ready"],
        "about": found.about,
    }  # fmt: skip
    files = {
        "learner.safetensors": save(found.learner.tensors), "waiting.safetensors": save(
            {name.removeprefix("waiting."): tensor for name, tensor in found.source.tensors.items()}
        ),
        "state.json": json.dumps(state, indent=1).encode(),
    }  # fmt: skip
    facts = {n: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items()}
    policy = hashlib.sha256((old / "policy" / "palaestra.json").read_bytes()).hexdigest()
    manifest = {"schema": 1, "kind": "ui", "policy": policy, "files": facts}
    for name, data in {**files, "manifest.json": json.dumps(manifest, indent=1).encode()}.items():
        (old / name).write_bytes(data)
