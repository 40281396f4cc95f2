"""Examples for the language stage: a prompt as the policy writes it, the tokens of a page, and the reply to learn.

Coordinates have soft labels, a bell curve around the middle of the target, so that a sampled click explores. Copying
heads get labels too: the tokens of the target of a click, and the source of each typed token.
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

from palaestra.policy.codecs.qwen_texts import COORDINATES
from palaestra.policy.screen_reader.architecture import COPY_HEAD, FOCUS_HEAD, START_HEAD, X_HEAD, Y_HEAD
from palaestra.policy.screen_reader.pages import Goal
from palaestra.policy.screen_reader.screen_tokens import ScreenTokenizer, ScreenTokens
from palaestra.policy.screen_reader.symbols import Box, Detections, Floats, SymbolSequence
from palaestra.policy.screen_reader.tokenizer import (
    CLICK,
    END_CLICK,
    END_TEXT,
    TYPE,
    coordinate_ids,
    press_key,
    scroll_down,
    widget_token,
)

_MAX_COORDINATE = COORDINATES - 1


@dataclass(frozen=True)
class AttentionLabel:
    """What a head should attend to when a token is predicted."""

    column: int
    """Index of the predicted token."""
    head: tuple[int, int]
    """Layer and head."""
    indices: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Example:
    """A prompt, the tokens of its picture, and the reply."""

    ids: list[int]
    start: int
    """Index of the first reply token."""
    rows: Floats
    """[N, ROW_FEATURES]"""
    soft: tuple[tuple[float, float], ...] = ()
    """For a click: mean and deviation of x and of y, from 0 to 999."""
    sources: tuple[AttentionLabel, ...] = ()


class ExampleBuilder:
    """Writes prompts and replies as the policy does."""

    def __init__(self, tokenizer: Any, *, blur_px: float) -> None:
        self._tokenizer, self._blur_px = tokenizer, blur_px
        self._head = self._encode("<|im_start|>user\n")
        self._image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._open = self._encode("<|vision_start|>")
        self._close = self._encode("<|vision_end|><|im_end|>\n<|im_start|>assistant\n")
        self._end = tokenizer.eos_token_id
        (self._click,), self._end_click = self._encode(CLICK), self._encode(END_CLICK)
        self._type, self._end_text = self._encode(TYPE), self._encode(END_TEXT)
        (self._space,) = self._encode(" ")
        self._x, self._y = coordinate_ids(tokenizer)
        self._screen_tokenizer = ScreenTokenizer(tokenizer)
        self._focused = tokenizer.convert_tokens_to_ids([widget_token(kind, on=True) for kind in ("field", "textarea")])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def build(
        self,
        goal: Goal,
        sequence: SymbolSequence,
        places: Mapping[str, Box],
        size: tuple[int, int],
        rng: random.Random,
    ) -> Example | None:
        """The example of a goal on a page; None if its reply cannot be learned from this page.

        That is so for targets without a token and for texts that are not in the prompt.
        """
        screen = self._screen_tokenizer.tokenize(sequence)
        instruction = self._encode(goal.instruction)
        first = len(self._head) + len(instruction) + len(self._open)
        prompt = [*self._head, *instruction, *self._open, *[self._image] * len(screen), *self._close]
        rows, start = screen.rows(size), len(prompt)
        if goal.target:
            return self._build_click(prompt, rows, places[goal.target], size, first, rng)
        if goal.text:
            escaped = json.dumps(goal.text, ensure_ascii=False)[1:-1]
            typed = self._encode(escaped)
            reply = [*self._type, *typed, *self._end_text, self._end]
            source = self._find_source(typed, instruction, screen, first)
            if source is None:
                return None
            sources = [
                AttentionLabel(start + 1 + place, COPY_HEAD if place else START_HEAD, (index,))
                for place, index in source
            ]
            focused = tuple((np.flatnonzero(np.isin(screen.ids, self._focused)) + first).tolist())
            if focused:
                sources.append(AttentionLabel(start + 1, FOCUS_HEAD, focused))
            return Example(prompt + reply, start, rows, (), tuple(sources))
        written = press_key(goal.keys[0].lower()) if goal.keys else scroll_down(goal.scroll)
        return Example([*prompt, *self._encode(written), self._end], start, rows)

    def _build_click(
        self, prompt: list[int], rows: Floats, box: Box, size: tuple[int, int], first: int, rng: random.Random
    ) -> Example | None:
        left, top, wide, tall = box
        x, y = rows[:, 1] * size[0], rows[:, 2] * size[1]
        is_inside = (x > left - 1) & (x < left + wide + 1) & (y > top - 1) & (y < top + tall + 1)
        attended = tuple((np.flatnonzero(is_inside) + first).tolist())
        if not attended:
            return None
        soft = tuple(
            (
                (low + side / 2) * _MAX_COORDINATE / whole,
                max(1.0, min(self._blur_px, side / 5)) * _MAX_COORDINATE / whole,
            )
            for low, side, whole in ((left, wide, size[0]), (top, tall, size[1]))
        )
        drawn_x, drawn_y = (min(_MAX_COORDINATE, max(0, round(rng.gauss(mean, deviation)))) for mean, deviation in soft)
        reply = [self._click, self._x[drawn_x], self._y[drawn_y], *self._end_click, self._end]
        start = len(prompt)
        sources = (AttentionLabel(start + 1, X_HEAD, attended), AttentionLabel(start + 2, Y_HEAD, attended))
        return Example(prompt + reply, start, rows, soft, sources)

    def _find_source(
        self, typed: list[int], instruction: list[int], screen: ScreenTokens, first: int
    ) -> list[tuple[int, int]] | None:
        """(index of a typed token or of the end, index of its source): in the instruction, or else on the screen.

        Spaces are no tokens on a screen; there they have no source.
        """
        at = _find_run(instruction, typed)
        if at is not None:
            return [(place, len(self._head) + at + place) for place in range(len(typed) + 1)]
        words = [place for place, token in enumerate(typed) if token != self._space]
        at = _find_run(screen.ids.tolist()[::-1], [typed[place] for place in words][::-1])
        if at is None:
            return None
        start = len(screen) - at - len(words)
        return [(place, first + start + rank) for rank, place in enumerate([*words, len(typed)])]


def _find_run(tokens: list[int], wanted: list[int]) -> int | None:
    """Where `wanted` begins first in `tokens`."""
    for at in range(len(tokens) - len(wanted) + 1):
        if tokens[at : at + len(wanted)] == wanted:
            return at
    return None


def jitter(detections: Detections, rng: np.random.Generator) -> Detections:
    """Detections that are a little off, and of which a few are missing, as the tower's are."""
    count = len(detections.symbols)
    boxes = detections.boxes + rng.normal(0, 0.35, (count, 4)).astype(np.float32)
    boxes[:, 2:] = np.maximum(boxes[:, 2:], 1.0)
    keep = rng.random(count) > 0.003
    colours = np.clip(detections.colours + rng.normal(0, 0.02, (count, 3)), 0, 1).astype(np.float32)
    return Detections(detections.symbols[keep], boxes[keep], colours[keep])


