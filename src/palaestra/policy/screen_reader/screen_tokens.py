"""From symbols in reading order to the tokens that the language model gets in place of the picture.

Words become the tokens that the tokenizer gives them in text, widgets become a token each. Where a line starts, how
wide the gap before a word is, a colon at its end and whether there is text inside a widget are features of a token, not
tokens: what stands before a value is then its label, and what stands before a field is its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, GAP, LINE, SPACE, Box, Floats, SymbolSequence
from palaestra.policy.screen_reader.tokenizer import BLANK, WordDivider, widget_token
from palaestra.policy.screen_reader.tower import CHARACTERS, WIDGETS

LOOK_FEATURES = 2 + 3 + 4
"""Width and height in units of 100 pixels; mean colour; the four flags of `ScreenTokens`."""
ROW_FEATURES = 1 + 2 + LOOK_FEATURES
"""Token; centre x and y as shares of the screen; look."""
_HOLDS_TEXT, _ENDS_WITH_COLON = 2, 3
"""Columns of the flags."""


@dataclass(frozen=True, eq=False)
class ScreenTokens:
    """Tokens of a screen in reading order."""

    ids: npt.NDArray[np.int64]
    boxes: Floats
    """[N, 4]: left, top, width, height in pixels."""
    colours: Floats
    """[N, 3] from 0 to 1."""
    flags: Floats
    """[N, 4]: starts a line, gap before (0.5: a space, 1: wide), holds text (of widgets), is followed by a colon."""

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, size: tuple[int, int]) -> Floats:
        """What the model's connector takes, [N, ROW_FEATURES]; `size` is the screen's width and height."""
        rows = np.zeros((len(self), ROW_FEATURES), np.float32)
        width, height = size
        rows[:, 0] = self.ids
        rows[:, 1] = (self.boxes[:, 0] + self.boxes[:, 2] / 2) / width
        rows[:, 2] = (self.boxes[:, 1] + self.boxes[:, 3] / 2) / height
        rows[:, 3:5] = self.boxes[:, 2:] / 100
        rows[:, 5:8] = self.colours
        rows[:, 8:] = self.flags
        return rows


@dataclass
class _Draft:
    """Tokens so far."""

    ids: list[int] = field(default_factory=list)
    boxes: list[list[float]] = field(default_factory=list)
    colours: list[list[float]] = field(default_factory=list)
    flags: list[list[float]] = field(default_factory=list)

    def add(self, token: int, box: list[float], colour: list[float], flags: list[float]) -> None:
        self.ids.append(token)
        self.boxes.append(box)
        self.colours.append(colour)
        self.flags.append(flags)


class ScreenTokenizer:
    """Turns symbols into tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._divider = WordDivider(tokenizer)
        names = [widget_token(kind, on=on) for kind in WIDGETS for on in (False, True)]
        self._widgets: list[int] = tokenizer.convert_tokens_to_ids(names)
        self._blank: int = tokenizer.convert_tokens_to_ids(BLANK)

    def tokenize(self, sequence: SymbolSequence) -> ScreenTokens:
        """The tokens of a screen; a single one for a screen without content, so that a prompt always has a picture."""
        symbols, boxes, colours = sequence.symbols.tolist(), sequence.boxes.tolist(), sequence.colours.tolist()
        draft = _Draft()
        starts_line, gap = 1.0, 0.0
        widget: Box | None = None
        widget_at = place = 0
        while place < len(symbols):
            symbol = symbols[place]
            if symbol in (LINE, SPACE, GAP):
                starts_line = max(starts_line, float(symbol == LINE))
                gap = {LINE: 1.0, SPACE: 0.5, GAP: 1.0}[symbol]
                place += 1
                continue
            if symbol >= FIRST_WIDGET:
                widget, widget_at = tuple(boxes[place]), len(draft.ids)
                token = self._widgets[symbol - FIRST_WIDGET]
                draft.add(token, boxes[place], colours[place], [starts_line, gap, 0.0, 0.0])
                end = place + 1
            else:
                end = place + 1
                while end < len(symbols) and symbols[end] < len(CHARACTERS):
                    end += 1
                self._add_word(draft, symbols[place:end], boxes[place:end], colours[place:end], [starts_line, gap])
                if widget is not None and _is_inside(boxes[place], widget):
                    draft.flags[widget_at][_HOLDS_TEXT] = 1.0
            starts_line, gap, place = 0.0, 0.0, end
        if not draft.ids:
            draft.add(self._blank, [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0])
        return ScreenTokens(
            np.array(draft.ids, np.int64),
            np.array(draft.boxes, np.float32),
            np.array(draft.colours, np.float32),
            np.array(draft.flags, np.float32),
        )

    def rows(self, sequence: SymbolSequence, size: tuple[int, int]) -> Floats:
        """The tokens as the model's connector takes them; `size` is the width and height of the screen."""
        return self.tokenize(sequence).rows(size)

    def _add_word(
        self,
        draft: _Draft,
        symbols: list[int],
        boxes: list[list[float]],
        colours: list[list[float]],
        before: list[float],
    ) -> None:
        word = "".join(CHARACTERS[symbol] for symbol in symbols)
        has_colon = len(word) > 1 and word.endswith(":")
        start = 0
        for token, length in self._divider.divide(word[:-1] if has_colon else word):
            end = start + length
            flags = [*(before if start == 0 else [0.0, 0.0]), 0.0, 0.0]
            draft.add(token, _union(boxes[start:end]), colours[start], flags)
            start = end
        draft.flags[-1][_ENDS_WITH_COLON] = float(has_colon)


def _union(boxes: list[list[float]]) -> list[float]:
    """The box around boxes."""
    left, top = min(box[0] for box in boxes), min(box[1] for box in boxes)
    right, bottom = max(box[0] + box[2] for box in boxes), max(box[1] + box[3] for box in boxes)
    return [left, top, right - left, bottom - top]


def _is_inside(box: list[float], outer: Box) -> bool:
    """Whether the middle of a box lies in another one."""
    x, y = box[0] + box[2] / 2, box[1] + box[3] / 2
    return outer[0] <= x <= outer[0] + outer[2] and outer[1] <= y <= outer[1] + outer[3]
