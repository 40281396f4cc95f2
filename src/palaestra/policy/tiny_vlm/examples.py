"""Training examples of the language stage: a prompt about a screen and the correct reply, as token ids.

Nearly all replies are clicks. A few type, press a key, scroll, wait or end the task, so that the model has seen every
action of the grammar. Some examples are from later in an episode, with previous actions listed in the prompt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from palaestra.policy.codecs.codec import ActionCodec
from palaestra.policy.codecs.coordinates import IMAGE_RULES, CoordinateFrame
from palaestra.policy.codecs.grammar import CODECS
from palaestra.policy.tiny_vlm.architecture import build_image_processor
from palaestra.policy.tiny_vlm.screen_dataset import ScreenDataset
from palaestra.policy.tiny_vlm.screens import HEIGHT, WIDTH, Widget, random_word
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


@dataclass(frozen=True)
class TrainingExample:
    """One prompt and its correct reply."""

    prompt: tuple[int, ...]
    """Everything between the image and the reply."""
    reply: tuple[int, ...]
    """With the end token."""
    widget: Widget | None = None
    """The widget to click; then the second and fourth token of the reply are its coordinates."""


class ExampleWriter:
    """Writes examples about the screens of a dataset, with the prompts that the policy uses."""

    def __init__(self, tokenizer: Any, image_token: int) -> None:
        pictures = PicturePreprocessor(build_image_processor(), memory_bytes=0)
        self._prompts = PromptWriter(tokenizer, tokenizer.chat_template, pictures, image_token=image_token, history=0)
        self._tokenizer, self._image_end = tokenizer, tokenizer.convert_tokens_to_ids("<|vision_end|>")
        self._codec: ActionCodec = CODECS["qwen3-vl"]
        self._frame: CoordinateFrame = IMAGE_RULES["tiny"].frame(Size(WIDTH, HEIGHT))
        self._picture = Picture(b"", (self._frame.image.width, self._frame.image.height))
        ids = self._prompt("", ())
        self.prefix = tuple(ids[: ids.index(self._image_end) + 1])
        """The start of every prompt, up to the end of the image."""

    def write_examples(
        self, dataset: ScreenDataset, rng: random.Random, *, other_share: float
    ) -> list[list[TrainingExample]]:
        """One example per instruction of each screen; a share of them is replaced by other actions than a click."""
        return [
            [
                self._other(widgets, rng)
                if rng.random() < other_share
                else self._click(instruction.text, instruction.widget, rng)
                for instruction in instructions
            ]
            for widgets, instructions in zip(dataset.widgets, dataset.instructions, strict=True)
        ]

    def _click(self, text: str, widget: Widget, rng: random.Random) -> TrainingExample:
        """A click on the widget; sometimes after clicks that missed."""
        past: list[UiAction] = []
        if rng.random() < 0.15:
            missed = range(rng.choice((1, 1, 2, 3)))
            past = [Click(Point(rng.randrange(WIDTH), rng.randrange(HEIGHT))) for _ in missed]
        return self._example(text, Click(_centre(widget)), past, widget)

    def _other(self, widgets: list[Widget], rng: random.Random) -> TrainingExample:
        fields = [widget for widget in widgets if widget.kind == "input"]
        if fields and rng.random() < 0.8:
            return self._entry(fields, [widget for widget in widgets if widget.kind == "button"], rng)
        widget, word = rng.choice(widgets), random_word(rng)
        key = rng.choice(("Enter", "Tab", "Escape", "Backspace"))
        seconds, pixels = rng.randint(1, 5), rng.choice((50, 100, 200))
        text, action = rng.choice(
            (
                (f'Type "{word}".', TypeText(word)),
                (f'Type "{word}".', TypeText(word)),
                (f"Press the {key} key.", PressKeys((key,))),
                (f"Wait {seconds} seconds.", Wait(seconds)),
                (f'Answer "{word}".', Answer(word)),
                ("The task is done.", Terminate(True)),
                ("This cannot be done.", Terminate(False)),
                ("Scroll down.", Scroll(_centre(widget), 0, pixels)),
                ("Double click the screen.", Click(_centre(widget), "left", 2)),
            )
        )
        return self._example(text, action, [], None)

    def _entry(self, fields: list[Widget], buttons: list[Widget], rng: random.Random) -> TrainingExample:
        """One step of filling in a field: click it, type, and press the button if there is one."""
        word, field = random_word(rng), rng.choice(fields)
        word = word.capitalize() if rng.random() < 0.6 else word
        last = f" and press {rng.choice(buttons).label}" if buttons else ""
        text = rng.choice((f'Enter "{word}" into the text field{last}.', f'Type "{word}" into the textbox{last}.'))
        actions: list[UiAction] = [Click(_centre(field)), TypeText(word)]
        stage = rng.randrange(3 if buttons else 2)
        if stage == 1:
            return self._example(text, actions[1], actions[:1], None)
        target = field if stage == 0 else rng.choice([one for one in buttons if text.endswith(f"{one.label}.")])
        return self._example(text, Click(_centre(target)), actions[:stage], target)

    def _example(self, text: str, action: UiAction, past: list[UiAction], widget: Widget | None) -> TrainingExample:
        turns = tuple(PastTurn(self._picture, (), self._codec.encode(one, self._frame)) for one in past)
        ids = self._prompt(text, turns)
        reply = self._tokenizer(self._codec.encode(action, self._frame), add_special_tokens=False)["input_ids"]
        prompt = tuple(ids[ids.index(self._image_end) + 1 :])
        return TrainingExample(prompt, (*reply, self._tokenizer.eos_token_id), widget)

    def _prompt(self, text: str, past: tuple[PastTurn, ...]) -> list[int]:
        ids: list[int] = self._prompts.write(Conversation("", text, past, self._picture)).ids.tolist()
        return ids


def _centre(widget: Widget) -> Point:
    x, y = widget.centre
    return Point(min(WIDTH - 1, int(x)), min(HEIGHT - 1, int(y)))


def grid_coordinate(pixel: float, side: int) -> float:
    """A position along a side of `side` pixels, in the grammar's coordinates from 0 to 999."""
    return max(0.0, min(999.0, pixel * 999 / side))
