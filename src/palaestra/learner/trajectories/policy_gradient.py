"""The loss that GRPO and PPO share: clipped surrogate, entropy bonus, pull towards the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from palaestra.errors import ExperienceError
from palaestra.learner.trajectories.batch import Loss, TokenBatch
from palaestra.learner.trajectories.policy import TokenLogProbs
from palaestra.learner.trajectories.token_loss import k3, surrogate

__all__ = ["policy_gradient_loss"]


def policy_gradient_loss(
    batch: TokenBatch,
    now: TokenLogProbs,
    *,
    clip_low: float,
    clip_high: float,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
) -> Loss:
    """The policy's part of the objective on a microbatch, as a sum over its tokens."""
    found = surrogate(
        now.log_probs, batch.proximal, batch.advantage, batch.importance, clip_low=clip_low, clip_high=clip_high
    )
    policy_loss = -(batch.weight * found.objective).sum()
    total = policy_loss
    with torch.no_grad():
        mean = batch.mask * batch.token_share
        said: dict[str, Tensor] = {
            "policy_loss": policy_loss.detach(),
            "approx_kl": (mean * (found.log_ratio.exp() - 1.0 - found.log_ratio)).sum(),
            "clip_fraction": (mean * found.clipped).sum(),
        }
    if entropy_coef > 0:
        if now.entropy is None:
            raise ExperienceError("entropy_coef is above 0 and the policy returned no entropy of its tokens.")
        total = total - entropy_coef * (batch.weight * now.entropy).sum()
    if kl_coef > 0:
        if batch.reference is None:
            raise ExperienceError("kl_coef is above 0 and the policy keeps no weights from before training.")
        distance = k3(now.log_probs, batch.reference)
        total = total + kl_coef * (batch.weight * distance).sum()
        said["reference_kl"] = (mean * distance.detach()).sum()
    return Loss(total, said)
