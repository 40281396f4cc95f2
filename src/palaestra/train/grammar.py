"""`Grammar`: how a model is shown screens and writes actions, the same for actors and the learner."""

from __future__ import annotations

from dataclasses import dataclass

from palaestra.errors import ConfigError
from palaestra.policy.codecs import CODECS, IMAGE_RULES, ActionCodec, ImageRule, codec_for_model_type
from palaestra.policy.vlm import VLMPolicy

__all__ = ["Grammar", "grammar_for"]


@dataclass(frozen=True)
class Grammar:
    """How a model is shown screens and writes actions."""

    codec: ActionCodec
    rule: ImageRule
    described: bool
    """Whether the prompt explains the grammar."""


def grammar_for(policy: VLMPolicy, *, codec: str | None = None, described: bool | None = None) -> Grammar:
    """The codec of this name, or the one that goes with the model; pictures in sizes its tower takes."""
    name = codec or codec_for_model_type(str(policy.parts.model.config.model_type))
    if name not in CODECS:
        raise ConfigError("actor.codec", name, "no codec has this name", f"There are {', '.join(CODECS)}")
    rule = IMAGE_RULES[name]
    if rule.factor != policy.factor:
        # A tower of other patches, such as a tiny model's: the family's area in tokens, in blocks of its own size.
        rule = ImageRule(policy.factor, policy.factor**2, 1280 * policy.factor**2)
    return Grammar(CODECS[name], rule, policy.config.name != "tiny" if described is None else described)
