"""The tiny model on disk, in the layout of the hub, with a manifest of what it was made of.

    config.json, generation_config.json, model.safetensors     weights in float16
    tokenizer.json, tokenizer_config.json, chat_template.jinja, preprocessor_config.json
    tiny_vlm.json                                               recipe, figures, versions, SHA-256 of each file

A directory is built under another name and renamed when it is whole.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.atomic import new_directory
from palaestra.policy.tiny_vlm.architecture import build_image_processor
from palaestra.policy.tiny_vlm.recipe import Recipe, Taught

__all__ = ["MANIFEST", "SHIPPED", "read_manifest", "refuse_existing", "write_model"]

MANIFEST = "tiny_vlm.json"
SHIPPED = Path(__file__).parent / "checkpoint"
"""The model that comes with the package."""
_PACKAGES = ("torch", "transformers", "tokenizers", "pillow", "numpy", "safetensors")


def refuse_existing(path: Path) -> None:
    """Nothing that is there is ever overwritten."""
    if path.exists():
        raise ConfigError("output", str(path), "exists already", "Name a directory that does not, or remove it")


def write_model(taught: Taught, recipe: Recipe, path: Path) -> dict[str, Any]:
    """Write a directory that does not exist yet; returns its manifest."""
    refuse_existing(path)
    with new_directory(path) as building:
        taught.model.half().save_pretrained(building)
        taught.tokenizer.save_pretrained(building)
        build_image_processor().save_pretrained(building)
        for file in building.iterdir():
            file.chmod(0o644)
        manifest = _manifest(taught, recipe, building)
        (building / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_manifest(path: Path = SHIPPED) -> dict[str, Any]:
    """The manifest of a directory, after every file was held against its hash."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        wanted = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("model", str(path), f"has no readable {MANIFEST} ({error})", "Make it again") from None
    for name, digest in wanted.items():
        file = path / name
        if not file.is_file() or _digest(file) != digest:
            raise CheckpointError("model", str(file), "is missing or was changed since it was made", "Make it again")
    return manifest


def _manifest(taught: Taught, recipe: Recipe, place: Path) -> dict[str, Any]:
    return {
        "recipe": asdict(recipe),
        "parameters": sum(weight.numel() for weight in taught.model.parameters()),
        "vocabulary": len(taught.tokenizer),
        "figures": {
            stage: {name: round(value, 4) for name, value in found.items()} for stage, found in taught.figures.items()
        },
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES}
        | {"python": platform.python_version(), "machine": platform.machine()},
        "files": {file.name: _digest(file) for file in sorted(place.iterdir())},
    }


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
