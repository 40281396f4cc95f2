"""Join a pretrained language model to the vision tower.

The language model keeps its vocabulary and gets further tokens: widgets, coordinates, and phrases of the action
grammar, so that a click is a few tokens. Embeddings of coordinates start as copies of words, because the language model
looks up what followed a word, and can do so with any word from the start. Those of phrases start as the mean of their
pieces.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palaestra.errors import ConfigError
from palaestra.policy.codecs.qwen_texts import CALL
from palaestra.policy.screen_reader.modeling import ScreenReaderConfig, ScreenReaderForConditionalGeneration
from palaestra.policy.screen_reader.segments import SCREEN_FORMAT, SEGMENTS, coordinate_tokens
from palaestra.policy.screen_reader.tokenizer import (
    BLANK,
    CLICK,
    END_CLICK,
    END_TEXT,
    SCROLL,
    TYPE,
    press_key,
    widget_token,
)
from palaestra.policy.screen_reader.tower import WIDGETS

PLACE = "language"
IMAGE = "<|image_pad|>"
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
NAME = "Action: click"
"""The reply begins with the text of the target, so that its coordinates are what followed that text on the screen."""
NAMED_CLICK = f"\n{CLICK}"
_KEYS = "enter tab escape backspace".split()
_PHRASES = (
    NAME, NAMED_CLICK, CLICK, END_CLICK, TYPE, END_TEXT, SCROLL, *(press_key(key) for key in _KEYS),
    f'{CALL}terminate", "status": "success"}}}}\n</tool_call>',
)  # fmt: skip
_MAX_LENGTH = 4096
CHAT_TEMPLATE = """\
{#- The picture comes before the text. A system message is left out: the action grammar is learned. -#}
{%- for message in messages if message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content if part.type == 'image' -%}
{{- '<|image_pad|>\\n' -}}
{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}
{{- part.text -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def load_language_model(path: Path) -> tuple[Any, Any]:
    """A causal language model in float32 and its tokenizer, from a directory or a GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not path.exists():
        raise ConfigError(PLACE, str(path), "no such file or directory", "Name a directory or a GGUF file")
    source, options = path, {}
    if path.suffix == ".gguf":
        source, options = path.parent, {"gguf_file": path.name}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, local_files_only=True, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True, **options)
    except (OSError, ValueError, ImportError) as error:
        reason = f"cannot be loaded ({' '.join(str(error).split())[:200]})"
        remedy = "Name the directory of a causal language model, or a GGUF file (pip install gguf accelerate)"
        raise ConfigError(PLACE, str(path), reason, remedy) from None
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in ("<|im_start|>", END) if token not in vocabulary]
    if missing or not getattr(tokenizer, "is_fast", False):
        reason = f"its tokenizer has no token {missing[0]}" if missing else "its tokenizer is not a fast one"
        raise ConfigError(PLACE, str(path), reason, "Use a chat model with the ChatML format, such as SmolLM2 or Qwen")
    return model, tokenizer


def extend_tokenizer(tokenizer: Any) -> Any:
    """The language model's tokenizer with the further tokens; the ids of its own stay the same."""
    import transformers
    from tokenizers import AddedToken, Tokenizer

    library: Any = transformers  # untyped
    inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    special = [IMAGE, BLANK, *(widget_token(kind, on=on) for kind in WIDGETS for on in (False, True))]
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    x, y = coordinate_tokens()
    inner.add_tokens([AddedToken(token, normalized=False) for token in (*x, *y, *_PHRASES)])
    return library.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=tokenizer.pad_token or END,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=_MAX_LENGTH,
        **{SCREEN_FORMAT: SEGMENTS},
    )


def join_language_model(language: Any, base: Any, tokenizer: Any, *, seed: int) -> Any:
    """The reading model of a language model; `base` is its own tokenizer, `tokenizer` the extended one."""
    import transformers

    library: Any = transformers  # untyped
    end = tokenizer.convert_tokens_to_ids(END)
    settings = language.config.to_dict()
    settings.pop("quantization_config", None)
    is_tied = bool(settings.get("tie_word_embeddings"))
    first = len(base)
    settings |= {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": end, "dtype": "float32"}
    config = ScreenReaderConfig(
        text_config=settings,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        tie_word_embeddings=is_tied,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = ScreenReaderForConditionalGeneration(config)
        weights = language.base_model.state_dict()
        del weights["embed_tokens.weight"]
        missing, unexpected = model.model.language_model.load_state_dict(weights, strict=False)
        if unexpected or missing != ["embed_tokens.weight"]:
            raise ConfigError(PLACE, config.text_config.model_type, f"has other weights ({missing}, {unexpected})")
        pairs = [(language.get_input_embeddings().weight, model.get_input_embeddings().weight)]
        if not is_tied:
            pairs.append((language.get_output_embeddings().weight, model.get_output_embeddings().weight))
        for old, new in pairs:
            _init_embeddings(new, old, base, tokenizer, first, seed)
        connector = model.model.vision_tower
        for part in (connector.place, connector.look[2]):
            part.weight.zero_()
        connector.look[2].bias.zero_()
    model.generation_config = library.GenerationConfig(eos_token_id=[end], pad_token_id=tokenizer.pad_token_id)
    model.tie_weights()
    return model


def _init_embeddings(new: Tensor, old: Tensor, base: Any, tokenizer: Any, first: int, seed: int) -> None:
    """Copy the rows of known tokens, and derive those of further tokens from them."""
    new[:first] = old[:first]
    norm = old[:first].norm(dim=-1).median()
    words = _plain_words(base)
    rng = random.Random(seed)
    x, y = coordinate_tokens()
    borrowed = dict(zip((*x, *y), rng.sample(words, len(x) + len(y)), strict=True))
    for token, place in tokenizer.get_vocab().items():
        if place < first:
            continue
        if token in borrowed:
            new[place] = old[borrowed[token]]
        else:
            text = token.strip("<|>*") if token.startswith("<|") else token
            mean = old[base(text, add_special_tokens=False)["input_ids"]].mean(0)
            mean = mean + 0.3 * norm * torch.randn(len(mean)) / len(mean) ** 0.5
            new[place] = mean * (norm / mean.norm())


def _plain_words(base: Any) -> list[int]:
    """Tokens that are a longer lower-case word after a space, from the rarer half of the vocabulary."""
    vocabulary = base.get_vocab()
    words = [
        place
        for token, place in vocabulary.items()
        if place > len(vocabulary) // 3
        and len(token) >= 5
        and token[0] in "\u0120\u2581"
        and token[1:].isalpha()
        and token[1:].islower()
    ]
    if len(words) < 2 * 100:
        words = sorted(vocabulary.values())
    return sorted(words)
