"""Evaluation of a policy on exactly n episodes in vector environments, without learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from palaestra.actor.compatibility import check_spaces
from palaestra.actor.policy_actor import check_action_masks
from palaestra.env.spaces import allocate_row
from palaestra.env.vector import EpisodeEnd, VectorEnv
from palaestra.errors import ConfigError
from palaestra.evaluation.statistics import wilson_interval
from palaestra.intervals import confidence_interval, format_return
from palaestra.policy.device import device_of, move_to
from palaestra.policy.network import eval_mode


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Returns and lengths of the episodes, by environment and order of play."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    successes: tuple[bool, ...] | None = None
    """Whether each episode solved the task; None if the environment does not report it."""

    @property
    def mean_return(self) -> float:
        """Mean over episodes."""
        return float(np.mean(self.returns))

    @property
    def std_return(self) -> float:
        """Standard deviation over episodes."""
        return float(np.std(self.returns))

    @property
    def ci95(self) -> tuple[float, float] | None:
        """95 % interval of the mean (Student's t); None for one episode."""
        return confidence_interval(self.returns)

    @property
    def success_rate(self) -> float | None:
        """Share of episodes that solved the task."""
        return None if self.successes is None else float(np.mean(self.successes))

    def __repr__(self) -> str:
        interval = "" if self.ci95 is None else ", 95 % interval {} to {}".format(*map(format_return, self.ci95))
        success = "" if self.success_rate is None else f", success rate {100 * self.success_rate:.0f} %"
        mean = format_return(self.mean_return)
        return f"<Evaluation of {len(self.returns)} episodes: mean return {mean}{interval}{success}>"

    def to_json(self) -> dict[str, Any]:
        """All numbers as plain JSON; success only if the environment reports it."""
        document: dict[str, Any] = {}
        if self.successes is not None:
            interval = wilson_interval(sum(self.successes), len(self.successes))
            document = {"success_rate": self.success_rate, "success_ci95": list(interval)}
        return document | {
            "episodes": len(self.returns),
            "mean_return": self.mean_return,
            "std_return": self.std_return,
            "ci95": self.ci95 and list(self.ci95),
            "min_return": min(self.returns),
            "max_return": max(self.returns),
            "mean_length": float(np.mean(self.lengths)),
        }


def evaluate(
    policy: nn.Module,
    env: VectorEnv,
    *,
    episodes: int,
    seed: int,
    deterministic: bool = True,
    on_progress: Callable[[int, int], None] = lambda episodes, steps: None,
) -> Evaluation:
    """Play exactly `episodes` episodes from `seed`; `deterministic` takes the most likely action each time.

    `on_progress` is called after every step of all environments, with the numbers of finished episodes and of steps.
    """
    if episodes < 1:
        raise ConfigError("episodes", episodes, "must be at least 1")
    check_spaces(policy, env)
    player: Any = policy
    distribution, device = player.distribution, device_of(policy)
    N = env.num_envs
    row = allocate_row(env.observation_space, N, env.mask_size)
    env.reset(seed, row)
    rng = np.random.default_rng(np.random.SeedSequence([seed, 3]))
    # A fixed number per environment: taking the first n to end would favour short episodes.
    shares = [episodes // N + (1 if i < episodes % N else 0) for i in range(N)]
    played: list[list[EpisodeEnd]] = [[] for _ in range(N)]
    steps = 0
    with eval_mode(policy):
        while any(len(done) < share for done, share in zip(played, shares, strict=True)):
            noise = mask = None
            if not deterministic:
                draw: Any = rng.random if distribution.noise_kind == "uniform" else rng.standard_normal
                noise = move_to(device, draw((N, distribution.noise_size), dtype=np.float32))
            if row.action_mask is not None:
                check_action_masks(distribution, row.action_mask, row.terminated | row.truncated)
                mask = move_to(device, row.action_mask)
            with torch.inference_mode():
                acted = player.act(move_to(device, row.observation), noise, mask=mask)
            for ended in env.step(distribution.to_env(acted.action.cpu().numpy()), row):
                if len(played[ended.index]) < shares[ended.index]:
                    played[ended.index].append(ended)
            steps += N
            on_progress(sum(map(len, played)), steps)
    ordered = [episode for done in played for episode in done]
    solved = tuple(episode.success for episode in ordered if episode.success is not None)
    return Evaluation(
        tuple(episode.episode_return for episode in ordered),
        tuple(episode.length for episode in ordered),
        solved if len(solved) == len(ordered) else None,
    )
