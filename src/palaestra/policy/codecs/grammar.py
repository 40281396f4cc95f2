"""`ActionGrammar`: the codec and image size rule of a model, the same for the actors and the learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from palaestra.errors import ConfigError
from palaestra.policy.codecs.anthropic import AnthropicCodec
from palaestra.policy.codecs.codec import ActionCodec
from palaestra.policy.codecs.coordinates import IMAGE_RULES, CoordinateFrame, Grid, ImagePixels, ImageRule
from palaestra.policy.codecs.decoding import DecodedAction, DecodeResult
from palaestra.policy.codecs.openai import OpenAICodec
from palaestra.policy.codecs.qwen import QwenCodec
from palaestra.policy.codecs.ui_tars import UiTarsCodec
from palaestra.sessions.action import Click, Drag, Move, Point, Scroll
from palaestra.sessions.screen import Size

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
"""All codecs by name."""

_BY_MODEL_TYPE = {
    "qwen2_5_vl": "qwen2.5-vl",
    "qwen3_vl": "qwen3-vl",
    "qwen3_vl_moe": "qwen3-vl",
    "palaestra_screen_reader": "qwen3-vl",
}


def codec_for_model_type(model_type: str) -> str:
    """The default codec of a transformers model type.

    A type names an architecture, not the training: UI-TARS 1.5 is a `qwen2_5_vl` too, so its codec must be configured.
    """
    if model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    reason = "models of this type have no action grammar of their own"
    raise ConfigError("model_type", model_type, reason, f"Name the codec: one of {', '.join(CODECS)}")


@dataclass(frozen=True)
class ActionGrammar:
    """How screens are shown to a model and how it writes actions."""

    codec: ActionCodec
    rule: ImageRule
    in_prompt: bool
    """Whether the system prompt explains the grammar."""


def build_grammar(codec: str, *, factor: int, in_prompt: bool = True) -> ActionGrammar:
    """The grammar of the named codec, for a model whose image sides are multiples of `factor` pixels."""
    if codec not in CODECS:
        raise ConfigError("actor.codec", codec, "no codec has this name", f"There are {', '.join(CODECS)}")
    rule = IMAGE_RULES[codec]
    if rule.factor != factor == 1:
        rule = IMAGE_RULES["unscaled"]
    elif rule.factor != factor:
        # Another patch size, such as the tiny model's: at most 1280 image tokens.
        rule = ImageRule(factor, factor**2, 1280 * factor**2)
    return ActionGrammar(CODECS[codec], rule, in_prompt)


class ReplyReader:
    """Decodes the replies of one episode in order, and tracks the mouse pointer, which some grammars refer to.

    The agent uses it while it plays, the learner to decode a recording again; both must get the same actions.
    """

    def __init__(self, codec: ActionCodec, rule: ImageRule) -> None:
        self._codec, self._rule = codec, rule
        self._pointer: Point | None = None

    def frame(self, screen: Size) -> CoordinateFrame:
        """The coordinate frame for a screen of this size, with the pointer where the last action left it."""
        return self._rule.frame(screen, pointer=self._pointer)

    def read(self, text: str, frame: CoordinateFrame) -> DecodeResult:
        """Decode the next reply."""
        result = self._codec.decode(text, frame)
        if isinstance(result, DecodedAction):
            action = result.action
            if isinstance(action, Drag):
                self._pointer = action.path[-1]
            elif isinstance(action, Click | Move | Scroll) and action.at is not None:
                self._pointer = action.at
        return result
