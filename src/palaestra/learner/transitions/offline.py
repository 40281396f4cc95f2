"""Algorithms for datasets: behaviour cloning, TD3+BC (Fujimoto & Gu 2021) and IQL (Kostrikov et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from palaestra.kernels.off_policy import MAX_ADVANTAGE_WEIGHT
from palaestra.learner.algorithm import schedule_factor
from palaestra.learner.transitions.algorithm import StepLoss, TransitionAlgorithm, TransitionConfig
from palaestra.learner.transitions.fused import FusedBC, FusedIQL, FusedTD3BC


class BC(TransitionAlgorithm):
    """Behaviour cloning: the mean squared error of continuous actions, the cross-entropy of discrete ones."""

    policy = "cloned_actor"
    target_groups = ()
    offline_only = True
    update_class = FusedBC

    def losses(self, policy: Any, target: Any, batch: Mapping[str, Any], step: int) -> Iterator[StepLoss]:
        """How far the policy's actions are from those of the dataset."""
        parameters, action = policy.parameters_of(batch["observation"]), batch["action"]
        if policy.is_discrete:
            loss = -policy.distribution.log_prob(parameters, action).mean()
        else:
            loss = nn.functional.mse_loss(parameters, action.reshape(parameters.shape))
        yield StepLoss("actor", loss, {"policy_loss": loss.detach()})


class TD3BCConfig(TransitionConfig):
    """Settings of TD3+BC."""

    target_interval: int = Field(default=2, ge=1)
    """Gradient steps between two moves of the target networks; the reference moves them with the actor."""
    policy_delay: int = Field(default=2, ge=1)
    """Gradient steps of the critics per step of the actor."""
    target_noise: float = Field(default=0.2, ge=0)
    """Standard deviation of the noise on the target action, as a share of half the action's range."""
    target_noise_clip: float = Field(default=0.5, ge=0)
    """Bound of that noise."""
    alpha: float = Field(default=2.5, gt=0)
    """Weight of the critic in the actor's loss, relative to the mean absolute value."""
    imitation: float = Field(default=1.0, ge=0)
    """Weight of the distance to the dataset's actions in the actor's loss. 0: plain TD3, for fine-tuning."""
    exploration_noise: float = Field(default=0.1, ge=0)
    """Standard deviation of the noise on actions in the environment, as a share of half the action's range."""


class TD3BC(TransitionAlgorithm):
    """TD3 with an actor that stays close to the actions of the data."""

    config_class = TD3BCConfig
    policy = "deterministic_actor_critic"
    target_groups = ("actor", "critic")
    noise_per_sample = 1
    update_class = FusedTD3BC

    def losses(self, policy: Any, target: Any, batch: Mapping[str, Any], step: int) -> Iterator[StepLoss]:
        """Critics, and the actor every `policy_delay` steps."""
        c, observation, next_observation = self.config, batch["observation"], batch["next_observation"]
        with torch.no_grad():
            noise = (c.target_noise * batch["noise"][:, 0]).clamp(-c.target_noise_clip, c.target_noise_clip)
            next_action = (target.parameters_of(next_observation) + noise).clamp(-1.0, 1.0)
            future = target.q_values(next_observation, next_action).min(0).values
            td_target = batch["reward"] + c.gamma * future * (~batch["terminated"])
        values = policy.q_values(observation, batch["action"])
        errors = values - td_target
        loss = errors.square().mean(-1).sum()
        metrics = {"value_loss": loss.detach(), "q_mean": values.mean().detach()}
        yield StepLoss("critic", loss, metrics, errors.abs().mean(0).detach())
        if (step + 1) % c.policy_delay:
            return
        action = policy.parameters_of(observation)
        value = policy.first_q_values(observation, action)
        scale = c.alpha / value.abs().mean().detach()
        distance = nn.functional.mse_loss(action, batch["action"].reshape(action.shape))
        loss = -scale * value.mean() + c.imitation * distance
        yield StepLoss("actor", loss, {"policy_loss": loss.detach(), "imitation_loss": distance.detach()})

    def exploration(self, progress: float) -> float:
        """Standard deviation of the noise on actions."""
        noise: float = self.config.exploration_noise
        return noise


class IQLConfig(TransitionConfig):
    """Settings of IQL."""

    expectile: float = Field(default=0.7, gt=0, lt=1)
    """Expectile of the values of the dataset's actions. Higher values trust the best actions more."""
    beta: float = Field(default=3.0, ge=0)
    """Inverse temperature of the regression: 0 clones the data, high values follow the advantage."""
    actor_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule of the actor's learning rate; it decays to 0 at the end of training."""


class IQL(TransitionAlgorithm):
    """Implicit Q-learning: values from the dataset's actions alone, and advantage-weighted regression."""

    config_class = IQLConfig
    policy = "implicit_q"
    update_class = FusedIQL

    def losses(self, policy: Any, target: Any, batch: Mapping[str, Any], step: int) -> Iterator[StepLoss]:
        """Value network, critics and actor; all three see the weights from before the step."""
        c, observation, action = self.config, batch["observation"], batch["action"]
        with torch.no_grad():
            target_q = target.q_values(observation, action).min(0).values
            future = policy.value(batch["next_observation"])
            td_target = batch["reward"] + c.gamma * future * (~batch["terminated"])
        advantage = target_q - policy.value(observation)
        side = torch.where(advantage.detach() < 0, 1.0 - c.expectile, c.expectile)
        value_loss = (side * advantage.square()).mean()
        values = policy.q_values(observation, action)
        errors = values - td_target
        critic_loss = errors.square().mean()
        weight = (c.beta * advantage.detach()).exp().clamp(max=MAX_ADVANTAGE_WEIGHT)
        log_prob = policy.distribution.log_prob(policy.parameters_of(observation), action)
        actor_loss = -(weight * log_prob).mean()
        metrics = {"expectile_loss": value_loss.detach(), "advantage_mean": advantage.mean().detach()}
        yield StepLoss("value_network", value_loss, metrics)
        metrics = {"value_loss": critic_loss.detach(), "q_mean": values.mean().detach()}
        yield StepLoss("critic", critic_loss, metrics, errors.abs().mean(0).detach())
        yield StepLoss("actor", actor_loss, {"policy_loss": actor_loss.detach()})

    def learning_rates(self, progress: float) -> dict[str, float]:
        """The actor's rate has a schedule of its own."""
        return {"actor": self.config.learning_rate * schedule_factor(self.config.actor_schedule, progress)}
