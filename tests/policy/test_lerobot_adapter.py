"""The LeRobot adapter against a stand-in with LeRobot's names and signatures, so that the contract is held everywhere.

The stand-in is ours: it shows that the adapter calls what LeRobot offers, not that LeRobot offers it.
`test_lerobot_real.py` runs the same adapter on the library itself where it is installed.
"""

import enum
import json
import sys
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import save_file
from torch import nn

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.policy import PolicyConfig, build_policy
from palaestra.policy.vla.conformance import random_observations
from palaestra.policy.vla.policy import as_tensordict

OBSERVATION = spaces.Dict(
    {
        "rgb": spaces.Box(0, 255, (8, 6, 3), np.uint8),
        "proprio": spaces.Box(-np.inf, np.inf, (4,), np.float32),
        "language": spaces.MultiDiscrete([9] * 3),
    }
)
ACTION = spaces.Box(-1, 1, (2,), np.float32)
CHUNK = spaces.Box(-1, 1, (3, 2), np.float32)
ADAPTER = "palaestra.policy.vla.lerobot:LeRobotModel"
STATS = {"observation.state": {"mean": [1.0] * 4, "std": [2.0] * 4}, "action": {"min": [-3.0, 0.0], "max": [1.0, 0.5]}}


class FeatureType(enum.StrEnum):
    STATE, VISUAL, ENV, ACTION = "STATE", "VISUAL", "ENV", "ACTION"


class NormalizationMode(enum.StrEnum):
    MIN_MAX, MEAN_STD, IDENTITY, QUANTILES = "MIN_MAX", "MEAN_STD", "IDENTITY", "QUANTILES"


@dataclass
class PolicyFeature:
    type: FeatureType
    shape: tuple


@dataclass
class Config:
    input_features: dict
    output_features: dict
    device: str | None = None
    n_obs_steps: int = 1
    chunk_size: int = 100
    n_action_steps: int = 100
    dim_model: int = 6
    temporal_ensemble_coeff: float | None = None
    pretrained_backbone_weights: str | None = "download me"
    normalization_mapping: dict = field(
        default_factory=lambda: (
            {"VISUAL": NormalizationMode.IDENTITY, "STATE": NormalizationMode.MEAN_STD}
            | {"ACTION": NormalizationMode.MIN_MAX}
        )
    )


