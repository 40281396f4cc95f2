"""The reading model's tokenizer: pieces of words, widgets, coordinates and phrases of the action grammar.

Text of the instruction, of the screen and of the reply is divided in the same way, so that a word is compared and
copied as one or a few tokens. Spaces are tokens of their own, and a word is divided at the same places whatever its
case. A click is five tokens: the phrase before the coordinates, `[x`, `, y]`, the phrase after them and the end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from palaestra.policy.codecs.qwen_texts import (
    CALL,
    COORDINATES,
    POINTER_ACTIONS,
    REQUEST,
    SPECIAL_TOKENS,
    add_folded_calls,
)
from palaestra.policy.screen_reader.pages import draw_page
from palaestra.policy.screen_reader.pages.words import random_label, random_value, random_word
from palaestra.policy.screen_reader.tower import CHARACTERS, WIDGETS

MERGES = 400
"""Learned merges of letters; each exists in lower case, with a capital and in upper case."""
SIGNS = "".join(char for char in CHARACTERS if not char.isascii())
"""Characters on screens that are more than a byte long; each is a token."""
BLANK = "<|blank|>"
"""Stands for a screen on which nothing was found."""
_PIECES = r' ?"|[A-Za-z]+|[0-9]{1,2}|[^A-Za-z0-9]'
"""What merges do not cross. An opening quotation mark takes the space before it along."""
_MAX_KNOWN = 50_000
"""Words whose division is remembered."""
_CORPUS_SEED, _CORPUS_WORDS, _CORPUS_PAGES = 0, 20_000, 3_000
_KEYS = (
    "enter tab escape backspace delete space up down left right home end pageup pagedown shift ctrl alt a c v x".split()
)
CLICK = f'{CALL}left_click", "coordinate": '
TYPE = f'{CALL}type", "text": "'
END_TEXT = '"}}\n</tool_call>'
END_CLICK = "}}\n</tool_call>"
SCROLL = f'{CALL}scroll", "pixels": '


def press_key(name: str) -> str:
    """The reply that presses a key."""
    return f'{CALL}key", "keys": ["{name}"]}}}}\n</tool_call>'


def scroll_down(pixels: int) -> str:
    """The reply that scrolls down."""
    return f"{SCROLL}{-pixels}{END_CLICK}"


_PHRASES = (
    "user\n", "assistant\n", *REQUEST.partition("{instruction}")[0:1], "\n\nPrevious actions:\n",
    "\n\nPrevious actions:\nNone", "\nStep ",
    *(f'{CALL}{word}", "coordinate": ' for word in POINTER_ACTIONS),
    *(f'{CALL}{word}"}}}}\n</tool_call>' for word in POINTER_ACTIONS),
    END_CLICK, TYPE, f'{CALL}answer", "text": "', END_TEXT,
    *(press_key(key) for key in _KEYS),
    f'{CALL}key", "keys": ["', '"]}}\n</tool_call>', f'{CALL}wait", "time": ',
    SCROLL, f'{CALL}hscroll", "pixels": ', ', "coordinate": ',
    f'{CALL}terminate", "status": "success"}}}}\n</tool_call>',
    f'{CALL}terminate", "status": "failure"}}}}\n</tool_call>',
)  # fmt: skip

CHAT_TEMPLATE = """\
{#- A system message is left out: this model was taught its one grammar. The text comes before the picture, so that what
is on the screen can be compared with it. -#}
{%- for message in messages if message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content if part.type == 'text' -%}
{{- part.text -}}
{%- endfor -%}
{%- for part in message.content if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def widget_token(kind: str, *, on: bool) -> str:
    """The token of a widget; `on`: checked or focused."""
    return f"<|{kind}{'*' if on else ''}|>"


def build_tokenizer() -> Any:
    """Build the tokenizer; its merges are learned from the words of synthetic pages, always the same ones."""
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    library: Any = transformers  # untyped
    merges = _add_cases(_learn_merges())
    entries = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries += list(dict.fromkeys(first + second for first, second in merges))
    inner = Tokenizer(models.BPE(vocab={entry: place for place, entry in enumerate(entries)}, merges=merges))
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    special = [*SPECIAL_TOKENS, BLANK, *(widget_token(kind, on=on) for kind in WIDGETS for on in (False, True))]
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokens = [*(f"[{number}" for number in range(COORDINATES)), *(f", {number}]" for number in range(COORDINATES))]
    tokens += [*SIGNS, *add_folded_calls(_PHRASES)]
    inner.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return library.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model directory."""
    import transformers

    library: Any = transformers  # untyped
    return library.PreTrainedTokenizerFast.from_pretrained(path)


def _learn_merges() -> list[tuple[str, str]]:
    """Merges of lower-case letters, and of pairs of digits."""
    import json

    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[^a-z]+"), "removed")
    trainer = trainers.BpeTrainer(vocab_size=26 + MERGES, show_progress=False)
    inner.train_from_iterator(_corpus(), trainer)
    learned = json.loads(inner.to_str())["model"]["merges"]
    digits = [(first, second) for first in "0123456789" for second in "0123456789"]
    return [*((first, second) for first, second in learned), *digits, ("\u0120", '"')]


def _corpus() -> Iterator[str]:
    """Words and instructions of synthetic pages, in lower case."""
    rng = random.Random(_CORPUS_SEED)
    for _ in range(_CORPUS_WORDS):
        yield rng.choice((random_word, random_value, random_label))(rng).lower()
    for _ in range(_CORPUS_PAGES):
        yield from (goal.instruction.lower() for goal in draw_page(rng, dense=False).goals)


def _add_cases(merges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The merges, each followed by the same one with a capital and in upper case."""
    cases = (
        (case_first(first), case_second(second))
        for first, second in merges
        for case_first, case_second in ((str, str), (str.capitalize, str), (str.upper, str.upper))
    )
    return list(dict.fromkeys(cases))


class WordDivider:
    """Divides words that were read on a screen into the tokens that the tokenizer gives the same words in text.

    Added tokens are not recognised: what stands on a screen cannot become a control token.
    """

    def __init__(self, tokenizer: Any) -> None:
        inner = tokenizer.backend_tokenizer
        self._model, self._signs = inner.model, {sign: inner.token_to_id(sign) for sign in SIGNS}
        self._pieces = re.compile(_PIECES)
        self._known: dict[str, list[tuple[int, int]]] = {}

    def divide(self, word: str) -> list[tuple[int, int]]:
        """(token, number of characters) of each piece."""
        known = self._known.get(word)
        if known is None:
            known = [part for piece in self._pieces.findall(word) for part in self._divide_piece(piece)]
            if len(self._known) < _MAX_KNOWN:
                self._known[word] = known
        return known

    def _divide_piece(self, piece: str) -> list[tuple[int, int]]:
        if piece in self._signs:
            return [(self._signs[piece], 1)]
        return [(token.id, len(token.value)) for token in self._model.tokenize(piece)]


def coordinate_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens of x and of y from 0 to 999."""
    return (
        tokenizer.convert_tokens_to_ids([f"[{number}" for number in range(COORDINATES)]),
        tokenizer.convert_tokens_to_ids([f", {number}]" for number in range(COORDINATES)]),
    )


def text_tokens(tokenizer: Any) -> dict[int, str]:
    """The text of each token that is text: pieces of words, digits, signs and spaces."""
    inner = tokenizer.backend_tokenizer
    model = {token: place for token, place in inner.get_vocab(with_added_tokens=False).items() if token.isascii()}
    signs = {sign: inner.token_to_id(sign) for sign in SIGNS}
    spaces = {" ": inner.token_to_id("\u0120"), ' "': inner.token_to_id('\u0120"')}
    return {place: text for text, place in {**model, **signs, **spaces}.items()}
