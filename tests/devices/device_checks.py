"""Checks of device placement on the fake GPU, run by test_devices.py in a separate process; prints JSON lines.

Each check compares what the CPU and the fake GPU compute; an operation on tensors of two devices raises.
"""

import json
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.devices.fake_gpu import GPU, GpuTensor, MixedDevices, fake_gpu

from palaestra.actor.asynchronous import AsyncConfig
from palaestra.env.make import as_vector_env
from palaestra.env.toy import MaskedChoice, MixedSenses, Pixels
from palaestra.errors import ConfigError
from palaestra.evaluation import evaluate
from palaestra.learner.ppo import PPO
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.config import PolicyConfig
from palaestra.policy.device import choose_device
from palaestra.policy.storage import load_policy, save_policy
from palaestra.policy.vla import VLAPolicy
from palaestra.policy.vla.conformance import check_vla_model
from palaestra.policy.vla.models import LinearVLA, SmallVLA
from palaestra.train.trainer import Trainer

TIMED = ("seconds", "per_second", "utilisation", "queue_depth")
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


class Choices(gymnasium.Env):
    """Random observations of one space, any action of another, episodes of five steps."""

    def __init__(self, actions, observations=None):
        self.observation_space = observations or spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self._left = 5
        return self.observation_space.sample(), {}

    def step(self, action):
        self._left -= 1
        return self.observation_space.sample(), float(np.sum(action)), False, self._left == 0, {}


def train_on(device, make, *, policy=None, updates=2, asynchronous=None, normalize=False, algorithm=None, **settings):
    env = one = as_vector_env([make() for _ in range(2)])
    chosen = policy(one) if policy else ActorCritic(
        one.observation_space, one.action_space, PolicyConfig(hidden=(8,), **settings), normalize_observation=normalize
    )  # fmt: skip
    trainer = Trainer(
        chosen, env, algorithm or PPO(batch_size=8, n_epochs=2), compiled="off", device=device,
        normalize_reward=normalize, asynchronous=asynchronous,
    )  # fmt: skip
    return trainer, trainer.train(16 * updates, 8)


def same(make, **settings):
    """Train on both; every metric and every weight must agree bit for bit."""
    here, told = train_on("cpu", make, **settings)
    there, found = train_on("fakegpu", make, **settings)
    assert there.device == GPU, there.device
    assert isinstance(there.training.learner.optimizer().first, GpuTensor)
    for one, other in zip(told, found, strict=True):
        different = {k: (one[k], other[k]) for k in one if one[k] != other[k] and not k.endswith(TIMED)}
        assert not different or all(np.isnan(v).all() for v in different.values()), different
    for name, weight in here.policy.state_dict().items():
        assert torch.equal(weight, there.policy.state_dict()[name].cpu()), name
    return there


@check
def the_fake_gpu_refuses_mixed_devices():
    with pytest.raises(MixedDevices):
        torch.zeros(3, device=GPU) + torch.zeros(3)


@check
def discrete_actions_and_normalised_observations():
    same(lambda: gymnasium.make("CartPole-v1"), normalize=True)


@check
def gaussian_actions():
    same(lambda: Choices(spaces.Box(-1, 1, (2,), np.float32)))


@check
def squashed_gaussian_actions():
    same(lambda: Choices(spaces.Box(-1, 1, (2,), np.float32)), distribution="squashed_gaussian")


@check
def several_choices_at_once():
    same(lambda: Choices(spaces.MultiDiscrete([3, 2])))


@check
def switches():
    same(lambda: Choices(spaces.MultiBinary(3)))


@check
def choices_as_observations():
    same(lambda: Choices(spaces.Discrete(2), spaces.MultiDiscrete([3, 4])))


@check
def masked_actions():
    same(MaskedChoice)


@check
def images():
    same(Pixels, updates=1)


@check
def dictionaries():
    same(MixedSenses, normalize=True)


@check
def vtrace_on_experience_of_older_weights():
    _stale(PPO(batch_size=8, n_epochs=1, correction="vtrace"))


@check
def decoupled_ppo_on_experience_of_older_weights():
    _stale(PPO(batch_size=8, n_epochs=1))


def _stale(algorithm):
    metrics = []
    for device in ("cpu", "fakegpu"):
        trainer, _ = train_on(device, lambda: gymnasium.make("CartPole-v1"), updates=1, algorithm=algorithm)
        rollout = trainer.collect_rollouts(8)
        assert rollout["observation"].device.type == "cpu"
        trainer.learn(rollout)
        metrics.append(trainer.learn(rollout))
    assert metrics[0] == metrics[1], metrics
    assert metrics[0]["staleness"] == 1.0


@check
def collecting_in_a_thread():
    settings = AsyncConfig(reproducible=True)
    there = same(lambda: gymnasium.make("CartPole-v1"), asynchronous=settings, updates=3, normalize=True)
    # Collecting in turn after it takes the learner's weights over.
    there.collect_rollouts(4)
    for mine, theirs in zip(there.policy.parameters(), there.collector.policy.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())


