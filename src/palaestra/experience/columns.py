"""A rollout as plain tensors: what stays when TensorDict is taken away."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["NO_FINGERPRINT", "PLURALS", "UNKNOWN_VERSION", "Columns"]

Columns: TypeAlias = dict[str, Any]
"""Tensors by key, `[T, N, ...]`, with the keys of a `Rollout`; `observation` may be a dict of tensors."""

NO_FINGERPRINT = 0
"""The `policy_fingerprint` of a step for which none was recorded."""

UNKNOWN_VERSION = -1
"""The `policy_version` of a step that came without one; it counts as a step of the present weights."""

PLURALS = {
    "observations": "observation",
    "actions": "action",
    "rewards": "reward",
    "values": "value",
    "next_values": "next_value",
    "log_probs": "log_prob",
    "action_masks": "action_mask",
    "dones": "done",
    "advantages": "advantage",
    "returns": "target",
}
"""How other libraries call the columns; a `Rollout` is read by these names as well, and stores none of them."""
