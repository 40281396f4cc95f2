"""From a conversation about a screen to the token ids of a prompt.

The chat template renders everything except the model's own replies, which are inserted as the ids that were sampled:
tokenizing a text again may give other tokens than the ones the model produced. As long as no turn leaves the history
window, every prompt starts with the previous prompt and its reply, id by id.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from palaestra.errors import ConfigError
from palaestra.policy.codecs.qwen_texts import REQUEST
from palaestra.policy.vlm.picture import Picture, PicturePreprocessor
from palaestra.strict_json import find_lone_surrogate

Ints = npt.NDArray[np.int32]

# Placeholder of a reply in the rendered text, from the private use area of Unicode.
REPLY = "\ue0f1answer\ue0f1"
MAX_LINE_CHARS = 300
"""Maximum length of an older turn in the prompt."""


@dataclass(frozen=True, eq=False)
class PastTurn:
    """A past turn: the screen and the model's reply."""

    picture: Picture
    token_ids: Sequence[int] | Ints
    """As sampled, including the end token."""
    text: str
    """Represents the turn once it has left the history window."""


@dataclass(frozen=True)
class Conversation:
    """Everything a model is given for its next reply."""

    system: str
    instruction: str
    past: Sequence[PastTurn]
    now: Picture

    def __post_init__(self) -> None:
        for place, text in (("system", self.system), ("instruction", self.instruction)):
            # A tokenizer would raise a TypeError without naming the text.
            if find_lone_surrogate(text) is not None:
                reason = "holds half of a surrogate pair, which no tokenizer takes"
                raise ConfigError(f"conversation.{place}", text, reason, "Write the whole character")


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids, and the pictures they refer to, in order."""

    ids: Ints
    pictures: tuple[Picture, ...]


class PromptWriter:
    """Writes prompts for one model."""

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        preprocessor: PicturePreprocessor,
        *,
        image_token: int,
        history: int,
        request: str = REQUEST,
        name: str = "",
    ) -> None:
        self.tokenizer, self.template, self.preprocessor = tokenizer, template, preprocessor
        self.image_token, self.history, self.request, self.name = image_token, history, request, name
        self._ids = functools.lru_cache(maxsize=1024)(self._tokenize)
        self._tokenizer_lock = threading.Lock()
        self._structure: list[str] = []
        """Special tokens that the template uses."""
        self.end_of_turn = self._probe_template()

    def write(self, conversation: Conversation) -> Prompt:
        """The prompt for the model's next reply."""
        past = list(conversation.past)
        start = max(0, len(past) - self.history)
        older, window = past[:start], past[start:]
        pictures = (*(turn.picture for turn in window), conversation.now)
        ids: list[int] = []
        for turn, picture in enumerate(pictures):
            piece = list(self._ids(self._render(conversation, older, turn)))
            if turn:
                reply = [int(token) for token in window[turn - 1].token_ids]
                # A reply that was cut has no end token and needs the template's.
                piece = piece[1:] if reply and reply[-1] == piece[0] else piece
                ids += reply
            ids += self._expand_picture(piece, self.preprocessor.count_tokens(picture))
        return Prompt(np.array(ids, np.int32), pictures)

    def tokenize_reply(self, text: str) -> list[int]:
        """The token ids of a text that the model could have replied, without the end token."""
        return list(self._tokenize(text))

    def format(self) -> dict[str, Any]:
        """Everything here that determines the tokens of a prompt, as plain JSON."""
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()), ensure_ascii=True)
        return {
            "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest(),
            "chat_template": hashlib.sha256(self.template.encode()).hexdigest(),
            "history": self.history,
            "request": self.request,
        }

    def _render(self, conversation: Conversation, older: Sequence[PastTurn], turn: int) -> str:
        """The text of one turn: everything before the first reply, or everything between two replies."""
        request = self.request.replace("{previous}", self._summarize(older))
        request = request.replace("{instruction}", self._escape(conversation.instruction))
        messages = [_message("system", conversation.system), _message("user", request, picture=True)]
        for _ in range(turn):
            messages += [_message("assistant", REPLY), _message("user", picture=True)]
        parts = self._apply_template(messages).split(REPLY)
        if len(parts) != turn + 1:
            raise self._template_error(f"writes {len(parts) - 1} of {turn} replies of a conversation")
        return parts[-1]

    def _summarize(self, older: Sequence[PastTurn]) -> str:
        lines = []
        for step, turn in enumerate(older, start=1):
            line = " ".join(self._escape(turn.text).split())
            lines.append(f"Step {step}: {line[:MAX_LINE_CHARS]}" + ("…" if len(line) > MAX_LINE_CHARS else ""))
        return "\n".join(lines) or "None"

    def _escape(self, text: str) -> str:
        """Break up special tokens that would end the turn, begin another, or stand for a picture."""
        for token in (REPLY, *self._structure):
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def _apply_template(self, messages: list[dict[str, Any]]) -> str:
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, chat_template=self.template, tokenize=False, add_generation_prompt=True
                )
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise self._template_error(f"fails on a conversation with pictures ({error})") from None

    def _tokenize(self, text: str) -> tuple[int, ...]:
        # A tokenizer is not thread-safe. Results are cached, so the lock is rarely contended.
        with self._tokenizer_lock:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _expand_picture(self, piece: list[int], tokens: int) -> list[int]:
        """Repeat the image token once per token of the picture."""
        places = [index for index, token in enumerate(piece) if token == self.image_token]
        if len(places) != 1:
            raise self._template_error(f"shows {len(places)} pictures where there is one")
        return piece[: places[0]] + [self.image_token] * tokens + piece[places[0] + 1 :]

    def _probe_template(self) -> int | None:
        """Find the template's special tokens; returns the one that ends a reply, None if that is plain text."""
        empty = Conversation("", "", (), Picture(b"", (0, 0)))
        before, after = (self._ids(self._render(empty, (), turn)) for turn in (0, 1))
        for piece in (before, after):
            self._expand_picture(list(piece), 1)
        # Only special tokens of an empty conversation. Others, such as tool call tags, may occur in replies.
        added = set(self.tokenizer.added_tokens_decoder)
        own = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} - {None}
        structure = self.tokenizer.convert_ids_to_tokens(sorted(added & {*before, *after} | own))
        self._structure = sorted(structure, key=len, reverse=True)
        return after[0] if after[0] in added else None

    def _template_error(self, reason: str) -> ConfigError:
        remedy = "Use the template that belongs to the model's instruction-tuned variant"
        return ConfigError("model.name", self.name, f"its chat template {reason}", remedy)


def _message(role: str, text: str = "", *, picture: bool = False) -> dict[str, Any]:
    parts: list[dict[str, str]] = [{"type": "image"}] if picture else []
    if text:
        parts.append({"type": "text", "text": text})
    return {"role": role, "content": parts}
