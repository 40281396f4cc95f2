"""Pretrained models as policies: configuration, loading, acting, learning with parts frozen, and files."""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import save_file
from torch import nn

from palaestra.config import parse_section
from palaestra.errors import CheckpointError, ConfigError
from palaestra.policy import PolicyConfig, build_policy, save_policy
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.storage import load_weights
from palaestra.policy.vla import VLAPolicy, load_vla_model
from palaestra.policy.vla.conformance import random_observations
from palaestra.policy.vla.models import GaussianHead, LinearVLA
from palaestra.policy.vla.policy import as_tensordict

OBSERVATION = spaces.Dict(
    {
        "rgb": spaces.Box(0, 255, (4, 4, 3), np.uint8),
        "proprio": spaces.Box(-np.inf, np.inf, (5,), np.float32),
        "language": spaces.MultiDiscrete([30] * 6),
    }
)
ACTION = spaces.Box(-1, 1, (2,), np.float32)
CHUNK = spaces.Box(-1, 1, (4, 2), np.float32)
LINEAR = "palaestra.policy.vla.models:LinearVLA"
HERE = __name__


def _built(action=ACTION, *, seed=3, action_dim=None, observation=OBSERVATION, normalize=False, **settings):
    config = {"name": "vla", "action_dim": action_dim, "vla_config": {"model_class": LINEAR, **settings}}
    config = parse_section(PolicyConfig, config, place="policy")
    return build_policy(config, observation, action, normalize_observation=normalize, seed=seed)


def _seen(size=3, seed=0):
    return random_observations(OBSERVATION, size, seed=seed)


# ----------------------------------------------------------------------------------------------------- configuration


def test_the_specifications_spelling_is_read_and_written_back_the_same():
    written = {
        "model_path": "checkpoints/pretrained_vla_model.pth",
        "model_class": "vla_models.GPTVLAModel",
        "model_config": {"vision_encoder": "resnet50", "freeze_vision_encoder": False},
    }
    config = parse_section(PolicyConfig, {"name": "vla", "action_dim": 7, "vla_config": written}, place="policy")
    assert config.vla_config.settings == {"vision_encoder": "resnet50", "freeze_vision_encoder": False}
    again = config.model_dump(mode="json")
    assert again["vla_config"] == {**written, "freeze": [], "learning_rate_scale": {}, "strict": True}
    assert parse_section(PolicyConfig, again, place="policy") == config
    assert "model_config" in PolicyConfig.model_json_schema()["$defs"]["VLAConfig"]["properties"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "vla"}, r"policy.vla_config = None: policy.name=vla needs it. Name the model: vla_config"),
        (
            {"vla_config": {"model_class": LINEAR}},
            "policy.name is 'actor_critic', which does not read it.*Set policy.name",
        ),
        ({"action_dim": 7}, "policy.action_dim = 7: policy.name is 'actor_critic'"),
        ({"name": "vla", "vla_config": {}}, r"policy.vla_config.model_class = None: required"),
        ({"name": "vla", "vla_config": {"model_class": LINEAR, "modelpath": "x"}}, "Did you mean 'model_path'"),
        ({"name": "vla", "vla_config": {"model_class": LINEAR, "learning_rate_scale": {"a": 0}}}, "greater than 0"),
        ({"name": "vla", "action_dim": 0, "vla_config": {"model_class": LINEAR}}, "policy.action_dim = 0"),
    ],
)
def test_a_mistake_in_the_section_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_section(PolicyConfig, settings, place="policy")


class NotAModule:
    pass


class NeedsMore(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()


class NoMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)


