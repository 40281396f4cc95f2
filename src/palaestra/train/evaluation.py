"""Policies of configurations and checkpoints, and their evaluation in environments of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from palaestra.env.make import EnvConfig, base_env_id, make_env, with_time_limit
from palaestra.env.vector import Space, VectorEnv
from palaestra.evaluation.play import Evaluation, evaluate
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.policy.build import build_policy
from palaestra.policy.device import Device, choose_device
from palaestra.policy.storage import load_weights
from palaestra.train.config import RunConfig, config_from
from palaestra.transport.ranks import Share

EVAL_SEED = 1_000_003
"""Added to the run's seed for evaluation, so that it uses other episodes than training."""


def make_policy(config: RunConfig, env: VectorEnv, device: torch.device, *, pretrained: bool) -> nn.Module:
    """The policy of a configuration for these environments."""
    return build_policy(
        config.policy,
        env.observation_space,
        env.action_space,
        normalize_observation=config.env.normalize_observation,
        seed=config.trainer.seed,
        pretrained=pretrained,
        device=device,
    )


def make_env_and_policy(
    config: RunConfig, *, pretrained: bool = True, share: Share | None = None
) -> tuple[VectorEnv, nn.Module]:
    """Environments and policy of a configuration, or a share of the environments; `pretrained` as in `build_policy`."""
    device = choose_device(config.trainer.device, place="trainer.device")
    if share is None:
        env = make_env(config.env)
    else:
        env = make_env(config.env.model_copy(update={"num_envs": share.count}), first_index=share.first)
    try:
        return env, make_policy(config, env, device, pretrained=pretrained)
    except BaseException:
        env.close()
        raise


def evaluation_env(config: RunConfig, episodes: int) -> EnvConfig:
    """The configuration of the environments of an evaluation; its episodes have a time limit in any case."""
    vectorization = "in_process" if config.env.backend == "gymnasium" else "auto"
    update = {"num_envs": min(episodes, 10), "vectorization": vectorization}
    return with_time_limit(config.env).model_copy(update=update)


def evaluate_during_training(config: RunConfig, policy: nn.Module) -> dict[str, float]:
    """Return and length of held-out episodes."""
    episodes, seed = config.trainer.eval_episodes, config.trainer.seed + EVAL_SEED
    env = make_env(evaluation_env(config, episodes))
    try:
        result = evaluate(policy, env, episodes=episodes, seed=seed)
    finally:
        env.close()
    metrics = {"eval_return": result.mean_return, "eval_return_std": result.std_return}
    metrics["eval_length"] = sum(result.lengths) / len(result.lengths)
    if result.success_rate is not None:
        metrics["eval_success_rate"] = result.success_rate
    return metrics


@dataclass(frozen=True)
class LoadedPolicy:
    """The policy of a checkpoint, and the spaces of the environment it was trained in."""

    config: RunConfig
    policy: nn.Module
    observation_space: Space
    action_space: Space


def load_vector_policy(path: Path, *, env: Mapping[str, Any] | None = None, device: Device = "cpu") -> LoadedPolicy:
    """Load the policy of a checkpoint. `env` replaces keys of the section `env` of its configuration."""
    here = choose_device(device)
    checkpoint = load_checkpoint(path, kind="vector")
    config = config_from(checkpoint.about["config"])
    # The environment that a compiled one copies has the same spaces.
    update = {"id": base_env_id(config.env.id), "num_envs": 1, "vectorization": "in_process", **(env or {})}
    single = make_env(config.env.model_copy(update=update))
    try:
        policy = make_policy(config, single, here, pretrained=False)
        spaces = single.observation_space, single.action_space
    finally:
        single.close()
    load_weights(policy, checkpoint.policy)
    return LoadedPolicy(config, policy, *spaces)


def evaluate_checkpoint(
    path: Path,
    *,
    episodes: int,
    seed: int | None,
    deterministic: bool = True,
    env: Mapping[str, Any] | None = None,
    make: Callable[[EnvConfig], VectorEnv] = make_env,
    device: Device = "cpu",
    on_progress: Callable[[int, int], None] = lambda episodes, steps: None,
) -> Evaluation:
    """Evaluate the policy of a checkpoint in its environment, which `make` creates.

    `env` replaces keys of the section `env` of its configuration. `device` may differ from the device of the training.
    `on_progress` as in `evaluate`.
    """
    here = choose_device(device)
    checkpoint = load_checkpoint(path, kind="vector")
    config = config_from(checkpoint.about["config"])
    config = config.model_copy(update={"env": config.env.model_copy(update=env)})
    environments = make(evaluation_env(config, episodes))
    try:
        policy = make_policy(config, environments, here, pretrained=False)
        load_weights(policy, checkpoint.policy)
        chosen = seed if seed is not None else config.trainer.seed + EVAL_SEED
        return evaluate(
            policy, environments, episodes=episodes, seed=chosen, deterministic=deterministic, on_progress=on_progress
        )
    finally:
        environments.close()
