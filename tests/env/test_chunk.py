"""Action chunks: executed one after the other, cut off by the end of an episode, and counted."""

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from palaestra.actor.collector import Collector
from palaestra.env import EnvConfig, make_env
from palaestra.env.factory import ActionChunk
from palaestra.env.in_process import InProcessEnv
from palaestra.env.spaces import allocate_row
from palaestra.errors import ConfigError
from palaestra.policy.actor_critic import ActResult


class Line(gymnasium.Env):
    """Walks along a line by the actions; three steps are an episode; each pays the step's length."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at, self._steps = 0.0, 0
        return np.array([0.0], np.float32), {}

    def step(self, action):
        self._at += float(action[0])
        self._steps += 1
        return np.array([self._at], np.float32), float(action[0]), self._steps == 3, False, {}


def test_a_chunk_pays_its_sum_and_ends_with_its_episode():
    env = ActionChunk(Line(), 2)
    env.reset(seed=0)
    assert env.action_space.shape == (2, 1)
    seen, reward, terminated, _, info = env.step(np.array([[0.5], [0.25]], np.float32))
    assert (seen[0], reward, terminated, info["actions_executed"]) == (0.75, 0.75, False, 2)
    _, reward, terminated, _, info = env.step(np.array([[0.5], [1.0]], np.float32))
    assert (reward, terminated, info["actions_executed"]) == (0.5, True, 1)  # the 1.0 never reached the environment


def test_the_vector_environment_tells_how_many_actions_the_last_chunk_had():
    env = InProcessEnv(lambda: ActionChunk(Line(), 2), 2)
    row = allocate_row(env.observation_space, 2, 0)
    env.reset(0, row)
    action = np.full((2, 2, 1), 0.5, np.float32)
    assert env.step(action, row) == []
    assert [ended.executed for ended in env.step(action, row)] == [1, 1]


class _Told(nn.Module):
    """A stand-in policy: chunks of two actions, each with the log-probability it is told."""

    class distribution:  # noqa: N801
        action_shape, action_dtype, noise_kind, noise_size = (2, 1), np.float32, "uniform", 1
        to_env = staticmethod(lambda action: action)

    chunk = 2

    def parameters(self, recurse=True):
        yield torch.zeros(1)

    def act(self, observation, noise, *, mask=None):
        n = len(noise)
        return ActResult(torch.full((n, 2, 1), 0.5), torch.tensor([[-1.0, -10.0]]).expand(n, 2), torch.zeros(n))

    def value(self, observation):
        return torch.zeros(len(observation))


def test_only_executed_actions_count_in_the_log_probability():
    env = InProcessEnv(lambda: ActionChunk(Line(), 2), 1)
    buffer = Collector(env, _Told(), seed=0, compiled="off").collect(4)
    assert buffer.duration.flatten().tolist() == [2, 1, 2, 1]
    assert buffer.log_prob.flatten().tolist() == [-11.0, -1.0, -11.0, -1.0]
    assert buffer.reward.flatten().tolist() == [1.0, 0.5, 1.0, 0.5]
    assert buffer.columns()["duration"].shape == (4, 1)


def test_chunks_come_by_configuration():
    env = make_env(EnvConfig(id="Pendulum-v1", num_envs=2, action_chunk=5))
    assert env.action_space.shape == (5, 1)
    env.close()


def test_chunks_of_discrete_actions_are_refused():
    with pytest.raises(ConfigError, match=r"env.action_chunk = 2: chunks need Box actions"):
        make_env(EnvConfig(id="CartPole-v1", action_chunk=2))


def test_compiled_environments_know_no_chunks():
    with pytest.raises(ConfigError, match=r"env.action_chunk"):
        make_env(EnvConfig(id="compiled/CartPole-v1", action_chunk=2))
