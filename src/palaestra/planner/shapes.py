"""The shapes of vision-language models, and their numbers of parameters.

`find_shape` knows the published sizes of the Qwen2.5-VL and Qwen3-VL families by name and reads `config.json` of a
model directory. The counts are exact: they are those of the published checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from palaestra.config import suggest_name
from palaestra.errors import ConfigError

Family = Literal["qwen2_5_vl", "qwen3_vl"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_TARGETS = {"attention": ATTENTION, "mlp": MLP, "attention+mlp": ATTENTION + MLP}


@dataclass(frozen=True)
class VisionShape:
    """The vision tower and the layers that join it to the language model."""

    family: Family
    depth: int
    hidden: int
    intermediate: int
    out_hidden: int
    patch: int
    merge: int = 2
    temporal_patch: int = 2
    positions: int = 0
    """Learned position embeddings."""
    deepstack: int = 0
    """Further outputs, each with a merger of its own, for deeper layers of the language model."""

    @property
    def parameters(self) -> int:
        """Number of weights."""
        h, f, wide = self.hidden, self.intermediate, self.hidden * self.merge**2
        pixels = 3 * self.temporal_patch * self.patch**2 * h
        attention = 4 * h * h + 4 * h
        head = wide * wide + wide + wide * self.out_hidden + self.out_hidden
        if self.family == "qwen2_5_vl":  # RMS norms, gated MLP
            block = attention + 2 * (h * f + f) + f * h + h + 2 * h
            return pixels + self.depth * block + h + head
        block = attention + h * f + f + f * h + h + 4 * h
        mergers = 2 * h + head + self.deepstack * (2 * wide + head)
        return pixels + h + self.positions * h + self.depth * block + mergers

    def count_tokens(self, width: int, height: int) -> int:
        """Tokens of a picture in a prompt, its sides rounded to whole blocks of merged patches."""
        block = self.patch * self.merge
        return max(1, round(width / block)) * max(1, round(height / block))


@dataclass(frozen=True)
class ModelShape:
    """The language model, and its vision tower."""

    name: str
    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether input and output embeddings are one matrix."""
    vision: VisionShape

    @property
    def query_width(self) -> int:
        """Width of the queries of one token over all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token over all heads."""
        return self.kv_heads * self.head_dim

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of one decoder layer."""
        h, q, kv, f = self.hidden, self.query_width, self.kv_width, self.intermediate
        return {
            "q_proj": (h, q),
            "k_proj": (h, kv),
            "v_proj": (h, kv),
            "o_proj": (q, h),
            "gate_proj": (h, f),
            "up_proj": (h, f),
            "down_proj": (f, h),
        }

    @property
    def layer_parameters(self) -> int:
        """Number of weights of one decoder layer."""
        weights = sum(inputs * outputs for inputs, outputs in self.linear_layers.values())
        extra = self.query_width + 2 * self.kv_width if self.family == "qwen2_5_vl" else 2 * self.head_dim
        return weights + extra + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Number of weights of the whole model."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden + self.vision.parameters

    def adapted_layers(self, option: str) -> tuple[str, ...]:
        """Linear layers of a decoder layer with an adapter, for a value of `model.lora_target_option`."""
        if option == "all-linear":
            return ATTENTION + MLP
        if option not in _TARGETS:
            remedy = f"Use one of {', '.join(_TARGETS)}, or all-linear"
            raise ConfigError("model.lora_target_option", option, "the planner cannot count its layers", remedy)
        return _TARGETS[option]

    def lora_parameters(self, rank: int, option: str = "attention+mlp") -> int:
        """Number of weights of the adapters in the language model."""
        sizes = (self.linear_layers[name] for name in self.adapted_layers(option))
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in sizes)


def _qwen2_5(name: str, *sizes: int, tied: bool = False, vision_intermediate: int = 3420) -> ModelShape:
    hidden, layers, heads, kv_heads, intermediate, vocabulary = sizes
    vision = VisionShape("qwen2_5_vl", 32, 1280, vision_intermediate, hidden, 14)
    return ModelShape(
        name, "qwen2_5_vl", hidden, layers, heads, kv_heads, 128, intermediate, vocabulary, tied, vision
    )  # fmt: skip


def _qwen3(name: str, *sizes: int, tied: bool = False, large_vision: bool = True) -> ModelShape:
    hidden, layers, heads, kv_heads, intermediate = sizes
    depth, width, inner = (27, 1152, 4304) if large_vision else (24, 1024, 4096)
    vision = VisionShape("qwen3_vl", depth, width, inner, hidden, 16, positions=2304, deepstack=3)
    return ModelShape(name, "qwen3_vl", hidden, layers, heads, kv_heads, 128, intermediate, 151_936, tied, vision)


_KNOWN = (
    _qwen2_5("Qwen/Qwen2.5-VL-3B-Instruct", 2048, 36, 16, 2, 11008, 151_936, tied=True),
    _qwen2_5("Qwen/Qwen2.5-VL-7B-Instruct", 3584, 28, 28, 4, 18944, 152_064),
    _qwen2_5("Qwen/Qwen2.5-VL-32B-Instruct", 5120, 64, 40, 8, 27648, 152_064, vision_intermediate=3456),
    _qwen2_5("Qwen/Qwen2.5-VL-72B-Instruct", 8192, 80, 64, 8, 29568, 152_064, vision_intermediate=3456),
    _qwen2_5("ByteDance-Seed/UI-TARS-1.5-7B", 3584, 28, 28, 4, 18944, 152_064),
    _qwen3("Qwen/Qwen3-VL-2B-Instruct", 2048, 28, 16, 8, 6144, tied=True, large_vision=False),
    _qwen3("Qwen/Qwen3-VL-4B-Instruct", 2560, 36, 32, 8, 9728, tied=True, large_vision=False),
    _qwen3("Qwen/Qwen3-VL-8B-Instruct", 4096, 36, 32, 8, 12288),
)
MODELS: Mapping[str, ModelShape] = {shape.name: shape for shape in _KNOWN}
"""Published models by their names on the hub."""
BUILT_IN = {"tiny": Path(__file__).parents[1] / "policy" / "tiny_vlm" / "checkpoint"}


def find_shape(name: str) -> ModelShape:
    """The shape of a published model, or of a directory with `config.json`; `ConfigError` if it is neither."""
    if name in MODELS:
        return MODELS[name]
    short = {known.rpartition("/")[2].removesuffix("-Instruct").lower(): known for known in MODELS}
    key = name.rpartition("/")[2].removesuffix("-Instruct").lower()
    if key in short:
        return MODELS[short[key]]
    path = BUILT_IN.get(name, Path(name).expanduser())
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return read_shape(path, name)
    remedy = suggest_name(name, MODELS, f"Known: {', '.join(MODELS)}; or name a directory with config.json")
    raise ConfigError("model.name", name, "the planner does not know this model", remedy)


def read_shape(path: Path, name: str) -> ModelShape:
    """The shape in a `config.json` of the Qwen2.5-VL or Qwen3-VL family."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        family = data["model_type"]
        if family not in ("qwen2_5_vl", "qwen3_vl"):
            raise ConfigError("model.name", name, f"is a {family}", "The planner knows qwen2_5_vl and qwen3_vl")
        text, vision = data.get("text_config") or data, data["vision_config"]
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        tower = VisionShape(
            family,
            depth=int(vision["depth"]),
            hidden=int(vision["hidden_size"]),
            intermediate=int(vision["intermediate_size"]),
            out_hidden=int(vision["out_hidden_size"]),
            patch=int(vision["patch_size"]),
            merge=int(vision.get("spatial_merge_size", 2)),
            temporal_patch=int(vision.get("temporal_patch_size", 2)),
            positions=int(vision.get("num_position_embeddings", 0)),
            deepstack=len(vision.get("deepstack_visual_indexes", ())),
        )
        return ModelShape(
            name,
            family,
            hidden=hidden,
            layers=int(text["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate=int(text["intermediate_size"]),
            vocabulary=int(text["vocab_size"]),
            tied=bool(data.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            vision=tower,
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = f"config.json cannot be read ({type(error).__name__}: {error})"
        raise ConfigError("model.name", name, reason, "Use the config.json of the published model") from None
