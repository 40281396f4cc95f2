"""The codecs there are, by name, and which one a model's architecture asks for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from palaestra.errors import ConfigError
from palaestra.policy.codecs.anthropic import AnthropicCodec
from palaestra.policy.codecs.codec import ActionCodec
from palaestra.policy.codecs.openai import OpenAICodec
from palaestra.policy.codecs.qwen import QwenCodec
from palaestra.policy.codecs.space import Grid, ImagePixels
from palaestra.policy.codecs.ui_tars import UiTarsCodec

__all__ = ["CODECS", "codec_for_model_type"]

CODECS: Mapping[str, ActionCodec] = MappingProxyType(
    {
        "qwen2.5-vl": QwenCodec("qwen2.5-vl", third=False),
        "qwen3-vl": QwenCodec("qwen3-vl", third=True),
        "ui-tars-1.0": UiTarsCodec("ui-tars-1.0", Grid(1000, "nearest"), boxes=True),
        "ui-tars-1.5": UiTarsCodec("ui-tars-1.5", ImagePixels(), boxes=False),
        "anthropic": AnthropicCodec(),
        "openai": OpenAICodec(),
    }
)
"""Every codec, by the name it is chosen by."""

_BY_MODEL_TYPE = {"qwen2_5_vl": "qwen2.5-vl", "qwen3_vl": "qwen3-vl", "qwen3_vl_moe": "qwen3-vl"}


def codec_for_model_type(model_type: str) -> str:
    """The name of the codec that models of a transformers type speak unless told otherwise.

    A type names an architecture, not what was taught: UI-TARS 1.5 is a `qwen2_5_vl` too and has to be named.
    """
    if model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    reason = "models of this type speak no action grammar by themselves"
    raise ConfigError("model_type", model_type, reason, f"Name the codec: one of {', '.join(CODECS)}")
