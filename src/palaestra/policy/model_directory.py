"""Directories of the models that this package makes: the layout of the Hugging Face hub, and a manifest.

The manifest has the recipe, the figures of its stages, the versions of the packages and the SHA-256 of every file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.atomic import atomic_directory

MANIFEST = "tiny_vlm.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "pillow", "numpy", "safetensors")


def check_output_path(path: Path) -> None:
    """Refuse a path that exists; nothing is overwritten."""
    if path.exists():
        raise ConfigError("output", str(path), "exists already", "Name a directory that does not, or remove it")


def write_model_directory(
    path: Path, save: Callable[[Path], None], facts: dict[str, Any], figures: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Write a new model directory with a manifest of `facts`, figures, versions and file hashes."""
    check_output_path(path)
    with atomic_directory(path) as directory:
        save(directory)
        for file in directory.iterdir():
            file.chmod(0o644)
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        manifest = {
            **facts,
            "figures": {
                stage: {name: round(value, 4) for name, value in metrics.items()} for stage, metrics in figures.items()
            },
            "versions": versions | {"python": platform.python_version(), "machine": platform.machine()},
            "files": {file.name: _digest(file) for file in sorted(directory.iterdir())},
        }
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a model directory and verify the hash of every file."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        digests = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("model", str(path), f"has no readable {MANIFEST} ({error})", "Make it again") from None
    for name, digest in digests.items():
        file = path / name
        if not file.is_file() or _digest(file) != digest:
            raise CheckpointError("model", str(file), "is missing or was changed since it was made", "Make it again")
    return manifest


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
