"""A policy that answers late, as one on a remote accelerator does: calls wait, and no core is busy meanwhile.

Each call lasts as long as it is told to, its own small computation included. Acting and valuing cost one inference.
A minibatch of learning costs `learn_seconds`; looking at old experience again (a pass without gradients, which
corrections for staleness need) a third of that per minibatch's worth of rows, since the backward pass takes two thirds.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from palaestra.policy.actor_critic import ActorCritic, ActResult

__all__ = ["SlowPolicy"]


class SlowPolicy(ActorCritic):
    """An actor-critic behind a slow line."""

    infer_seconds = 0.0
    learn_seconds = 0.0
    learn_rows = 1
    """Rows in the minibatch that takes `learn_seconds`."""

    def act(self, *args: Any, **kwargs: Any) -> ActResult:
        """One inference."""
        began = time.perf_counter()
        acted = super().act(*args, **kwargs)
        _last_until(began + self.infer_seconds)
        return acted

    def value(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One inference as well: the critic sits where the actor does."""
        began = time.perf_counter()
        found = super().value(*args, **kwargs)
        _last_until(began + self.infer_seconds)
        return found

    def evaluate_actions(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Forward and backward pass of a minibatch; only the forward pass where no gradient is wanted."""
        began = time.perf_counter()
        found = super().evaluate_actions(*args, **kwargs)
        share = 1.0 if torch.is_grad_enabled() else len(found[0]) / self.learn_rows / 3
        _last_until(began + share * self.learn_seconds)
        return found


def _last_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
