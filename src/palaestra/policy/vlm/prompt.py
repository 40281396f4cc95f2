"""From a conversation about a screen to the exact token ids a model is given.

The chat template writes everything except the model's own answers: these enter as the very ids that were sampled.
Text that is tokenised again may come out as other tokens, and then what is learned from is not what was said. As long
as no turn leaves the window, every prompt starts with the previous prompt and its answer, id by id.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from palaestra.errors import ConfigError
from palaestra.policy.vlm.config import REQUEST
from palaestra.policy.vlm.picture import Picture, PicturePreprocessor
from palaestra.strict_json import find_lone_surrogate

__all__ = ["Conversation", "PastTurn", "Prompt", "PromptWriter"]

Ints = npt.NDArray[np.int32]

# Stands in the rendered text where an answer goes. From the private use area: no font draws it and nobody types it.
ANSWER = "\ue0f1answer\ue0f1"
LONGEST_LINE = 300
"""Characters of one older turn. A model that rambles would otherwise fill its own prompt with it."""


@dataclass(frozen=True, eq=False)
class PastTurn:
    """One turn that lies behind: what was seen, and what was said to it."""

    picture: Picture
    token_ids: Sequence[int] | Ints
    """As sampled, the end token included."""
    text: str
    """What stands for the turn once it has left the window."""


@dataclass(frozen=True)
class Conversation:
    """Everything a model knows when it is to answer."""

    system: str
    instruction: str
    past: Sequence[PastTurn]
    now: Picture

    def __post_init__(self) -> None:
        for place, text in (("system", self.system), ("instruction", self.instruction)):
            # A tokenizer would raise a TypeError that names neither.
            if find_lone_surrogate(text) is not None:
                reason = "holds half of a surrogate pair, which no tokenizer takes"
                raise ConfigError(f"conversation.{place}", text, reason, "Write the whole character")


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids, and the pictures they speak of, in their order."""

    ids: Ints
    pictures: tuple[Picture, ...]


class PromptWriter:
    """Writes prompts for one model."""

    def __init__(
        self, tokenizer: Any, template: str, shop: PicturePreprocessor, *, image_token: int, history: int,
        request: str = REQUEST, name: str = "",
    ) -> None:  # fmt: skip
        self.tokenizer, self.template, self.shop = tokenizer, template, shop
        self.image_token, self.history, self.request, self.name = image_token, history, request, name
        self._ids = functools.lru_cache(maxsize=1024)(self._tokenised)
        self._one_at_a_time = threading.Lock()
        self._structure: list[str] = []
        self.end_of_turn = self._probe()

    def write(self, conversation: Conversation) -> Prompt:
        """The prompt for the model's next answer."""
        past = list(conversation.past)
        left = max(0, len(past) - self.history)
        older, window = past[:left], past[left:]
        pictures = (*(turn.picture for turn in window), conversation.now)
        ids: list[int] = []
        for turn, picture in enumerate(pictures):
            piece = list(self._ids(self._rendered(conversation, older, turn)))
            if turn:
                answer = [int(token) for token in window[turn - 1].token_ids]
                # An answer that was cut short has no end token of its own and needs the template's.
                piece = piece[1:] if answer and answer[-1] == piece[0] else piece
                ids += answer
            ids += self._with_picture(piece, self.shop.tokens(picture.size))
        return Prompt(np.array(ids, np.int32), pictures)

    def _rendered(self, conversation: Conversation, older: Sequence[PastTurn], turn: int) -> str:
        """What the template adds for one turn: all up to the first answer, or all between two answers."""
        asked = self.request.replace("{previous}", self._lines(older)).replace(
            "{instruction}", self._harmless(conversation.instruction)
        )
        messages = [
            _message("system", conversation.system),
            _message("user", asked, picture=True),
        ]
        for _ in range(turn):
            messages += [_message("assistant", ANSWER), _message("user", picture=True)]
        parts = self._applied(messages).split(ANSWER)
        if len(parts) != turn + 1:
            raise self._refusal(f"writes {len(parts) - 1} of {turn} answers of a conversation")
        return parts[-1]

    def _lines(self, older: Sequence[PastTurn]) -> str:
        lines = []
        for step, turn in enumerate(older, start=1):
            line = " ".join(self._harmless(turn.text).split())
            lines.append(f"Step {step}: {line[:LONGEST_LINE]}" + ("…" if len(line) > LONGEST_LINE else ""))
        return "\n".join(lines) or "None"

    def _harmless(self, text: str) -> str:
        """The text without anything that would end the turn, begin another, or stand for a picture."""
        for token in (ANSWER, *self._structure):
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def _applied(self, messages: list[dict[str, Any]]) -> str:
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, chat_template=self.template, tokenize=False, add_generation_prompt=True
                )
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise self._refusal(f"fails on a conversation with pictures ({error})") from None

    def _tokenised(self, text: str) -> tuple[int, ...]:
        # Two threads at once in one tokenizer raise; the pieces are remembered, so this is seldom waited for.
        with self._one_at_a_time:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _with_picture(self, piece: list[int], tokens: int) -> list[int]:
        places = [index for index, token in enumerate(piece) if token == self.image_token]
        if len(places) != 1:
            raise self._refusal(f"shows {len(places)} pictures where there is one")
        return piece[: places[0]] + [self.image_token] * tokens + piece[places[0] + 1 :]

    def _probe(self) -> int | None:
        """Learn the template's structure; gives the token it ends an answer with, None when that is plain text."""
        nothing = Conversation("", "", (), Picture(b"", (0, 0)))
        before, after = (self._ids(self._rendered(nothing, (), turn)) for turn in (0, 1))
        for piece in (before, after):
            self._with_picture(list(piece), 1)
        # Tokens of their own that occur in a conversation about nothing. Others, such as the brackets of a tool call,
        # belong to what may be said.
        added = set(self.tokenizer.added_tokens_decoder)
        own = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} - {None}
        structure = self.tokenizer.convert_ids_to_tokens(sorted(added & {*before, *after} | own))
        self._structure = sorted(structure, key=len, reverse=True)
        return after[0] if after[0] in added else None

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            "model.name", self.name, f"its chat template {reason}",
            "Use the template that belongs to the model's instruction-tuned variant",
        )  # fmt: skip


def _message(role: str, text: str = "", *, picture: bool = False) -> dict[str, Any]:
    parts: list[dict[str, str]] = [{"type": "image"}] if picture else []
    if text:
        parts.append({"type": "text", "text": text})
    return {"role": role, "content": parts}
