"""Policies as files: the same actions come back, and what does not fit changes nothing."""

import json
import struct

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from palaestra.errors import CheckpointError
from palaestra.policy import ActorCritic, PolicyConfig, load_policy, save_policy
from palaestra.policy.storage import load_weights, space_from_json, space_to_json

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
OBSERVATIONS = {
    "vector": VECTOR,
    "uneven bounds": spaces.Box(np.array([-1, -2], np.float32), np.array([1, np.inf], np.float32)),
    "matrix": spaces.Box(-1, 1, (2, 3), np.float32),
    "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
    "choice": spaces.Discrete(4, start=2),
    "choices": spaces.MultiDiscrete([2, 3], start=[1, 0]),
    "switches": spaces.MultiBinary(3),
    "mixed": spaces.Dict({"body/joints": VECTOR, "camera": spaces.Box(0, 255, (8, 8, 1), np.uint8)}),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=5),
    "several": spaces.MultiDiscrete([2, 3]),
    "several from elsewhere": spaces.MultiDiscrete([2, 3], start=[1, 7]),
    "switches": spaces.MultiBinary(2),
    "box": spaces.Box(-2, 2, (2,), np.float32),
    "box table": spaces.Box(-2, 2, (2, 2), np.float32),
}


def _observations(space, size=6):
    space.seed(3)
    samples = [space.sample() for _ in range(size)]
    if isinstance(space, spaces.Dict):
        return {name: torch.as_tensor(np.stack([s[name] for s in samples])) for name in space.spaces}
    return torch.as_tensor(np.stack(samples))


def _policy(observation=VECTOR, action=ACTIONS["discrete"], *, seed=1, normalize=False, **config):
    config = PolicyConfig(**({"hidden": (8,), "image_features": 6} | config))
    return ActorCritic(observation, action, config, normalize_observation=normalize, seed=seed)


def _acts(policy, observation):
    with torch.no_grad():
        return policy.act(observation, torch.full((6, policy.distribution.noise_size), 0.3))


def _same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_a_policy_comes_back_from_its_file_for_every_kind_of_observation(kind, tmp_path):
    space = OBSERVATIONS[kind]
    policy = _policy(space, normalize=True)
    observation = _observations(space)
    policy.update_statistics(observation)
    back = load_policy(save_policy(policy, tmp_path / "policy.safetensors"))
    assert back.observation_space == space
    assert _same(_acts(policy, observation), _acts(back, observation))


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("distribution", ["auto", "squashed_gaussian"])
def test_a_policy_comes_back_from_its_file_for_every_kind_of_action(kind, distribution, tmp_path):
    policy = _policy(action=ACTIONS[kind], distribution=distribution, log_std_init=-0.7, activation="relu")
    back = load_policy(save_policy(policy, tmp_path / "policy.safetensors"))
    observation = _observations(VECTOR)
    ours, theirs = _acts(policy, observation), _acts(back, observation)
    assert back.action_space == ACTIONS[kind]
    assert type(back.distribution) is type(policy.distribution)
    assert _same(ours, theirs)
    sent, sent_back = (p.distribution.to_env(a.action.numpy()) for p, a in ((policy, ours), (back, theirs)))
    assert np.array_equal(sent, sent_back)


@pytest.mark.parametrize("space", [*OBSERVATIONS.values(), *ACTIONS.values()], ids=str)
def test_a_space_comes_back_from_plain_json(space):
    assert space_from_json(json.loads(json.dumps(space_to_json(space)))) == space


def test_the_statistics_of_the_normaliser_are_in_the_file(tmp_path):
    policy = _policy(normalize=True)
    policy.update_statistics(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
    back = load_policy(save_policy(policy, tmp_path / "policy.safetensors"))
    assert back.encoder.normalizers["observation"].mean.tolist() == [2.0, 2.0, 2.0]
    assert back.encoder.normalizers["observation"].count.item() == 2


OTHERS = {
    "wider": {"hidden": (9,)},
    "deeper": {"hidden": (8, 8)},
    "another observation": {"observation": spaces.Box(-1, 1, (4,), np.float32)},
    "another action": {"action": spaces.Discrete(4)},
    "with a normaliser": {"normalize": True},
}


@pytest.mark.parametrize("other", OTHERS)
def test_weights_of_another_architecture_are_refused_before_any_of_ours_change(other, tmp_path):
    path = save_policy(_policy(**OTHERS[other]), tmp_path / "other.safetensors")
    policy = _policy(seed=2)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"another architecture|has shape"):
        load_weights(policy, path)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)

    def forward(self, observation):
        out = self.body(observation)
        return out[:, :3], out[:, 3]


def test_a_network_of_ones_own_needs_its_code_again_and_then_comes_back(tmp_path):
    policy = ActorCritic(VECTOR, spaces.Discrete(3), network=Own())
    path = save_policy(policy, tmp_path / "own.safetensors")
    with pytest.raises(CheckpointError, match="network of your own"):
        load_policy(path)
    back = load_policy(path, network=Own())
    assert _same(_acts(policy, _observations(VECTOR)), _acts(back, _observations(VECTOR)))


def test_the_file_is_safetensors_and_holds_no_pickle(tmp_path):
    raw = save_policy(_policy(), tmp_path / "policy.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert "actor.0.weight" in header
    assert json.loads(header["__metadata__"]["palaestra"])["schema"] == 1
    assert not raw.startswith((b"\x80", b"PK"))


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"PK\x03\x04 not really a zip", b"{}" * 50])
def test_what_is_not_a_policy_is_refused(content, tmp_path):
    path = tmp_path / "policy.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_policy(path)


def test_a_truncated_file_and_a_missing_one_are_refused(tmp_path):
    path = save_policy(_policy(), tmp_path / "policy.safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_policy(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_policy(tmp_path / "nothing.safetensors")


def test_a_policy_of_a_newer_schema_is_refused(tmp_path):
    path = save_policy(_policy(), tmp_path / "policy.safetensors")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'\\"schema\\": 1', b'\\"schema\\": 9', 1))
    assert path.read_bytes() != raw
    with pytest.raises(CheckpointError, match="schema 1 or older"):
        load_policy(path)
