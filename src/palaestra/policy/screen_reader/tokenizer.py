"""The reading model's tokenizer: characters, coordinates and phrases of the action grammar.

All text is spelled, so that it can be compared with the text on the screen character by character. A click is five
tokens: the phrase before the coordinates, `[x`, `, y]`, the phrase after them and the end.
"""

from __future__ import annotations

from typing import Any

from palaestra.policy.codecs.qwen_texts import (
    CALL,
    COORDINATES,
    POINTER_ACTIONS,
    REQUEST,
    SPECIAL_TOKENS,
    add_folded_calls,
)

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


def build_tokenizer() -> Any:
    """Build the tokenizer; nothing in it is learned from data."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    library: Any = transformers  # untyped
    entries = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={entry: place for place, entry in enumerate(entries)}, merges=[])
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokens = [*(f"[{number}" for number in range(COORDINATES)), *(f", {number}]" for number in range(COORDINATES))]
    tokens += add_folded_calls(_PHRASES)
    inner.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return library.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


def coordinate_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens of x and of y from 0 to 999."""
    return (
        tokenizer.convert_tokens_to_ids([f"[{number}" for number in range(COORDINATES)]),
        tokenizer.convert_tokens_to_ids([f", {number}]" for number in range(COORDINATES)]),
    )


def character_ids(tokenizer: Any, characters: str) -> list[int]:
    """The token of each character that is one byte, and -1 for others."""
    ids = [tokenizer(char, add_special_tokens=False)["input_ids"] for char in characters]
    return [one[0] if len(one) == 1 else -1 for one in ids]