class Picky(LinearVLA):
    def __init__(self, observation_space, action_dim):
        raise ValueError("the checkpoint of\nlast week only")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_class": "nowhere.models.Gpt"}, "'nowhere.models.Gpt': cannot be imported.*on PYTHONPATH"),
        ({"model_class": f"{HERE}:Nothing"}, "cannot be imported.*Nothing"),
        ({"model_class": "Gpt"}, "names no class in a module. Write package.module:Class"),
        ({"model_class": f"{HERE}:NotAModule"}, "is not a subclass of torch.nn.Module but the class NotAModule"),
        ({"model_class": f"{HERE}:LINEAR"}, "is not a subclass of torch.nn.Module but a str"),
        ({"model_class": f"{HERE}:NeedsMore"}, "vla_config.model_config = {}: .*refused it.*vocabulary.*It takes"),
        ({"model_config": {"depth": 3}}, r"model_config = {'depth': 3}: .*depth.*It takes action_dim, chunk, hidden"),
        ({"model_class": f"{HERE}:Picky"}, r"ValueError: the checkpoint of last week only"),
        ({"model_class": f"{HERE}:NoMethods"}, "policy.vla_config.model_class = 'NoMethods': it has no method forward"),
        ({"model_config": {"action_dim": 3}}, "environment has 2 numbers, the model's has 3"),
        ({"model_config": {"chunk": 4}}, "set env.action_chunk=4"),
        ({"action_dim": 7}, "policy.action_dim = 7: an action of the environment has 2 numbers. Set policy"),
        ({"action": spaces.Discrete(3)}, r"policy.name = 'vla': .*environment's are Discrete\(3\). Use policy"),
        ({"normalize": True}, "env.normalize_observation = True: a pretrained model receives observations as they are"),
        ({"freeze": ["vision_encodr"]}, "freeze = 'vision_encodr': no parameter.*Did you mean 'vision_encoder'"),
        ({"learning_rate_scale": {"lora": 0.1}}, "rate_scale = 'lora': no parameter.*The parts are action_head"),
        ({"freeze": ["vision_encoder"], "learning_rate_scale": {"vision_encoder": 0.1}}, "all of it is frozen"),
        ({"freeze": ["vision_encoder", "action_head", "value_head", "gaussian"]}, "nothing is left to train"),
        ({"freeze": ["value_head", "vision_encoder"]}, "no gradient of what get_value returned reaches"),
        ({"model_path": "nowhere/weights.pt"}, "vla_config.model_path = 'nowhere/weights.pt': there is no directory"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_trained_is_refused_before_anything_runs(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        _built(**settings)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- loading


def test_weights_come_from_the_file_and_without_one_from_the_seed(tmp_path):
    torch.manual_seed(11)
    theirs = LinearVLA(OBSERVATION, 2).state_dict()
    save_file(theirs, tmp_path / "w.safetensors")
    loaded = _built(model_path=str(tmp_path / "w.safetensors")).model.state_dict()
    assert all(torch.equal(loaded[name], theirs[name]) for name in theirs)
    one, two, other = (_built(seed=seed).model.vision_encoder.weight for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_building_leaves_torchs_own_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    _built()
    assert torch.equal(torch.rand(3), expected)


def test_what_did_not_fit_is_in_the_notices_of_the_policy(tmp_path):
    state = {f"module.{name}": value for name, value in LinearVLA(OBSERVATION, 3).state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    policy = _built(model_path=str(tmp_path / "w.pth"), strict=False)
    prefix, misfit = policy.notices
    assert "every name begins with 'module.', which was taken off" in prefix
    assert "4 of 7 weights fit, 3 of another shape ('action_head.bias' is (3,) in the file and (2,)" in misfit


class WithNewHead(LinearVLA):
    fresh_weights = ("value_head", "gaussian")

    def checkpoint_weights(self, tensors):
        return {name.replace("backbone", "vision_encoder"): value for name, value in tensors.items()}

    @classmethod
    def checkpoint_config(cls, path):
        return {"hidden": 5}


def test_a_class_may_rename_a_files_weights_add_parts_of_its_own_and_read_its_shape_from_the_file(tmp_path):
    state = LinearVLA(OBSERVATION, 2, hidden=5).state_dict()
    kept = {n.replace("vision_encoder", "backbone"): v for n, v in state.items() if "head" not in n or "action" in n}
    kept.pop("gaussian.log_std")
    save_file(kept, tmp_path / "w.safetensors")
    policy = _built(model_class=f"{HERE}:WithNewHead", model_path=str(tmp_path / "w.safetensors"))
    assert policy.notices == []
    assert torch.equal(policy.model.vision_encoder.weight, state["vision_encoder.weight"])
    with pytest.raises(
        ConfigError, match=r"is \(2, 5\) in the file and \(2, 6\) in the model"
    ):  # what is written counts
        _built(
            model_class=f"{HERE}:WithNewHead", model_path=str(tmp_path / "w.safetensors"), model_config={"hidden": 6}
        )


def test_a_checkpoint_that_brings_every_weight_needs_no_pretrained_file():
    config = {"name": "vla", "vla_config": {"model_class": LINEAR, "model_path": "gone.pt"}}
    config = parse_section(PolicyConfig, config, place="policy")
    assert isinstance(build_policy(config, OBSERVATION, ACTION, pretrained=False), VLAPolicy)


def test_a_model_is_loaded_from_keywords_as_well():
    model = load_vla_model(
        model_class="palaestra.policy.vla.models.LinearVLA", action_dim=2, observation_space=OBSERVATION
    )
    assert isinstance(model, LinearVLA)
    with pytest.raises(
        ConfigError, match=r"policy.vla_config.modelclass = 'x': unknown key. Did you mean 'model_class'"
    ):
        load_vla_model(modelclass="x")


# ------------------------------------------------------------------------------------------------------------ acting


def test_joined_keys_become_nested_ones_and_an_observation_without_keys_gets_one():
    seen = as_tensordict({"arm/rgb": torch.zeros(3, 2), "arm/joints": torch.ones(3, 1), "language": torch.ones(3, 4)})
    assert seen.batch_size == (3,)
    assert tuple(seen["arm", "rgb"].shape) == (3, 2)
    assert as_tensordict(torch.zeros(5, 2))["observation"].shape == (5, 2)


def test_the_same_noise_draws_the_same_action_and_other_noise_another():
    policy, seen = _built(), _seen()
    noise = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    first, again = policy.act(seen, noise), policy.act(seen, noise.clone())
    noise[2, 1] += 1e-6
    other = policy.act(seen, noise)
    assert torch.equal(first.action, again.action)
    assert not torch.equal(first.action, other.action)
    assert torch.equal(policy.act(seen, None).action, policy.model(as_tensordict(seen), deterministic=True))


class FromTheGlobalGenerator(LinearVLA):
    def forward(self, observations):
        mean = super().forward(observations, deterministic=True)
        return mean + 0.37 * torch.randn_like(mean)


def test_a_model_that_takes_no_generator_is_seeded_and_torchs_own_state_put_back():
    policy, seen, noise = _built(model_class=f"{HERE}:FromTheGlobalGenerator"), _seen(), torch.full((3, 2), 0.5)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    first = policy.act(seen, noise).action
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(policy.act(seen, noise).action, first)
    assert torch.equal(policy.act(seen, None).action, policy.act(seen, None).action)


def test_two_threads_that_act_at_once_do_not_mix_up_their_random_numbers():
    policy, seen = _built(model_class=f"{HERE}:FromTheGlobalGenerator"), _seen()
    noises = [torch.full((3, 2), 0.01 * i) for i in range(40)]
    alone = [policy.act(seen, noise).action for noise in noises]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda noise: policy.act(seen, noise).action, noises))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_the_normal_distribution_by_hand():
    head = GaussianHead(2, log_std_init=math.log(0.5))
    log_prob, entropy = head.evaluate(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.0]]))
    # One and two standard deviations away: -(1 + 4) / 2 - 2 log 0.5 - log(2 pi) = -2.9516
    assert log_prob.tolist() == pytest.approx([-2.951583], rel=1e-5)
    assert entropy.tolist() == pytest.approx([2 * (0.5 + math.log(0.5) + 0.5 * math.log(2 * math.pi))], rel=1e-5)


