"""How well a model operates screens, on seeds that no training draws."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from palaestra.actor.pool import play_all
from palaestra.actor.task_runner import EpisodeOrder
from palaestra.actor.task_sampler import TaskChoice, held_out
from palaestra.experience.trajectory import Trajectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.policy.vlm import VLMPolicy
from palaestra.train.session_source import SessionAddress
from palaestra.train.ui_config import UiRunConfig, ui_config_from
from palaestra.train.ui_hall import LocalSampler, grammar_of, open_ui_hall

__all__ = ["load_ui_policy", "play_held_out"]


def play_held_out(
    config: UiRunConfig, policy: VLMPolicy, address: SessionAddress, *, episodes: int, first: int = 0,
    tasks: Sequence[TaskChoice] | None = None, greedy: bool | None = None, samples: int = 1,
    heard: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[Trajectory]:  # fmt: skip
    """Play `episodes` held-out tasks from number `first` on, each `samples` times, with the weights that act now."""
    drawn = held_out(tuple(tasks or config.tasks), episodes, first=first)
    orders = [
        EpisodeOrder(f"h{number:06d}.{sample}", task, seed=number * 1009 + sample, key=choice.key)
        for number, (choice, task) in enumerate(drawn, start=first)
        for sample in range(samples)
    ]
    greedy = config.evaluation.greedy if greedy is None else greedy
    sampler = LocalSampler(policy, threads=config.inference.torch_threads)

    async def played() -> list[Trajectory]:
        async with open_ui_hall(
            config, address, sampler, grammar_of(config, policy), lockstep=True, temperature=0.0 if greedy else None
        ) as hall:
            return await play_all(
                hall.play, orders, concurrent=config.actor_pool.target_concurrent_actors, present=hall.present,
                heard=lambda order, trajectory: heard(trajectory),
            )  # fmt: skip

    with asyncio.Runner() as runner:
        return runner.run(played())


def load_ui_policy(path: Path, *, device: str | None = None) -> tuple[UiRunConfig, VLMPolicy]:
    """The model of a checkpoint, and the configuration it was trained with; `device` replaces its `model.device`."""
    checkpoint = load_checkpoint(path, kind="screens")
    config = ui_config_from(checkpoint.about["config"])
    if device is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    policy = VLMPolicy.from_config(config.model, seed=config.trainer.seed)
    policy.load(checkpoint.policy)
    return config, policy
