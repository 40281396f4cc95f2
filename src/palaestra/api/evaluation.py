"""`evaluate`: held-out episodes of a run, a checkpoint or a policy, with a 95 % confidence interval."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from palaestra.api.event_loop import call_outside_event_loop
from palaestra.api.trained_run import TrainedRun, load
from palaestra.env.make import EnvConfig, as_vector_env, make_env
from palaestra.env.vector import VectorEnv
from palaestra.errors import ConfigError
from palaestra.evaluation.play import Evaluation
from palaestra.evaluation.play import evaluate as play_episodes
from palaestra.policy.device import Device
from palaestra.train.evaluation import EVAL_SEED, evaluate_checkpoint

if TYPE_CHECKING:
    from palaestra.api.screen_evaluation import ScreenReport

Evaluated: TypeAlias = TrainedRun | str | os.PathLike[str]
"""A run, or the id or path of a run or checkpoint."""


def evaluate(
    policy: Evaluated | nn.Module,
    env: Any = None,
    *,
    episodes: int = 100,
    seed: int | None = None,
    deterministic: bool | None = None,
    device: Device | None = None,
    tasks: Sequence[str] = (),
    samples: int = 1,
    against: Evaluated | None = None,
) -> Evaluation | ScreenReport:
    """Play `episodes` episodes on seeds that training does not use.

    A policy that is an `nn.Module` is evaluated in `env`; a run or checkpoint in the environment it was trained in.
    `deterministic` takes the most likely action; the default is True, and for models on screens as configured.
    `tasks`, `samples` and `against` are for models on screens: other tasks, attempts per task, and a run or checkpoint
    to compare with on the same tasks, before which `policy` is listed as "after".
    """
    if episodes < 1 or samples < 1:
        raise ConfigError("evaluate(episodes, samples)", (episodes, samples), "each must be at least 1")
    if isinstance(policy, nn.Module):
        return _evaluate_module(policy, env, episodes, seed, deterministic)
    run = policy if isinstance(policy, TrainedRun) else load(policy, env=env)
    if run.on_screens:
        return _evaluate_on_screens(run, against, episodes, seed, deterministic, device, tasks, samples)
    if tasks or samples > 1 or against is not None:
        remedy = "Leave them out; to compare two policies, use: palaestra eval A --against B"
        raise ConfigError("evaluate(tasks, samples, against)", tasks or against, "are for models on screens", remedy)

    def make(config: EnvConfig) -> VectorEnv:
        return make_env(config.model_copy(update=run.env))

    return evaluate_checkpoint(
        run.checkpoint,
        episodes=episodes,
        seed=seed,
        deterministic=deterministic is not False,
        make=make,
        device=device or "auto",
    )


def _evaluate_module(
    policy: nn.Module, env: Any, episodes: int, seed: int | None, deterministic: bool | None
) -> Evaluation:
    if env is None:
        raise ConfigError(
            "evaluate(env)", None, "a module has no environment of its own", "Give one: env='CartPole-v1'"
        )
    return play_episodes(
        policy,
        as_vector_env(env),
        episodes=episodes,
        seed=EVAL_SEED if seed is None else seed,
        deterministic=deterministic is not False,
    )


def _evaluate_on_screens(
    run: TrainedRun,
    against: Evaluated | None,
    episodes: int,
    seed: int | None,
    deterministic: bool | None,
    device: Device | None,
    tasks: Sequence[str],
    samples: int,
) -> ScreenReport:
    from palaestra.api.screen_evaluation import evaluate_on_screens

    other: Path | None = None
    if against is not None:
        other = (against if isinstance(against, TrainedRun) else load(against)).checkpoint
    return call_outside_event_loop(
        lambda: evaluate_on_screens(
            run.checkpoint,
            other,
            episodes=episodes,
            first=seed or 0,
            tasks=",".join(tasks),
            greedy=deterministic,
            samples=samples,
            device=None if device is None else str(device),
        )
    )
