"""Instructions as numbers: a tiny fixed vocabulary of whole words, enough for the tasks on the table.

Owns which word has which number; a number never changes its word, because checkpoints have learned them. Refuses words
it does not know and sentences that do not fit. Driven by `env.table`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from palaestra.errors import ConfigError

__all__ = ["COLOURS", "LENGTH", "WORDS", "decode", "encode"]

COLOURS = ("red", "green", "blue", "yellow", "purple")
WORDS = ("", "reach", "push", "the", "block", "to", "goal", *COLOURS)
"""The word of each number. Number 0 is no word: it fills the rest of a short sentence."""
LENGTH = 8
"""Numbers in an encoded instruction, whatever it says."""

_NUMBERS = {word: number for number, word in enumerate(WORDS) if word}


def encode(sentence: str) -> NDArray[np.int64]:
    """The numbers of a sentence's words, filled up with 0 to `LENGTH`."""
    words = sentence.split()
    if len(words) > LENGTH:
        raise ConfigError("instruction", sentence, f"has {len(words)} words", f"Use at most {LENGTH}")
    numbers = np.zeros(LENGTH, np.int64)
    for i, word in enumerate(words):
        if word not in _NUMBERS:
            raise ConfigError("instruction", sentence, f"{word!r} is no known word", f"Known: {', '.join(_NUMBERS)}")
        numbers[i] = _NUMBERS[word]
    return numbers


def decode(numbers: Iterable[int]) -> str:
    """The sentence that `encode` turned into these numbers."""
    return " ".join(WORDS[number] for number in numbers if number)
