"""Which linear layers an adapter goes on, by their full names.

Short names lie: `gate_proj` is a layer of the language model in every Qwen-VL, and of the vision tower too in
Qwen2.5-VL. So the names are matched here, on the modules that are really there, and PEFT is given the full ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from palaestra.config import nearest
from palaestra.errors import ConfigError
from palaestra.policy.vlm.config import ModelConfig, TargetOption

__all__ = ["adapted_modules", "add_lora", "in_vision_tower", "linear_modules", "target_modules", "trainable_parts"]

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
            close = nearest(target, {*_endings(names), *names})
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
