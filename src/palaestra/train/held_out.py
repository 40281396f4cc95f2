"""Held-out evaluation on screens: tasks with seeds that training never draws, and loading of models for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from palaestra.actor.inference import start_rollout_workers
from palaestra.actor.pool import play_all
from palaestra.actor.task_runner import EpisodeRequest
from palaestra.experience.trajectory import Trajectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.learner.trajectories.reward import reward_warnings
from palaestra.policy.vlm import VLMPolicy
from palaestra.policy.vlm.sampler import LocalSampler, ReplySampler
from palaestra.sessions.clients.provider import SessionAddress, load_tasks, open_provider
from palaestra.sessions.task_sampler import held_out
from palaestra.train.screen_config import ScreenRunConfig, screen_config_from


def check_tasks(config: ScreenRunConfig, address: SessionAddress) -> list[str]:
    """Load each task once; `ConfigError` for the first that cannot be loaded.

    Returns warnings about rewards that favour unfinished episodes.
    """
    requests = [request for _, request in held_out(config.tasks, len(config.tasks))]
    specs = load_tasks(
        requests,
        config.environment,
        address,
        session_type=config.actor.session_type,
        actors=config.actor_pool.target_concurrent_actors,
    )
    warnings: dict[str, None] = {}
    for spec in specs:
        low, _ = spec.reward_range or config.reward.assumed_range
        warnings |= dict.fromkeys(reward_warnings(config.reward, low, task=f"{spec.suite}/{spec.name}"))
    return list(warnings)


def play_held_out(
    config: ScreenRunConfig,
    policy: Any,
    address: SessionAddress,
    *,
    episodes: int,
    first: int = 0,
    greedy: bool | None = None,
    samples: int = 1,
    on_finished: Callable[[Trajectory], None] = lambda trajectory: None,
    sampler: ReplySampler | None = None,
) -> list[Trajectory]:
    """Play `episodes` held-out tasks from number `first` on, each `samples` times, with the published weights.

    `sampler` samples the replies; by default the policy in this process.
    """
    drawn = held_out(config.tasks, episodes, first=first)
    requests = [
        EpisodeRequest(f"h{number:06d}.{sample}", task, seed=number * 1009 + sample, key=choice.key)
        for number, (choice, task) in enumerate(drawn, start=first)
        for sample in range(samples)
    ]
    greedy = config.evaluation.greedy if greedy is None else greedy
    used = LocalSampler(policy, threads=config.inference.torch_threads) if sampler is None else sampler

    async def play() -> list[Trajectory]:
        async with start_rollout_workers(
            open_provider(config.environment, address, session_type=config.actor.session_type),
            used,
            policy.grammar,
            config.actor,
            max_batch=config.inference.max_batch,
            lockstep=True,
            temperature=0.0 if greedy else None,
        ) as workers:
            return await play_all(
                workers.play,
                requests,
                concurrent=config.actor_pool.target_concurrent_actors,
                set_num_actors=workers.inference.set_num_actors,
                on_finished=lambda request, trajectory: on_finished(trajectory),
            )

    with asyncio.Runner() as runner:
        return runner.run(play())


def build_policy(config: ScreenRunConfig) -> VLMPolicy:
    """The model of a configuration, with the action grammar of its actors."""
    # As in training: more threads than cores that are free of browsers slow down both.
    torch.set_num_threads(config.trainer.torch_threads)
    return VLMPolicy.from_config(
        config.model, seed=config.trainer.seed, codec=config.actor.codec, describe_grammar=config.actor.describe_grammar
    )


def load_screen_policy(path: Path, *, device: str | None = None) -> tuple[ScreenRunConfig, VLMPolicy]:
    """The model and the configuration of a checkpoint; `device` overrides `model.device`."""
    checkpoint = load_checkpoint(path, kind="screens")
    config = screen_config_from(checkpoint.about["config"])
    if device is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    policy = build_policy(config)
    policy.load(checkpoint.policy)
    return config, policy
