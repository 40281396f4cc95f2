"""From symbols in reading order to the tokens that a pretrained language model gets in place of the picture.

A segment is a widget with the text in or beside it, or a run of text on one line in one colour. It becomes its widget's
token, its words in the language model's own tokens, and one token each for x and y of its middle. The reply has the
same coordinate tokens, so the language model finds a place as it finds the word after a word: by looking up what
followed before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palaestra.policy.screen_reader.screen_tokens import ScreenTokens
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, GAP, LINE, SPACE, Box, Floats, SymbolSequence
from palaestra.policy.screen_reader.tokenizer import BLANK, widget_token
from palaestra.policy.screen_reader.tower import CHARACTERS, WIDGETS

BINS = 100
"""Values of a coordinate token."""
SCREEN_FORMAT = "screen_format"
"""Key of the tokenizer's settings that says how a screen is written."""
SEGMENTS = "segments"
_BESIDE = ("checkbox", "radio")
"""Widgets whose text stands beside them."""
_SAME_COLOUR = 0.1
"""Texts whose colours differ by more are different segments, such as a link in a sentence."""
_MAX_KNOWN = 50_000
"""Words whose tokens are remembered."""


def coordinate_value(place: int) -> int:
    """The coordinate, from 0 to 999, that a bin stands for."""
    return round((place + 0.5) * 1000 / BINS)


def coordinate_tokens() -> tuple[list[str], list[str]]:
    """Tokens of x and of y, by bin."""
    values = [coordinate_value(place) for place in range(BINS)]
    return [f"[{value}" for value in values], [f", {value}]" for value in values]


