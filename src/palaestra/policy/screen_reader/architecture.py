"""The small reading model, with some heads wired so that comparing and copying words need not be discovered.

The features of a token are divided: its place on the screen, its own code, the codes of the two tokens before it, the
code of a label that is looked for, and those that the output layer reads.

- First layer: two heads attend to the two tokens before.
- Second layer: heads attend to tokens with the same code, to the token that is the label before this one, and to tokens
  with the same label. One fetches the label of the focused field.
- Last layer: two heads copy a place (x and y), one copies the token after that label, and one copies the token that
  follows where the two tokens before it are the same.

This is how they start; all weights are trained. Which place to look at is learned.
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
from palaestra.policy.screen_reader.tokenizer import coordinate_ids, text_tokens

HIDDEN, LAYERS, HEADS, HEAD_SIZE = 256, 4, 8, 32
THETA = 1e7
"""Base of the rotary positions."""
TOKEN_CODE = 32
"""Length of a token's code."""
OWN, BEFORE, BEFORE_THAT = 32, 64, 96
"""Where the codes of a token and of the two before it begin."""
LABEL = 128
"""Where the code of the label of the focused field begins."""
PLACE_OUT, TOKEN_OUT = 160, 176
"""Where the output layer reads a coordinate and a token to copy."""
X_HEAD, Y_HEAD, START_HEAD, COPY_HEAD = (LAYERS - 1, 0), (LAYERS - 1, 1), (LAYERS - 1, 2), (LAYERS - 1, 3)
"""Layer and head that copy a place, the first token of a text and the tokens that follow."""
FOCUS_HEAD = (1, 4)
"""Layer and head that attend to the focused field."""
_FAST = 5
"""The frequencies of rotary positions by which a head tells neighbouring tokens apart."""
_SHARPNESS = 1.3
"""Scale of the projections of comparing heads."""
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


def _token_codes(tokenizer: Any) -> dict[int, Tensor]:
    """A code per token of text; those of a word in different cases are similar."""
    texts = text_tokens(tokenizer)
    # Sorted: the order of a set of strings differs from process to process, and with it the codes.
    words = {word: torch.randn(TOKEN_CODE) for word in sorted({text.lower() for text in texts.values()})}
    return {token: 0.8 * words[text.lower()] + 0.6 * torch.randn(TOKEN_CODE) for token, text in sorted(texts.items())}


def _init_embeddings(model: Any, tokenizer: Any) -> None:
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    inputs.normal_(0, 0.3)
    outputs.normal_(0, 0.05)
    place, look = model.model.vision_tower.place.weight, model.model.vision_tower.look
    look[2].weight.mul_(0.5)
    inputs[:, : 5 * TOKEN_CODE] = 0
    # Widgets and control tokens have codes too: a field is what stands before the text in it.
    inputs[:, OWN : OWN + TOKEN_CODE].normal_()
    for token, code in _token_codes(tokenizer).items():
        inputs[token, OWN : OWN + TOKEN_CODE] = code
        outputs[token, TOKEN_OUT : TOKEN_OUT + TOKEN_CODE] += 0.25 * code
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
        _copy(layers[0].self_attn, head, OWN, (BEFORE, BEFORE_THAT)[head], TOKEN_CODE, gain=0.5)
    second, last = layers[1].self_attn, layers[-1].self_attn
    for head, query, key in ((0, OWN, OWN), (1, BEFORE, OWN), (2, BEFORE_THAT, OWN), (3, BEFORE, BEFORE)):
        _attend_same(second, head, [(query, (key,), 20)])
    _copy(second, FOCUS_HEAD[1], BEFORE, LABEL, TOKEN_CODE, gain=1.0)
    for _, head in (X_HEAD, Y_HEAD):
        _copy(last, head, head * PLACE_CODE, PLACE_OUT, PLACE_CODE, gain=1.5)
    _attend_same(last, START_HEAD[1], [(LABEL, (BEFORE, BEFORE_THAT), 20)])
    _attend_same(last, COPY_HEAD[1], [(OWN, (BEFORE,), 12), (BEFORE, (BEFORE_THAT,), 8)])
    for _, head in (START_HEAD, COPY_HEAD):
        _copy(last, head, OWN, TOKEN_OUT, TOKEN_CODE, gain=1.0)


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


def _attend_same(attention: Any, head: int, pairs: list[tuple[int, tuple[int, ...], int]]) -> None:
    """Make a head attend where a code at `keys` equals the query's code at `query`, for each (query, keys, dimensions).

    Uses only those features of a head that rotary positions hardly turn.
    """
    half = HEAD_SIZE // 2
    slow = [*range(_FIRST_SLOW, half), *range(half + _FIRST_SLOW, HEAD_SIZE)]
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[_rows(head)] *= 0.05
        projection.bias[_rows(head)] = 0.0
    start = 0
    for query, keys, size in pairs:
        basis = _SHARPNESS * torch.linalg.qr(torch.randn(TOKEN_CODE, TOKEN_CODE))[0][:size]
        rows = torch.tensor(slow[start : start + size]) + head * HEAD_SIZE
        attention.q_proj.weight[rows, query : query + TOKEN_CODE] = basis
        for key in keys:
            attention.k_proj.weight[rows, key : key + TOKEN_CODE] = basis
        start += size


def _copy(attention: Any, head: int, source: int, target: int, size: int, *, gain: float) -> None:
    """Make a head copy features `source` of what it attends to into features `target`."""
    attention.v_proj.weight[_rows(head)] = 0.0
    attention.o_proj.weight[:, _rows(head)] = 0.0
    first = head * HEAD_SIZE
    attention.v_proj.weight[first : first + size, source : source + size] = torch.eye(size)
    attention.o_proj.weight[target : target + size, first : first + size] = gain * torch.eye(size)
