"""The LeRobot adapter on LeRobot itself; skipped where it is not installed (`pip install 'palaestra[lerobot]'`).

A real ACT with a small transformer and torchvision's ResNet-18, and a real SmolVLA around a tiny SmolVLM, both freshly
initialised: their published weights are not needed to see that the pieces fit.
"""

import contextlib
import importlib.util
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from palaestra.config import parse_section
from palaestra.policy import PolicyConfig, build_policy
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.vla.conformance import random_observations

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lerobot") is None, reason="LeRobot is not installed"),
    pytest.mark.filterwarnings("ignore"),
]

OBSERVATION = spaces.Dict(
    {
        "rgb": spaces.Box(0, 255, (48, 48, 3), np.uint8),
        "proprio": spaces.Box(-np.inf, np.inf, (4,), np.float32),
        "language": spaces.MultiDiscrete([30] * 6),
    }
)
CHUNK = spaces.Box(-1, 1, (4, 2), np.float32)
SMALL = {
    "dim_model": 32, "n_heads": 2, "dim_feedforward": 64, "n_encoder_layers": 1, "n_vae_encoder_layers": 1,
    "latent_dim": 8, "chunk_size": 6, "n_action_steps": 6,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _torchvision():
    """torchvision built for another torch lacks its compiled operators; declared by name, its networks work.

    Nothing is declared where torchvision imports as it is. ACT uses none of these operators.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ImportError, RuntimeError):
            import torchvision  # noqa: F401

            yield
            return
        found = importlib.util.find_spec("torchvision")
        source = (Path(found.submodule_search_locations[0]) / "_meta_registrations.py").read_text()
        library = torch.library.Library("torchvision", "DEF")
        for name in set(re.findall(r'register_(?:meta\("|fake\("torchvision::)(\w+)"', source)):
            library.define(f"{name}(Tensor x) -> Tensor")
        yield


def _built(action=CHUNK, observation=OBSERVATION, **section):
    section = {"model_class": "palaestra.policy.vla.lerobot:LeRobotModel", **section}
    section.setdefault("model_config", {} if "model_path" in section else {"policy": "act", "config": SMALL})
    config = parse_section(PolicyConfig, {"name": "vla", "vla_config": section}, place="policy")
    return build_policy(config, observation, action, seed=1)


def test_a_real_act_keeps_every_rule_of_a_model():
    policy = _built()
    assert type(policy.model.policy).__name__ == "ACTPolicy"
    assert type(policy.model.policy).__module__ == "lerobot.policies.act.modeling_act"
    assert policy.act(random_observations(OBSERVATION, 3), torch.full((3, 2), 0.5)).action.shape == (3, 4, 2)
    single = _built(spaces.Box(-1, 1, (2,), np.float32))
    assert single.act(random_observations(OBSERVATION, 3), None).action.shape == (3, 2)


def test_a_saved_act_acts_as_lerobots_own_pipeline_does(tmp_path):
    from lerobot.policies.act.processor_act import make_act_pre_post_processors

    ours = _built()
    stats = {
        "observation.images.rgb": {"mean": torch.full((3, 1, 1), 0.4), "std": torch.full((3, 1, 1), 0.2)},
        "observation.state": {"mean": torch.arange(4.0), "std": torch.tensor([1.0, 2.0, 0.5, 3.0])},
        "action": {"mean": torch.tensor([0.1, -0.2]), "std": torch.tensor([0.5, 2.0])},
    }
    theirs = ours.model.policy
    before, after = make_act_pre_post_processors(theirs.config, stats)
    theirs.save_pretrained(tmp_path)
    before.save_pretrained(tmp_path)
    after.save_pretrained(tmp_path)
    loaded = _built(model_path=str(tmp_path))
    assert loaded.notices == []
    seen = random_observations(OBSERVATION, 3)
    batch = {"observation.images.rgb": seen["rgb"].permute(0, 3, 1, 2) / 255, "observation.state": seen["proprio"]}
    expected = after(theirs.predict_action_chunk(before(batch)))[:, :4]
    assert torch.allclose(loaded.act(seen, None).action, expected, atol=1e-5)
    assert not torch.allclose(ours.act(seen, None).action, expected, atol=1e-2)  # the statistics matter


def test_a_frozen_resnet_stays_bit_identical_while_the_rest_moves():
    from palaestra.learner.adam import Adam

    policy = _built(freeze=["policy.model.backbone", "policy.model.vae_encoder"])
    seen = random_observations(OBSERVATION, 4)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    flat = FlatParameters.of(policy)
    adam = Adam(flat, 1e-5)
    for step in range(2):
        with torch.inference_mode():
            acted = policy.act(seen, torch.full((4, 2), 0.1 * step))
        log_prob, entropy, value = policy.evaluate_actions(seen, acted.action.clone())
        assert torch.allclose(log_prob, acted.log_prob.sum(-1), atol=1e-4)  # the ratio of a fresh batch is 1
        flat.gradient.zero_()
        (log_prob.mean() + entropy.mean() + (value - 1).square().mean()).backward()
        adam.step("policy", flat.trainable("policy"), 1e-2, 1.0)
    same = {name for name, value in policy.state_dict().items() if torch.equal(value, before[name])}
    resnet = {name for name in before if name.startswith("model.policy.model.backbone.")}
    assert resnet <= same
    assert "model.policy.model.action_head.weight" not in same
    assert "model.policy.model.decoder.layers.0.linear1.weight" not in same


@pytest.fixture
def tiny_smolvlm(tmp_path, monkeypatch):
    """A SmolVLM of a few thousand weights, by its configuration; its tokenizer is two numbers."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    from transformers import SmolVLMConfig

    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    SmolVLMConfig(
        image_token_id=31, scale_factor=2, pad_token_id=0,
        vision_config={**vision, "image_size": 48, "patch_size": 12},
        text_config={**text, "model_type": "llama", "num_key_value_heads": 2, "vocab_size": 32, "pad_token_id": 0},
    ).save_pretrained(tmp_path)  # fmt: skip
    import lerobot.policies.smolvla.smolvlm_with_expert as smolvlm

    tokens = SimpleNamespace(tokenizer=SimpleNamespace(fake_image_token_id=29, global_image_token_id=30))
    monkeypatch.setattr(smolvlm, "AutoProcessor", SimpleNamespace(from_pretrained=lambda _: tokens))
    return str(tmp_path)


def test_a_real_smolvla_keeps_every_rule_of_a_model_and_reads_its_instruction(tiny_smolvlm):
    small = {
        "vlm_model_name": tiny_smolvlm, "num_vlm_layers": 2, "resize_imgs_with_padding": [48, 48], "num_steps": 3,
        "chunk_size": 6, "n_action_steps": 6, "max_state_dim": 8, "max_action_dim": 4, "expert_width_multiplier": 0.5,
    }  # fmt: skip
    words = spaces.Dict({**OBSERVATION.spaces, "language": spaces.MultiDiscrete([28] * 6)})
    policy = _built(CHUNK, words, model_config={"policy": "smolvla", "config": small})
    assert type(policy.model.policy).__name__ == "SmolVLAPolicy"
    seen = random_observations(words, 3)
    acted = policy.act(seen, torch.full((3, 2), 0.5))
    log_prob, _, _ = policy.evaluate_actions(seen, acted.action.detach())
    assert torch.allclose(log_prob, acted.log_prob.sum(-1), atol=1e-4)
    log_prob.sum().backward()
    expert = policy.model.policy.model.vlm_with_expert.lm_expert
    assert all(p.grad is not None for p in expert.layers[0].mlp.parameters())
    vision = policy.model.policy.model.vlm_with_expert.vlm.model.vision_model
    assert all(p.grad is None for p in vision.parameters())  # SmolVLA freezes it unless told otherwise
    other = {**seen, "language": (seen["language"] + 1) % 28}
    assert not torch.allclose(policy.act(other, None).action, policy.act(seen, None).action, atol=1e-6)
