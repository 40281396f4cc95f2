"""The weights that learn, on their way from the network that learns to the network that acts.

A fingerprint is taken of the acting network's own memory, after the copy. Samples carry it; a learner that compares it
with its own finds out at once when an update did not arrive, instead of after days of learning from the wrong policy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from palaestra.errors import CheckpointError
from palaestra.policy.fingerprint import weights_fingerprint
from palaestra.policy.vlm.network import Network

__all__ = ["copy_weights", "fingerprint", "load_trainable_state", "trainable_state"]


def trainable_state(network: Network) -> dict[str, Tensor]:
    """Copies of the weights that learn, by name, on the CPU."""
    return {name: weight.detach().cpu().clone() for name, weight in network.trainable().items()}


def load_trainable_state(network: Network, state: Mapping[str, Tensor], *, place: str = "weights") -> None:
    """Give the network other values of the weights that learn; refuses, before changing anything, what does not fit."""
    own = network.trainable()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or extra:
        raise CheckpointError(
            place, f"{len(state)} tensors",
            f"they are of another model or other adapters (missing {missing[:2] or 'nothing'}, "
            f"unexpected {extra[:2] or 'nothing'})",
            "Use the section model of the configuration they were trained with",
        )  # fmt: skip
    for name, weight in own.items():
        if weight.shape != state[name].shape:
            raise CheckpointError(
                place, name, f"has shape {tuple(state[name].shape)}, this model needs {tuple(weight.shape)}",
                "Use the section model of the configuration they were trained with",
            )  # fmt: skip
    copy_weights(state, own)


def copy_weights(source: Mapping[str, Tensor], target: Mapping[str, nn.Parameter]) -> None:
    """Copy values name by name; `target` may hold more."""
    with torch.no_grad():
        for name, value in source.items():
            target[name].copy_(value)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Differs when the weights an answer is drawn from do; the value head is none of them."""
    return weights_fingerprint({name: weight for name, weight in weights.items() if not name.startswith("value_head")})
