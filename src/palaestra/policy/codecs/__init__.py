"""Action codecs: how each family of models says what it does to a screen, read and written exactly or not at all."""

from palaestra.policy.codecs.codec import ActionCodec
from palaestra.policy.codecs.coordinates import IMAGE_RULES, Frame, ImageRule, image_size
from palaestra.policy.codecs.decoding import Decoded, Understood, Unreadable
from palaestra.policy.codecs.grammar import CODECS, codec_for_model_type

__all__ = [
    "CODECS",
    "IMAGE_RULES",
    "ActionCodec",
    "Decoded",
    "Frame",
    "ImageRule",
    "Understood",
    "Unreadable",
    "codec_for_model_type",
    "image_size",
]
