"""What a policy and an environment agree on: the same spaces, and rollouts of the same columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from palaestra.env.spaces import allocate_row, flat_observation_space
from palaestra.env.vector import VectorEnv
from palaestra.errors import ConfigError
from palaestra.experience.columns import ArraySpec, RolloutSpec

__all__ = ["buffer_shape", "check_fit", "rollout_spec"]


def check_fit(policy: Any, env: VectorEnv) -> None:
    """Refuse a policy for other spaces than the environment's, which would fail (or read foreign memory) in a step."""
    for name in ("observation_space", "action_space"):
        mine, theirs = getattr(policy, name, None), getattr(env, name)
        if mine is not None and not _same_shape(mine, theirs):
            raise ConfigError(
                f"policy.{name}", str(mine), f"does not fit the environment's {theirs}",
                "Build the policy from the environment's spaces",
            )  # fmt: skip


def _same_shape(mine: Any, theirs: Any) -> bool:
    if type(mine) is not type(theirs):
        return False
    if hasattr(mine, "spaces"):
        return set(mine.spaces) == set(theirs.spaces) and all(
            _same_shape(part, theirs.spaces[name]) for name, part in mine.spaces.items()
        )
    # How many choices, and where they start: the policy sends the environment's own numbers.
    counted = all(np.array_equal(getattr(mine, x, 0), getattr(theirs, x, 0)) for x in ("n", "nvec", "start"))
    return bool(mine.shape == theirs.shape and counted)


def buffer_shape(env: VectorEnv, policy: Any) -> dict[str, Any]:
    """What a buffer for this environment and policy is made of, besides its length: arguments of its constructor."""
    observation = allocate_row(env.observation_space, env.num_envs, env.mask_size).observation
    specs: Any
    if isinstance(observation, dict):
        specs = {name: ArraySpec(part.shape[1:], part.dtype) for name, part in observation.items()}
    else:
        specs = ArraySpec(observation.shape[1:], observation.dtype)
    action = ArraySpec(policy.distribution.action_shape, np.dtype(policy.distribution.action_dtype))
    return {
        "num_envs": env.num_envs, "observation": specs, "action": action, "mask_size": env.mask_size,
        "chunk": getattr(policy, "chunk", 1),
    }  # fmt: skip


def rollout_spec(env: VectorEnv, policy: Any) -> RolloutSpec:
    """What a rollout of this environment looks like to this policy."""
    shape, distribution = buffer_shape(env, policy), policy.distribution
    space = flat_observation_space(env.observation_space)
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
    """Lowest and highest value of a discrete space; None for one whose values the policy takes as they are."""
    if isinstance(space, spaces.Discrete):
        return np.asarray(space.start), np.asarray(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return np.asarray(space.start), np.asarray(space.start + space.nvec - 1)
    return None
