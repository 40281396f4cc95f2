"""`ModelConfig`: the vision-language model, its trainable parts, and the length of its history."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from palaestra.config import Section

INSTRUCTION_ONLY = "{instruction}"
"""The request to models whose image processor reads."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file of an adapter's settings in PEFT's layout."""
TargetOption = Literal["attention", "mlp", "attention+mlp", "all-linear", "custom"]


class ModelConfig(Section):
    """The section `model` of a configuration."""

    name: str = Field(min_length=1)
    """A model of the Hugging Face hub (`Qwen/Qwen2.5-VL-3B-Instruct`), a directory in its layout, or a built-in model:
    `tiny`, `tiny-reader`."""

    revision: str | None = None
    """Branch, tag or commit on the hub. A commit makes a run repeatable; a branch may move."""

    use_lora: bool = True
    """Train LoRA adapters and freeze the weights. False trains the weights themselves, at about 20 bytes each."""

    lora_target_option: TargetOption = "attention+mlp"
    """Linear layers of the language model that get an adapter. Attention alone learns less at the same rank."""

    lora_target_modules: tuple[str, ...] = ()
    """With `custom`: full module names, or suffixes that start after a dot (`self_attn.q_proj`)."""

    lora_rank: int = Field(default=32, ge=1)
    """Rank of the adapters. Reinforcement learning carries few bits per episode; 8 is often enough."""

    lora_alpha: int | None = Field(default=None, ge=1)
    """Adapters are scaled by `lora_alpha / lora_rank`. Default: 32 at any rank, so that the best learning rate hardly
    depends on the rank."""

    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapters in training. Above 0 the ratio of PPO and GRPO is noisy from the first step."""

    lora_vision: bool = False
    """Also add adapters to the vision tower. Most inference servers accept adapters in the language model only."""

    freeze_vision: bool = True
    """With `use_lora: false`: freeze the vision tower. Its features can then be cached."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, memory of one layer instead of all."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the frozen weights. `auto`: float32 on a CPU and without LoRA, else bfloat16. Trainable weights are
    always float32."""

    device: str = "auto"
    """Device of the model: `cpu`, `cuda`, `cuda:1`, …; `auto`: the first GPU, or the CPU."""

    attn_implementation: str | None = None
    """`sdpa`, `eager` or `flash_attention_2`. Default: chosen by transformers."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum length of a reply; longer ones are cut."""

    history: int = Field(default=4, ge=0)
    """Number of past turns in the prompt with their screenshots; older turns become lines of text."""

    request: str | None = None
    """Text beside the first screenshot, with placeholders `{instruction}` and `{previous}` (older turns as text).
    Default: the text that the model was trained with."""

    adapter: Path | None = None
    """An adapter to start from: a directory in PEFT's layout, a checkpoint, or a run (its best checkpoint), for example
    of supervised fine-tuning. Its rank and alpha count. It is also the reference of `algorithm.kl_coef`."""

    value_gradient: bool = False
    """Whether the value loss also trains the model. False: only the value head."""

    picture_memory_mb: int = Field(default=512, ge=0)
    """Size of the caches of preprocessed pictures and their features. Each screenshot is used many times."""

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.lora_target_modules and self.lora_target_option != "custom":
            raise ValueError("lora_target_modules counts only with lora_target_option: custom")
        if self.lora_target_option == "custom" and self.use_lora and not self.lora_target_modules:
            raise ValueError("lora_target_option: custom needs lora_target_modules, a list of module names")
        if self.adapter is not None and not self.use_lora:
            raise ValueError("adapter needs use_lora: true")
        if not self.use_lora and self.dtype in ("bfloat16", "float16"):
            # Around 1, bfloat16 values are 0.0078 apart; a step of 1e-5 is lost in rounding.
            raise ValueError(f"dtype {self.dtype} cannot hold the small steps of full training; use float32, or LoRA")
        if self.request is not None and "{instruction}" not in self.request:
            raise ValueError("request must contain {instruction}, or the model is never told its task")
        return self

    @property
    def alpha(self) -> int:
        """The effective value of `lora_alpha`."""
        return 32 if self.lora_alpha is None else self.lora_alpha
