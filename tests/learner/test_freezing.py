"""Weights that are frozen or thawed after training began: neither gradient nor momentum moves what is frozen."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from palaestra.actor import AsyncConfig
from palaestra.env import EnvConfig, make_env
from palaestra.errors import ConfigError
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.train import Trainer


class TwoLayers(nn.Module):
    """A body and a head that both outputs share."""

    def __init__(self, observation_space: spaces.Box, action_space: spaces.Discrete) -> None:
        super().__init__()
        self.body = nn.Linear(observation_space.shape[0], 8)
        self.head = nn.Linear(8, int(action_space.n) + 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(self.body(observation).tanh())
        return out[:, :-1], out[:, -1]


def trainer_for(compiled: Literal["auto", "on", "off"] = "auto", *, own: bool = False, **settings: Any) -> Trainer:
    env = make_env(EnvConfig(id="compiled/CartPole-v1", num_envs=2))
    network = TwoLayers(env.observation_space, env.action_space) if own else None
    policy = ActorCritic(env.observation_space, env.action_space, network=network)
    return Trainer(policy, env, PPO(batch_size=16, n_epochs=2, learning_rate=1e-2), compiled=compiled, **settings)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


@pytest.mark.parametrize("compiled", ["auto", "off"])
def test_a_layer_frozen_after_the_first_update_keeps_its_weights_and_the_others_learn_on(compiled: Any) -> None:
    trainer = trainer_for(compiled)
    trainer.train(32, rollout_length=16)
    policy: Any = trainer.policy
    policy.actor[0].requires_grad_(False)
    frozen, head, critic = weights(policy.actor[0]), weights(policy.actor[4]), weights(policy.critic)
    trainer.train(96, rollout_length=16)
    assert torch.equal(weights(policy.actor[0]), frozen)
    assert not torch.equal(weights(policy.actor[4]), head)
    assert not torch.equal(weights(policy.critic), critic)


@pytest.mark.parametrize("compiled", ["auto", "off"])
def test_a_whole_actor_can_be_frozen_while_the_critic_learns(compiled: Any) -> None:
    trainer = trainer_for(compiled)
    trainer.train(32, rollout_length=16)
    policy: Any = trainer.policy
    policy.actor.requires_grad_(False)
    frozen, critic = weights(policy.actor), weights(policy.critic)
    trainer.train(64, rollout_length=16)
    assert torch.equal(weights(policy.actor), frozen)
    assert not torch.equal(weights(policy.critic), critic)


def test_part_of_an_own_network_frozen_after_the_first_update_keeps_its_weights() -> None:
    trainer = trainer_for(own=True)
    trainer.train(32, rollout_length=16)
    network: Any = trainer.policy.network
    network.body.requires_grad_(False)
    frozen, head = weights(network.body), weights(network.head)
    trainer.train(64, rollout_length=16)
    assert torch.equal(weights(network.body), frozen)
    assert not torch.equal(weights(network.head), head)


def test_what_is_thawed_learns_again_on_the_compiled_path() -> None:
    trainer = trainer_for()
    policy: Any = trainer.policy
    policy.actor[0].requires_grad_(False)
    trainer.train(32, rollout_length=16)
    policy.actor[0].requires_grad_(True)
    before = weights(policy.actor[0])
    trainer.train(64, rollout_length=16)
    assert not torch.equal(weights(policy.actor[0]), before)


@pytest.mark.parametrize("asynchronous", [None, AsyncConfig(max_staleness=0)])
def test_what_was_frozen_at_the_start_learns_after_it_is_thawed(asynchronous: AsyncConfig | None) -> None:
    env = make_env(EnvConfig(id="compiled/CartPole-v1", num_envs=2))
    network: Any = TwoLayers(env.observation_space, env.action_space)
    network.body.requires_grad_(False)
    policy = ActorCritic(env.observation_space, env.action_space, network=network)
    trainer = Trainer(policy, env, PPO(batch_size=16, n_epochs=2), asynchronous=asynchronous)
    frozen = weights(network.body)
    trainer.train(32, rollout_length=16)
    assert torch.equal(weights(network.body), frozen)
    network.body.requires_grad_(True)
    trainer.train(64, rollout_length=16)
    assert not torch.equal(weights(network.body), frozen)


@pytest.mark.parametrize("collector", ["thread", "process"])
def test_background_collection_goes_on_with_weights_frozen_between_two_trainings(collector: Any) -> None:
    config = EnvConfig(id="CartPole-v1", num_envs=2)
    env = make_env(config)
    network: Any = TwoLayers(env.observation_space, env.action_space)
    policy = ActorCritic(env.observation_space, env.action_space, network=network)
    first = Trainer(policy, env, PPO(batch_size=16, n_epochs=2))
    first.train(32, rollout_length=16)
    network.body.requires_grad_(False)
    frozen, head = weights(network.body), weights(network.head)
    trainer = Trainer(policy, env, asynchronous=AsyncConfig(collector=collector, max_staleness=0), env_config=config)
    trainer.train(32, rollout_length=16)
    assert torch.equal(weights(network.body), frozen)
    assert not torch.equal(weights(network.head), head)


def test_a_layer_replaced_between_two_updates_is_the_one_that_acts_and_learns() -> None:
    trainer = trainer_for()
    trainer.train(32, rollout_length=16)
    policy: Any = trainer.policy
    policy.actor[4] = nn.Linear(64, 2)
    before = weights(policy.actor[4])
    trainer.train(64, rollout_length=16)
    assert not torch.equal(weights(policy.actor[4]), before)
    vector = FlatParameters.of(policy).vector
    assert policy.actor[4].weight.data_ptr() in range(vector.data_ptr(), vector.data_ptr() + 4 * len(vector))


@pytest.mark.parametrize("compiled", ["auto", "off"])
def test_a_policy_with_every_weight_frozen_is_refused(compiled: Any) -> None:
    trainer = trainer_for(compiled)
    trainer.policy.requires_grad_(False)
    with pytest.raises(ConfigError, match="every weight is frozen"):
        trainer.train(32, rollout_length=16)