class Network(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.backbone = nn.Linear(3, config.dim_model)
        self.state = nn.Linear(4, config.dim_model)
        self.places = nn.Parameter(torch.randn(config.chunk_size, config.dim_model))
        self.action_head = nn.Linear(config.dim_model, config.output_features["action"].shape[0])

    def forward(self, batch):
        (image,) = (part for name, part in batch.items() if name.startswith("observation.images"))
        seen = self.backbone(image.mean((2, 3))) + self.state(batch["observation.state"])
        return self.action_head(torch.tanh(seen[:, None] + self.places))


class Policy(nn.Module):
    config_class, name = Config, "act"

    def __init__(self, config, **kwargs):
        super().__init__()
        assert config.pretrained_backbone_weights is None
        self.config, self.model = config, Network(config)

    @torch.no_grad()
    def predict_action_chunk(self, batch):
        self.eval()
        return self.model(batch)


class FlowPolicy(Policy):
    name = "flow"

    @torch.no_grad()
    def predict_action_chunk(self, batch, noise=None, **kwargs):
        assert noise.shape == (len(batch["observation.state"]), self.config.chunk_size, 2)
        return self.model(batch) + noise


FlowPolicy.config_class = dataclass(
    type("FlowConfig", (Config,), {"__annotations__": {"max_action_dim": int}, "max_action_dim": 2})
)


@pytest.fixture(autouse=True)
def _lerobot(monkeypatch):
    held = {
        "lerobot": {},
        "lerobot.policies": {},
        "lerobot.policies.act": {},
        "lerobot.policies.act.modeling_act": {"ACTPolicy": Policy},
        "lerobot.policies.flow": {},
        "lerobot.policies.flow.modeling_flow": {"FlowPolicy": FlowPolicy},
        "lerobot.configs": {},
        "lerobot.configs.types": {
            "FeatureType": FeatureType,
            "NormalizationMode": NormalizationMode,
            "PolicyFeature": PolicyFeature,
        },
    }
    for name, content in held.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def _built(action=CHUNK, observation=OBSERVATION, *, model_path=None, freeze=(), **settings):
    settings = settings if model_path else {"policy": "act", **settings}
    section = {"model_class": ADAPTER, "model_path": model_path, "model_config": settings, "freeze": freeze}
    config = parse_section(PolicyConfig, {"name": "vla", "vla_config": section}, place="policy")
    return build_policy(config, observation, action, seed=1)


def _seen(size=3):
    return random_observations(OBSERVATION, size)


@pytest.mark.parametrize("action", [ACTION, CHUNK], ids=["single", "chunk"])
@pytest.mark.parametrize("policy", ["act", "flow"])
def test_a_policy_of_lerobot_keeps_every_rule_of_a_model(action, policy):
    built = _built(action, policy=policy, features="model.action_head", config={"chunk_size": 5}, stats=STATS)
    assert built.act(_seen(), torch.full((3, 2), 0.5)).action.shape == (3, *action.shape)


def test_pixels_become_fractions_with_channels_first_and_state_is_normalised():
    model = _built(stats=STATS).model
    seen = _seen()
    batch = model._build_batch(as_tensordict(seen))
    assert torch.allclose(batch["observation.images.rgb"], seen["rgb"].permute(0, 3, 1, 2) / 255)
    assert torch.allclose(batch["observation.state"], (seen["proprio"] - 1.0) / 2.0)
    assert torch.equal(batch["observation.language.attention_mask"], seen["language"] != 0)


def test_actions_come_back_in_the_environments_units_and_so_does_the_width_of_exploration():
    scaled, plain = _built(stats=STATS), _built(stats={"observation.state": STATS["observation.state"]})
    one, two = scaled.act(_seen(), None).action, plain.act(_seen(), None).action
    # [-1, 1] onto [-3, 1] and [0, 0.5]: scale 2 and 0.25, offset -1 and 0.25.
    assert torch.allclose(one, two * torch.tensor([2.0, 0.25]) + torch.tensor([-1.0, 0.25]), atol=1e-6)
    assert scaled.model.gaussian.log_std.exp().tolist() == pytest.approx(
        [0.735759, 0.0919699], rel=1e-5
    )  # e^-1 times the scale
    assert plain.model.gaussian.log_std.exp().tolist() == pytest.approx([0.367879] * 2, rel=1e-5)


def test_fewer_actions_than_the_policy_predicts_are_its_first_ones():
    long, short = (_built(action, config={"chunk_size": 5}) for action in (CHUNK, ACTION))
    assert torch.equal(long.act(_seen(), None).action[:, 0], short.act(_seen(), None).action)


def test_a_directory_of_save_pretrained_says_what_it_holds(tmp_path):
    torch.manual_seed(5)
    features = {"observation.images.top": ("VISUAL", (3, 8, 6)), "observation.state": ("STATE", (4,))}
    theirs = Policy(Config(
        {name: PolicyFeature(FeatureType(kind), shape) for name, (kind, shape) in features.items()},
        {"action": PolicyFeature(FeatureType.ACTION, (2,))}, chunk_size=4, pretrained_backbone_weights=None,
    ))  # fmt: skip
    described = {
        "type": "act", "chunk_size": 4, "device": "cuda", "pretrained_backbone_weights": "download me",
        "input_features": {name: {"type": kind, "shape": shape} for name, (kind, shape) in features.items()},
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    stats = {f"{key}.{name}": torch.tensor(value) for key, part in STATS.items() for name, value in part.items()}
    save_file(stats, tmp_path / "policy_preprocessor_step_3_normalizer_processor.safetensors")
    policy = _built(model_path=str(tmp_path))
    assert policy.notices == []
    assert policy.model._keys["observation.images.top"] == "rgb"  # one camera there, one here
    seen = _seen()
    image, state = seen["rgb"].permute(0, 3, 1, 2) / 255, (seen["proprio"] - 1) / 2
    expected = theirs.predict_action_chunk({"observation.images.top": image, "observation.state": state})[:, :3]
    expected = expected * torch.tensor([2.0, 0.25]) + torch.tensor([-1.0, 0.25])
    assert torch.allclose(policy.act(seen, None).action, expected, atol=1e-6)


def test_a_frozen_backbone_gets_no_gradient_and_everything_else_does():
    policy = _built(freeze=["policy.model.backbone"])
    seen = _seen()
    acted = policy.act(seen, torch.full((3, 2), 0.5))
    log_prob, _, value = policy.evaluate_actions(seen, acted.action.detach())
    (log_prob.sum() + value.sum()).backward()
    without = {name for name, parameter in policy.named_parameters() if parameter.grad is None}
    assert without == {"model.policy.model.backbone.weight", "model.policy.model.backbone.bias"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "actt"}, r"model_config.policy = 'actt': LeRobot has no such policy"),
        ({"policy": "a.b"}, "is not a name"),
        ({"config": {"dim_modl": 3}}, "config.dim_modl = 3: Config has no such field. Did you mean 'dim_model'"),
        ({"config": {"n_obs_steps": 2}}, "uses earlier observations"),
        ({"config": {"temporal_ensemble_coeff": 0.01}}, "averaging over earlier chunks.*Set it to null"),
        ({"config": {"chunk_size": 2}}, "chunk_size = 2: env.action_chunk executes 3 actions. Set env.action_chunk=2"),
        ({"keys": {"observation.state": "propio"}}, "the environment shows no such key. Did you mean 'proprio'"),
        (
            {"config": {"input_features": {"observation.images.wrist": {}, "observation.images.top": {}}}},
            r"needs observation.images.top, observation.images.wrist. Say .*{observation.images.top: rgb}; .*shows",
        ),
        ({"stats": {"observation.state": {"mean": [0.0]}}}, "MEAN_STD needs mean and std"),
        ({"features": "model.backbon"}, r"features = 'model.backbon': is not a linear layer of act.*model.action_head"),
        ({"config": {"output_features": {"action": {"type": "ACTION", "shape": [7]}}}}, "environment's have 2 numbers"),
    ],
)
def test_a_mistake_is_told_with_the_remedy(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        _built(**settings)
    assert "\n" not in str(caught.value)


def test_a_config_that_is_not_lerobots_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model": "other"}')
    with pytest.raises(ConfigError, match=r"its config.json is not LeRobot's"):
        _built(model_path=str(tmp_path))


def test_without_lerobot_the_remedy_is_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lerobot.policies", None)
    with pytest.raises(ConfigError, match=r"LeRobot cannot be imported .*pip install 'palaestra\[lerobot\]'"):
        _built()
