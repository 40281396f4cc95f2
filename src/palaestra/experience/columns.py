"""A rollout as plain tensors: what stays when TensorDict is taken away."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["NO_FINGERPRINT", "Columns"]

Columns: TypeAlias = dict[str, Any]
"""Tensors by key, `[T, N, ...]`, with the keys of a `Rollout`; `observation` may be a dict of tensors."""

NO_FINGERPRINT = 0
"""The `policy_fingerprint` of a step for which none was recorded."""