@dataclass
class ExampleBatch:
    """Examples, padded to T tokens."""

    ids: Tensor
    """[examples, T]"""
    mask: Tensor
    """[examples, T]: 1 where there is a token."""
    rows: Tensor
    """[screen tokens of all examples, ROW_FEATURES]"""
    counts: list[int]
    """Screen tokens per example."""
    at: Tensor
    """[N, 2]: row and column of the positions that predict a reply token."""
    labels: Tensor
    """[N]"""
    soft: Tensor
    """[C, 1000] labels of coordinates."""
    soft_at: Tensor
    """[C] indices into `labels`."""
    attend_at: Tensor
    """[A] indices into `labels`."""
    attend_head: list[tuple[int, int]]
    """Layer and head of each of A labels."""
    attend: Tensor
    """[A, T]: 1 where the head should attend."""


def collate(examples: Sequence[Example], padding: int) -> ExampleBatch:
    """Several examples as one batch; `padding` is a token id."""
    length = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), length), padding)
    mask = torch.zeros(len(examples), length, dtype=torch.long)
    labels: list[int] = []
    at, soft, soft_at, attend_at, attend = [], [], [], [], []
    attend_head: list[tuple[int, int]] = []
    line = torch.arange(float(COORDINATES))
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        mask[row, : len(example.ids)] = 1
        sources: dict[int, list[AttentionLabel]] = {}
        for source in example.sources:
            sources.setdefault(source.column, []).append(source)
        for column in range(example.start, len(example.ids)):
            index = len(labels)
            at.append((row, column - 1))
            labels.append(example.ids[column])
            axis = column - example.start - 1
            if 0 <= axis < len(example.soft):
                mean, deviation = example.soft[axis]
                soft.append(torch.softmax(-0.5 * ((line - mean) / deviation) ** 2, 0))
                soft_at.append(index)
            for source in sources.get(column, ()):
                target = torch.zeros(length)
                target[list(source.indices)] = 1.0
                attend.append(target)
                attend_at.append(index)
                attend_head.append(source.head)
    return ExampleBatch(
        ids,
        mask,
        torch.from_numpy(np.concatenate([example.rows for example in examples])),
        [len(example.rows) for example in examples],
        torch.tensor(at),
        torch.tensor(labels),
        torch.stack(soft) if soft else torch.zeros(0, COORDINATES),
        torch.tensor(soft_at, dtype=torch.long),
        torch.tensor(attend_at, dtype=torch.long),
        attend_head,
        torch.stack(attend) if attend else torch.zeros(0, length),
    )
