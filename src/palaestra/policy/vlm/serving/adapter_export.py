"""The learner's adapter as a directory in PEFT's layout, which an inference engine loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from palaestra.errors import CollectorFailed
from palaestra.files.atomic import atomic_directory
from palaestra.policy.vlm.lora import ADAPTER, adapter_tensors
from palaestra.policy.vlm.network import Network, sampling_fingerprint

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class ExportedAdapter:
    """An adapter on disk."""

    path: Path
    fingerprint: str
    """Of the tensors as they were read back from the disk."""


def export_adapter(network: Network, weights: Mapping[str, Tensor], path: Path) -> ExportedAdapter:
    """Write the adapter among `weights`, which have the names of the network's weights, to a new directory.

    Never the same directory twice: engines cache prompts by the path of the adapter.
    """
    own = adapter_weights(weights)
    with atomic_directory(path, durable=False) as directory:
        network.wrapped.peft_config["default"].save_pretrained(directory)
        settings: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        # Engines match layers by the last part of their names; the tensors name the layers in full.
        settings["target_modules"] = sorted({name.rsplit(".", 1)[-1] for name in settings["target_modules"]})
        settings["inference_mode"] = True
        (directory / "adapter_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
        tensors = {
            PEFT_PREFIX + name.replace(".default.", "."): tensor.detach().float().cpu().contiguous()
            for name, tensor in own.items()
        }
        save_file(tensors, directory / ADAPTER, metadata={"format": "pt"})
    fingerprint = sampling_fingerprint(adapter_tensors(path))
    wanted = sampling_fingerprint({name: tensor.detach().float() for name, tensor in own.items()})
    if fingerprint != wanted:
        raise CollectorFailed(f"the adapter in {path} is not the one that was written. Check the disk.")
    return ExportedAdapter(path, fingerprint)


def adapter_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the adapter among the trainable weights: all but the value head."""
    return {name: tensor for name, tensor in weights.items() if ".lora_" in name}


def without_effect(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with which the model answers as if it had no adapter."""
    return {name: torch.zeros_like(tensor) if ".lora_B." in name else tensor for name, tensor in weights.items()}


def with_strong_effect(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Weights with which the model answers very differently, the same ones each time."""
    generator = torch.Generator().manual_seed(20_230)
    return {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator).to(tensor)
        if ".lora_B." in name
        else tensor
        for name, tensor in sorted(weights.items())
    }
