"""`RolloutWorkers`: everything that plays episodes: sessions from a provider, replies from a sampler, actions through a
codec.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from palaestra.actor.inference import BatchedInference, InferenceStatistics
from palaestra.actor.pool import Play
from palaestra.actor.task_runner import ActorConfig, TaskRunner
from palaestra.actor.vlm_agent import VlmAgent
from palaestra.experience.trajectory import Trajectory
from palaestra.policy.codecs.grammar import Grammar
from palaestra.policy.vlm.sampler import Sampler
from palaestra.sessions.provider import SessionProvider

__all__ = ["RolloutWorkers", "start_rollout_workers"]


class RolloutWorkers:
    """A task runner whose agents share one batched sampler."""

    def __init__(self, runner: TaskRunner, inference: BatchedInference) -> None:
        self._runner, self._inference = runner, inference

    @property
    def play(self) -> Play:
        """Plays one order."""
        return self._runner.run_episode

    def present(self, count: int) -> None:
        """So many actors are playing."""
        self._inference.present(count)

    @property
    def statistics(self) -> InferenceStatistics:
        """What the sampler has answered so far."""
        return self._inference.statistics


@asynccontextmanager
async def start_rollout_workers(
    provider: SessionProvider,
    sampler: Sampler,
    grammar: Grammar,
    config: ActorConfig,
    *,
    max_batch: int,
    lockstep: bool,
    temperature: float | None = None,
    failed: Callable[[Trajectory], None] = lambda trajectory: None,
) -> AsyncIterator[RolloutWorkers]:
    """Workers while the block lasts; `temperature` replaces the actor's, 0 is greedy.

    `failed` is given the trajectory of every session that broke and is tried again.
    """
    temperature = config.temperature if temperature is None else temperature
    inference = BatchedInference(sampler, temperature=temperature, max_batch=max_batch, lockstep=lockstep)
    agent = VlmAgent(inference.ask, grammar.codec, grammar.rule, temperature=temperature, system=grammar.described)
    try:
        yield RolloutWorkers(TaskRunner(provider.open, agent, config, failed=failed), inference)
    finally:
        await inference.close()
        await provider.close()
