"""Words on synthetic screens: colours, captions that interfaces have, and made-up words of any letters."""

from __future__ import annotations

import random

__all__ = ["COLOURS", "ORDINALS", "caption", "made_up", "sentence"]

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 30, 30), "blue": (30, 60, 230), "green": (20, 140, 40), "yellow": (240, 225, 30),
    "purple": (128, 10, 128), "orange": (250, 140, 20), "cyan": (30, 220, 230), "gray": (128, 128, 128),
    "black": (10, 10, 10), "white": (252, 252, 252), "magenta": (240, 20, 240), "pink": (250, 170, 190),
    "brown": (130, 75, 35), "olive": (128, 128, 10), "lime": (40, 250, 40),
}  # fmt: skip
"""Names that instructions use, each with a colour that is varied a little wherever it is drawn."""

ORDINALS = ("1st", "2nd", "3rd", "4th", "5th")
_CAPTIONS = (
    "add apply back close copy create delete done edit exit find finish go help home join load login menu more new "
    "open paste play print quit read remove reply reset run save search select send share show sign skip start stop "
    "switch view yes no cancel ok submit next previous accept decline continue"
).split()
_ONSETS = "b c d f g h j k l m n p qu r s t v w x y z bl br ch cl cr dr fl fr gr pl pr sh sl sp st th tr".split()
_VOWELS = "a e i o u a e i o ea ou ai y".split()
_CODAS = ["", "", "", "n", "r", "s", "t", "l", "m", "d", "ck", "x", "nd", "rt", "st"]


def made_up(rng: random.Random) -> str:
    """A pronounceable word of one to three syllables that means nothing."""
    syllables = rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def caption(rng: random.Random) -> str:
    """What stands on a button, a tab or beside a box."""
    word = rng.choice(_CAPTIONS) if rng.random() < 0.3 else made_up(rng)
    style = rng.random()
    return word if style < 0.5 else word.capitalize() if style < 0.8 else word.upper()


def sentence(rng: random.Random, words: int) -> str:
    """Filling text."""
    return " ".join(made_up(rng) for _ in range(words)).capitalize() + "."
