"""SAC: a stochastic policy that maximises return and entropy, with two critics (Haarnoja et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import Field

from palaestra.learner.transitions.algorithm import StepLoss, TransitionAlgorithm, TransitionConfig
from palaestra.learner.transitions.fused import FusedSAC


class SACConfig(TransitionConfig):
    """Settings of SAC."""

    learning_starts: int = Field(default=100, ge=0)
    """Environment steps before the first gradient step; a policy that is not pretrained takes them at random."""
    temperature: float | None = Field(default=None, gt=0)
    """Weight of the entropy. null: learned, so that the entropy stays near `target_entropy`."""
    target_entropy: float | None = None
    """Entropy that the learned temperature aims at, in nats. null: minus the number of action dimensions."""

    def resolve_target_entropy(self, num_dimensions: int) -> float:
        """The entropy at which the temperature does not change."""
        return -float(num_dimensions) if self.target_entropy is None else self.target_entropy


class SAC(TransitionAlgorithm):
    """Soft actor-critic with two critics and a learned temperature."""

    config_class = SACConfig
    policy = "soft_actor_critic"
    noise_per_sample = 2
    update_class = FusedSAC

    def losses(self, policy: Any, target: Any, batch: Mapping[str, Any], step: int) -> Iterator[StepLoss]:
        """Temperature, critics and actor, in this order."""
        c, distribution, noise = self.config, policy.distribution, batch["noise"]
        observation, next_observation = batch["observation"], batch["next_observation"]
        action, log_prob = distribution.sample_with_log_prob(policy.parameters_of(observation), noise[:, 0])
        alpha = (
            policy.temperature.detach().exp() if c.temperature is None else policy.temperature.new_tensor(c.temperature)
        )
        if c.temperature is None:
            entropy_target = c.resolve_target_entropy(distribution.size)
            loss = -(policy.temperature * (log_prob.detach() + entropy_target).mean()).sum()
            yield StepLoss("temperature", loss, {"temperature": alpha.squeeze()})
        with torch.no_grad():
            next_action, next_log_prob = distribution.sample_with_log_prob(
                policy.parameters_of(next_observation), noise[:, 1]
            )
            future = target.q_values(next_observation, next_action).min(0).values - alpha * next_log_prob
            td_target = batch["reward"] + c.gamma * future * (~batch["terminated"])
        values = policy.q_values(observation, batch["action"])
        errors = values - td_target
        loss = 0.5 * errors.square().mean(-1).sum()
        metrics = {"value_loss": loss.detach(), "q_mean": values.mean().detach()}
        yield StepLoss("critic", loss, metrics, errors.abs().mean(0).detach())
        loss = (alpha * log_prob - policy.q_values(observation, action).min(0).values).mean()
        yield StepLoss("actor", loss, {"policy_loss": loss.detach(), "entropy": -log_prob.mean().detach()})
