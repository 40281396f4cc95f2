"""Memory of one update and of the sampler, by part, from the shapes of a model.

The formulas count the tensors that `policy.vlm` and `learner.trajectories` keep: frozen weights, float32 adapters with
their copies, gradients and Adam's moments, what the backward pass needs of every token, and the logits, which are
computed in bounded chunks. benchmarks/true_shapes.py compares them with the memory of a real update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from palaestra.config import Section
from palaestra.errors import ConfigError
from palaestra.planner.shapes import ModelShape

FLOAT32 = 4
LOGITS_CHUNK = 2**26
"""Logits that the learner computes at a time (`policy.vlm.scoring.CHUNK_NUMBERS`)."""
SAMPLED_VALUES = 4
"""Arrays of the size of the logits that exist at once: the logits, masked, scaled and as log-probabilities."""
GB = 1e9


class ModelPlan(Section):
    """The section `model`: the model and how it is trained. Keys mean the same as in a training configuration."""

    name: str = Field(default="Qwen/Qwen2.5-VL-3B-Instruct", min_length=1)
    """A published model, or a directory with config.json."""
    use_lora: bool = True
    """Train LoRA adapters; false trains all weights in float32."""
    lora_rank: int = Field(default=32, ge=1)
    """Rank of the adapters."""
    lora_target_option: str = "attention+mlp"
    """Linear layers with an adapter: `attention`, `mlp`, `attention+mlp` or `all-linear`."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the frozen weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum length of a reply."""
    history: int = Field(default=4, ge=0)
    """Past turns in the prompt with their screenshots."""
    screen: tuple[int, int] = (1280, 720)
    """Width and height of a screenshot in pixels, as the model sees it."""
    text_tokens: int = Field(default=900, ge=1)
    """Tokens of a prompt beside its pictures and replies: system prompt, instruction, template."""
    reply_tokens: int = Field(default=60, ge=1)
    """Mean length of a reply."""
    microbatch_turns: int = Field(default=8, ge=1)
    """Turns per forward pass of the learner (`trainer.microbatch_turns`)."""

    @property
    def bytes_per_weight(self) -> int:
        """Bytes of one frozen weight."""
        return FLOAT32 if self.dtype == "float32" or not self.use_lora else 2

    def prompt_tokens(self, shape: ModelShape) -> int:
        """Tokens of a prompt with a full history."""
        picture = shape.vision.count_tokens(*self.screen)
        return self.text_tokens + (self.history + 1) * picture + self.history * self.reply_tokens


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one process by part, in bytes."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())


def trained_parameters(model: ModelPlan, shape: ModelShape) -> int:
    """Number of trained weights, with the value head."""
    trained = shape.lora_parameters(model.lora_rank, model.lora_target_option) if model.use_lora else shape.parameters
    return trained + shape.hidden + 1


