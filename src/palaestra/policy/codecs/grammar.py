"""The codecs there are, by name, and which one a model's architecture asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from palaestra.errors import ConfigError
from palaestra.policy.codecs.anthropic import AnthropicCodec
from palaestra.policy.codecs.codec import ActionCodec
from palaestra.policy.codecs.coordinates import IMAGE_RULES, Frame, Grid, ImagePixels, ImageRule
from palaestra.policy.codecs.decoding import Decoded, Understood
from palaestra.policy.codecs.openai import OpenAICodec
from palaestra.policy.codecs.qwen import QwenCodec
from palaestra.policy.codecs.ui_tars import UiTarsCodec
from palaestra.sessions.action import Click, Drag, Move, Point, Scroll, UiAction
from palaestra.sessions.screen import Size

__all__ = ["CODECS", "Grammar", "ReplyReader", "build_grammar", "codec_for_model_type"]


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


@dataclass(frozen=True)
class Grammar:
    """How a model is shown screens and writes actions."""

    codec: ActionCodec
    rule: ImageRule
    described: bool
    """Whether the prompt explains the grammar."""


def build_grammar(codec: str, *, factor: int, described: bool = True) -> Grammar:
    """The grammar of the codec of this name, for a model whose pictures are multiples of `factor` pixels."""
    if codec not in CODECS:
        raise ConfigError("actor.codec", codec, "no codec has this name", f"There are {', '.join(CODECS)}")
    rule = IMAGE_RULES[codec]
    if rule.factor != factor:
        # A tower of other patches, such as a tiny model's: the family's area in tokens, in blocks of its own size.
        rule = ImageRule(factor, factor**2, 1280 * factor**2)
    return Grammar(CODECS[codec], rule, described)


class ReplyReader:
    """Reads the replies of one episode."""

    def __init__(self, codec: ActionCodec, rule: ImageRule) -> None:
        self._codec, self._rule = codec, rule
        self._pointer: Point | None = None

    def frame(self, screen: Size) -> Frame:
        """How the model sees a screen of this size, with the pointer where the replies so far have left it."""
        return self._rule.frame(screen, pointer=self._pointer)

    def read(self, text: str, frame: Frame) -> Decoded:
        """What the next reply says."""
        decoded = self._codec.decode(text, frame)
        if isinstance(decoded, Understood):
            self._pointer = _pointer_after(decoded.action, self._pointer)
        return decoded


def _pointer_after(action: UiAction, before: Point | None) -> Point | None:
    if isinstance(action, Click | Move | Scroll) and action.at is not None:
        return action.at
    return action.path[-1] if isinstance(action, Drag) else before
