"""Qwen2.5-VL and Qwen3-VL at toy size: the real classes, a tokenizer with the real special tokens, random weights."""

import json
from pathlib import Path

import torch

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
WORDS = [
    '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [4, 8]}}\n</tool_call>',
    "You are a helpful assistant.\n\nPlease generate the next move according to the UI screenshot.",
    "Previous actions:\nStep 1: click the button\nNone\nInstruction: press OK",
]
# Says what the published templates say for conversations of text and pictures, default system message included.
TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
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
HIDDEN, LAYERS, PATCH, VOCABULARY = 32, 2, 4, 400
FACTOR = PATCH * 2
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(WORDS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def config(family, ids, *, hidden=HIDDEN, layers=LAYERS):
    import transformers

    section = [hidden // 16, hidden // 32, hidden // 32]  # of half a head, for time, height and width
    text = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section},
    }  # fmt: skip
    tokens = {
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": hidden, "out_hidden_size": hidden, "intermediate_size": 2 * hidden, "num_heads": 4,
        "patch_size": PATCH, "spatial_merge_size": 2,
    }  # fmt: skip
    if family == "qwen2_5_vl":
        vision |= {"window_size": 4 * FACTOR, "fullatt_block_indexes": [1]}
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    if family == "qwen2_vl":
        vision |= {"embed_dim": hidden, "mlp_ratio": 2}
        return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    text |= {"head_dim": hidden // 4}
    text["rope_parameters"]["mrope_interleaved"] = True
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)


def model(family, ids, *, seed=0, **sizes):
    import transformers

    kinds = {
        "qwen2_vl": transformers.Qwen2VLForConditionalGeneration,
        "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = kinds[family](config(family, ids, **sizes))
        with torch.no_grad():
            # At the usual scale of 0.02 every token is about as likely as any other and no context matters, so that
            # a wrong position or mask would pass unseen.
            for name, weight in made.named_parameters():
                if weight.dim() > 1:
                    weight.mul_(12.0 if "lm_head" in name or "embed_tokens" in name else 6.0)
    return made


def make(directory: Path, family: str, *, seed=0, **sizes) -> Path:
    """A directory in the hub's layout."""
    from transformers import GenerationConfig, Qwen2VLImageProcessorPil

    words = tokenizer()
    ids = {token: words.convert_tokens_to_ids(token) for token in SPECIALS}
    made = model(family, ids, seed=seed, **sizes)
    made.generation_config = GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"]
    )
    made.save_pretrained(directory)
    words.save_pretrained(directory)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, size={"shortest_edge": FACTOR**2, "longest_edge": 4096},
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    ).save_pretrained(directory)  # fmt: skip
    return directory


def screenshot(number: int, size=(40, 32)) -> bytes:
    """A picture as a screen gives it: PNG, no two alike."""
    import io

    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def edit(directory: Path, name: str, **values) -> None:
    """Change keys of one of a directory's JSON files; None removes one."""
    path = directory / name
    held = json.loads(path.read_text())
    held |= values
    path.write_text(json.dumps({key: value for key, value in held.items() if value is not None}))
