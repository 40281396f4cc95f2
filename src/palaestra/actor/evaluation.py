"""Evaluation: exactly n episodes on environments of its own, with the policy's most likely actions.

Each environment plays a fixed share of the episodes. Taking the first n that end anywhere would favour short ones.
Nothing is learned and no statistic moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from palaestra.actor.acting import refuse_impossible
from palaestra.actor.fit import check_fit
from palaestra.actor.proportion import wilson_interval
from palaestra.env.spaces import allocate_row
from palaestra.env.vector import Ended, StepRow, VectorEnv
from palaestra.errors import ConfigError
from palaestra.policy.device import device_of, move_to
from palaestra.policy.eval_mode import eval_mode

__all__ = ["Evaluation", "confidence_interval", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of the episodes, by environment and then in order of play."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    successes: tuple[bool, ...] | None = None
    """Which episodes solved the task; None where the environment does not say."""

    @property
    def mean_return(self) -> float:
        """Mean over episodes."""
        return float(np.mean(self.returns))

    @property
    def std_return(self) -> float:
        """Standard deviation over episodes."""
        return float(np.std(self.returns))

    @property
    def ci95(self) -> tuple[float, float]:
        """95 % interval of the mean (Student's t)."""
        return confidence_interval(self.returns)

    @property
    def success_rate(self) -> float | None:
        """Share of episodes that solved the task."""
        return None if self.successes is None else float(np.mean(self.successes))

    def report(self) -> dict[str, Any]:
        """As plain JSON."""
        solved: dict[str, Any] = {}
        if self.successes is not None:
            interval = wilson_interval(sum(self.successes), len(self.successes))
            solved = {"success_rate": self.success_rate, "success_ci95": list(interval)}
        return {
            **solved,
            "episodes": len(self.returns),
            "mean_return": self.mean_return,
            "std_return": self.std_return,
            "ci95": list(self.ci95),
            "min_return": min(self.returns),
            "max_return": max(self.returns),
            "mean_length": float(np.mean(self.lengths)),
        }


def confidence_interval(numbers: tuple[float, ...]) -> tuple[float, float]:
    """95 % interval of the mean by Student's t; a single number is its own interval."""
    from scipy.special import stdtrit

    n, mean = len(numbers), float(np.mean(numbers))
    if n < 2:
        return mean, mean
    half = float(stdtrit(n - 1, 0.975)) * float(np.std(numbers, ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def evaluate(policy: nn.Module, env: VectorEnv, *, episodes: int, seed: int, deterministic: bool = True) -> Evaluation:
    """Play exactly `episodes` episodes from `seed`; `deterministic` takes the most likely action each time."""
    if episodes < 1:
        raise ConfigError("episodes", episodes, "must be at least 1")
    check_fit(policy, env)
    player: Any = policy
    device = device_of(policy)
    row = _first_row(env, seed)
    rng = np.random.default_rng(np.random.SeedSequence([seed, 3]))
    N = env.num_envs
    wanted = [episodes // N + (1 if i < episodes % N else 0) for i in range(N)]
    played: list[list[Ended]] = [[] for _ in range(N)]
    with eval_mode(policy):
        while any(len(done) < want for done, want in zip(played, wanted, strict=True)):
            noise = None if deterministic else move_to(device, _noise(player.distribution, rng, N))
            mask = None
            if row.action_mask is not None:
                refuse_impossible(player.distribution, row.action_mask, row.terminated | row.truncated)
                mask = move_to(device, row.action_mask)
            with torch.inference_mode():
                acted = player.act(move_to(device, row.observation), noise, mask=mask)
            action: NDArray[Any] = acted.action.cpu().numpy()
            for ended in env.step(player.distribution.to_env(action), row):
                if len(played[ended.index]) < wanted[ended.index]:
                    played[ended.index].append(ended)
    flat = [episode for done in played for episode in done]
    solved = tuple(episode.success for episode in flat if episode.success is not None)
    return Evaluation(
        tuple(episode.episode_return for episode in flat),
        tuple(episode.length for episode in flat),
        solved if len(solved) == len(flat) else None,
    )


def _first_row(env: VectorEnv, seed: int) -> StepRow:
    row = allocate_row(env.observation_space, env.num_envs, env.mask_size)
    env.reset(seed, row)
    return row


def _noise(distribution: Any, rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    draw: Any = rng.random if distribution.noise_kind == "uniform" else rng.standard_normal
    noise: NDArray[np.float32] = draw((n, distribution.noise_size), dtype=np.float32)
    return noise
