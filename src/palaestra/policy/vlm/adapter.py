"""Adapters on a model: fresh ones, or those a directory holds to start from."""

from __future__ import annotations

from typing import Any

from palaestra.errors import CheckpointError
from palaestra.policy.vlm.checkpoint import read_adapter
from palaestra.policy.vlm.config import ModelConfig
from palaestra.policy.vlm.lora import add_lora, in_vision_tower
from palaestra.policy.vlm.weights import copy_weights

__all__ = ["adapted"]


def adapted(model: Any, config: ModelConfig) -> Any:
    """Freeze the model and give it adapters, in place; returns PEFT's wrapper of it."""
    if config.adapter is None:
        return add_lora(model, config)
    place, path = "model.adapter", str(config.adapter)
    settings, tensors = read_adapter(config.adapter)
    for key, theirs in (("lora_rank", settings["rank"]), ("lora_alpha", settings["alpha"])):
        if key in config.model_fields_set and getattr(config, key) != theirs:
            raise CheckpointError(
                place, path, f"was made with {key} {theirs:g}, the configuration says {getattr(config, key)}",
                f"Leave out model.{key}: the adapter's own counts",
            )  # fmt: skip
    # The layers it was made for are those it has tensors of; settings may name them by patterns.
    targets = tuple(sorted({name.split(".lora_")[0] for name in tensors}))
    own = config.model_copy(
        update={
            "lora_rank": settings["rank"], "lora_alpha": settings["alpha"], "lora_target_option": "custom",
            "lora_target_modules": targets,
        }
    )  # fmt: skip
    if not config.lora_vision and any(in_vision_tower(name) for name in targets):
        raise CheckpointError(place, path, "has adapters in the vision tower", "Set model.lora_vision=true")
    present = {name for name, _ in model.named_modules()}
    absent = [name for name in targets if name not in present]
    if absent:
        raise CheckpointError(
            place, path, f"is for another model: {len(absent)} of its {len(targets)} layers, such as {absent[0]!r}, "
            f"are not in this {model.config.model_type}", "Use the model it was trained on",
        )  # fmt: skip
    wrapped = add_lora(model, own)
    weights = dict(model.named_parameters())
    other = [name for name, tensor in tensors.items() if name not in weights or weights[name].shape != tensor.shape]
    if other:
        raise CheckpointError(
            place, path, f"{len(other)} of its tensors have another shape here, such as {other[0]!r}",
            "Use the model it was trained on",
        )  # fmt: skip
    copy_weights(tensors, weights)
    return wrapped
