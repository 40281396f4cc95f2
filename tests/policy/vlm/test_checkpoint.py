"""What was learned survives on disk, in layouts that PEFT and transformers read."""

import json

import numpy as np
import pytest
import torch
from tests.policy.vlm.conftest import built, move, pixels_and_grid, requests, turns_of

from palaestra.errors import CheckpointError, ConfigError
from palaestra.policy.vlm import ModelConfig, VLMPolicy


def _logits(model, policy, request):
    ids = torch.from_numpy(request.prompt.ids.astype(np.int64))[None]
    with torch.no_grad():
        return model(
            input_ids=ids, attention_mask=torch.ones_like(ids), **pixels_and_grid(policy, request.prompt.pictures),
            mm_token_type_ids=(ids == policy.learner.image_token).int(),
        ).logits  # fmt: skip


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_policy_goes_on_from_its_checkpoint_exactly(build, tmp_path, lora):
    policy = build(use_lora=lora, moved=False)
    move(policy, by=0.02)
    policy.publish(5)
    policy.save(tmp_path / "five")
    asked = requests(policy, 3)
    answers = policy.sample(asked, max_new_tokens=5)
    other = build(use_lora=lora, moved=False)
    other.load(tmp_path / "five")
    assert other.version == 5
    assert other.fingerprint == policy.fingerprint
    again = other.sample(asked, max_new_tokens=5)
    for one, two in zip(answers, again, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert one.log_probs.tolist() == two.log_probs.tolist()
    turns = turns_of(asked, answers)
    values = [p.log_probs(turns, with_values=True, grad=False).values.tolist() for p in (policy, other)]
    assert values[0] == values[1]
    assert any(values[0])


def test_adapters_load_with_peft_itself(build, directory, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    policy = build()
    policy.save(tmp_path / "it")
    assert sorted(file.name for file in (tmp_path / "it").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "palaestra.json", "value_head.safetensors",
    ]  # fmt: skip
    plain = AutoModelForImageTextToText.from_pretrained(directory).eval()
    theirs = PeftModel.from_pretrained(plain, tmp_path / "it").eval()
    (request,) = requests(policy, 3)[2:]
    ours = _logits(policy.learner.model, policy, request)
    torch.testing.assert_close(_logits(theirs, policy, request), ours, atol=1e-4, rtol=0)
    with theirs.disable_adapter():
        assert (_logits(theirs, policy, request) - ours).abs().max() > 1e-2


def test_a_merged_export_is_a_plain_model_that_answers_the_same(build, tmp_path):
    from transformers import AutoModelForImageTextToText

    policy = build()
    weights = {name: weight.clone() for name, weight in policy.learner.model.named_parameters()}
    policy.export_merged(tmp_path / "merged")
    assert all(torch.equal(weight, weights[name]) for name, weight in policy.learner.model.named_parameters())
    (request,) = requests(policy, 3)[2:]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    ours = _logits(policy.learner.model, policy, request)
    torch.testing.assert_close(_logits(model, policy, request), ours, atol=1e-4, rtol=0)
    started = built(tmp_path / "merged", moved=False)
    assert started.prompt(_same()).ids.tolist() == policy.prompt(_same()).ids.tolist()


def _same():
    from tests.policy.vlm.conftest import conversation

    return conversation(1, 2)


def test_a_full_checkpoint_is_a_model_one_can_name(build, tmp_path):
    policy = build(use_lora=False, moved=False)
    move(policy, by=0.02)
    policy.save(tmp_path / "full")
    again = built(tmp_path / "full", moved=False)
    (request,) = requests(policy, 1)
    torch.testing.assert_close(
        _logits(again.learner.model, again, request), _logits(policy.learner.model, policy, request), atol=1e-4, rtol=0
    )


def test_checkpoints_are_saved_and_loaded_without_progress_bars(build, tmp_path, capfd):
    policy = build(use_lora=False, moved=False)
    capfd.readouterr()
    policy.save(tmp_path / "full")
    policy.load(tmp_path / "full")
    assert capfd.readouterr() == ("", "")


def test_a_checkpoint_of_another_architecture_is_refused_with_both_names(directories, tmp_path):
    policy, other = built(directories["qwen2_5_vl"]), built(directories["qwen3_vl"])
    policy.save(tmp_path / "it")
    before = other.fingerprint
    with pytest.raises(CheckpointError, match=r"qwen2_5_vl, 2 layers of width 32.* this model is qwen3_vl"):
        other.load(tmp_path / "it")
    ranked = built(directories["qwen2_5_vl"], lora_rank=8)
    with pytest.raises(CheckpointError, match=r"rank 4 on 14 layers.* rank 8 on 14 layers"):
        ranked.load(tmp_path / "it")
    assert other.fingerprint == before


def test_training_starts_from_an_adapter_that_is_named(qwen3, directories, tmp_path):
    policy = built(qwen3, lora_rank=2, lora_alpha=6, lora_target_option="attention")
    policy.save(tmp_path / "it")
    warm = VLMPolicy.from_config(ModelConfig(name=str(qwen3), adapter=tmp_path / "it"))
    assert warm.fingerprint == policy.fingerprint
    (request,) = requests(policy, 3)[2:]
    (one,), (two,) = (p.sample([request], max_new_tokens=4) for p in (policy, warm))
    assert one.log_probs.tolist() == two.log_probs.tolist()
    move(warm, seed=1)
    (reference,) = warm.reference_log_probs(turns_of([request], [two]))
    np.testing.assert_allclose(reference.numpy(), two.log_probs, atol=1e-4)
    with pytest.raises(CheckpointError, match="made with lora_rank 2, the configuration says 8"):
        VLMPolicy.from_config(ModelConfig(name=str(qwen3), adapter=tmp_path / "it", lora_rank=8))
    with pytest.raises(CheckpointError, match=r"adapter_config.json"):
        VLMPolicy.from_config(ModelConfig(name=str(qwen3), adapter=tmp_path))
    deep = built(qwen3, lora_vision=True)
    deep.save(tmp_path / "deep")
    with pytest.raises(CheckpointError, match="adapters in the vision tower"):
        VLMPolicy.from_config(ModelConfig(name=str(qwen3), adapter=tmp_path / "deep"))
    with pytest.raises(CheckpointError, match=r"is for another model: .*linear_fc1.* are not in this qwen2_5_vl"):
        VLMPolicy.from_config(
            ModelConfig(name=str(directories["qwen2_5_vl"]), adapter=tmp_path / "deep", lora_vision=True)
        )


def test_a_checkpoint_that_was_touched_is_refused(qwen3, tmp_path):
    policy = built(qwen3)
    place = tmp_path / "it"
    policy.save(place)
    with pytest.raises(CheckpointError, match="never overwritten"):
        policy.save(place)
    file = place / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is truncated \(\d+ of \d+ bytes\)"):
        policy.load(place)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="corrupt"):
        policy.load(place)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is missing"):
        policy.load(place)
    (place / "palaestra.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(CheckpointError, match=r"palaestra.json cannot be read"):
        policy.load(place)
    with pytest.raises(ConfigError, match="no such checkpoint"):
        policy.load(tmp_path / "nowhere")


def test_half_a_checkpoint_is_no_checkpoint(qwen3, tmp_path, monkeypatch):
    from palaestra.policy.vlm import checkpoint

    def full(*_):
        raise OSError("no space left")

    policy = built(qwen3)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        policy.save(tmp_path / "it")
    assert list(tmp_path.iterdir()) == []