def plan_learner_memory(
    model: ModelPlan,
    shape: ModelShape,
    *,
    shards: int = 1,
    turns: int | None = None,
    prompts: int | None = None,
    host: bool = False,
    kept_versions: int = 1,
    overhead: int = 0,
) -> MemoryPlan:
    """Peak memory of one learner process; `turns` of a microbatch, by default as configured.

    `prompts`: distinct prompts among them, by default as many. Without gradient checkpointing, a prompt that several
    turns share, as the first ones of a group do, goes through the model once.
    `shards`: number of GPUs over which FSDP splits weights, gradients and Adam's moments. `host`: the learner computes
    on the CPU, so that copies of earlier adapters, kept in main memory, count as well.
    """
    if shards < 1:
        raise ConfigError("hardware.shards", shards, "a model lies on at least one GPU", "Give 1 or more")
    turns = model.microbatch_turns if turns is None else turns
    trained = trained_parameters(model, shape)
    layer_bytes = shape.layer_parameters * model.bytes_per_weight
    parts = {"weights": shape.parameters * model.bytes_per_weight // shards}
    if shards > 1:
        # FSDP gathers one layer while the next one is fetched.
        parts["gathered layers"] = 2 * layer_bytes
    if model.use_lora:
        parts["adapters"] = trained * FLOAT32 // shards
    parts["acting copy"] = trained * FLOAT32
    if host:
        parts["earlier versions"] = (1 + kept_versions) * trained * FLOAT32
    parts["gradients"] = trained * FLOAT32 // shards
    parts["Adam"] = 2 * trained * FLOAT32 // shards
    tokens = (turns if prompts is None else prompts) * model.prompt_tokens(shape) + turns * model.reply_tokens
    parts["activations"] = tokens * activation_bytes(model, shape)
    parts["logits"] = logits_bytes(shape, turns * model.reply_tokens)
    if overhead:
        parts["CUDA and allocator"] = overhead
    return MemoryPlan(parts)


def activation_bytes(model: ModelPlan, shape: ModelShape) -> int:
    """Bytes per token that exist at once in the backward pass."""
    kept = layer_activation_bytes(model, shape)
    hidden, dtype = shape.hidden, model.bytes_per_weight
    # Gradients on their way through the MLP, the widest part of a layer.
    passing = (2 * FLOAT32 + 2 * dtype) * shape.intermediate + 2 * FLOAT32 * hidden
    if model.gradient_checkpointing:
        return shape.layers * hidden * dtype + kept + passing
    return shape.layers * kept + passing


def layer_activation_bytes(model: ModelPlan, shape: ModelShape) -> int:
    """Bytes per token that one decoder layer keeps for the backward pass."""
    h, q, f, dtype = shape.hidden, shape.query_width, shape.intermediate, model.bytes_per_weight
    norms = 2 * h * FLOAT32
    attention = 4 * q * dtype + shape.heads * FLOAT32  # queries, repeated keys and values, output
    mlp = 3 * f * dtype  # gate, its activation, up
    if model.use_lora:
        # A frozen layer keeps nothing; every adapter keeps its own float32 copy of the input, and its inner result.
        sizes = [shape.linear_layers[name][0] for name in shape.adapted_layers(model.lora_target_option)]
        linear = sum(FLOAT32 * (inputs + model.lora_rank) for inputs in sizes)
    else:
        linear = dtype * (2 * h + q + f)
    return norms + attention + mlp + linear


def logits_bytes(shape: ModelShape, tokens: int) -> int:
    """Memory of the logits of so many reply tokens, and of what is computed from them."""
    numbers = min(tokens * shape.vocabulary, LOGITS_CHUNK)
    return numbers * FLOAT32 * SAMPLED_VALUES


def plan_sampler_memory(
    model: ModelPlan, shape: ModelShape, *, batch: int, shards: int = 1, overhead: int = 0
) -> MemoryPlan:
    """Peak memory of one sampler process with `batch` replies at a time."""
    context = model.prompt_tokens(shape) + model.max_new_tokens
    # The widest moment of a prompt's pass: gate, up and their product of one layer, for all prompts at once.
    passing = batch * model.prompt_tokens(shape) * 3 * shape.intermediate * model.bytes_per_weight
    parts = {
        "weights": shape.parameters * model.bytes_per_weight // shards,
        "adapters": trained_parameters(model, shape) * FLOAT32 if model.use_lora else 0,
        "KV cache": batch * context * cache_bytes(model, shape) // shards,
        "prompt": passing // shards,
        "logits": batch * shape.vocabulary * FLOAT32 * SAMPLED_VALUES,
    }
    if overhead:
        parts["CUDA and allocator"] = overhead
    return MemoryPlan(parts)


def cache_bytes(model: ModelPlan, shape: ModelShape) -> int:
    """Bytes of keys and values per token."""
    return 2 * shape.layers * shape.kv_width * model.bytes_per_weight


def fitting_microbatch(
    model: ModelPlan, shape: ModelShape, memory: float, *, shards: int = 1, overhead: int = 0
) -> int:
    """The largest number of turns per forward pass that fits into `memory` bytes; 0 if not even one does."""

    def fits(turns: int) -> bool:
        return plan_learner_memory(model, shape, turns=turns, shards=shards, overhead=overhead).total <= memory

    return _largest(fits)


def fitting_sampler_batch(
    model: ModelPlan, shape: ModelShape, memory: float, *, shards: int = 1, overhead: int = 0
) -> int:
    """The largest number of replies at a time that fits into `memory` bytes; 0 if not even one does."""

    def fits(batch: int) -> bool:
        return plan_sampler_memory(model, shape, batch=batch, shards=shards, overhead=overhead).total <= memory

    return _largest(fits)


def _largest(fits: Callable[[int], bool], limit: int = 2**20) -> int:
    """The largest number up to `limit` that fits, by bisection; memory grows with the number."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
