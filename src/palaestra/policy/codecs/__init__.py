"""Action codecs: how each family of models says what it does to a screen, read and written exactly or not at all."""

from palaestra.policy.codecs.codec import ActionCodec, Decoded, Understood, Unreadable
from palaestra.policy.codecs.frame import IMAGE_RULES, Frame, ImageRule, image_size
from palaestra.policy.codecs.table import CODECS, codec_for_model_type

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
