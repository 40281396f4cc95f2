"""Examples for a pretrained language model that is joined to the tower: a screen, and instructions with replies.

The screen stands before the instruction, so all instructions about it share its tokens. They cannot attend to each
other. Besides the goals of a page there are plain ones, such as to click a text that stands on it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palaestra.policy.screen_reader.joined.language_model import ASSISTANT, END, NAME, NAMED_CLICK, USER
from palaestra.policy.screen_reader.pages import Goal
from palaestra.policy.screen_reader.segments import Segment, SegmentedScreen, SegmentTokenizer
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, Box, Floats, SymbolSequence
from palaestra.policy.screen_reader.tokenizer import END_CLICK, END_TEXT, TYPE, press_key, scroll_down
from palaestra.policy.screen_reader.tower import WIDGETS

PLAIN_GOALS = 3
"""Plain goals per page."""
_MAX_NAME = 5
"""Tokens of a segment that its name has."""
_MAX_PLAIN_WORDS = 3
_FORMS = {
    "button": ('Click on the "{}" button.', "Click the {} button.", 'Press "{}".', "Press {}."),
    "checkbox": ("Select {}.", 'Check "{}".', "Click {}."),
    "radio": ("Select {}.", 'Choose "{}".', "Click {}."),
    "field": ("Click the {} field.", "Click the field {}."),
    "": ('Click on "{}".', "Click {}.", 'Click on the link "{}".'),
}
"""Instructions of plain goals by the kind of the widget; without one it is a text."""


@dataclass(frozen=True, eq=False)
class Branch:
    """An instruction and the reply to it."""

    prompt: list[int]
    reply: list[int]
    kinds: str
    """A letter per reply token: action, name, x, y, text or rest."""


@dataclass(frozen=True, eq=False)
class PageExample:
    """A screen and instructions about it."""

    prefix: list[int]
    """Tokens up to the instruction."""
    screen_start: int
    rows: Floats
    """[N, ROW_FEATURES] of the screen's tokens."""
    branches: list[Branch]

    def __len__(self) -> int:
        return len(self.prefix) + sum(len(branch.prompt) + len(branch.reply) for branch in self.branches)


