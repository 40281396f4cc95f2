"""Which learning rate to begin with when none is given, and why, in a sentence fit to print."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LearningRate", "choose_learning_rate", "pace"]

LEAST = 0.1
"""Of the rate, once it has decayed: fine enough to settle, and not nothing for a run that is prolonged."""


class LearningRate(NamedTuple):
    """A rate and the reason for it."""

    rate: float
    reason: str


_RATES = {(True, True): 2e-4, (False, True): 1e-5, (True, False): 1e-5, (False, False): 1e-6}
"""By (LoRA, supervised). A LoRA adapter wants about ten times the rate of the whole model; a policy gradient, whose
direction is far noisier than that of a likelihood, about a tenth of what imitation bears."""


def choose_learning_rate(*, lora: bool, supervised: bool, given: float | None = None) -> LearningRate:
    """The rate that was given, or else the usual one for what is trained (`lora`) and how (`supervised`)."""
    if given is not None:
        return LearningRate(given, f"learning rate {given:g}, as configured")
    rate = _RATES[lora, supervised]
    what = "a LoRA adapter" if lora else "the full weights"
    how = "imitation of accepted episodes" if supervised else "a policy gradient"
    return LearningRate(
        rate, f"learning rate {rate:g}, the usual start for {how} on {what}; set trainer.learning_rate to change it"
    )


def pace(update: int, *, warmup: int, decay: int | None) -> float:
    """The share of the rate at an update, counted from 0: grows over `warmup`, falls to a tenth over `decay`."""
    growing = min(1.0, (update + 1) / max(1, warmup))
    falling = 1.0 if decay is None else max(LEAST, 1.0 - (1.0 - LEAST) * update / decay)
    return growing * falling
