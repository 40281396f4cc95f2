"""Checkpoints of a vision-language policy, in the layouts that other programs read.

    adapter_config.json, adapter_model.safetensors   PEFT's layout, when adapters are trained
    config.json, model*.safetensors, tokenizer, …    transformers' layout, when the model itself is
    value_head.safetensors                           the value head
    palaestra.json                                   architecture, version, SHA-256 of each file; written last

A directory is built under a temporary name, fsynced and renamed. Reading checks the architecture and every hash before
anything is changed. Nothing is unpickled.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from palaestra.errors import CheckpointError
from palaestra.files.atomic import atomic_directory
from palaestra.files.checkpoint import check_files, digest_files, read_digests
from palaestra.policy.vlm.loading import LoadedModel, hide_progress_bar
from palaestra.policy.vlm.lora import adapted_modules, adapter_tensors
from palaestra.policy.vlm.network import Network
from palaestra.policy.weight_sync import copy_weights

SCHEMA = 1
MANIFEST, VALUE_HEAD = "palaestra.json", "value_head.safetensors"
PLACE = "checkpoint"


@dataclass(frozen=True)
class Architecture:
    """What a checkpoint must have in common with the model it is loaded into."""

    model_type: str
    layers: int
    width: int
    adapters: int
    """Number of layers with an adapter; 0 if the model itself is trained."""
    rank: int
    digest: str
    """Hash of the names and shapes of all weights except the adapters'."""

    @classmethod
    def of(cls, network: Network) -> Architecture:
        """The architecture of a network."""
        text = network.model.config.get_text_config()
        shapes = {
            name.replace(".base_layer.", "."): tuple(weight.shape)
            for name, weight in network.model.named_parameters()
            if ".lora_" not in name
        }
        return cls(
            model_type=str(network.model.config.model_type),
            layers=int(text.num_hidden_layers),
            width=int(text.hidden_size),
            adapters=len(adapted_modules(network.model)),
            rank=0 if network.wrapped is None else int(network.wrapped.peft_config["default"].r),
            digest=hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:12],
        )

    def __str__(self) -> str:
        adapters = f"adapters of rank {self.rank} on {self.adapters} layers" if self.adapters else "no adapters"
        return f"{self.model_type}, {self.layers} layers of width {self.width}, {adapters} ({self.digest})"


def save_checkpoint(
    network: Network, loaded: LoadedModel, path: Path, *, version: int, weights: Mapping[str, Tensor] | None = None
) -> str:
    """Write the trained weights to a new directory; returns the SHA-256 of its manifest.

    `weights`: the trained weights of a sharded network by name, whole.
    """
    with _checkpoint_directory(path, network, {"version": version, "base": loaded.name}) as directory:
        if network.wrapped is not None:
            named = weights and {f"base_model.model.{name}": tensor for name, tensor in weights.items()}
            network.wrapped.save_pretrained(directory, save_embedding_layers=False, state_dict=named)
            (directory / "README.md").unlink(missing_ok=True)
        else:
            _save_model(network.model, loaded, directory, weights)
        head = {name: tensor.detach().cpu().contiguous() for name, tensor in network.value_head.state_dict().items()}
        save_file(head, directory / VALUE_HEAD)
    return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()


def load_checkpoint(network: Network, path: Path) -> int:
    """Load a checkpoint into the network; returns its version. Nothing is changed if it does not fit."""
    manifest = _read_manifest(path)
    theirs, ours = Architecture(**manifest["architecture"]), Architecture.of(network)
    if theirs != ours:
        reason = f"it is of another architecture: {theirs}, while this model is {ours}"
        remedy = "Use the section model of the configuration it was trained with"
        raise CheckpointError(PLACE, str(path), reason, remedy)
    head = {f"value_head.{name}": tensor for name, tensor in load_file(path / VALUE_HEAD).items()}
    if network.wrapped is not None:
        network.load_trainable(adapter_tensors(path) | head, place=PLACE)
    else:
        with hide_progress_bar():
            other = type(network.model).from_pretrained(path, dtype=torch.float32, use_safetensors=True)
        copy_weights(dict(other.named_parameters()) | head, dict(network.named_parameters()))
        network.feature_cache.clear()
    return int(manifest["version"])


def export_merged(network: Network, loaded: LoadedModel, path: Path, *, version: int) -> None:
    """Write a model with its adapters merged; loading it needs neither PEFT nor Palaestra."""
    facts = {"version": version, "base": loaded.name, "merged": True}
    with _checkpoint_directory(path, network, facts) as directory:
        model = network.model
        if network.wrapped is not None:
            # Unmerging is not exact, so a copy is merged; only layers with an adapter are copied.
            adapted = adapted_modules(network.model)
            shared: dict[int, Any] = {
                id(weight): weight
                for name, weight in network.model.named_parameters()
                if name.split(".base_layer.")[0] not in adapted and ".lora_" not in name
            }
            model = copy.deepcopy(network.wrapped, shared).merge_and_unload(safe_merge=True)
        _save_model(model, loaded, directory)


def _save_model(model: Any, loaded: LoadedModel, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    # A checkpoint is saved every few minutes, and the bar would interrupt the progress of the training.
    with hide_progress_bar():
        model.save_pretrained(directory, state_dict=None if weights is None else model.state_dict() | weights)
    loaded.tokenizer.save_pretrained(directory)
    loaded.image_processor.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(loaded.chat_template, encoding="utf-8")


@contextmanager
def _checkpoint_directory(path: Path, network: Network, facts: dict[str, Any]) -> Iterator[Path]:
    """Create a directory atomically; its manifest is written last."""
    if path.exists():
        raise CheckpointError(PLACE, str(path), "exists already and is never overwritten", "Choose another name")
    facts = {"schema": SCHEMA, "architecture": asdict(Architecture.of(network)), **facts}
    with atomic_directory(path) as directory:
        yield directory
        manifest = json.dumps({**facts, "files": digest_files(directory)}, indent=1)
        (directory / MANIFEST).write_bytes(manifest.encode())


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after verifying the hash of every file."""
    if not path.is_dir():
        raise CheckpointError(PLACE, str(path), "there is no such checkpoint directory")
    try:
        raw = (path / MANIFEST).read_bytes()
        manifest: dict[str, Any] = json.loads(raw)
        if manifest.get("kind") == "module":
            reason = f"holds a module of your own ({manifest.get('class')})"
            remedy = "Continue in Python: train_screens(config, policy=module, resume=…)"
            raise CheckpointError(PLACE, str(path), reason, remedy)
        files = read_digests(raw)
        schema, _ = int(manifest["schema"]), Architecture(**manifest["architecture"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"its {MANIFEST} cannot be read ({error})"
        raise CheckpointError(PLACE, str(path), reason, "Use an earlier checkpoint") from None
    if schema > SCHEMA:
        raise CheckpointError(PLACE, str(path), f"schema {schema} is newer than {SCHEMA}", "Upgrade palaestra")
    if manifest.get("merged"):
        reason = "is an export with the adapters worked in"
        raise CheckpointError(PLACE, str(path), reason, "Name it in model.name instead")
    check_files(path, files)
    return manifest
