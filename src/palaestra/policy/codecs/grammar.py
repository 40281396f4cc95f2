"""`Grammar`: how a model is shown screens and writes actions, the same for the actors and the learner."""

from __future__ import annotations

from dataclasses import dataclass

from palaestra.errors import ConfigError
from palaestra.policy.codecs.codec import ActionCodec
from palaestra.policy.codecs.frame import IMAGE_RULES, ImageRule
from palaestra.policy.codecs.table import CODECS

__all__ = ["Grammar", "build_grammar"]


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
