"""The tiny model's tokenizer: bytes, the words of instructions, and phrases of the action grammar.

A click is six tokens, because every fixed piece of its JSON is one token and so is every number from 0 to 999. Other
text is single bytes, apart from a few hundred words that instructions use: an unknown caption is spelled, so that it
can be compared letter by letter with the text on the screen.
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
from palaestra.policy.tiny_vlm.screens import COLOURS, ORDINALS

CLICK = f'{CALL}left_click", "coordinate": ['
_PHRASES = (
    "user\n", "assistant\n", *REQUEST.partition("{instruction}")[0:1], "\n\nPrevious actions:\n",
    "\n\nPrevious actions:\nNone", "\nStep ", ": ", ", ",
    *(f'{CALL}{word}", "coordinate": [' for word in POINTER_ACTIONS),
    *(f'{CALL}{word}"}}}}\n</tool_call>' for word in POINTER_ACTIONS),
    "]}}\n</tool_call>", f'{CALL}type", "text": "', f'{CALL}answer", "text": "', '"}}\n</tool_call>',
    f'{CALL}key", "keys": ["', '", "', '"]}}\n</tool_call>', f'{CALL}wait", "time": ', "}}\n</tool_call>",
    f'{CALL}scroll", "pixels": ', f'{CALL}hscroll", "pixels": ', ', "coordinate": [',
    f'{CALL}terminate", "status": "success"}}}}\n</tool_call>',
    f'{CALL}terminate", "status": "failure"}}}}\n</tool_call>',
)  # fmt: skip
_KEYS = "enter tab escape backspace delete space up down left right home end shift ctrl alt".split()
_VERBS = "click press tap choose select focus enter type close open find check tick switch follow go push hit"
_WORDS = (
    f"{_VERBS} the a an on in into of to and then from by button buttons box boxes textbox text input field textarea "
    "area checkbox radio link tab page part widget dialog window cross square colored coloured color colour labeled "
    "called named with that says first second third fourth fifth last top bottom left right upper lower leftmost "
    "rightmost topmost bottommost largest smallest submit clicking one it its is at screen corner middle centre "
    "cursor item sign password username name all both any other next previous row rows sheet form each time"
).split()


def _words() -> list[str]:
    plain = [*dict.fromkeys([*_WORDS, *COLOURS, "grey", *_KEYS])]
    # The byte-level alphabet writes a space before a word as Ġ.
    forms = [form for word in plain for form in (word, word.capitalize(), f"Ġ{word}", f"Ġ{word.capitalize()}")]
    return [*forms, *(ordinal[1:] for ordinal in ORDINALS)]


def build_tokenizer() -> Any:
    """Build the tokenizer; nothing in it is learned from data."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    library: Any = transformers  # untyped

    entries = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *_words()])
    # Without merges, a word is one token if it is in the vocabulary as a whole, and otherwise its bytes.
    model = models.BPE(vocab={entry: place for place, entry in enumerate(entries)}, merges=[], ignore_merges=True)
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    inner.add_tokens([AddedToken(str(number), normalized=False) for number in range(10, COORDINATES)])
    inner.add_tokens([AddedToken(phrase, normalized=False) for phrase in add_folded_calls(_PHRASES)])
    return library.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


CHAT_TEMPLATE = """\
{#- A system message is left out: this model was taught its one grammar and cannot be told another. -#}
{%- for message in messages if message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
