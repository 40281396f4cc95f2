"""SAC: a stochastic policy that maximises return and entropy, with two critics (Haarnoja et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import Field

from palaestra.learner.adam import Adam
from palaestra.learner.transitions.algorithm import StepLoss, TransitionAlgorithm, TransitionConfig, TransitionUpdate
from palaestra.learner.transitions.fused import FusedSAC
from palaestra.policy.off_policy.fused import why_not_fused


class SACConfig(TransitionConfig):
    """Settings of SAC."""

    learning_starts: int = Field(default=100, ge=0)
    """Environment steps with random actions before the first gradient step."""
    temperature: float | None = Field(default=None, gt=0)
    """Weight of the entropy. null: learned, so that the entropy stays near `target_entropy`."""
    target_entropy: float | None = None
    """Entropy that the learned temperature aims at, in nats. null: minus the number of action dimensions."""


class SAC(TransitionAlgorithm):
    """Soft actor-critic with two critics and a learned temperature."""

    config_class = SACConfig
    policy = "soft_actor_critic"
    noise_per_sample = 2

    def losses(self, policy: Any, target: Any, batch: Mapping[str, Any], step: int) -> Iterator[StepLoss]:
        """Temperature, critics and actor, in this order."""
        c, distribution, noise = self.config, policy.distribution, batch["noise"]
        observation, following = batch["observation"], batch["next_observation"]
        action, log_prob = distribution.sample_with_log_prob(policy.parameters_of(observation), noise[:, 0])
        alpha = (
            policy.temperature.detach().exp() if c.temperature is None else policy.temperature.new_tensor(c.temperature)
        )
        if c.temperature is None:
            aim = self.aimed_entropy(policy)
            loss = -(policy.temperature * (log_prob.detach() + aim).mean()).sum()
            yield StepLoss("temperature", loss, {"temperature": alpha.squeeze()})
        with torch.no_grad():
            next_action, next_log_prob = distribution.sample_with_log_prob(policy.parameters_of(following), noise[:, 1])
            future = target.q_values(following, next_action).min(0).values - alpha * next_log_prob
            wanted = batch["reward"] + c.gamma * future * (~batch["terminated"])
        values = policy.q_values(observation, batch["action"])
        errors = values - wanted
        loss = 0.5 * errors.square().mean(-1).sum()
        metrics = {"value_loss": loss.detach(), "q_mean": values.mean().detach()}
        yield StepLoss("critic", loss, metrics, errors.abs().mean(0).detach())
        loss = (alpha * log_prob - policy.q_values(observation, action).min(0).values).mean()
        yield StepLoss("actor", loss, {"policy_loss": loss.detach(), "entropy": -log_prob.mean().detach()})

    def aimed_entropy(self, policy: Any) -> float:
        """The entropy at which the temperature stays as it is."""
        given: float | None = self.config.target_entropy
        return -float(policy.distribution.size) if given is None else given

    def compiled_update(self, policy: Any, target: Any, adam: Adam) -> TransitionUpdate | None:
        """The same update without autograd."""
        return None if why_not_fused(policy) else FusedSAC(self.config, self.target_groups, policy, target, adam)
