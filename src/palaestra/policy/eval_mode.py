"""Acting in eval mode: dropout draws nothing and batch norm learns nothing while a policy acts.

An action must be drawn from the distribution that learning evaluates it under. A module is in train mode when it is
made, so a user's own network with dropout would act with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["eval_mode"]


@contextmanager
def eval_mode(policy: nn.Module) -> Iterator[None]:
    """Every module in eval mode; afterwards each is in the mode it was in."""
    training = [module for module in policy.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
