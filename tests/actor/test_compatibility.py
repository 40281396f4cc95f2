"""Training that cannot fit into memory is refused before a run exists, and in Python before anything is allocated."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from palaestra.actor.compatibility import policy_bytes
from palaestra.cli.train import check_config
from palaestra.env.toy import Countdown
from palaestra.errors import ConfigError
from palaestra.experience import ArraySpec, RolloutBuffer
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.config import PolicyConfig
from palaestra.train.config import config_from
from palaestra.train.trainer import Trainer
from palaestra.train.vector import train


def _trainer(**settings):
    env = gymnasium.make("CartPole-v1")
    return Trainer(ActorCritic(env.observation_space, env.action_space), [env], **settings)


def test_a_rollouts_size_is_known_without_allocating_it():
    spec = (4, ArraySpec((3,), np.dtype(np.float32)), ArraySpec((), np.dtype(np.int64)))
    buffer = RolloutBuffer(10, *spec, mask_size=2)
    arrays = [value for value in vars(buffer).values() if isinstance(value, np.ndarray)]
    assert RolloutBuffer.bytes_needed(10, *spec, mask_size=2) == sum(array.nbytes for array in arrays)
    assert RolloutBuffer.bytes_needed(10**15, *spec) > 10**15
    with pytest.raises(ConfigError, match=r"num_steps = 1000000000000: it needs about \d"):
        RolloutBuffer(10**12, *spec)


def test_a_learning_policy_takes_seven_numbers_per_trained_weight_and_ten_in_the_background():
    env = gymnasium.make("CartPole-v1")
    policy = ActorCritic(env.observation_space, env.action_space, PolicyConfig(hidden=(3,)))
    # Actor 4*3+3 + 3*2+2 = 23, critic 4*3+3 + 3*1+1 = 19.
    assert policy_bytes(policy) == 7 * 4 * 42
    assert policy_bytes(policy, asynchronous=True) == 10 * 4 * 42
    policy.critic.requires_grad_(False)
    assert policy_bytes(policy) == 7 * 4 * 23 + 4 * 19


@pytest.mark.parametrize("call", ["train", "collect"])
def test_a_rollout_that_cannot_fit_is_refused_in_python(call):
    trainer = _trainer()
    with pytest.raises(ConfigError, match=r"it needs about .* TB of memory \(a rollout of 100,000,000,000 steps x 1 "):
        trainer.train(10**12, 10**11) if call == "train" else trainer.collect_rollouts(10**11)


def test_a_run_that_cannot_fit_is_refused_before_its_directory_exists(tmp_path):
    config = config_from({"env": {"id": "CartPole-v1"}, "trainer": {"rollout_length": 10**11}})
    with pytest.raises(ConfigError) as refused:
        train(config, root=tmp_path / "runs", run_id="one")
    text = str(refused.value)
    assert text.startswith("trainer.rollout_length = 100000000000: it needs about ")
    assert "a rollout of 100,000,000,000 steps x 8 environments" in text
    assert "Set a shorter trainer.rollout_length, fewer env.num_envs, or a smaller policy." in text
    assert not (tmp_path / "runs").exists()


def test_a_gpu_has_a_limit_of_its_own(monkeypatch):
    trainer = _trainer()
    monkeypatch.setattr("palaestra.actor.compatibility.device_of", lambda policy: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1_000_000))
    trainer.training.check_memory(16)
    with pytest.raises(
        ConfigError, match=r"the policy .*a rollout .*, but 1\.0 MB is available\. .*trainer\.device=cpu"
    ):
        trainer.training.check_memory(10_000)


def test_the_check_before_a_launch_counts_all_environments():
    data = {"env": {"id": "CartPole-v1", "num_envs": 1000}, "trainer": {"rollout_length": 10**9}}
    with pytest.raises(ConfigError, match="x 1000 environments"):
        check_config(data)


def test_a_network_that_cannot_fit_is_refused_before_its_weights_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("palaestra.processes.memory.memory_limit", lambda: 25_300_000_000)
    data = {"env": {"id": "CartPole-v1"}, "policy": {"hidden": [65_536, 65_536]}}
    # Two networks, each 65536 * 65536 weights and a few more: 34.4 GB, and as gradients and moments three times that.
    with pytest.raises(ConfigError) as refused:
        train(config_from(data), root=tmp_path / "runs", run_id="one")
    assert str(refused.value) == (
        "policy.hidden = [65536, 65536]: it needs about 137.5 GB of memory (weights 34.4 GB, gradients 34.4 GB, Adam's "
        "moments 68.7 GB), but 25.3 GB is available. Use fewer or narrower layers."
    )
    assert not (tmp_path / "runs").exists()


def test_first_weights_that_take_minutes_are_announced(monkeypatch):
    monkeypatch.setattr("palaestra.policy.network.SLOW_TO_DRAW", 1000)
    env = Countdown()
    with pytest.warns(UserWarning, match=r"policy.hidden = \[64, 64\]: drawing .* first weights takes minutes"):
        ActorCritic(env.observation_space, env.action_space)


def test_numbers_that_look_like_a_picture_are_reported_before_training():
    picture = spaces.Box(0, 1, (84, 84, 3), np.float32)
    (notice,) = ActorCritic(picture, spaces.Discrete(2), PolicyConfig(hidden=(4,))).notices
    assert notice.startswith(
        "The observation of shape (84, 84, 3) and type float32 is read as 21,168 separate numbers."
    )
    assert ActorCritic(spaces.Box(0, 1, (3, 4), np.float32), spaces.Discrete(2)).notices == []
