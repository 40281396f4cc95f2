"""Numbers of weights are those of the published checkpoints, and memory follows from them."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

import palaestra
from palaestra.errors import ConfigError
from palaestra.planner.memory import (
    ModelPlan,
    cache_bytes,
    fitting_microbatch,
    logits_bytes,
    plan_learner_memory,
    plan_sampler_memory,
    trained_parameters,
)
from palaestra.planner.shapes import MODELS, find_shape

PUBLISHED = {
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
}
SMALL = ModelPlan(screen=(644, 392), history=0, text_tokens=45, reply_tokens=35)
"""The batch of benchmarks/true_shapes.py."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_weights_as_its_published_checkpoint(name):
    assert find_shape(name).parameters == PUBLISHED[name]


def test_a_model_is_found_by_its_short_name_too():
    assert find_shape("qwen2.5-vl-7b") is MODELS["Qwen/Qwen2.5-VL-7B-Instruct"]


def test_the_built_in_model_has_as_many_weights_as_its_file():
    checkpoint = Path(palaestra.__file__).parent / "policy" / "tiny_vlm" / "checkpoint"
    with safe_open(checkpoint / "model.safetensors", "numpy") as file:
        sizes = [file.get_slice(key).get_shape() for key in file.keys()]
    total = 0
    for size in sizes:
        product = 1
        for side in size:
            product *= side
        total += product
    assert find_shape("tiny").parameters == total


def test_adapters_of_rank_32_in_the_3b_model_have_60_million_weights_and_the_value_head_2049():
    shape = find_shape("qwen2.5-vl-3b")
    # q and o 4096, k and v 2304, gate, up and down 13056 inputs and outputs each, per layer
    assert shape.lora_parameters(32) == 36 * 32 * (2 * 4096 + 2 * 2304 + 3 * 13056)
    assert shape.lora_parameters(32, "attention") == 36 * 32 * (2 * 4096 + 2 * 2304)
    assert trained_parameters(SMALL, shape) == 59_867_136 + 2049


def test_a_picture_of_644_by_392_pixels_has_322_tokens():
    shape = find_shape("qwen2.5-vl-3b")
    assert shape.vision.count_tokens(644, 392) == 23 * 14 == 322
    assert SMALL.prompt_tokens(shape) == 367
    assert (
        ModelPlan(screen=(644, 392), history=2, text_tokens=45, reply_tokens=35).prompt_tokens(shape) == 45 + 966 + 70
    )


def test_the_parts_of_a_learner_add_up():
    shape = find_shape("qwen2.5-vl-3b")
    memory = plan_learner_memory(SMALL, shape, turns=1)
    adapter = 4 * 59_869_185
    assert memory.parts["weights"] == 2 * 3_754_622_976
    assert memory.parts["adapters"] == memory.parts["gradients"] == memory.parts["acting copy"] == adapter
    assert memory.parts["Adam"] == 2 * adapter
    assert memory.parts["logits"] == 35 * 151_936 * 4 * 4
    assert memory.total == sum(memory.parts.values())
    on_cpu = plan_learner_memory(SMALL, shape, turns=1, host=True)
    assert on_cpu.total - memory.total == 2 * adapter  # this version's weights and the last one's


def test_recomputing_keeps_one_layer_instead_of_36():
    shape = find_shape("qwen2.5-vl-3b")
    thrifty = SMALL.model_copy(update={"gradient_checkpointing": True})
    kept = plan_learner_memory(SMALL, shape, turns=1).parts["activations"]
    recomputed = plan_learner_memory(thrifty, shape, turns=1).parts["activations"]
    assert kept > 10 * recomputed
    assert plan_learner_memory(SMALL, shape, turns=2).parts["activations"] == 2 * kept
    shared = plan_learner_memory(SMALL, shape, turns=2, prompts=1).parts["activations"]
    assert shared * 402 == kept * (367 + 35 + 35)


def test_logits_of_many_tokens_are_computed_in_chunks_of_a_gigabyte():
    shape = find_shape("qwen2.5-vl-3b")
    assert logits_bytes(shape, 1) == 151_936 * 16
    assert logits_bytes(shape, 100_000) == 2**26 * 16


def test_full_training_takes_16_bytes_per_weight_and_four_shards_a_quarter_of_them():
    shape, plan = find_shape("qwen2.5-vl-3b"), ModelPlan(use_lora=False)
    parts = plan_learner_memory(plan, shape).parts
    assert parts["weights"] == 4 * shape.parameters
    assert parts["gradients"] + parts["Adam"] == 12 * (shape.parameters + 2049)
    split = plan_learner_memory(plan, shape, shards=4).parts
    assert split["weights"] == shape.parameters
    assert split["Adam"] == parts["Adam"] // 4


def test_keys_and_values_of_a_token_take_36_kilobytes_in_the_3b_model():
    shape = find_shape("qwen2.5-vl-3b")
    assert cache_bytes(SMALL, shape) == 2 * 36 * 256 * 2
    cache = plan_sampler_memory(SMALL, shape, batch=8).parts["KV cache"]
    assert cache == 8 * (367 + 256) * 36_864


def test_the_largest_microbatch_fits_and_one_more_turn_does_not():
    shape = find_shape("qwen2.5-vl-7b")
    turns = fitting_microbatch(SMALL, shape, 40e9)
    assert plan_learner_memory(SMALL, shape, turns=turns).total <= 40e9
    assert plan_learner_memory(SMALL, shape, turns=turns + 1).total > 40e9
    assert fitting_microbatch(SMALL, shape, 1e9) == 0


def test_an_unknown_model_and_an_unreadable_config_are_refused_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"Did you mean 'Qwen/Qwen2.5-VL-3B-Instruct'"):
        find_shape("Qwen/Qwen2.5-VL-3b-Instuct")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(ConfigError, match="is a llava"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    with pytest.raises(ConfigError, match="vision_config"):
        find_shape(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot count its layers"):
        find_shape("qwen2.5-vl-3b").lora_parameters(8, "custom")
