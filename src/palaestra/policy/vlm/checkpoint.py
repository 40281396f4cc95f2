"""What was learned, on disk, in the layouts other programs read.

    adapter_config.json, adapter_model.safetensors   PEFT's layout, when adapters are trained
    config.json, model*.safetensors, tokenizer, …    transformers' layout, when the model itself is
    value_head.safetensors                           the value head
    palaestra.json                                   architecture, version, SHA-256 of each file; written last

A directory is built under a temporary name, fsynced and renamed. Reading checks the architecture and every hash before
anything is changed, and never unpickles.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from palaestra.errors import CheckpointError
from palaestra.files.atomic import atomic_directory
from palaestra.files.checkpoint import check_files, digest_files, read_digests
from palaestra.policy.vlm.loading import Parts
from palaestra.policy.vlm.lora import adapted_modules, adapter_tensors
from palaestra.policy.vlm.network import Network, load_trainable_state
from palaestra.policy.weight_sync import copy_weights

__all__ = ["Architecture", "export_merged", "load_checkpoint", "save_checkpoint"]

SCHEMA = 1
MANIFEST, VALUE_HEAD = "palaestra.json", "value_head.safetensors"
PLACE = "checkpoint"


@dataclass(frozen=True)
class Architecture:
    """What a checkpoint must share with the model it is loaded into."""

    model_type: str
    layers: int
    width: int
    adapters: int
    """Layers that have one; 0 when the model itself is trained."""
    rank: int
    digest: str
    """Of names and shapes of all weights but the adapters'."""

    @classmethod
    def of(cls, network: Network) -> Architecture:
        """The network's own."""
        text = network.model.config.get_text_config()
        shapes = {
            name.replace(".base_layer.", "."): tuple(weight.shape)
            for name, weight in network.model.named_parameters()
            if ".lora_" not in name
        }
        adapted = adapted_modules(network.model)
        return cls(
            model_type=str(network.model.config.model_type), layers=int(text.num_hidden_layers),
            width=int(text.hidden_size), adapters=len(adapted),
            rank=0 if network.wrapped is None else int(network.wrapped.peft_config["default"].r),
            digest=hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:12],
        )  # fmt: skip

    def __str__(self) -> str:
        learns = f"adapters of rank {self.rank} on {self.adapters} layers" if self.adapters else "no adapters"
        return f"{self.model_type}, {self.layers} layers of width {self.width}, {learns} ({self.digest})"


def save_checkpoint(network: Network, parts: Parts, path: Path, *, version: int) -> str:
    """Write what was learned to a directory that does not exist yet; returns the SHA-256 of its manifest."""

    def write(place: Path) -> None:
        if network.wrapped is not None:
            network.wrapped.save_pretrained(place, save_embedding_layers=False)
            (place / "README.md").unlink(missing_ok=True)
        else:
            _save_model(network.model, parts, place)
        save_file(
            {n: t.detach().cpu().contiguous() for n, t in network.value_head.state_dict().items()}, place / VALUE_HEAD
        )

    facts = {"architecture": asdict(Architecture.of(network)), "version": version, "base": parts.name}
    return _write_directory(path, write, facts)


def load_checkpoint(network: Network, path: Path) -> int:
    """Give the network what a directory holds; returns its version. Nothing is changed when it is refused."""
    facts = _verify(path)
    theirs, ours = Architecture(**facts["architecture"]), Architecture.of(network)
    if theirs != ours:
        raise CheckpointError(
            PLACE, str(path), f"it is of another architecture: {theirs}, while this model is {ours}",
            "Use the section model of the configuration it was trained with",
        )  # fmt: skip
    head = {f"value_head.{name}": tensor for name, tensor in load_file(path / VALUE_HEAD).items()}
    if network.wrapped is not None:
        load_trainable_state(network, adapter_tensors(path) | head, place=PLACE)
    else:
        other = type(network.model).from_pretrained(path, dtype=torch.float32, use_safetensors=True)
        copy_weights(dict(other.named_parameters()) | head, dict(network.named_parameters()))
        network.memory.clear()
    return int(facts["version"])


def export_merged(network: Network, parts: Parts, path: Path, *, version: int) -> None:
    """Write a model with the adapters worked into its weights; it needs neither PEFT nor Palaestra to be loaded."""

    def write(place: Path) -> None:
        if network.wrapped is None:
            _save_model(network.model, parts, place)
            return
        # Taking adapters out again is not exact, so they are worked into a copy; only layers that have one are copied.
        adapted = adapted_modules(network.model)
        shared: dict[int, Any] = {
            id(weight): weight
            for name, weight in network.model.named_parameters()
            if name.split(".base_layer.")[0] not in adapted and ".lora_" not in name
        }
        merged = copy.deepcopy(network.wrapped, shared).merge_and_unload(safe_merge=True)
        _save_model(merged, parts, place)

    facts = {"architecture": asdict(Architecture.of(network)), "version": version, "base": parts.name, "merged": True}
    _write_directory(path, write, facts)


def _save_model(model: Any, parts: Parts, place: Path) -> None:
    model.save_pretrained(place)
    parts.tokenizer.save_pretrained(place)
    parts.image_processor.save_pretrained(place)
    (place / "chat_template.jinja").write_text(parts.chat_template, encoding="utf-8")


def _write_directory(path: Path, write: Callable[[Path], None], facts: dict[str, Any]) -> str:
    if path.exists():
        raise CheckpointError(PLACE, str(path), "exists already and is never overwritten", "Choose another name")
    with atomic_directory(path) as making:
        write(making)
        raw = json.dumps({"schema": SCHEMA, **facts, "files": digest_files(making)}, indent=1).encode()
        (making / MANIFEST).write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def _verify(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint whose every file is as it was written."""
    if not path.is_dir():
        raise CheckpointError(PLACE, str(path), "there is no such checkpoint directory")
    try:
        raw = (path / MANIFEST).read_bytes()
        facts: dict[str, Any] = json.loads(raw)
        if facts.get("kind") == "module":
            raise CheckpointError(
                PLACE,
                str(path),
                f"holds a module of one's own ({facts.get('class')})",
                "Go on in Python: train_screens(config, policy=module, resume=…)",
            )
        files = read_digests(raw)
        schema, _ = int(facts["schema"]), Architecture(**facts["architecture"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            PLACE, str(path), f"its {MANIFEST} cannot be read ({error})", "Use an earlier checkpoint"
        ) from None
    if schema > SCHEMA:
        raise CheckpointError(PLACE, str(path), f"schema {schema} is newer than {SCHEMA}", "Upgrade palaestra")
    if facts.get("merged"):
        raise CheckpointError(
            PLACE, str(path), "is an export with the adapters worked in", "Name it in model.name instead"
        )
    check_files(path, files)
    return facts
