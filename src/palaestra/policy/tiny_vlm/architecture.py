"""The tiny model's shape: Qwen3-VL's own classes with two million weights and pictures cut into patches of 8 pixels."""

from __future__ import annotations

import math
from typing import Any

import torch

from palaestra.policy.tiny_vlm.tokenizer import NUMBERS

__all__ = ["CODE", "FACTOR", "PATCH", "WAVES", "build_image_processor", "build_model", "number_ids", "waves"]

PATCH, MERGE = 8, 2
FACTOR = PATCH * MERGE
_HIDDEN, _LAYERS = 128, 3
_VISION, _DEPTH = 96, 1
WAVES = 0.5 * 1.25 ** torch.arange(8)
"""Frequencies that numbers are told apart by: enough to draw a bell a few pixels wide, and no finer."""
CODE = 2 * len(WAVES)
"""How long a number's code is. A cell's place, across and then down, fills the first two of these of what the tower
says about it."""


def build_image_processor() -> Any:
    """Cuts pictures up; their size is decided elsewhere."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=1, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": FACTOR**2, "longest_edge": 1280 * FACTOR**2},
    )  # fmt: skip


def build_model(tokenizer: Any, *, seed: int) -> Any:
    """The model with weights drawn from the seed, those of numbers apart."""
    import transformers

    library: Any = transformers  # untyped

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    ids |= {token: tokenizer.convert_tokens_to_ids(token) for token in ("<|image_pad|>", "<|video_pad|>")}
    start, end = (tokenizer.convert_tokens_to_ids(f"<|vision_{side}|>") for side in ("start", "end"))
    text = {
        "vocab_size": len(tokenizer), "hidden_size": _HIDDEN, "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": _HIDDEN // 4,
        "max_position_embeddings": 4096, "initializer_range": 0.05, "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "depth": _DEPTH, "hidden_size": _VISION, "out_hidden_size": _HIDDEN, "intermediate_size": 2 * _VISION,
        "num_heads": 2, "initializer_range": 0.08, "patch_size": PATCH, "temporal_patch_size": 1,
        "spatial_merge_size": MERGE, "num_position_embeddings": 26**2, "deepstack_visual_indexes": [],
    }  # fmt: skip
    config = library.Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=start, vision_end_token_id=end,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = library.Qwen3VLForConditionalGeneration(config)
    model.generation_config = library.GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"], do_sample=True
    )
    _order_numbers(model, tokenizer)
    _order_places(model.model.visual.pos_embed.weight)
    _wire_copying(model)
    return model


def number_ids(tokenizer: Any) -> list[int]:
    """Tokens of 0, 1, … 999."""
    found: list[int] = tokenizer.convert_tokens_to_ids([str(number) for number in range(NUMBERS)])
    return found


def _order_numbers(model: Any, tokenizer: Any) -> None:
    """Let numbers that are close look alike, going in and coming out.

    Drawn at random they would be a thousand unrelated words, and each would have to be seen often. Sines and cosines
    of their value say how far apart they are; that 499 and 501 are neighbours need not be learned.
    """
    code = waves(torch.arange(NUMBERS) / NUMBERS, WAVES)
    ids = torch.tensor(number_ids(tokenizer))
    going_in, coming_out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        # As large as what a layer adds; smaller, a word would be drowned by the first thing that is said about it.
        going_in.mul_(10.0)
        for weight, place in ((going_in, 2 * CODE), (coming_out, _HIDDEN - CODE)):
            weight[ids] = weight[ids] * 0.1
            weight[ids, place : place + CODE] += 0.4 * code


def _wire_copying(model: Any) -> None:
    """Let the last layer's first two heads carry a cell's place across and down to where numbers are said.

    Which cell, they have to learn; that a place is said by copying its code, they need not.
    """
    attention, size = model.model.language_model.layers[-1].self_attn, _HIDDEN // 4
    one = torch.eye(CODE)
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            # Attention that can pick one cell of a hundred from the first step on.
            layer.self_attn.q_norm.weight.fill_(1.5)
            layer.self_attn.k_norm.weight.fill_(1.5)
        for head in range(2):
            own = slice(head * size, (head + 1) * size)
            attention.v_proj.weight[own] = 0.0
            attention.v_proj.weight[head * size : head * size + CODE, head * CODE : (head + 1) * CODE] = one
            attention.o_proj.weight[:, own] = 0.0
            attention.o_proj.weight[_HIDDEN - CODE :, head * size : head * size + CODE] = 1.5 * one


def _order_places(weight: torch.Tensor) -> None:
    """The same for places on the screen, which the tower would otherwise know as unrelated names."""
    side = math.isqrt(len(weight))
    along = torch.arange(side) / side
    code = waves(along, 0.25 * 1.15 ** torch.arange(weight.shape[1] // 4))
    across, down = code.expand(side, -1, -1), code[:, None].expand(-1, side, -1)
    with torch.no_grad():
        weight.copy_(0.5 * torch.cat([across, down], -1).reshape(weight.shape))


def waves(value: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """[values, 2 x frequencies], of mean square 1."""
    phase = 2 * math.pi * value[:, None] * frequencies
    return math.sqrt(2) * torch.cat([phase.sin(), phase.cos()], -1)