@dataclass
class Segment:
    """A widget or a run of text."""

    widget: int | None = None
    """Symbol."""
    box: Box = (0.0, 0.0, 0.0, 0.0)
    """Of the widget, or else around the words: left, top, width, height in pixels."""
    words: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Of widget and words."""

    @property
    def text(self) -> str:
        """The words with spaces between them."""
        return " ".join(self.words)


@dataclass(frozen=True, eq=False)
class SegmentedScreen:
    """The segments of a screen and their tokens."""

    segments: list[Segment]
    tokens: ScreenTokens


@dataclass
class _Word:
    """A word on the screen."""

    text: str
    box: Box
    colour: list[float]


class SegmentTokenizer:
    """Turns symbols into the tokens of segments."""

    def __init__(self, tokenizer: Any) -> None:
        self._inner = tokenizer.backend_tokenizer
        names = [widget_token(kind, on=on) for kind in WIDGETS for on in (False, True)]
        self._widgets: list[int] = tokenizer.convert_tokens_to_ids(names)
        self._blank: int = tokenizer.convert_tokens_to_ids(BLANK)
        self._x, self._y = (tokenizer.convert_tokens_to_ids(tokens) for tokens in coordinate_tokens())
        self._known: dict[str, list[int]] = {}

    def rows(self, sequence: SymbolSequence, size: tuple[int, int]) -> Floats:
        """The tokens as the model's connector takes them; `size` is the width and height of the screen."""
        return self.split(sequence, size).tokens.rows(size)

    def split(self, sequence: SymbolSequence, size: tuple[int, int]) -> SegmentedScreen:
        """The segments of a screen and their tokens; a blank token for a screen without content."""
        segments: list[Segment] = []
        ids: list[int] = []
        boxes: list[Box] = []
        colours: list[list[float]] = []
        flags: list[list[float]] = []

        def add(token: int, box: Box, colour: list[float], flag: list[float]) -> None:
            ids.append(token)
            boxes.append(box)
            colours.append(colour)
            flags.append(flag)

        for starts_line, items in self._group(sequence):
            segment = Segment()
            line = [float(starts_line), 0.0, 0.0, 0.0]
            for item in items:
                if isinstance(item, _Word):
                    segment.words.append(item.text)
                    for token in self.divide(item.text):
                        segment.tokens.append(token)
                        add(token, item.box, item.colour, line)
                else:
                    segment.widget, box, colour = item
                    token = self._widgets[segment.widget - FIRST_WIDGET]
                    segment.tokens.append(token)
                    add(token, box, colour, [*line[:2], float(len(items) > 1), 0.0])
                line = [0.0, 0.0, 0.0, 0.0]
            words = [item.box for item in items if isinstance(item, _Word)]
            segment.box = items[0][1] if not isinstance(items[0], _Word) else _union(words)
            for token in self.place_tokens(segment.box, size):
                add(token, segment.box, colours[-1], line)
            segments.append(segment)
        if not ids:
            add(self._blank, (0.0, 0.0, 0.0, 0.0), [0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0])
        return SegmentedScreen(
            segments,
            ScreenTokens(
                np.array(ids, np.int64),
                np.array(boxes, np.float32),
                np.array(colours, np.float32),
                np.array(flags, np.float32),
            ),
        )

    def place_tokens(self, box: Box, size: tuple[int, int]) -> tuple[int, int]:
        """Tokens of x and y of the middle of a box."""
        x, y = (box[0] + box[2] / 2) / size[0], (box[1] + box[3] / 2) / size[1]
        return self._x[_bin(x)], self._y[_bin(y)]

    def divide(self, word: str) -> list[int]:
        """The tokens of a word as they are in running text, after a space.

        Added tokens are not recognised: what stands on a screen cannot become a control token.
        """
        known = self._known.get(word)
        if known is None:
            text = f" {word}"
            if self._inner.normalizer is not None:
                text = self._inner.normalizer.normalize_str(text)
            pieces = [piece for piece, _ in self._inner.pre_tokenizer.pre_tokenize_str(text)]
            known = [token.id for piece in pieces for token in self._inner.model.tokenize(piece)]
            if len(self._known) < _MAX_KNOWN:
                self._known[word] = known
        return known

    def _group(self, sequence: SymbolSequence) -> list[tuple[bool, list[Any]]]:
        """Widgets (symbol, box, colour) and words by segment, and whether a segment starts a line."""
        symbols, boxes, colours = sequence.symbols.tolist(), sequence.boxes.tolist(), sequence.colours.tolist()
        groups: list[tuple[bool, list[Any]]] = []
        starts_line, is_new = True, True
        place = 0
        while place < len(symbols):
            symbol = symbols[place]
            if symbol in (LINE, GAP, SPACE):
                starts_line |= symbol == LINE
                is_new |= symbol != SPACE
                place += 1
                continue
            end = place + 1
            if symbol >= FIRST_WIDGET:
                groups.append((starts_line, [(symbol, tuple(boxes[place]), colours[place])]))
            else:
                while end < len(symbols) and symbols[end] < len(CHARACTERS):
                    end += 1
                word = _Word(
                    "".join(CHARACTERS[char] for char in symbols[place:end]),
                    _union(boxes[place:end]),
                    np.mean(colours[place:end], 0).tolist(),
                )
                if is_new or not _continues(groups[-1][1], word):
                    groups.append((starts_line, [word]))
                else:
                    groups[-1][1].append(word)
            starts_line, is_new, place = False, False, end
        return groups


def _continues(items: list[Any], word: _Word) -> bool:
    """Whether a word without a gap before it belongs to the segment of the items before it."""
    first, last = items[0], items[-1]
    if not isinstance(first, _Word):
        symbol, outer, _ = first
        kind = WIDGETS[(symbol - FIRST_WIDGET) // 2]
        return kind in _BESIDE or _is_inside(word.box, outer)
    differences = np.abs(_chroma(last.colour) - _chroma(word.colour))
    return bool(differences.max() < _SAME_COLOUR)


def _chroma(colour: list[float]) -> Any:
    red, green, blue = colour
    return np.array([red - green, green - blue])


def _bin(share: float) -> int:
    return min(BINS - 1, max(0, int(share * BINS)))


def _union(boxes: list[Any]) -> Box:
    """The box around boxes."""
    left, top = min(box[0] for box in boxes), min(box[1] for box in boxes)
    right, bottom = max(box[0] + box[2] for box in boxes), max(box[1] + box[3] for box in boxes)
    return left, top, right - left, bottom - top


def _is_inside(box: Box, outer: Box) -> bool:
    """Whether the middle of a box lies in another one."""
    x, y = box[0] + box[2] / 2, box[1] + box[3] / 2
    return outer[0] <= x <= outer[0] + outer[2] and outer[1] <= y <= outer[1] + outer[3]
