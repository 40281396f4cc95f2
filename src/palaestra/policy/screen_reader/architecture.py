"""The small reading model, with some heads wired so that comparing and copying text need not be discovered.

The features of a token are divided: its place on the screen, its character, the two characters before it, and those
that the output layer reads. Two heads of the first layer start by attending to the two tokens before; two of the second
by attending to tokens with the same characters before them; three of the last by copying a place (x and y), or the
character that follows where the text before it is the same. Which place to look at is learned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from palaestra.policy.screen_reader.modeling import (
    FREQUENCIES,
    PLACE_CODE,
    ScreenReaderConfig,
    ScreenReaderForConditionalGeneration,
    fourier_features,
)
from palaestra.policy.screen_reader.symbols import FIRST_WIDGET, GAP, LINE, SPACE
from palaestra.policy.screen_reader.tokenizer import character_ids, coordinate_ids
from palaestra.policy.screen_reader.tower import CHARACTERS

HIDDEN, LAYERS, HEADS, HEAD_SIZE = 192, 4, 6, 32
THETA = 1e7
"""Base of the rotary positions."""
CHAR_CODE = 32
"""Length of a character's code."""
OWN, BEFORE, BEFORE_THAT = 32, 64, 96
"""Where the codes of a token's character and of the two before it begin."""
PLACE_OUT, CHAR_OUT = 128, 144
"""Where the output layer reads a coordinate and a character."""
X_HEAD, Y_HEAD, COPY_HEAD = 0, 1, 2
"""Heads of the last layer."""
_BOUNDARIES = ' "\n'
"""Characters between words, which have similar codes."""
_FAST = 5
"""The frequencies of rotary positions by which a head tells neighbouring tokens apart."""
_FIRST_SLOW = 6
"""The first frequency that hardly turns within a prompt."""


def build_model(tokenizer: Any, *, seed: int) -> ScreenReaderForConditionalGeneration:
    """The model before training."""
    import transformers

    library: Any = transformers  # untyped

    end, padding = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    text = library.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=4096,
        attention_bias=True,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
        tie_word_embeddings=False,
    )
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    config = ScreenReaderConfig(text_config=text, image_token_id=image, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ScreenReaderForConditionalGeneration(config)
        model.generation_config = library.GenerationConfig(
            eos_token_id=[end, padding], pad_token_id=padding, do_sample=True
        )
        with torch.no_grad():
            _init_embeddings(model, tokenizer)
            _init_heads(model)
    return model


def _character_codes() -> dict[str, Tensor]:
    """A code per character; cases of a letter are similar, and so are the characters between words."""
    # Sorted: the order of a set of strings differs from process to process, and with it the codes.
    codes = {char: torch.randn(CHAR_CODE) for char in sorted({*map(chr, range(128)), *CHARACTERS})}
    for char, code in list(codes.items()):
        if char.isupper() and char.isascii():
            codes[char] = 0.85 * codes[char.lower()] + 0.53 * code
    boundary = torch.randn(CHAR_CODE)
    for char in _BOUNDARIES:
        codes[char] = 0.9 * boundary + 0.44 * codes[char]
    return codes


def _init_embeddings(model: Any, tokenizer: Any) -> None:
    codes = _character_codes()
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    inputs.normal_(0, 0.3)
    outputs.normal_(0, 0.05)
    symbol, place, look = (
        model.model.vision_tower.symbol.weight,
        model.model.vision_tower.place.weight,
        model.model.vision_tower.look,
    )
    symbol.normal_(0, 0.3)
    look[2].weight.mul_(0.5)
    inputs[:, : 4 * CHAR_CODE] = 0
    symbol[:, : 4 * CHAR_CODE] = 0
    ascii_chars = "".join(chr(code) for code in range(128))
    for char, token in zip(ascii_chars, character_ids(tokenizer, ascii_chars), strict=True):
        if token >= 0:
            inputs[token, OWN : OWN + CHAR_CODE] = codes[char]
            outputs[token, CHAR_OUT : CHAR_OUT + CHAR_CODE] += 0.25 * codes[char]
    for place_in_table, char in enumerate(CHARACTERS):
        symbol[place_in_table, OWN : OWN + CHAR_CODE] = codes[char]
    for special, char in ((SPACE, " "), (GAP, " "), (LINE, "\n")):
        symbol[special, OWN : OWN + CHAR_CODE] = codes[char]
    symbol[FIRST_WIDGET:, OWN : OWN + CHAR_CODE] = codes["\n"] * 0.9
    place.zero_()
    place[: 2 * PLACE_CODE] = 0.7 * torch.eye(2 * PLACE_CODE)
    code = fourier_features(torch.arange(1000) / 999, FREQUENCIES)
    for ids in coordinate_ids(tokenizer):
        outputs[ids, PLACE_OUT : PLACE_OUT + PLACE_CODE] += 0.4 * code
        inputs[ids, PLACE_OUT : PLACE_OUT + PLACE_CODE] = 0.4 * code


def _init_heads(model: Any) -> None:
    layers = model.model.language_model.layers
    for head, offset in ((0, 1), (1, 2)):
        _attend_back(layers[0].self_attn, head, offset)
        _copy(layers[0].self_attn, head, OWN, (BEFORE, BEFORE_THAT)[head], CHAR_CODE, gain=0.5)
    for head in (0, 1):
        _attend_same(layers[1].self_attn, head, [(OWN, OWN, 8), (BEFORE, BEFORE, 6), (BEFORE_THAT, BEFORE_THAT, 6)])
    last = layers[-1].self_attn
    for head in (X_HEAD, Y_HEAD):
        _copy(last, head, head * PLACE_CODE, PLACE_OUT, PLACE_CODE, gain=1.5)
    _attend_same(last, COPY_HEAD, [(OWN, BEFORE, 12), (BEFORE, BEFORE_THAT, 8)])
    _copy(last, COPY_HEAD, OWN, CHAR_OUT, CHAR_CODE, gain=1.0)


def _rows(head: int) -> slice:
    return slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)