@pytest.mark.parametrize("action", [ACTION, CHUNK], ids=["single", "chunk"])
def test_what_acting_says_is_what_evaluation_says(action):
    policy, seen = _built(action), _seen()
    with torch.inference_mode():
        acted = policy.act(seen, torch.full((3, 2), 0.5))
    assert acted.action.shape == (3, *action.shape)
    assert acted.log_prob.shape == ((3, 4) if action is CHUNK else (3,))
    log_prob, entropy, value = policy.evaluate_actions(seen, acted.action.clone())
    assert torch.allclose(log_prob, acted.log_prob.reshape(3, -1).sum(-1))
    assert torch.equal(value, acted.value)
    # Two numbers of standard deviation exp(-1): 2 * (0.5 log(2 pi e) - 1) = 0.8379 nats, four times in a chunk.
    assert entropy.tolist() == pytest.approx([0.837877 * (4 if action is CHUNK else 1)] * 3, rel=1e-5)
    assert torch.equal(policy.value(seen), value)


def test_actions_of_a_chunk_that_were_not_executed_do_not_count():
    policy, seen = _built(CHUNK), _seen()
    acted = policy.act(seen, torch.full((3, 2), 0.5))
    log_prob, entropy, _ = policy.evaluate_actions(seen, acted.action, duration=torch.tensor([4, 1, 2]))
    each = acted.log_prob
    assert torch.allclose(log_prob, torch.stack([each[0].sum(), each[1, 0], each[2, 0] + each[2, 1]]))
    assert entropy.tolist() == pytest.approx([4 * 0.837877, 0.837877, 2 * 0.837877], rel=1e-5)
    changed = acted.action.clone()
    changed[1, 1:] = 9.0
    assert torch.equal(policy.evaluate_actions(seen, changed, duration=torch.tensor([4, 1, 2]))[0][1], log_prob[1])


def test_the_collector_is_told_what_it_needs():
    policy = _built(CHUNK)
    assert (policy.chunk, policy.action_dim, policy.distribution.action_shape) == (4, 2, (4, 2))
    assert policy.distribution.action_dtype is np.float32
    sent = policy.distribution.to_env(np.full((3, 4, 2), 2.5, np.float32))
    assert sent.max() == 1.0
    with pytest.raises(ConfigError, match="cannot be masked"):
        policy.act(_seen(), None, mask=torch.ones(3, 2))


