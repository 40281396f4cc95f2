"""The tiny model's architecture: Qwen3-VL's own classes with two million weights and image patches of 8 pixels."""

from __future__ import annotations

import math
from typing import Any

import torch

from palaestra.policy.codecs.qwen_texts import COORDINATES

PATCH, MERGE = 8, 2
FACTOR = PATCH * MERGE
_HIDDEN, _LAYERS = 128, 3
_VISION, _DEPTH = 96, 1
FREQUENCIES = 0.5 * 1.25 ** torch.arange(8)
"""Frequencies of the code of numbers: fine enough for a bell curve a few pixels wide."""
CODE = 2 * len(FREQUENCIES)
"""Length of a number's code. The first `2 * CODE` features of a cell are its x and y position."""


def build_image_processor() -> Any:
    """The image processor; it cuts images into patches and does not resize them."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=1,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": FACTOR**2, "longest_edge": 1280 * FACTOR**2},
    )


def build_model(tokenizer: Any, *, seed: int) -> Any:
    """The model with random weights, except for numbers and positions, which start as Fourier features."""
    import transformers

    library: Any = transformers  # untyped

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    ids |= {token: tokenizer.convert_tokens_to_ids(token) for token in ("<|image_pad|>", "<|video_pad|>")}
    start, end = (tokenizer.convert_tokens_to_ids(f"<|vision_{side}|>") for side in ("start", "end"))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": _HIDDEN // 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": _DEPTH,
        "hidden_size": _VISION,
        "out_hidden_size": _HIDDEN,
        "intermediate_size": 2 * _VISION,
        "num_heads": 2,
        "initializer_range": 0.08,
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 26**2,
        "deepstack_visual_indexes": [],
    }
    config = library.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = library.Qwen3VLForConditionalGeneration(config)
    model.generation_config = library.GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"], do_sample=True
    )
    _init_number_embeddings(model, tokenizer)
    _init_position_embeddings(model.model.visual.pos_embed.weight)
    _init_copying_heads(model)
    return model


def number_ids(tokenizer: Any) -> list[int]:
    """Tokens of 0, 1, … 999."""
    ids: list[int] = tokenizer.convert_tokens_to_ids([str(number) for number in range(COORDINATES)])
    return ids


def _init_number_embeddings(model: Any, tokenizer: Any) -> None:
    """Give numbers that are close similar input and output embeddings.

    With random embeddings they would be a thousand unrelated tokens, each of which needs many examples. Fourier
    features encode how far apart they are, so that the model need not learn that 499 and 501 are neighbours.
    """
    code = fourier_features(torch.arange(COORDINATES) / COORDINATES, FREQUENCIES)
    ids = torch.tensor(number_ids(tokenizer))
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        # As large as the output of a layer, which would otherwise drown the token.
        inputs.mul_(10.0)
        for weight, place in ((inputs, 2 * CODE), (outputs, _HIDDEN - CODE)):
            weight[ids] = weight[ids] * 0.1
            weight[ids, place : place + CODE] += 0.4 * code


def _init_copying_heads(model: Any) -> None:
    """Initialise the last layer's first two heads to copy a cell's x and y position to the output.

    Which cell to attend to is learned in training.
    """
    attention, size = model.model.language_model.layers[-1].self_attn, _HIDDEN // 4
    identity = torch.eye(CODE)
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            # Sharp enough attention to pick one cell of a hundred from the start.
            layer.self_attn.q_norm.weight.fill_(1.5)
            layer.self_attn.k_norm.weight.fill_(1.5)
        for head in range(2):
            own = slice(head * size, (head + 1) * size)
            attention.v_proj.weight[own] = 0.0
            attention.v_proj.weight[head * size : head * size + CODE, head * CODE : (head + 1) * CODE] = identity
            attention.o_proj.weight[:, own] = 0.0
            attention.o_proj.weight[_HIDDEN - CODE :, head * size : head * size + CODE] = 1.5 * identity


def _init_position_embeddings(weight: torch.Tensor) -> None:
    """Initialise the vision tower's position embeddings with Fourier features."""
    side = math.isqrt(len(weight))
    along = torch.arange(side) / side
    code = fourier_features(along, 0.25 * 1.15 ** torch.arange(weight.shape[1] // 4))
    across, down = code.expand(side, -1, -1), code[:, None].expand(-1, side, -1)
    with torch.no_grad():
        weight.copy_(0.5 * torch.cat([across, down], -1).reshape(weight.shape))


def fourier_features(value: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Sines and cosines of the values: [values, 2 x frequencies], of mean square 1."""
    phase = 2 * math.pi * value[:, None] * frequencies
    return math.sqrt(2) * torch.cat([phase.sin(), phase.cos()], -1)
