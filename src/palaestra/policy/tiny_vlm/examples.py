"""Lessons: what the model is asked about a screen, and what it should answer, as token ids.

Nearly all answers are clicks. A few type, press a key, scroll, wait or end the task, so that no word of the grammar is
foreign to the model. Some lessons come later in an episode, with actions that lie behind listed in the prompt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from palaestra.policy.codecs.codec import ActionCodec
from palaestra.policy.codecs.coordinates import IMAGE_RULES, CoordinateFrame
from palaestra.policy.codecs.grammar import CODECS
from palaestra.policy.tiny_vlm.architecture import build_image_processor
from palaestra.policy.tiny_vlm.screen_dataset import Pool
from palaestra.policy.tiny_vlm.screens import HEIGHT, WIDTH, Widget, made_up
from palaestra.policy.vlm.picture import Picture, PicturePreprocessor
from palaestra.policy.vlm.prompt import Conversation, PastTurn, PromptWriter
from palaestra.sessions.action import (
    Answer,
    Click,
    Point,
    PressKeys,
    Scroll,
    Terminate,
    TypeText,
    UiAction,
    Wait,
)
from palaestra.sessions.screen import Size

__all__ = ["Lesson", "Teacher", "line_of"]


@dataclass(frozen=True)
class Lesson:
    """One question and its answer."""

    question: tuple[int, ...]
    """Everything between the picture and the answer."""
    answer: tuple[int, ...]
    """With the end token."""
    widget: Widget | None = None
    """What is to be clicked: the second and fourth token of the answer are a place on it."""


class Teacher:
    """Writes lessons about the screens of a pool, in the very tokens a policy will be asked with."""

    def __init__(self, tokenizer: Any, image_token: int) -> None:
        shop = PicturePreprocessor(build_image_processor(), memory_bytes=0)
        self._writer = PromptWriter(tokenizer, tokenizer.chat_template, shop, image_token=image_token, history=0)
        self._tokenizer, self._end = tokenizer, tokenizer.convert_tokens_to_ids("<|vision_end|>")
        self._codec: ActionCodec = CODECS["qwen3-vl"]
        self._frame: CoordinateFrame = IMAGE_RULES["tiny"].frame(Size(WIDTH, HEIGHT))
        self._picture = Picture(b"", (self._frame.image.width, self._frame.image.height))
        whole = self._prompt("", ())
        self.prefix = tuple(whole[: whole.index(self._end) + 1])
        """What every prompt begins with: all up to the end of the picture."""

    def lessons(self, pool: Pool, rng: random.Random, *, other: float) -> list[list[Lesson]]:
        """For each screen one lesson per instruction; a share `other` of them is not about a plain click."""
        return [
            [
                self._other(widgets, rng) if rng.random() < other else self.click(asked.text, asked.widget, rng)
                for asked in all_asked
            ]
            for widgets, all_asked in zip(pool.widgets, pool.asked, strict=True)
        ]

    def click(self, text: str, widget: Widget, rng: random.Random) -> Lesson:
        """A plain click; sometimes after others that missed."""
        past = [self._missed(rng) for _ in range(rng.choice((1, 1, 2, 3)))] if rng.random() < 0.15 else []
        return self._lesson(text, Click(_middle(widget)), past, widget)

    def _missed(self, rng: random.Random) -> UiAction:
        return Click(Point(rng.randrange(WIDTH), rng.randrange(HEIGHT)))

    def _other(self, widgets: list[Widget], rng: random.Random) -> Lesson:
        fields = [widget for widget in widgets if widget.kind == "input"]
        if fields and rng.random() < 0.8:
            return self._entry(fields, [widget for widget in widgets if widget.kind == "button"], rng)
        some, word = rng.choice(widgets), made_up(rng)
        key, name = rng.choice((("Enter", "Enter"), ("Tab", "Tab"), ("Escape", "Escape"), ("Backspace", "Backspace")))
        seconds, pixels = rng.randint(1, 5), rng.choice((50, 100, 200))
        text, action = rng.choice(
            (
                (f'Type "{word}".', TypeText(word)),
                (f'Type "{word}".', TypeText(word)),
                (f"Press the {name} key.", PressKeys((key,))),
                (f"Wait {seconds} seconds.", Wait(seconds)),
                (f'Answer "{word}".', Answer(word)),
                ("The task is done.", Terminate(True)),
                ("This cannot be done.", Terminate(False)),
                ("Scroll down.", Scroll(_middle(some), 0, pixels)),
                ("Double click the screen.", Click(_middle(some), "left", 2)),
            )
        )
        return self._lesson(text, action, [], None)

    def _entry(self, fields: list[Widget], buttons: list[Widget], rng: random.Random) -> Lesson:
        """Fill in a field: click it, type, and press the button if there is one."""
        word, field = made_up(rng), rng.choice(fields)
        word = word.capitalize() if rng.random() < 0.6 else word
        last = f" and press {rng.choice(buttons).label}" if buttons else ""
        text = rng.choice((f'Enter "{word}" into the text field{last}.', f'Type "{word}" into the textbox{last}.'))
        acts: list[UiAction] = [Click(_middle(field)), TypeText(word)]
        stage = rng.randrange(3 if buttons else 2)
        if stage == 1:
            return self._lesson(text, acts[1], acts[:1], None)
        target = field if stage == 0 else rng.choice([one for one in buttons if text.endswith(f"{one.label}.")])
        return self._lesson(text, Click(_middle(target)), acts[:stage], target)

    def _lesson(self, text: str, action: UiAction, past: list[UiAction], widget: Widget | None) -> Lesson:
        said = tuple(PastTurn(self._picture, (), self._codec.encode(act, self._frame)) for act in past)
        whole = self._prompt(text, said)
        question = tuple(whole[whole.index(self._end) + 1 :])
        answer = self._tokenizer(self._codec.encode(action, self._frame), add_special_tokens=False)["input_ids"]
        return Lesson(question, (*answer, self._tokenizer.eos_token_id), widget)

    def _prompt(self, text: str, past: tuple[PastTurn, ...]) -> list[int]:
        ids: list[int] = self._writer.write(Conversation("", text, past, self._picture)).ids.tolist()
        return ids


def _middle(widget: Widget) -> Point:
    x, y = widget.centre
    return Point(min(WIDTH - 1, int(x)), min(HEIGHT - 1, int(y)))


def line_of(pixel: float, side: int) -> float:
    """A place along a side of so many pixels, as the grammar counts it: from 0 to 999."""
    return max(0.0, min(999.0, pixel * 999 / side))
