"""How much memory training will take, added up before anything is allocated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from palaestra.actor.fit import buffer_shape
from palaestra.env.vector import VectorEnv
from palaestra.experience.buffer import RolloutBuffer
from palaestra.memory import check_fits
from palaestra.policy.device import device_of

__all__ = ["check_memory", "policy_bytes"]

COPIES = 7
"""Of every trained weight: itself, its gradient, Adam's two moments, and three to undo an update that breaks."""
COPIES_IN_BACKGROUND = 3
"""More with a background collector: its own, and two on the board that hands weights over."""


def policy_bytes(policy: nn.Module, *, background: bool = False) -> int:
    """What a policy takes while it learns."""
    copies = COPIES + (COPIES_IN_BACKGROUND if background else 0)
    return sum(p.numel() * p.element_size() * (copies if p.requires_grad else 1) for p in policy.parameters())


def check_memory(
    policy: nn.Module,
    env: VectorEnv,
    num_steps: int,
    *,
    n_epochs: int,
    in_background: int | None = None,
    num_envs: int | None = None,
) -> None:
    """Refuse rollouts of `num_steps` steps that cannot fit into memory beside the policy.

    `in_background`: rollouts that a background collector's ring holds, None without one; `num_envs`: of the run, when
    `env` is a smaller one to try things on.
    """
    shape: dict[str, Any] = buffer_shape(env, policy)
    count = env.num_envs if num_envs is None else num_envs
    rollout = RolloutBuffer.bytes_needed(num_steps, **{**shape, "num_envs": count})
    segments = in_background or 1
    weights = policy_bytes(policy, background=in_background is not None)
    shuffles = n_epochs * num_steps * count * 8
    name = f"{segments} rollouts" if segments > 1 else "a rollout"
    parts = {f"{name} of {num_steps:,} steps x {count} environments": segments * rollout, "its shuffles": shuffles}
    device = device_of(policy)
    remedy = "Set a shorter trainer.rollout_length, fewer env.num_envs, or a smaller policy"
    if device.type == "cuda":
        on_gpu = {"the policy": weights, "a rollout": rollout, "its shuffles": shuffles}
        limit = int(torch.cuda.mem_get_info(device)[1])
        check_fits("trainer.rollout_length", num_steps, on_gpu, f"{remedy}, or trainer.device=cpu", limit=limit)
    else:
        parts["the policy"] = weights
    check_fits("trainer.rollout_length", num_steps, parts, remedy)
