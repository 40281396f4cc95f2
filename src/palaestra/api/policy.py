"""Policies for Gymnasium environments that act on observations: `run.policy.predict(observation)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from palaestra.env.spaces import ActionLayout, ObservationLayout, flatten_observation
from palaestra.errors import ConfigError
from palaestra.experience.columns import possible_actions
from palaestra.policy.device import Device, device_of, move_to
from palaestra.policy.network import eval_mode
from palaestra.train.evaluation import load_vector_policy


class TrainedPolicy:
    """A policy for a Gymnasium environment."""

    def __init__(self, module: nn.Module, observation_space: Any, action_space: Any) -> None:
        self.module = module
        """The network, a `torch.nn.Module`."""
        self.observation_space, self.action_space = observation_space, action_space
        self._observations, self._actions = ObservationLayout(observation_space), ActionLayout(action_space)
        self._rng = np.random.default_rng(0)

    @classmethod
    def from_checkpoint(
        cls, path: Path, *, env: Mapping[str, Any] | None = None, device: Device = "cpu"
    ) -> TrainedPolicy:
        """The policy of a checkpoint; `env` replaces keys of the section `env` of its configuration."""
        loaded = load_vector_policy(path, env=env, device=device)
        return cls(loaded.policy, loaded.observation_space, loaded.action_space)

    def predict(self, observation: Any, *, deterministic: bool = True, action_mask: Any = None) -> Any:
        """The action for one observation, or the actions for a batch of them, as `env.step` takes them.

        `deterministic` takes the most likely action; otherwise actions are sampled. `action_mask`: which choices are
        allowed, for environments that report it. With `env.action_chunk`, an action is a chunk of actions.
        """
        observation = flatten_observation(observation)
        try:
            batch_size = self._observations.batch_size(observation)
            stored = self._observations.empty((batch_size or 1,))
            with np.errstate(over="ignore", invalid="ignore"):  # refused below
                if batch_size is None:
                    self._observations.write(stored, 0, observation)
                else:
                    self._observations.write_batch(stored, observation)
            non_finite = self._observations.find_non_finite(observation)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            kind = type(observation).__name__
            several = "a dictionary of arrays with" if self._observations.is_dict else "an array of"
            reason, remedy = str(error), f"Give one observation of the environment, or {several} several"
            if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
                reason = "is an observation and its info, as env.reset() returns them"
                remedy = "Give the first: observation, info = env.reset()"
            raise ConfigError("predict(observation)", kind, reason, remedy) from None
        if non_finite is not None:
            place, entry = non_finite
            remedy = "Check where the observation comes from, or clip it"
            raise ConfigError(f"predict(observation){place}", entry, "is not finite as float32", remedy)
        actions = self._act(stored, batch_size or 1, deterministic, action_mask)
        if batch_size is not None:
            return actions
        return int(actions[0]) if actions.ndim == 1 else actions[0]

    def _act(self, observations: Any, size: int, deterministic: bool, action_mask: Any) -> Any:
        policy: Any = self.module
        distribution, device = policy.distribution, device_of(self.module)
        noise = mask = None
        if not deterministic:
            draw: Any = self._rng.random if distribution.noise_kind == "uniform" else self._rng.standard_normal
            noise = move_to(device, draw((size, distribution.noise_size), dtype=np.float32))
        if action_mask is not None:
            mask = move_to(device, self._check_mask(np.asarray(action_mask, dtype=np.bool_), size))
        with torch.inference_mode(), eval_mode(self.module):
            acted = policy.act(move_to(device, observations), noise, mask=mask)
        return self._actions.batch(self._actions.clip(distribution.to_env(acted.action.cpu().numpy())))

    def _check_mask(self, mask: Any, size: int) -> Any:
        """The mask as `[size, choices]`."""
        distribution: Any = self.module.distribution
        choices, count = distribution.choices, distribution.num_parameters
        if choices is not None and mask.size != size * count:
            reason = f"has shape {mask.shape}; {size} observation{'s need' if size > 1 else ' needs'} {size} x {count}"
            raise ConfigError("predict(action_mask)", mask.tolist(), reason, "Give one value per choice")
        mask = mask.reshape(size, -1)
        if not possible_actions(mask, choices).all():
            raise ConfigError("predict(action_mask)", mask.tolist(), "allows no action", "Allow at least one")
        return mask

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.parameters())
        spaces = f"from {self.observation_space} to {self.action_space}"
        return f"<TrainedPolicy {type(self.module).__name__}, {count:,} weights, {spaces}>"
