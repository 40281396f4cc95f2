"""A model and an environment of the shapes that specification 003 names; its tests put this directory on the path."""

from typing import ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn


class MyVLAModel(nn.Module):
    """The three methods that the specification asks for, and nothing else."""

    def __init__(self, action_dim: int = 7) -> None:
        super().__init__()
        self.vision_encoder = nn.Linear(8 * 8 * 3, 16)
        self.language_model = nn.EmbeddingBag(10, 16)
        self.action_head = nn.Linear(16 + 7, action_dim)
        self.value_head = nn.Linear(16 + 7, 1)
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    def features(self, observations):
        seen = self.vision_encoder(observations["rgb"].flatten(1).float() / 255)
        return torch.cat(
            [torch.tanh(seen + self.language_model(observations["language"])), observations["proprio"]], -1
        )

    def distribution(self, observations):
        return torch.distributions.Normal(self.action_head(self.features(observations)), self.log_std.exp())

    def forward(self, observations):
        return self.distribution(observations).sample()

    def get_value(self, observations):
        return self.value_head(self.features(observations))

    def evaluate_actions(self, observations, actions):
        distribution = self.distribution(observations)
        return distribution.log_prob(actions).sum(-1), distribution.entropy().sum(-1)


class GPTVLAModel(MyVLAModel):
    """Takes the configuration of the specification's example."""

    def __init__(self, vision_encoder, language_model, freeze_vision_encoder, action_dim):
        super().__init__(action_dim)
        self.names = (vision_encoder, language_model, freeze_vision_encoder)


class Arm(gymnasium.Env):
    """Seven joints, a picture, a sentence; pays for moving little."""

    metadata: ClassVar = {"render_modes": []}

    def __init__(self):
        self.observation_space = spaces.Dict(
            {
                "rgb": spaces.Box(0, 255, (8, 8, 3), np.uint8),
                "proprio": spaces.Box(-np.inf, np.inf, (7,), np.float32),
                "language": spaces.MultiDiscrete([10] * 4),
            }
        )
        self.action_space = spaces.Box(-1, 1, (7,), np.float32)
        self.steps = 0

    def _seen(self):
        return {
            "rgb": self.np_random.integers(0, 256, (8, 8, 3), np.uint8),
            "proprio": np.zeros(7, np.float32),
            "language": np.arange(4),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def step(self, action):
        self.steps += 1
        return self._seen(), -float(np.square(action).sum()), self.steps == 10, False, {}
