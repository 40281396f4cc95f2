"""`ModelConfig`: which vision-language model is trained, what of it, and how much of the past it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from palaestra.config import Section

__all__ = ["REQUEST", "ModelConfig", "TargetOption"]

REQUEST = (
    "Please generate the next move according to the UI screenshot, instruction and previous actions.\n\n"
    "Instruction: {instruction}\n\nPrevious actions:\n{previous}"
)
TargetOption = Literal["attention", "mlp", "attention+mlp", "all-linear", "custom"]


class ModelConfig(Section):
    """The section `model` of a configuration."""

    name: str = Field(min_length=1)
    """A model of the Hugging Face hub (`Qwen/Qwen2.5-VL-3B-Instruct`), a directory in its layout, or `tiny`."""

    revision: str | None = None
    """Branch, tag or commit on the hub. A commit makes a run repeatable; a branch may move."""

    use_lora: bool = True
    """Train small matrices beside the frozen weights. False trains the weights themselves: about 16 bytes each."""

    lora_target_option: TargetOption = "attention+mlp"
    """Which linear layers of the language model get an adapter. Attention alone learns less at the same rank."""

    lora_target_modules: tuple[str, ...] = ()
    """With `custom`: module names, or their ends from a dot on (`self_attn.q_proj`)."""

    lora_rank: int = Field(default=32, ge=1)
    """Width of the adapters. Reinforcement learning carries few bits per episode; 8 is often enough."""

    lora_alpha: int | None = Field(default=None, ge=1)
    """Adapters count `lora_alpha / lora_rank`. Left out: 32, whatever the rank, so that the best learning rate
    hardly depends on the rank."""

    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropped inputs of the adapters while learning. Above 0 the ratio of PPO and GRPO is noisy from the first step."""

    lora_vision: bool = False
    """Give the vision tower adapters as well. Most servers of adapters accept them in the language model only."""

    freeze_vision: bool = True
    """With `use_lora: false`: leave the vision tower as it is. Also lets pictures be encoded once and remembered."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: about a third more time, memory of one layer instead of all."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the frozen weights. `auto`: float32 on a CPU and without LoRA, else bfloat16. What is trained is float32."""

    device: str = "auto"
    """Where the model answers and learns: `cpu`, `cuda`, `cuda:1`, …; `auto`: the first GPU there is, or the CPU."""

    attn_implementation: str | None = None
    """`sdpa`, `eager`, `flash_attention_2`. Left out: what transformers finds best."""

    max_new_tokens: int = Field(default=256, ge=1)
    """An answer that has not ended by then is cut."""

    history: int = Field(default=4, ge=0)
    """How many past turns stay in the prompt with their screenshots; older ones become lines of text."""

    request: str = REQUEST
    """What stands beside the first screenshot; `{instruction}` and `{previous}` (older turns as text) are filled in."""

    adapter: Path | None = None
    """A directory with an adapter in PEFT's layout to start from."""

    value_gradient: bool = False
    """Whether the value's error also moves the model. False: only the value head learns from it."""

    picture_memory_mb: int = Field(default=512, ge=0)
    """How much prepared pictures may take. Each screenshot is shown many times; below a batch's worth it is redone."""

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.lora_target_modules and self.lora_target_option != "custom":
            raise ValueError("lora_target_modules counts only with lora_target_option: custom")
        if self.lora_target_option == "custom" and self.use_lora and not self.lora_target_modules:
            raise ValueError("lora_target_option: custom needs lora_target_modules, a list of module names")
        if self.adapter is not None and not self.use_lora:
            raise ValueError("adapter needs use_lora: true")
        if not self.use_lora and self.dtype in ("bfloat16", "float16"):
            # Weights of 1 are 0.0078 apart in bfloat16; a step of 1e-5 leaves every one of them where it was.
            raise ValueError(f"dtype {self.dtype} cannot hold the small steps of full training; use float32, or LoRA")
        if "{instruction}" not in self.request:
            raise ValueError("request must contain {instruction}, or the model is never told its task")
        return self

    @property
    def alpha(self) -> int:
        """What `lora_alpha` comes to."""
        return 32 if self.lora_alpha is None else self.lora_alpha
