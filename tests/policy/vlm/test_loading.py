"""Whatever is wrong with a model is one clear message, before anything else happens."""

import json
import shutil
import subprocess
import sys

import pytest
from tests.policy.vlm import toy

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.policy.vlm import ModelConfig, VLMPolicy
from palaestra.policy.vlm.loading import load_model


@pytest.fixture
def copied(qwen3, tmp_path):
    return shutil.copytree(qwen3, tmp_path / "model")


def refusal(name, **keys):
    with pytest.raises(ConfigError) as raised:
        VLMPolicy.from_config(ModelConfig(name=str(name), **keys))
    return str(raised.value)


def test_a_directory_that_is_not_there_is_named_with_the_nearest(qwen3):
    said = refusal(qwen3.parent / "qwen3_vI")
    assert said.startswith("model.name = ")
    assert "no such directory" in said
    assert "there is qwen3_vl" in said


def test_a_hub_that_cannot_be_reached_is_said_so(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = refusal("nobody/nothing-vl")
    assert "config.json cannot be loaded" in said
    assert "name its directory here" in said


def test_a_model_that_only_reads_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 16}))
    assert "is a qwen2, which does not turn pictures and text into text" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "config.json cannot be loaded"), ("{", "not a valid JSON"), ('{"model_type": "wibble"}', "wibble")],
)
def test_a_directory_without_a_readable_configuration_is_refused(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert reason in refusal(tmp_path)


def test_a_model_without_a_chat_template_is_refused_with_the_remedy(copied):
    (copied / "chat_template.jinja").unlink()
    said = refusal(copied)
    assert "has no chat template" in said
    assert "instruction-tuned" in said


def test_a_template_beside_the_processor_counts_as_well(copied):
    template = (copied / "chat_template.jinja").read_text()
    (copied / "chat_template.jinja").unlink()
    (copied / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    VLMPolicy.from_config(ModelConfig(name=str(copied), lora_rank=2))


def test_a_model_without_its_tokenizer_is_refused(copied):
    (copied / "tokenizer.json").unlink()
    assert "tokenizer" in refusal(copied)


def test_a_model_without_its_image_processor_is_refused(copied):
    (copied / "preprocessor_config.json").unlink()
    assert "the image processor cannot be loaded" in refusal(copied)


def test_another_way_to_prepare_pictures_is_refused(copied):
    from transformers import CLIPImageProcessorPil

    CLIPImageProcessorPil().save_pretrained(copied)
    assert "does not cut them into a grid of patches" in refusal(copied)


def test_missing_cut_or_foreign_weights_are_refused(copied, directories):
    file = copied / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:3000])
    assert "the weights cannot be loaded" in refusal(copied)
    file.unlink()
    assert "the weights cannot be loaded" in refusal(copied)
    shutil.copy(directories["qwen2_5_vl"] / "model.safetensors", file)
    assert "weights are missing from its files" in refusal(copied)


def test_other_things_this_machine_does_not_have_are_said_with_their_key(qwen3):
    assert refusal(qwen3, attn_implementation="wibble").startswith("model.attn_implementation = 'wibble'")
    assert refusal(qwen3, device="cuda:7").startswith("model.device = 'cuda:7'")


def test_the_specifications_section_loads_as_it_is_written():
    written = {"name": "Qwen/Qwen2.5-VL-3B-Instruct", "use_lora": True}
    config = parse_section(ModelConfig, written | {"lora_target_option": "attention+mlp", "lora_rank": 32})
    assert (config.lora_rank, config.alpha, config.lora_vision, config.history) == (32, 32, False, 4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_rnk": 8}, "model.lora_rnk = 8: unknown key. Did you mean 'lora_rank'?"),
        ({"lora_target_option": "attn"}, "model.lora_target_option = 'attn'"),
        ({"lora_target_option": "custom"}, "needs lora_target_modules"),
        ({"lora_target_modules": ["q_proj"]}, "counts only with lora_target_option: custom"),
        ({"lora_rank": 0}, "model.lora_rank = 0"),
        ({"trust_remote_code": True}, "model.trust_remote_code = True: unknown key"),
        ({"use_lora": False, "dtype": "bfloat16"}, "cannot hold the small steps"),
        ({"use_lora": False, "adapter": "there"}, "adapter needs use_lora"),
        ({"request": "do it"}, "must contain {instruction}"),
    ],
)
def test_wrong_keys_are_refused_with_the_remedy(keys, message):
    with pytest.raises(ConfigError) as raised:
        parse_section(ModelConfig, {"name": "tiny", **keys}, place="model")
    assert message in str(raised.value)


def test_half_precision_trains_adapters_in_float32(qwen3):
    import torch
    from tests.policy.vlm.conftest import requests, turns_of

    policy = VLMPolicy.from_config(ModelConfig(name=str(qwen3), dtype="bfloat16", lora_rank=4))
    assert {weight.dtype for weight in policy.trainable_parameters()} == {torch.float32}
    assert policy.learner.model.lm_head.weight.dtype == torch.bfloat16
    asked = requests(policy, 3)
    answers = policy.sample(asked, max_new_tokens=4)
    scored = policy.log_probs(turns_of(asked, answers), with_values=True)
    assert scored.log_probs.dtype == torch.float32
    scored.log_probs.sum().backward()
    assert all(w.grad is not None for n, w in policy.learner.trainable().items() if "lora" in n)


@pytest.mark.parametrize(("has_instructions", "warnings"), [(True, 0), (False, 1)])
def test_a_type_that_the_processor_emulates_gives_a_warning(monkeypatch, caplog, has_instructions, warnings):
    monkeypatch.setattr("palaestra.policy.vlm.loading.has_bfloat16_instructions", lambda: has_instructions)
    load_model(ModelConfig(name="tiny", dtype="bfloat16"))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    assert all("Use model.dtype=auto" in record.message for record in caplog.records)


def test_the_policy_package_itself_loads_neither_transformers_nor_peft():
    code = """
import sys, palaestra.policy, palaestra.policy.vlm
sys.exit(str([name for name in ("transformers", "peft", "tokenizers") if name in sys.modules] or ""))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "", done.stderr


def test_a_toy_can_be_built_twice_the_same(qwen3, tmp_path):
    again = toy.make(tmp_path / "again", "qwen3_vl")
    assert (again / "model.safetensors").read_bytes() == (qwen3 / "model.safetensors").read_bytes()