class PageExampleBuilder:
    """Writes prompts and replies as the policy does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.segment_tokenizer = SegmentTokenizer(tokenizer)
        self._head, self._newline = self._encode(USER), self._encode("\n")
        self._close = self._encode(f"{END}\n{ASSISTANT}")
        (self._end,) = self._encode(END)
        (self._name,), (self._click,) = self._encode(NAME), self._encode(NAMED_CLICK)
        (self._type,), (self._end_text,) = self._encode(TYPE), self._encode(END_TEXT)
        (self._end_click,) = self._encode(END_CLICK)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def build(
        self,
        goals: Sequence[Goal],
        sequence: SymbolSequence,
        places: Mapping[str, Box],
        size: tuple[int, int],
        rng: random.Random,
    ) -> PageExample | None:
        """The example of a page; None if no reply can be learned from it."""
        screen = self.segment_tokenizer.split(sequence, size)
        branches = [self._build_branch(goal, screen, places, size) for goal in goals]
        branches += self._build_plain(screen, size, rng)
        known = [branch for branch in branches if branch is not None]
        if not known:
            return None
        prefix = [*self._head, *screen.tokens.ids.tolist(), *self._newline]
        return PageExample(prefix, len(self._head), screen.tokens.rows(size), known)

    def _build_branch(
        self, goal: Goal, screen: SegmentedScreen, places: Mapping[str, Box], size: tuple[int, int]
    ) -> Branch | None:
        if goal.target:
            target = _find_target(screen.segments, places[goal.target])
            return None if target is None else self._build_click(goal.instruction, screen, target, size)
        if goal.text:
            texts = [goal.instruction, *(segment.text for segment in screen.segments)]
            if not any(goal.text in text for text in texts):
                return None
            typed = self._encode(json.dumps(goal.text, ensure_ascii=False)[1:-1])
            reply = [self._type, *typed, self._end_text, self._end]
            return self._branch(goal.instruction, reply, "a" + "t" * len(typed) + "tr")
        written = press_key(goal.keys[0].lower()) if goal.keys else scroll_down(goal.scroll)
        reply = [*self._encode(written), self._end]
        return self._branch(goal.instruction, reply, "a" + "r" * (len(reply) - 1))

    def _build_click(self, instruction: str, screen: SegmentedScreen, target: int, size: tuple[int, int]) -> Branch:
        segments = screen.segments
        name = segments[target].tokens[:_MAX_NAME]
        if not segments[target].words and target:
            name = [*segments[target - 1].tokens[-_MAX_NAME:], *name]
        x, y = self.segment_tokenizer.place_tokens(segments[target].box, size)
        reply = [self._name, *name, self._click, x, y, self._end_click, self._end]
        return self._branch(instruction, reply, "a" + "n" * (len(name) + 1) + "xyrr")

    def _branch(self, instruction: str, reply: list[int], kinds: str) -> Branch:
        return Branch([*self._encode(instruction), *self._close], reply, kinds)

    def _build_plain(self, screen: SegmentedScreen, size: tuple[int, int], rng: random.Random) -> list[Branch]:
        segments = screen.segments
        texts = [segment.text.lower() for segment in segments]
        found: list[tuple[int, str, str]] = []
        for place, segment in enumerate(segments):
            kind = "" if segment.widget is None else WIDGETS[(segment.widget - FIRST_WIDGET) // 2]
            text = segment.text
            if kind in ("field", "textarea") and place and segments[place - 1].widget is None:
                kind, text = "field", segments[place - 1].text.rstrip(":")
            is_unique = sum(text.lower() in other for other in texts) == 1
            if kind in _FORMS and 1 <= len(text.split()) <= _MAX_PLAIN_WORDS and is_unique:
                found.append((place, kind, text))
        chosen = rng.sample(found, min(len(found), PLAIN_GOALS))
        return [
            self._build_click(rng.choice(_FORMS[kind]).format(text), screen, place, size)
            for place, kind, text in chosen
        ]


def _find_target(segments: Sequence[Segment], box: Box) -> int | None:
    """The segment with its middle in the box of the target; one with a widget first."""
    left, top, wide, tall = box
    inside = [
        place
        for place, segment in enumerate(segments)
        if left - 1 < segment.box[0] + segment.box[2] / 2 < left + wide + 1
        and top - 1 < segment.box[1] + segment.box[3] / 2 < top + tall + 1
    ]
    inside.sort(key=lambda place: segments[place].widget is None)
    return inside[0] if inside else None


@dataclass
class PageBatch:
    """Pages, padded to T tokens."""

    ids: Tensor
    """[pages, T]"""
    positions: Tensor
    """[pages, T]: every branch continues after the screen."""
    mask: Tensor
    """[pages, 1, T, T]: True where a token attends."""
    rows: Tensor
    """[screen tokens of all pages, ROW_FEATURES]"""
    rows_at: Tensor
    """[screen tokens of all pages, 2]: page and column."""
    at: Tensor
    """[N, 2]: page and column of the positions that predict a reply token."""
    labels: Tensor
    """[N]"""
    kinds: str
    """[N] letters, as in `Branch`."""


def collate_pages(pages: Sequence[PageExample], padding: int) -> PageBatch:
    """Several pages as one batch; `padding` is a token id."""
    length = max(len(page) for page in pages)
    ids = torch.full((len(pages), length), padding)
    positions = torch.zeros(len(pages), length, dtype=torch.long)
    branch_of = torch.full((len(pages), length), -1)
    rows_at, at, labels, kinds = [], [], [], []
    for row, page in enumerate(pages):
        start = len(page.prefix)
        ids[row, :start] = torch.tensor(page.prefix)
        positions[row, :start] = torch.arange(start)
        branch_of[row, :start] = 0
        rows_at += [(row, page.screen_start + place) for place in range(len(page.rows))]
        column = start
        for number, branch in enumerate(page.branches, start=1):
            tokens = [*branch.prompt, *branch.reply]
            end = column + len(tokens)
            ids[row, column:end] = torch.tensor(tokens)
            positions[row, column:end] = start + torch.arange(len(tokens))
            branch_of[row, column:end] = number
            at += [(row, place - 1) for place in range(column + len(branch.prompt), end)]
            labels += branch.reply
            kinds.append(branch.kinds)
            column = end
    same = (branch_of[:, :, None] == branch_of[:, None, :]) | (branch_of[:, None, :] == 0)
    mask = (same & torch.ones(length, length, dtype=torch.bool).tril()) | torch.eye(length, dtype=torch.bool)
    return PageBatch(
        ids,
        positions,
        mask[:, None],
        torch.from_numpy(np.concatenate([page.rows for page in pages])),
        torch.tensor(rows_at),
        torch.tensor(at),
        torch.tensor(labels),
        "".join(kinds),
    )
