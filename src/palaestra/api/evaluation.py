"""`evaluate`: held-out episodes of a run, a checkpoint or a policy, with a 95 % confidence interval."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import nn

from palaestra.api.environments import environment_section
from palaestra.api.event_loop import call_outside_event_loop
from palaestra.api.policy import TrainedPolicy
from palaestra.api.trained_run import TrainedRun, load
from palaestra.env.make import EnvConfig, as_vector_env, with_time_limit
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
    policy: Evaluated | TrainedPolicy | nn.Module,
    env: Any = None,
    *,
    episodes: int = 100,
    seed: int | None = None,
    deterministic: bool | None = None,
    device: Device | None = None,
    tasks: str | Sequence[str] = (),
    samples: int = 1,
    against: Evaluated | None = None,
) -> Evaluation | ScreenReport:
    """Play `episodes` episodes on seeds that training does not use.

    `env`: an id, or a class or function that makes an environment. A run or checkpoint is evaluated in the one it was
    trained in if none is given; `run.policy` or another `nn.Module` needs one, which may also be an environment object.
    `deterministic` takes the most likely action; the default is True, and for models on screens as configured.
    `tasks`, `samples` and `against` are for models on screens: other tasks, attempts per task, and a run or checkpoint
    to compare with on the same tasks.
    """
    _check_count("episodes", episodes, 1)
    _check_count("samples", samples, 1)
    if seed is not None:
        _check_count("seed", seed, 0)
    if isinstance(policy, TrainedPolicy):
        policy = policy.module
    if isinstance(policy, nn.Module):
        return _evaluate_module(policy, env, episodes, seed, deterministic)
    run = policy if isinstance(policy, TrainedRun) else load(policy)
    if run.on_screens:
        if env is not None:
            raise ConfigError("evaluate(env)", env, "is not for models on screens", "Name other tasks with tasks=[…]")
        names = [tasks] if isinstance(tasks, str) else tasks
        return _evaluate_on_screens(run, against, episodes, seed, deterministic, device, names, samples)
    if tasks or samples > 1 or against is not None:
        remedy = "Leave them out; to compare two policies, use: palaestra eval A --against B"
        raise ConfigError("evaluate(tasks, samples, against)", tasks or against, "are for models on screens", remedy)
    # The arguments of the environment of the training are not those of another one.
    section = run.env if env is None else {"backend": "gymnasium", "kwargs": {}, **environment_section(env)}
    return evaluate_checkpoint(
        run.checkpoint,
        episodes=episodes,
        seed=seed,
        deterministic=deterministic is not False,
        env=section,
        device=device or "auto",
    )


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"evaluate({name})", value, f"must be a whole number and at least {least}")


def _evaluate_module(
    policy: nn.Module, env: Any, episodes: int, seed: int | None, deterministic: bool | None
) -> Evaluation:
    if env is None:
        raise ConfigError(
            "evaluate(env)", None, "a module has no environment of its own", "Give one: env='CartPole-v1'"
        )
    if isinstance(env, str) or callable(env):
        env = with_time_limit(EnvConfig(num_envs=8, **environment_section(env)))
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
