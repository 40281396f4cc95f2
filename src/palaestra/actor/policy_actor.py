"""Acting with a policy on NumPy arrays, in compiled kernels or through torch, with one interface.

`build_actor` chooses the implementation. Random noise is an argument.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from palaestra.env.compiled_cartpole import CompiledCartPole
from palaestra.env.vector import EpisodeEnd, Observation, VectorEnv
from palaestra.errors import ConfigError, EnvironmentContractError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import possible_actions
from palaestra.kernels.cartpole import rollout_cartpole
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.compiled import CompiledActorCritic, why_not_compiled
from palaestra.policy.device import device_of, move_to

Compiled: TypeAlias = Literal["auto", "on", "off"]
"""`auto`: compiled kernels if the policy supports them; `on`: raise an error otherwise; `off`: always torch."""
Floats: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.bool_] | None


class TorchActor:
    """Acts with any policy through torch."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy: Any = policy
        self._device = device_of(policy)

    def is_current(self) -> bool:
        """Whether the policy is still on the same device."""
        return self._device == device_of(self._policy)

    def act_into(
        self, observation: Observation, noise: Floats, mask: Mask, action: NDArray[Any], log_prob: Floats, value: Floats
    ) -> None:
        """Write actions, log-probabilities and values for `[N, ...]` observations, without gradients."""
        with torch.inference_mode():
            acted = self._policy.act(
                move_to(self._device, observation),
                move_to(self._device, noise),
                mask=None if mask is None else move_to(self._device, mask),
            )
        shapes = (acted.action.shape, acted.log_prob.shape, acted.value.shape)
        wanted = (action.shape, log_prob.shape, value.shape)
        if shapes != wanted:  # numpy would broadcast a single number
            raise self._shape_error(
                "act", "action, log_prob and value", [list(s) for s in shapes], [list(s) for s in wanted]
            )
        action[:] = acted.action.cpu().numpy()
        log_prob[:] = acted.log_prob.cpu().numpy()
        value[:] = acted.value.cpu().numpy()

    def value(self, observation: Observation) -> Floats:
        """Values `[N]`."""
        with torch.inference_mode():
            values: Floats = self._policy.value(move_to(self._device, observation)).float().cpu().numpy()
        count = len(next(iter(observation.values())) if isinstance(observation, dict) else observation)
        if values.shape != (count,):
            raise self._shape_error("value", "values", list(values.shape), [count])
        return values

    def _shape_error(self, method: str, what: str, got: object, wanted: object) -> ConfigError:
        return ConfigError(
            "policy", type(self._policy).__name__, f"its {method} returned {what} of shape {got}", f"Return {wanted}"
        )


PolicyActor: TypeAlias = TorchActor | CompiledActorCritic


def check_action_masks(distribution: Any, mask: NDArray[np.bool_], ignored: NDArray[np.bool_]) -> None:
    """Raise if the mask `[N, k]` of an environment allows no action, except where `ignored`."""
    allowed = possible_actions(mask, getattr(distribution, "choices", None)) | ignored
    if not allowed.all():
        raise EnvironmentContractError(
            f"environment {int(np.argmin(allowed))} allows no action: its info['action_mask'] forbids all of them. "
            "Allow at least one action in every step, or end the episode where there is none."
        )


def build_actor(policy: nn.Module, compiled: Compiled = "auto", *, masked: bool = False) -> PolicyActor:
    """The fastest actor for this policy."""
    if compiled == "off":
        return TorchActor(policy)
    reason = "actions are masked" if masked else why_not_compiled(policy, learning=False)
    if reason is None:
        assert isinstance(policy, ActorCritic)
        return CompiledActorCritic(policy)
    if compiled == "on":
        raise ConfigError(
            "trainer.compiled", "on", f"this policy cannot run compiled: {reason}", "Use 'auto' to fall back to torch"
        )
    return TorchActor(policy)


def has_rollout_kernel(env: VectorEnv, acting: PolicyActor) -> bool:
    """Whether one kernel can run the whole rollout of this environment and policy."""
    poles: Any = env
    return type(poles) is CompiledCartPole and isinstance(acting, CompiledActorCritic) and acting.takes_raw


def run_rollout_kernel(
    poles: Any, net: Any, buffer: RolloutBuffer, noise: NDArray[np.float32]
) -> list[tuple[int, EpisodeEnd]]:
    """Fill the buffer in one kernel; returns the episodes that ended, each with its step."""
    N, most = buffer.num_envs, buffer.num_steps * buffer.num_envs
    ended = _allocate_ended(most)
    steps = np.empty(most, np.int64)
    count = rollout_cartpole(
        noise,
        (net.actor, net.critic, net.actor_sizes, net.critic_sizes, net.activation),
        (poles.state, poles.elapsed, poles.stream, poles.limit),
        (
            buffer.observation,
            buffer.action,
            buffer.log_prob,
            buffer.value,
            buffer.reward,
            buffer.terminated,
            buffer.truncated,
        ),
        (steps, *ended),
        net.scratch(N),
        _allocate_ended(N),
    )
    who, last, lengths = ended
    return [
        (int(steps[k]), EpisodeEnd(int(who[k]), last[k].copy(), float(lengths[k]), int(lengths[k])))
        for k in range(count)
    ]


def _allocate_ended(count: int) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Arrays for index, last observation and length of ended episodes."""
    return np.empty(count, np.int64), np.empty((count, 4), np.float32), np.empty(count, np.int64)
