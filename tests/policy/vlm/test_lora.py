"""An adapter goes where it was meant to go, by full names, and the vision tower is left alone."""

import pytest
from tests.policy.vlm.conftest import built

from palaestra.errors import ConfigError
from palaestra.policy.vlm.lora import adapted_modules, target_modules

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
NAMES = [
    "model.visual.blocks.0.attn.qkv", "model.visual.blocks.0.mlp.gate_proj", "model.visual.merger.mlp.0",
    "model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.o_proj",
    "model.language_model.layers.0.mlp.gate_proj", "model.language_model.layers.10.mlp.gate_proj",
]  # fmt: skip


@pytest.mark.parametrize(
    ("option", "vision", "wanted"),
    [
        ("attention", False, [3, 4]),
        ("mlp", False, [5, 6]),
        ("attention+mlp", False, [3, 4, 5, 6]),
        ("all-linear", False, [3, 4, 5, 6]),
        ("attention", True, [0, 3, 4]),
        ("mlp", True, [1, 5, 6]),
        ("all-linear", True, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_an_option_means_layers_of_the_language_model_and_of_the_tower_only_when_asked(option, vision, wanted):
    assert target_modules(NAMES, option, (), vision) == [NAMES[i] for i in wanted]


@pytest.mark.parametrize(
    ("custom", "wanted"),
    [
        (["gate_proj"], [5, 6]),
        (["self_attn.q_proj"], [3]),
        (["model.language_model.layers.0.mlp.gate_proj"], [5]),
        (["layers.0.mlp.gate_proj", "o_proj"], [4, 5]),
    ],
)
def test_custom_targets_are_whole_names_or_their_ends_from_a_dot_on(custom, wanted):
    assert target_modules(NAMES, "custom", custom, False) == [NAMES[i] for i in wanted]


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        (["q_prj"], "'q_prj': matches no linear layer of the model. Nearest: q_proj"),
        (["proj"], "matches no linear layer"),
        (["attn.qkv"], "matches layers of the vision tower only. Set model.lora_vision=true"),
        (["q_proj", "wibble"], "'wibble': matches no linear layer of the model. There is 0, gate_proj"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error_with_the_nearest_names(custom, message):
    with pytest.raises(ConfigError) as raised:
        target_modules(NAMES, "custom", custom, False)
    assert message in str(raised.value)


def test_an_option_that_matches_nothing_is_an_error_with_what_there_is():
    with pytest.raises(ConfigError, match=r"matches none of the model's linear layers. Use 'custom'.*query_key"):
        target_modules(["transformer.h.0.mixer.query_key"], "attention", (), False)


@pytest.mark.parametrize(
    ("option", "endings", "layers"),
    [("attention", ATTENTION, 8), ("mlp", MLP, 6), ("all-linear", ATTENTION | MLP, 14)],
)
def test_on_the_real_classes_adapters_are_in_the_language_model_and_nowhere_else(build, option, endings, layers):
    policy = build(lora_target_option=option)
    got = adapted_modules(policy.learner.model)
    assert len(got) == layers
    assert {name.rsplit(".", 1)[-1] for name in got} == endings
    assert all(name.startswith("model.language_model.layers.") for name in got)
    assert all("lora" in name or "value_head" in name for name in policy.learner.trainable())


def test_what_is_trained_is_counted_by_part(build):
    # Rank 4 at width 32: query and output 4 * (32 + 32), key and value 4 * (32 + 16), three of the MLP 4 * (32 + 64).
    attention, mlp = 2 * (2 * 256 + 2 * 192), 2 * 3 * 384
    assert build().trainable_parts() == {"language attention": attention, "language mlp": mlp, "value head": 33}
    seeing = build(lora_vision=True, lora_target_option="all-linear").trainable_parts()
    assert set(seeing) == {
        "language attention", "language mlp", "value head", "vision attention", "vision mlp",
        "between vision and language",
    }  # fmt: skip


def test_full_training_leaves_the_tower_alone_unless_told(build):
    frozen = build(use_lora=False, moved=False)
    assert not any("visual" in name for name in frozen.learner.trainable())
    assert "vision attention" in build(use_lora=False, freeze_vision=False, moved=False).trainable_parts()


def test_adapters_are_drawn_from_the_seed_and_start_as_no_change(qwen3):
    from palaestra.policy.vlm import ModelConfig, VLMPolicy

    config = ModelConfig(name=str(qwen3), lora_rank=4)
    one, same, other = (VLMPolicy.from_config(config, seed=seed).fingerprint for seed in (1, 1, 2))
    assert one == same != other
    fresh = built(qwen3, moved=False)
    assert all(not weight.any() for name, weight in fresh.learner.trainable().items() if "lora_B" in name)
