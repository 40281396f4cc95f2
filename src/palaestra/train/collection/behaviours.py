"""Behaviour policies: what acts while a dataset is collected.

A behaviour chooses one action per environment. All randomness comes from the generator that it is given, so that the
same seed gives the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from palaestra.config import import_address
from palaestra.env.spaces import ActionLayout, random_actions
from palaestra.env.vector import Array, Flags, Observation, Space, VectorEnv
from palaestra.errors import ConfigError


class Behaviour(Protocol):
    """Acts in N environments at once."""

    def begin(self, seed: int) -> None:
        """Begin an episode; called only if there is one environment, so that policies may have a memory."""

    def act(self, observation: Observation, mask: Flags | None, rng: np.random.Generator) -> Array:
        """The actions `[N, ...]` for the environments."""

    def describe(self) -> dict[str, Any]:
        """What it is, for the manifest of the dataset."""

    def close(self) -> None:
        """Release its process, if it has one."""


class _MemorylessBehaviour:
    """Base class of behaviours that depend on the current observation only."""

    def begin(self, seed: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class RandomBehaviour(_MemorylessBehaviour):
    """Acts at random: uniformly, or uniformly among the actions that a mask allows."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def act(self, observation: Observation, mask: Flags | None, rng: np.random.Generator) -> Array:
        """Random actions."""
        first = next(iter(observation.values())) if isinstance(observation, dict) else observation
        if mask is None and isinstance(self._space, spaces.Discrete):
            return np.asarray(self._space.start + rng.integers(self._space.n, size=len(first)))
        return random_actions(self._space, len(first), rng, mask)

    def describe(self) -> dict[str, Any]:
        """Its name."""
        return {"policy": "random"}


class ScriptedBehaviour(_MemorylessBehaviour):
    """Acts by a function `observation -> action` of the user, called for one environment at a time."""

    def __init__(self, address: str, space: Space) -> None:
        try:
            function = import_address(address, place="--policy") if ":" in address else None
        except ConfigError as error:
            remedy = "Check the address; PYTHONPATH=. finds modules of the current directory"
            raise ConfigError("--policy", address, error.reason, remedy) from None
        if not callable(function):
            remedy = "Write random, or the address of a function: package.module:function"
            raise ConfigError("--policy", address, "is neither 'random' nor a function", remedy)
        self._function: Callable[[Any], Any] = function
        self._address, self._space, self._layout = address, space, ActionLayout(space)

    def act(self, observation: Observation, mask: Flags | None, rng: np.random.Generator) -> Array:
        """The results of the function; `ConfigError` if one is not an action of the environment."""
        is_dict = isinstance(observation, dict)
        count = len(next(iter(observation.values()))) if isinstance(observation, dict) else len(observation)
        actions = self._layout.empty(count)
        for i in range(count):
            one = {name: part[i] for name, part in observation.items()} if is_dict else observation[i]  # type: ignore
            try:
                action = np.asarray(self._function(one))
            except Exception as error:
                reason = f"the function raised {type(error).__name__}: {error}"
                raise ConfigError(
                    "--policy", self._address, reason, "Call it with one observation to see why"
                ) from error
            self._check(action)
            actions[i] = action
        return actions

    def describe(self) -> dict[str, Any]:
        """Its address."""
        return {"policy": self._address}

    def _check(self, action: Array) -> None:
        if action.dtype.kind not in "biuf" or action.shape != self._layout.shape:
            reason = f"returned {action.dtype} of shape {list(action.shape)}, which is not an action of {self._space}"
            raise ConfigError("--policy", self._address, reason, "Return one action")
        typed = action.astype(self._layout.native_dtype)
        if not self._space.contains(typed if self._layout.shape else typed[()]):
            reason = f"returned {action.tolist()}, which is not in {self._space}"
            raise ConfigError("--policy", self._address, reason, "Return one action, clipped to the bounds")


class CheckpointBehaviour(_MemorylessBehaviour):
    """Acts with the policy of a checkpoint of palaestra for vector environments."""

    def __init__(self, path: Path, env: VectorEnv, *, deterministic: bool) -> None:
        import torch

        from palaestra.actor.compatibility import check_spaces
        from palaestra.learner.checkpoint import load_checkpoint
        from palaestra.policy.storage import load_weights
        from palaestra.train.config import config_from
        from palaestra.train.evaluation import make_policy

        checkpoint = load_checkpoint(path, kind="vector")
        config = config_from(checkpoint.about["config"])
        if config.env.action_chunk > 1:
            reason = "it acts in chunks of actions, which a dataset of single steps cannot hold"
            raise ConfigError("--checkpoint", str(path), reason, "Choose another checkpoint")
        self._torch = torch
        self._policy: Any = make_policy(config, env, torch.device("cpu"), pretrained=False)
        check_spaces(self._policy, env)
        load_weights(self._policy, checkpoint.policy)
        self._policy.eval()
        self._deterministic = deterministic
        self._facts = {
            "policy": "checkpoint",
            "checkpoint": path.name,
            "checkpoint_sha256": checkpoint.sha256,
            "algorithm": config.algorithm["name"],
            "trained_steps": int(checkpoint.progress["steps"]),
            "deterministic": deterministic,
        }

    def act(self, observation: Observation, mask: Flags | None, rng: np.random.Generator) -> Array:
        """The most likely actions, or sampled ones."""
        torch, distribution = self._torch, self._policy.distribution
        noise = None
        if not self._deterministic:
            first = next(iter(observation.values())) if isinstance(observation, dict) else observation
            draw: Any = rng.random if distribution.noise_kind == "uniform" else rng.standard_normal
            noise = torch.from_numpy(draw((len(first), distribution.noise_size), dtype=np.float32))
        if isinstance(observation, dict):
            tensors: Any = {name: torch.from_numpy(array) for name, array in observation.items()}
        else:
            tensors = torch.from_numpy(observation)
        masks = None if mask is None else torch.from_numpy(mask)
        with torch.inference_mode():
            acted = self._policy.act(tensors, noise, mask=masks)
        return np.asarray(distribution.to_env(acted.action.numpy()))

    def describe(self) -> dict[str, Any]:
        """The checkpoint and its digest."""
        return dict(self._facts)


class NoisyBehaviour:
    """Replaces a share of the actions of another behaviour by random ones."""

    def __init__(self, behaviour: Behaviour, space: Space, share: float) -> None:
        self._behaviour, self._random, self._share = behaviour, RandomBehaviour(space), share

    def begin(self, seed: int) -> None:
        """Begin an episode."""
        self._behaviour.begin(seed)

    def close(self) -> None:
        """Release the process of the behaviour."""
        self._behaviour.close()

    def act(self, observation: Observation, mask: Flags | None, rng: np.random.Generator) -> Array:
        """Actions of the behaviour, some of them replaced."""
        actions = np.array(self._behaviour.act(observation, mask, rng))
        replaced = rng.random(len(actions)) < self._share
        if replaced.any():
            actions[replaced] = self._random.act(observation, mask, rng)[replaced]
        return actions

    def describe(self) -> dict[str, Any]:
        """The behaviour, and the share."""
        return {**self._behaviour.describe(), "noise": self._share}