@check
def a_collector_on_the_cpu_beside_a_learner_on_the_gpu():
    settings = AsyncConfig(reproducible=True, collector_device="cpu")
    there = same(lambda: gymnasium.make("CartPole-v1"), asynchronous=settings, updates=3, normalize=True)
    collector = there.training.source.collector
    assert {parameter.device.type for parameter in collector.policy.parameters()} == {"cpu"}
    there.collect_rollouts(4)
    for mine, theirs in zip(there.policy.parameters(), collector.policy.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs)


@check
def a_sampler_on_the_cpu_beside_a_learner_on_the_gpu():
    from tests.learner.trajectories.played import build_policy

    policy = build_policy()
    before = policy.learner.trainable()
    gpu = policy.learner.clone(GPU)
    assert {weight.device for _, weight in gpu.named_parameters()} == {GPU}
    # Its copy shares nothing: the learner stays where it was.
    assert {weight.device.type for _, weight in policy.named_parameters()} == {"cpu"}
    policy.learner = gpu
    for weight in (weight for name, weight in gpu.named_parameters() if name in before):
        weight.requires_grad_(True)
    policy.sample_on(torch.device("cpu"))
    assert {weight.device.type for _, weight in policy._acting.named_parameters()} == {"cpu"}
    with torch.no_grad():
        next(iter(gpu.trainable().values())).add_(1.0)
    policy.publish(1)
    assert policy._acting_fingerprint == policy.fingerprint


def _words():
    return Choices(
        spaces.Box(-1, 1, (2,), np.float32),
        spaces.Dict(
            {
                "rgb": spaces.Box(0, 255, (32, 32, 3), np.uint8),
                "proprio": spaces.Box(-1, 1, (2,), np.float32),
                "language": spaces.MultiDiscrete([8, 8]),
            }
        ),
    )


@check
def a_small_vla():
    def policy(env):
        torch.manual_seed(0)
        model = SmallVLA(action_dim=2, image_size=32, proprio=2, vocabulary=8, depth=False)
        return VLAPolicy(model, env.observation_space, env.action_space, freeze=["vision_encoder"])

    same(_words, policy=policy)


@check
def a_vla_that_acts_in_chunks_in_a_thread():
    def policy(env):
        torch.manual_seed(0)
        model = LinearVLA(env.observation_space, 2, chunk=3)
        return VLAPolicy(model, env.observation_space, env.action_space)

    def make():
        return Choices(spaces.Box(-1, 1, (3, 2), np.float32))

    same(make, policy=policy, updates=3, asynchronous=AsyncConfig(reproducible=True))


@check
def a_vla_is_checked_where_it_trains():
    env = _words()
    model = LinearVLA(env.observation_space, 2).to("fakegpu")
    check_vla_model(model, env.observation_space, env.action_space)


@check
def evaluation_and_files_across_devices():
    env = gymnasium.make("CartPole-v1")
    there, _ = train_on("fakegpu", lambda: gymnasium.make("CartPole-v1"), normalize=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        save_policy(there.policy, path / "policy.safetensors")
        here = load_policy(path / "policy.safetensors")
        again = load_policy(path / "policy.safetensors", device="fakegpu")
        assert (here.device.type, again.device) == ("cpu", GPU)
        for sampled in (False, True):
            played = [
                evaluate(p, Trainer(p, [env]).env, episodes=3, seed=1, deterministic=sampled) for p in (here, again)
            ]
            assert played[0] == played[1], played
        there.save_checkpoint(path / "update_1")
        resumed, _ = train_on("cpu", lambda: gymnasium.make("CartPole-v1"), normalize=True, updates=1)
        resumed.load_checkpoint(path / "update_1")
        assert torch.equal(resumed.training.learner.optimizer().second, there.training.learner.optimizer().second.cpu())
        back, _ = train_on("fakegpu", lambda: gymnasium.make("CartPole-v1"), normalize=True, updates=1)
        back.load_checkpoint(path / "update_1")
        told, found = resumed.train(64, 8)[-1], back.train(64, 8)[-1]
        assert {k: v for k, v in told.items() if not k.endswith(TIMED)} == {
            k: v for k, v in found.items() if not k.endswith(TIMED)
        }


@check
def a_policy_that_is_moved_between_two_trainings():
    trainer, _ = train_on("cpu", lambda: gymnasium.make("CartPole-v1"))
    trainer.policy.to("fakegpu")
    assert trainer.train(64, 8)[-1]["actor_grad_norm"] > 0
    trainer.policy.cpu()
    assert trainer.train(96, 8)[-1]["actor_grad_norm"] > 0


@check
def the_kernels_step_aside():
    env = gymnasium.make("CartPole-v1")
    policy = ActorCritic(env.observation_space, env.action_space, device="fakegpu")
    Trainer(policy, [env], PPO(batch_size=8)).train(16, 8)
    with pytest.raises(ConfigError, match="the kernels run on the CPU only, and the weights are on fakegpu:0"):
        Trainer(policy, [env], compiled="on")


@check
def a_device_is_given_its_index():
    assert choose_device("fakegpu") == GPU


def main():
    warnings.simplefilter("ignore")  # torch's own, about a backend of this name
    with fake_gpu():
        for function in CHECKS:
            try:
                function()
                fault = ""
            except BaseException:  # noqa: BLE001  told to the test that waits for it
                fault = traceback.format_exc()
            print(json.dumps([function.__name__, fault]), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
