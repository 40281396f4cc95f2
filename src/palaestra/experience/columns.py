"""A rollout as plain tensors: what stays when TensorDict is taken away."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Columns"]

Columns: TypeAlias = dict[str, Any]
"""Tensors by key, `[T, N, ...]`, with the keys of a `Rollout`; `observation` may be a dict of tensors."""
