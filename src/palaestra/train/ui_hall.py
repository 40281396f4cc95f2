"""The hall in which a model plays: sessions from a source, answers from a sampler, actions through a codec."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from palaestra.actor.inference import Answered, BatchedInference, InferenceStatistics, Question, Sampler
from palaestra.actor.pool import Play
from palaestra.actor.task_runner import TaskRunner
from palaestra.actor.vlm_agent import VlmAgent
from palaestra.experience.trajectory import Trajectory
from palaestra.policy.codecs.grammar import Grammar
from palaestra.policy.vlm import SampleRequest, VLMPolicy
from palaestra.sessions.provider import SessionAddress, open_provider
from palaestra.train.ui_config import UiRunConfig

__all__ = ["LocalSampler", "UiHall", "build_policy", "open_ui_hall"]


def build_policy(config: UiRunConfig) -> VLMPolicy:
    """The model that the configuration names, with the grammar that its actors speak."""
    return VLMPolicy.from_config(
        config.model,
        seed=config.trainer.seed,
        codec=config.actor.codec,
        describe_grammar=config.actor.describe_grammar,
    )


class LocalSampler:
    """Answers with a policy in this process."""

    def __init__(self, policy: VLMPolicy, *, threads: int) -> None:
        self._policy, self._threads = policy, threads

    def answer(self, questions: Sequence[Question], *, temperature: float) -> list[Answered]:
        """An answer to each, in one batch."""
        import torch

        # Threads are a property of the calling thread, and this one is the inference desk's own.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        prompts = [self._policy.prompt(question.conversation) for question in questions]
        requests = [SampleRequest(prompt, question.seed) for prompt, question in zip(prompts, questions, strict=True)]
        drawn = self._policy.sample(requests, temperature=temperature)
        return [Answered(prompt, sampled) for prompt, sampled in zip(prompts, drawn, strict=True)]


class UiHall:
    """A runner at a desk of inference."""

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
        """Of inference."""
        return self._inference.statistics


@asynccontextmanager
async def open_ui_hall(
    config: UiRunConfig, address: SessionAddress, sampler: Sampler, grammar: Grammar, *, lockstep: bool,
    temperature: float | None = None, failed: Callable[[Trajectory], None] = lambda trajectory: None,
) -> AsyncIterator[UiHall]:  # fmt: skip
    """Everything needed to play while the block lasts; `temperature` replaces the actor's, 0 is greedy."""
    heat = config.actor.temperature if temperature is None else temperature
    sessions = open_provider(config.environment, address, session_type=config.actor.session_type)
    inference = BatchedInference(
        sampler, temperature=heat, max_batch=config.inference.max_batch, lockstep=lockstep
    )  # fmt: skip
    agent = VlmAgent(inference.ask, grammar.codec, grammar.rule, temperature=heat, system=grammar.described)

    try:
        yield UiHall(TaskRunner(sessions.open, agent, config.actor, failed=failed), inference)
    finally:
        await inference.close()
        await sessions.close()