class InOnePass(LinearVLA):
    def __init__(self, observation_space, action_dim):
        super().__init__(observation_space, action_dim)
        self.passes = 0

    def _features(self, observations):
        self.passes += 1
        return super()._features(observations)

    def evaluate(self, observations, actions):
        features = self._features(observations)
        log_prob, entropy = self.gaussian.evaluate(self.action_head(features), actions)
        return log_prob, entropy, self.value_head(features)

    def act(self, observations, *, deterministic=False, generator=None):
        features = self._features(observations)
        mean = self.action_head(features)
        actions = self.gaussian.sample(mean, deterministic=deterministic, generator=generator)
        return actions, self.gaussian.evaluate(mean, actions)[0], self.value_head(features)


def test_a_model_that_can_answer_in_one_pass_is_asked_once():
    policy, plain, seen = _built(model_class=f"{HERE}:InOnePass"), _built(), _seen()
    policy.model.passes = 0
    acted = policy.act(seen, torch.full((3, 2), 0.5))
    policy.evaluate_actions(seen, acted.action)
    assert policy.model.passes == 2
    assert all(torch.allclose(a, b) for a, b in zip(acted, plain.act(seen, torch.full((3, 2), 0.5)), strict=True))


# ---------------------------------------------------------------------------------------------------------- learning


def test_the_model_stays_in_eval_mode_so_that_a_fresh_ratio_is_exactly_one():
    policy = _built()
    assert not policy.train().model.training
    assert not policy.training


def test_parts_have_their_own_learning_rate_and_frozen_ones_none():
    scales = {"vision_encoder": 0.1, "gaussian.log_std": 2.0}
    policy = _built(learning_rate_scale=scales, freeze=["value_head.bias"])
    groups = policy.parameter_groups()
    assert {name: sum(p.numel() for p in group) for name, group in groups.items()} == {
        "policy": 8 * 2 + 2 + 8,
        "policy.vision_encoder": (48 + 5 + 6) * 8 + 8,
        "policy.gaussian.log_std": 2,
    }
    assert policy.learning_rate_scales == {"policy": 1.0, "policy.vision_encoder": 0.1, "policy.gaussian.log_std": 2.0}


def test_a_frozen_part_stays_bit_identical_while_the_rest_learns():
    from palaestra.learner.adam import Adam

    policy, seen = _built(freeze=["vision_encoder"]), _seen()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    flat = FlatParameters.of(policy)
    adam = Adam(flat, 1e-5)
    for step in range(3):
        acted = policy.act(seen, torch.full((3, 2), 0.1 * step))
        log_prob, entropy, value = policy.evaluate_actions(seen, acted.action.detach())
        flat.gradient.zero_()
        (log_prob.mean() + entropy.mean() + (value - 1).square().mean()).backward()
        adam.step("policy", flat.trainable("policy"), 1e-2, 1.0)
    same = {name for name, value in policy.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"model.vision_encoder.weight", "model.vision_encoder.bias"}


class HalfPrecision(LinearVLA):
    def __init__(self, observation_space, action_dim):
        super().__init__(observation_space, action_dim)
        self.value_head.bfloat16()


def test_other_precisions_are_trained_as_float32_and_that_is_told():
    policy = _built(model_class=f"{HERE}:HalfPrecision")
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert policy.notices == ["The model's bfloat16 weights are trained as float32."]


# ------------------------------------------------------------------------------------------------------------- files


class Tied(LinearVLA):
    def __init__(self, observation_space, action_dim):
        super().__init__(observation_space, action_dim)
        self.reader = nn.Linear(8, 1)
        self.reader.weight = self.value_head.weight


@pytest.mark.parametrize("cls", [LINEAR, f"{HERE}:Tied"], ids=["linear", "tied"])
def test_a_checkpoint_brings_every_weight_back_into_a_policy_built_anew(cls, tmp_path):
    policy, other, seen = _built(model_class=cls), _built(model_class=cls, seed=9), _seen()
    FlatParameters.of(policy)
    load_weights(other, save_policy(policy, tmp_path / "policy.safetensors"))
    noise = torch.full((3, 2), 0.5)
    assert all(torch.equal(a, b) for a, b in zip(policy.act(seen, noise), other.act(seen, noise), strict=True))
    with pytest.raises(CheckpointError, match=r"another architecture|has shape"):
        load_weights(_built(model_config={"hidden": 9}), tmp_path / "policy.safetensors")


def test_a_policy_can_be_copied_and_pickled_for_a_collector_elsewhere():
    policy, seen, noise = _built(CHUNK, freeze=["vision_encoder"]), _seen(), torch.full((3, 2), 0.5)
    FlatParameters.of(policy)
    expected = policy.act(seen, noise)
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert all(torch.equal(a, b) for a, b in zip(twin.act(seen, noise), expected, strict=True))
        assert not twin.model.vision_encoder.weight.requires_grad
