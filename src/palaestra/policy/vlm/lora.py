"""LoRA adapters: which linear layers get one, new adapters, and adapters to start from.

PEFT receives full module names. Short names are ambiguous: `gate_proj` is a layer of the language model in every
Qwen-VL, and in Qwen2.5-VL also of the vision tower.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from palaestra.config import closest_names
from palaestra.errors import CheckpointError, ConfigError
from palaestra.policy.vlm.config import ADAPTER_CONFIG, ModelConfig, TargetOption
from palaestra.policy.weight_sync import copy_weights

ADAPTER = "adapter_model.safetensors"
ATTENTION = {"attn", "self_attn", "attention", "linear_attn"}
MLP = {"mlp", "feed_forward", "ffn"}
VISION = {"visual", "vision_tower", "vision_model", "vision_encoder", "image_tower"}
# The layers between vision tower and language model. Families build them differently; only all-linear includes them.
BETWEEN = re.compile(r"merger|projector|connector")


def in_vision_tower(name: str) -> bool:
    """Whether a module or parameter belongs to the vision tower."""
    return bool(VISION & set(name.split(".")))


def target_modules(names: Sequence[str], option: TargetOption, custom: Sequence[str], vision: bool) -> list[str]:
    """The names of the linear layers that get an adapter; `ConfigError` if there are none."""
    if option == "custom":
        return _match_custom(names, custom, vision)
    allowed = [name for name in names if vision or not in_vision_tower(name)]
    targets = [name for name in allowed if _matches(name, option)]
    if not targets:
        reason = "matches none of the model's linear layers"
        remedy = f"Use 'custom' with lora_target_modules; there is {_join(_endings(allowed))}"
        raise ConfigError("model.lora_target_option", option, reason, remedy)
    return targets


def _matches(name: str, option: TargetOption) -> bool:
    if option == "all-linear":
        return True
    parents = set(name.split(".")[:-1])
    if any(BETWEEN.search(parent) for parent in parents):
        return False
    return bool(parents & {"attention": ATTENTION, "mlp": MLP, "attention+mlp": ATTENTION | MLP}[option])


def _match_custom(names: Sequence[str], custom: Sequence[str], vision: bool) -> list[str]:
    place = "model.lora_target_modules"
    chosen: set[str] = set()
    for target in custom:
        matching = {name for name in names if name == target or name.endswith("." + target)}
        allowed = {name for name in matching if vision or not in_vision_tower(name)}
        if matching and not allowed:
            reason, remedy = "matches layers of the vision tower only", "Set model.lora_vision=true if you mean them"
            raise ConfigError(place, target, reason, remedy)
        if not matching:
            close = closest_names(target, {*_endings(names), *names})
            remedy = f"Nearest: {_join(close)}" if close else f"There is {_join(_endings(names))}"
            raise ConfigError(place, target, "matches no linear layer of the model", remedy)
        chosen |= allowed
    return [name for name in names if name in chosen]


def _endings(names: Iterable[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in names})


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "")


def adapted_modules(model: nn.Module) -> set[str]:
    """Names of the layers that have an adapter."""
    return {name.rsplit(".lora_A.", 1)[0] for name, _ in model.named_parameters() if ".lora_A." in name}


def trainable_parts(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Number of trainable weights by part of the model."""
    counts: Counter[str] = Counter()
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            counts[_part(name)] += parameter.numel()
    return dict(counts)


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


def add_adapters(model: Any, config: ModelConfig) -> Any:
    """Freeze the model and add adapters in place: new ones, or those of `model.adapter`. Returns PEFT's wrapper."""
    if config.adapter is None:
        return _add_new_adapters(model, config)
    place, path = "model.adapter", str(config.adapter)
    rank, alpha, tensors = _read_adapter(config.adapter)
    for key, value in (("lora_rank", rank), ("lora_alpha", alpha)):
        if key in config.model_fields_set and getattr(config, key) != value:
            reason = f"was made with {key} {value:g}, the configuration says {getattr(config, key)}"
            raise CheckpointError(place, path, reason, f"Leave out model.{key}: the adapter's own counts")
    # The adapter's settings may name layers by patterns; its tensors name them in full.
    targets = tuple(sorted({name.split(".lora_")[0] for name in tensors}))
    if not config.lora_vision and any(in_vision_tower(name) for name in targets):
        raise CheckpointError(place, path, "has adapters in the vision tower", "Set model.lora_vision=true")
    present = {name for name, _ in model.named_modules()}
    absent = [name for name in targets if name not in present]
    if absent:
        layers = f"{len(absent)} of its {len(targets)} layers, such as {absent[0]!r}"
        reason = f"is for another model: {layers}, are not in this {model.config.model_type}"
        raise CheckpointError(place, path, reason, "Use the model it was trained on")
    settings = {"lora_rank": rank, "lora_alpha": alpha, "lora_target_option": "custom", "lora_target_modules": targets}
    wrapped = _add_new_adapters(model, config.model_copy(update=settings))
    weights = dict(model.named_parameters())
    misfits = [name for name, tensor in tensors.items() if name not in weights or weights[name].shape != tensor.shape]
    if misfits:
        reason = f"{len(misfits)} of its tensors have another shape here, such as {misfits[0]!r}"
        raise CheckpointError(place, path, reason, "Use the model it was trained on")
    copy_weights(tensors, weights)
    return wrapped


def _add_new_adapters(model: Any, config: ModelConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    head = model.get_output_embeddings()
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head]
    targets = target_modules(linear, config.lora_target_option, config.lora_target_modules, config.lora_vision)
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(model, settings)
    differing = adapted_modules(model) ^ set(targets)
    if differing:
        raise RuntimeError(f"PEFT added or omitted adapters on {sorted(differing)[:3]} against its targets")
    return wrapped


def adapter_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of an adapter directory, under their names in the model."""
    named = {}
    for name, tensor in load_file(path / ADAPTER).items():
        stem, _, kind = name.removeprefix("base_model.model.").rpartition(".")
        named[f"{stem}.default.{kind}"] = tensor
    return named


def _read_adapter(path: Path) -> tuple[int, float, dict[str, Tensor]]:
    """Rank, alpha and tensors of an adapter directory in PEFT's layout."""
    place = "model.adapter"
    try:
        settings: dict[str, Any] = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind, rank, alpha = settings["peft_type"], int(settings["r"]), float(settings["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"holds no adapter_config.json that can be read ({error})"
        remedy = "Name the directory that PEFT's save_pretrained wrote"
        raise CheckpointError(place, str(path), reason, remedy) from None
    if kind != "LORA" or settings.get("use_dora") or settings.get("modules_to_save"):
        raise CheckpointError(place, str(path), f"is not a plain LoRA adapter ({kind})", "Merge it into its model")
    try:
        return rank, alpha, adapter_tensors(path)
    except (OSError, SafetensorError) as error:
        reason = f"{ADAPTER} cannot be read ({error})"
        raise CheckpointError(place, str(path), reason, "Save the adapter as safetensors") from None
