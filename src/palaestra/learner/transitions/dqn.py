"""DQN: values of discrete actions from a replay buffer, with a target network (Mnih et al. 2015).

Options: double Q-learning (van Hasselt 2016), dueling heads (`policy.kwargs.dueling`) and prioritised replay (Schaul
2016).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from palaestra.learner.transitions.algorithm import StepLoss, TransitionAlgorithm, TransitionConfig
from palaestra.learner.transitions.compiled import CompiledDQN


class DQNConfig(TransitionConfig):
    """Settings of DQN."""

    learning_rate: float = Field(default=1e-4, gt=0, le=3e38)
    """Step size of Adam."""
    batch_size: int = Field(default=32, ge=1)
    """Transitions per gradient step."""
    learning_starts: int = Field(default=100, ge=0)
    """Environment steps before the first gradient step; a policy that is not pretrained takes them at random."""
    train_freq: int = Field(default=4, ge=1)
    """Steps of every environment between two updates."""
    target_tau: float = Field(default=1.0, gt=0, le=1)
    """Polyak coefficient of the target network (1: copy the weights)."""
    target_interval: int = Field(default=2_500, ge=1)
    """Gradient steps between two moves of the target network."""
    max_grad_norm: float | None = Field(default=10.0, gt=0)
    """The gradient is clipped to this norm. null: no clipping."""
    precision: Literal["float32"] = "float32"
    """Precision of the products of matrices."""
    double: bool = False
    """Choose the next action by the trained network and value it by the target network."""
    exploration_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the training in which epsilon falls from its initial to its final value."""
    exploration_initial: float = Field(default=1.0, ge=0, le=1)
    """Probability of a random action at the start."""
    exploration_final: float = Field(default=0.05, ge=0, le=1)
    """Probability of a random action after that."""
    prioritized: bool = False
    """Sample transitions in proportion to their last error."""
    priority_alpha: float = Field(default=0.6, ge=0, le=1)
    """Exponent of the error; 0 samples uniformly."""
    priority_beta: float = Field(default=0.4, ge=0, le=1)
    """Exponent of the importance weights at the start; it rises to 1 at the end of training."""


class DQN(TransitionAlgorithm):
    """Q-learning with a replay buffer and a target network."""

    config_class = DQNConfig
    policy = "q_network"
    update_class = CompiledDQN

    def losses(self, policy: Any, target: Any, batch: Mapping[str, Any], step: int) -> Iterator[StepLoss]:
        """Huber loss of the temporal-difference error."""
        values = policy.q_values(batch["observation"])
        q_taken = values.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        td_target = self.targets(policy, target, batch)
        loss = nn.functional.smooth_l1_loss(q_taken, td_target, reduction="none")
        if "weight" in batch:
            loss = loss * batch["weight"]
        error = (q_taken - td_target).detach()
        metrics = {"value_loss": loss.mean().detach(), "q_mean": q_taken.mean().detach()}
        yield StepLoss("critic", loss.mean(), metrics, error)

    @torch.no_grad()
    def targets(self, policy: Any, target: Any, batch: Mapping[str, Any]) -> Tensor:
        """Reward plus the discounted value of the next observation, which is 0 after termination."""
        next_values = target.q_values(batch["next_observation"])
        if self.config.double:
            best = policy.q_values(batch["next_observation"]).argmax(-1, keepdim=True)
            future = next_values.gather(-1, best).squeeze(-1)
        else:
            future = next_values.max(-1).values
        result: Tensor = batch["reward"] + self.config.gamma * future * (~batch["terminated"])
        return result

    def exploration(self, progress: float) -> float:
        """Epsilon."""
        c = self.config
        share = 1.0 if c.exploration_fraction == 0 else min(1.0, progress / c.exploration_fraction)
        epsilon: float = c.exploration_initial + share * (c.exploration_final - c.exploration_initial)
        return epsilon

    @property
    def priority_exponent(self) -> float | None:
        """Exponent of the priorities; None if the buffer is sampled uniformly."""
        return self.config.priority_alpha if self.config.prioritized else None

    def importance_exponent(self, progress: float) -> float:
        """Rises to 1 at the end of training."""
        beta: float = self.config.priority_beta
        return beta + min(1.0, progress) * (1.0 - beta)
