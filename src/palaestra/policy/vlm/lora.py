"""Which linear layers an adapter goes on, by their full names.

Short names lie: `gate_proj` is a layer of the language model in every Qwen-VL, and of the vision tower too in
Qwen2.5-VL. So the names are matched here, on the modules that are really there, and PEFT is given the full ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from palaestra.config import closest_names
from palaestra.errors import CheckpointError, ConfigError
from palaestra.policy.vlm.config import ModelConfig, TargetOption
from palaestra.policy.weight_sync import copy_weights

__all__ = [
    "adapted",
    "adapted_modules",
    "adapter_tensors",
    "add_lora",
    "in_vision_tower",
    "linear_modules",
    "target_modules",
    "trainable_parts",
]


PLACE = "model.lora_target_option"
ATTENTION = {"attn", "self_attn", "attention", "linear_attn"}
MLP = {"mlp", "feed_forward", "ffn"}
VISION = {"visual", "vision_tower", "vision_model", "vision_encoder", "image_tower"}
# The layers between tower and language model; every family builds them differently, so no option but all-linear
# means them.
BETWEEN = re.compile(r"merger|projector|connector")


def linear_modules(model: Any) -> list[str]:
    """Full names of the linear layers an adapter can go on; the output layer is none of them."""
    head = model.get_output_embeddings()
    return [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head]


def in_vision_tower(name: str) -> bool:
    """Whether a module or parameter belongs to the part that sees."""
    return bool(VISION & set(name.split(".")))


def target_modules(names: Sequence[str], option: TargetOption, custom: Sequence[str], vision: bool) -> list[str]:
    """Those of `names` that get an adapter, in order. Never empty: what matches nothing is a `ConfigError`."""
    if option == "custom":
        return _custom(names, custom, vision)
    allowed = [name for name in names if vision or not in_vision_tower(name)]
    found = [name for name in allowed if _is_meant(name, option)]
    if not found:
        raise ConfigError(
            PLACE, option, "matches none of the model's linear layers",
            f"Use 'custom' with lora_target_modules; there is {_some(_endings(allowed))}",
        )  # fmt: skip
    return found


def _is_meant(name: str, option: TargetOption) -> bool:
    if option == "all-linear":
        return True
    parents = set(name.split(".")[:-1])
    if any(BETWEEN.search(parent) for parent in parents):
        return False
    wanted = {"attention": ATTENTION, "mlp": MLP, "attention+mlp": ATTENTION | MLP}[option]
    return bool(parents & wanted)


def _custom(names: Sequence[str], custom: Sequence[str], vision: bool) -> list[str]:
    chosen: set[str] = set()
    for target in custom:
        matching = {name for name in names if name == target or name.endswith("." + target)}
        seen = {name for name in matching if vision or not in_vision_tower(name)}
        if matching and not seen:
            raise ConfigError(
                "model.lora_target_modules", target, "matches layers of the vision tower only",
                "Set model.lora_vision=true if you mean them",
            )  # fmt: skip
        if not matching:
            close = closest_names(target, {*_endings(names), *names})
            remedy = f"Nearest: {_some(close)}" if close else f"There is {_some(_endings(names))}"
            raise ConfigError("model.lora_target_modules", target, "matches no linear layer of the model", remedy)
        chosen |= seen
    return [name for name in names if name in chosen]


def _endings(names: Iterable[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in names})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "")


def add_lora(model: Any, config: ModelConfig) -> Any:
    """Freeze the model and give it fresh adapters, in place; returns PEFT's wrapper of it."""
    from peft import LoraConfig, get_peft_model

    wanted = target_modules(
        linear_modules(model), config.lora_target_option, config.lora_target_modules, config.lora_vision
    )
    settings = LoraConfig(
        r=config.lora_rank, lora_alpha=config.alpha, lora_dropout=config.lora_dropout, target_modules=wanted,
        bias="none", task_type="CAUSAL_LM",
    )  # fmt: skip
    wrapped = get_peft_model(model, settings)
    got = adapted_modules(model)
    if got != set(wanted):
        raise RuntimeError(
            f"PEFT put adapters on {sorted(got ^ set(wanted))[:3]} that were not meant, or left them out"
        )
    return wrapped


def adapted_modules(model: nn.Module) -> set[str]:
    """Names of the layers that have an adapter."""
    return {name.rsplit(".lora_A.", 1)[0] for name, _ in model.named_parameters() if ".lora_A." in name}


def trainable_parts(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """How many numbers are trained, by the part of the model they are in."""
    counts: dict[str, int] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            part = _part(name)
            counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def _part(name: str) -> str:
    parents = set(name.split("."))
    where = "vision" if in_vision_tower(name) else "language"
    if name.startswith("value_head"):
        return "value head"
    if any(BETWEEN.search(parent) for parent in parents):
        return "between vision and language"
    if parents & ATTENTION:
        return f"{where} attention"
    if parents & MLP:
        return f"{where} mlp"
    return f"{where}, other"


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


ADAPTER = "adapter_model.safetensors"


def adapter_tensors(path: Path) -> dict[str, Tensor]:
    """The adapter's tensors under the names they have in the model."""
    named = {}
    for name, tensor in load_file(path / ADAPTER).items():
        stem, _, kind = name.removeprefix("base_model.model.").rpartition(".")
        named[f"{stem}.default.{kind}"] = tensor
    return named


def read_adapter(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An adapter in PEFT's layout that anybody may have written: its settings and its tensors."""
    place = "model.adapter"
    try:
        settings: dict[str, Any] = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        kind, rank, alpha = settings["peft_type"], int(settings["r"]), float(settings["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            place, str(path), f"holds no adapter_config.json that can be read ({error})",
            "Name the directory that PEFT's save_pretrained wrote",
        ) from None  # fmt: skip
    if kind != "LORA" or settings.get("use_dora") or settings.get("modules_to_save"):
        raise CheckpointError(place, str(path), f"is not a plain LoRA adapter ({kind})", "Merge it into its model")
    try:
        tensors = adapter_tensors(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            place, str(path), f"{ADAPTER} cannot be read ({error})", "Save the adapter as safetensors"
        ) from None
    return {"rank": rank, "alpha": alpha}, tensors