def _attend_back(attention: Any, head: int, offset: int) -> None:
    """Make a head attend to the token `offset` places before."""
    half, strength = HEAD_SIZE // 2, 7.0
    frequency = THETA ** (-torch.arange(half) / half)
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[_rows(head)] *= 0.05
        projection.bias[_rows(head)] = 0.0
    used = torch.arange(_FAST)
    attention.q_proj.bias[head * HEAD_SIZE + used] = strength
    attention.k_proj.bias[head * HEAD_SIZE + used] = strength * torch.cos(offset * frequency[used])
    attention.k_proj.bias[head * HEAD_SIZE + half + used] = strength * torch.sin(offset * frequency[used])


def _attend_same(attention: Any, head: int, pairs: list[tuple[int, int, int]]) -> None:
    """Make a head attend where the code at `key` equals the query's code at `query`, for each (query, key, dimensions).

    Uses only those features of a head that rotary positions hardly turn.
    """
    half = HEAD_SIZE // 2
    slow = [*range(_FIRST_SLOW, half), *range(half + _FIRST_SLOW, HEAD_SIZE)]
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[_rows(head)] *= 0.05
        projection.bias[_rows(head)] = 0.0
    start = 0
    for query, key, size in pairs:
        basis = torch.linalg.qr(torch.randn(CHAR_CODE, CHAR_CODE))[0][:size]
        rows = torch.tensor(slow[start : start + size]) + head * HEAD_SIZE
        attention.q_proj.weight[rows, query : query + CHAR_CODE] = basis
        attention.k_proj.weight[rows, key : key + CHAR_CODE] = basis
        start += size


def _copy(attention: Any, head: int, source: int, target: int, size: int, *, gain: float) -> None:
    """Make a head copy features `source` of what it attends to into features `target`."""
    attention.v_proj.weight[_rows(head)] = 0.0
    attention.o_proj.weight[:, _rows(head)] = 0.0
    first = head * HEAD_SIZE
    attention.v_proj.weight[first : first + size, source : source + size] = torch.eye(size)
    attention.o_proj.weight[target : target + size, first : first + size] = gain * torch.eye(size)
