"""Compatibility of a policy and an environment: spaces, shapes of rollouts, and the memory that training needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import nn

from palaestra.env.spaces import ObservationLayout, allocate_row
from palaestra.env.vector import VectorEnv
from palaestra.errors import ConfigError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import ArraySpec, RolloutSpec, map_column
from palaestra.policy.device import device_of
from palaestra.processes.memory import check_fits_in_memory

COPIES = 7
"""Copies of every trained weight: itself, its gradient, two moments of Adam, and three to undo a failed update."""
ASYNCHRONOUS_COPIES = 3
"""Further copies with asynchronous collection: the collector's own, and two on the weight board."""


def check_spaces(policy: Any, env: VectorEnv) -> None:
    """Raise `ConfigError` if policy and environment have different spaces. Kernels would read invalid memory."""
    for name in ("observation_space", "action_space"):
        mine, theirs = getattr(policy, name, None), getattr(env, name)
        if mine is not None and not is_same_shape(mine, theirs):
            raise ConfigError(
                f"policy.{name}",
                str(mine),
                f"does not fit the environment's {theirs}",
                "Build the policy from the environment's spaces",
            )


def is_same_shape(mine: Any, theirs: Any) -> bool:
    """Whether two spaces have the same kind, shape and values."""
    if type(mine) is not type(theirs):
        return False
    if hasattr(mine, "spaces"):
        return set(mine.spaces) == set(theirs.spaces) and all(
            is_same_shape(part, theirs.spaces[name]) for name, part in mine.spaces.items()
        )
    # Discrete spaces must also agree in the number of values and the first value.
    same_values = all(np.array_equal(getattr(mine, x, 0), getattr(theirs, x, 0)) for x in ("n", "nvec", "start"))
    return bool(mine.shape == theirs.shape and same_values)


def buffer_shape(env: VectorEnv, policy: Any) -> dict[str, Any]:
    """Arguments of `RolloutBuffer` for this environment and policy, except its length."""
    observation = allocate_row(env.observation_space, env.num_envs, env.mask_size).observation
    action = ArraySpec(policy.distribution.action_shape, np.dtype(policy.distribution.action_dtype))
    return {
        "num_envs": env.num_envs,
        "observation": map_column(observation, lambda part: ArraySpec(part.shape[1:], part.dtype)),
        "action": action,
        "mask_size": env.mask_size,
        "chunk": getattr(policy, "chunk", 1),
    }


def rollout_spec(env: VectorEnv, policy: Any) -> RolloutSpec:
    """Shapes and types of the rollouts of this environment and policy."""
    shape, distribution = buffer_shape(env, policy), policy.distribution
    space = ObservationLayout(env.observation_space).space
    parts = (
        {f"observation/{name}": part for name, part in space.spaces.items()}
        if isinstance(space, spaces.Dict)
        else {"observation": space}
    )
    choices = getattr(distribution, "choices", None)
    return RolloutSpec(
        observation=shape["observation"],
        action=shape["action"],
        choices=choices,
        mask_size=distribution.num_parameters if choices is not None else 0,
        needs_mask=env.mask_size > 0,
        chunk=shape["chunk"],
        bounds={name: bounds for name, part in parts.items() if (bounds := _bounds(part)) is not None},
    )


def _bounds(space: Any) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Lowest and highest value of a discrete space; None for other spaces."""
    if isinstance(space, spaces.Discrete):
        return np.asarray(space.start), np.asarray(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return np.asarray(space.start), np.asarray(space.start + space.nvec - 1)
    return None


def policy_bytes(policy: nn.Module, *, asynchronous: bool = False) -> int:
    """Memory of a policy during training."""
    copies = COPIES + (ASYNCHRONOUS_COPIES if asynchronous else 0)
    return sum(p.numel() * p.element_size() * (copies if p.requires_grad else 1) for p in policy.parameters())


def check_memory(
    policy: nn.Module,
    env: VectorEnv,
    num_steps: int,
    *,
    n_epochs: int,
    ring_segments: int | None = None,
    num_envs: int | None = None,
) -> None:
    """Raise `ConfigError` if rollouts of `num_steps` steps and the policy do not fit into memory.

    `ring_segments`: rollouts in the ring of asynchronous collection, None if synchronous; `num_envs`: number of
    environments of the run, if it differs from `env`.
    """
    shape: dict[str, Any] = buffer_shape(env, policy)
    count = env.num_envs if num_envs is None else num_envs
    rollout = RolloutBuffer.bytes_needed(num_steps, **{**shape, "num_envs": count})
    segments = ring_segments or 1
    weights = policy_bytes(policy, asynchronous=ring_segments is not None)
    shuffles = n_epochs * num_steps * count * 8
    name = f"{segments} rollouts" if segments > 1 else "a rollout"
    parts = {f"{name} of {num_steps:,} steps x {count} environments": segments * rollout, "its shuffles": shuffles}
    device = device_of(policy)
    remedy = "Set a shorter trainer.rollout_length, fewer env.num_envs, or a smaller policy"
    if device.type == "cuda":
        on_gpu = {"the policy": weights, "a rollout": rollout, "its shuffles": shuffles}
        limit = int(torch.cuda.mem_get_info(device)[1])
        check_fits_in_memory(
            "trainer.rollout_length", num_steps, on_gpu, f"{remedy}, or trainer.device=cpu", limit=limit
        )
    else:
        parts["the policy"] = weights
    check_fits_in_memory("trainer.rollout_length", num_steps, parts, remedy)
