"""Weights of a vision-language model divided among processes (FSDP2), so that a model larger than one GPU can learn.

Every layer of the language model is gathered for its forward and backward pass and freed afterwards; its gradients are
averaged and divided in the backward pass. The vision tower, the embeddings and the value head stay whole: frozen
features are cached, so the processes do not run the tower equally often, and tied embeddings cannot be divided.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from palaestra.errors import ConfigError
from palaestra.policy.vlm.lora import in_vision_tower
from palaestra.policy.vlm.network import Network


def shard_layers(network: Network, *, compute_dtype: torch.dtype | None) -> int:
    """Divide the weights of the language model's layers among all processes; returns the number of layers.

    `compute_dtype`: data type of forward and backward passes; None: that of the weights. Gradients are averaged in
    float32. All processes call this, with the same weights.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layers = find_layers(network.model)
    mesh = init_device_mesh(network.device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        # Each layer by itself, without an enclosing unit: scoring calls parts of the model, never its `forward`.
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    network.sharded = True
    return len(layers)


def find_layers(model: Any) -> list[Any]:
    """The layers of the language model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [
        part
        for name, part in model.named_modules()
        if isinstance(part, GradientCheckpointingLayer) and not in_vision_tower(name)
    ]
    if not layers:
        reason = f"transformers marks no layers of a {model.config.model_type} that could be divided"
        raise ConfigError("trainer.sharding", "fsdp", reason, "Use trainer.sharding=ddp")
    return layers
