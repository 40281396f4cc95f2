"""Texts of synthetic pages: pseudo-words, codes, numbers, names and the words that forms use."""

from __future__ import annotations

import random

_ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl pr sh sl st th tr qu".split()
_VOWELS = "a e i o u a e i o u ai ea ou io y".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "x", "nd", "st", "ck", "rk", "lp"]
_ALNUM = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
UI_WORDS = (
    "ok okay Ok OK yes Yes no No submit Submit cancel Cancel next Next previous Previous login Login search Search "
    "send Send save Save close Close open Open delete Delete reply Reply back Back help Help more More add Add edit "
    "Edit view View copy Copy start Start stop Stop home Home menu Menu apply Apply reset Reset done Done one ONE two "
    "TWO three THREE first second third fourth fifth"
).split()
LABELS = (
    "Name City Code Item Room Team Plan Tag Country Color Colour Email Phone Username Password Age Title Street Zip "
    "Price Date Time Year Month Day Group Type Size Note Language Religion Gender Order Number State Job Score User "
    "First_name Last_name Verify_password Tags Company Field Answer Value Id Key Model Amount Unit Level Rank"
).split()


def pseudo_word(rng: random.Random, syllables: int | None = None) -> str:
    """A pronounceable word that no dictionary has."""
    count = rng.choice((1, 2, 2, 2, 3)) if syllables is None else syllables
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)) + rng.choice(_CODAS)
    return word if len(word) > 1 else word + rng.choice("aeiou")


def random_code(rng: random.Random, low: int = 1, high: int = 7) -> str:
    """Random letters and digits."""
    return "".join(rng.choice(_ALNUM) for _ in range(rng.randint(low, high)))


def random_number(rng: random.Random) -> str:
    """A number, date, time or price."""
    return rng.choice(
        (
            str(rng.randrange(10)),
            str(rng.randrange(10, 1000)),
            str(rng.randrange(100, 100_000)),
            f"{rng.randrange(1, 13):02d}/{rng.randrange(1, 29):02d}/{rng.randrange(1990, 2030)}",
            f"{rng.randrange(1, 13)}:{rng.randrange(60):02d}",
            f"${rng.randrange(1, 500)}",
            f"{rng.randrange(1, 200)}.{rng.randrange(100):02d}",
        )
    )


def random_word(rng: random.Random) -> str:
    """A word of any kind, as buttons, links and options have them."""
    kind = rng.random()
    if kind < 0.45:
        word = pseudo_word(rng)
        return rng.choice((word, word, word.capitalize(), word.capitalize(), word.upper()))
    if kind < 0.7:
        return random_code(rng, 2, 7)
    if kind < 0.85:
        return rng.choice(UI_WORDS)
    return random_number(rng)


def random_value(rng: random.Random) -> str:
    """A value that is typed into a form."""
    kind = rng.random()
    if kind < 0.5:
        return random_name(rng)
    if kind < 0.65:
        return random_number(rng)
    if kind < 0.85:
        return random_code(rng, 2, 8)
    if kind < 0.93:
        return random_email(rng)
    return f"{random_name(rng)} {random_name(rng)}"


def random_email(rng: random.Random) -> str:
    """An e-mail address."""
    return f"{pseudo_word(rng, 1)}.{pseudo_word(rng, 1)}{rng.randrange(1, 100)}@{pseudo_word(rng, 2)}.org"


def random_name(rng: random.Random) -> str:
    """A word with a capital letter."""
    return pseudo_word(rng).capitalize()


def random_label(rng: random.Random) -> str:
    """The label of a field."""
    return rng.choice(LABELS).replace("_", " ") if rng.random() < 0.65 else pseudo_word(rng).capitalize()


def random_sentence(rng: random.Random, low: int = 2, high: int = 9) -> str:
    """Pseudo-words with punctuation."""
    words = [pseudo_word(rng) for _ in range(rng.randint(low, high))]
    words[0] = words[0].capitalize()
    return " ".join(words) + rng.choice((".", ".", "", "!", "?"))
