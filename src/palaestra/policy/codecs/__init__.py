"""Action codecs: how each family of models writes UI actions as text."""

from palaestra.policy.codecs.codec import ActionCodec
from palaestra.policy.codecs.coordinates import IMAGE_RULES, CoordinateFrame, ImageRule, image_size
from palaestra.policy.codecs.decoding import DecodedAction, DecodeResult, UnreadableReply
from palaestra.policy.codecs.grammar import CODECS, codec_for_model_type

__all__ = [
    "CODECS",
    "IMAGE_RULES",
    "ActionCodec",
    "CoordinateFrame",
    "DecodeResult",
    "DecodedAction",
    "ImageRule",
    "UnreadableReply",
    "codec_for_model_type",
    "image_size",
]
