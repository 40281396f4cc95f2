"""Batched inference: questions of all actors are collected and answered together.

A batch begins as soon as the sampler is free and enough actors wait, or a moment after the first one asked; questions
that come meanwhile are in the next one. In lockstep a batch waits for every actor that is playing, so that the same
seeds give the same batches and the same numbers. Weights change between batches, never within one.
`start_rollout_workers` puts it between a sampler and the agents that play on a provider's sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from palaestra.actor.agent import VlmAgent
from palaestra.actor.task_runner import ActorConfig, Play, TaskRunner
from palaestra.experience.trajectory import Trajectory
from palaestra.policy.codecs.grammar import ActionGrammar
from palaestra.policy.vlm.sampler import ReplyRequest, ReplySampler, SampledReply
from palaestra.sessions.provider import SessionProvider

__all__ = ["BatchedInference", "RolloutWorkers", "start_rollout_workers"]

STUCK_S = 5.0
"""In lockstep: how long a batch waits for an actor that does not ask, such as one that waits for a session while the
others hold them all. Going on without it costs repeatability, waiting for ever would cost the run."""
LINGER_S = 0.003
"""Otherwise: how long a batch waits for more questions after the first."""

Asked: TypeAlias = tuple[ReplyRequest, asyncio.Future[SampledReply]]


class BatchedInference:
    """Answers the questions of many actors with one sampler. Belongs to the event loop it is used in."""

    def __init__(
        self,
        sampler: ReplySampler,
        *,
        temperature: float,
        max_batch: int = 64,
        lockstep: bool = False,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._sampler, self._temperature = sampler, temperature
        self._max_batch, self._lockstep = max_batch, lockstep
        self._patience = stuck_s if lockstep else LINGER_S
        self._waiting: list[Asked] = []
        self._under_way: list[Asked] = []
        self._playing = 0
        self._changed = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="palaestra-inference")
        self._serving: asyncio.Task[None] | None = None
        self.busy_seconds = 0.0
        """Time in which the sampler has worked so far."""
        self.out_of_step = 0
        """Batches in lockstep that went on without an actor."""

    def set_players(self, count: int) -> None:
        """Set how many actors play; batches are not held up for more."""
        self._playing = count
        self._changed.set()

    async def ask(self, question: ReplyRequest) -> SampledReply:
        """The answer, when its batch is done."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        answer: asyncio.Future[SampledReply] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        self._changed.set()
        return await answer

    async def close(self) -> None:
        """Answer nothing more and cancel what still waits. Returns when the sampler is at rest."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for _, answer in (*self._under_way, *self._waiting):
            answer.cancel()
        self._waiting.clear()
        await asyncio.to_thread(self._worker.shutdown)

    async def _serve(self) -> None:
        while True:
            await self._wait_for_enough()
            batch = self._under_way = self._take_batch()
            if not batch:
                continue
            questions, began = [question for question, _ in batch], time.perf_counter()
            answer_all = partial(self._sampler.sample, questions, temperature=self._temperature)
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._worker, answer_all)
            except Exception as error:  # noqa: BLE001  raised in every actor that asked
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            self.busy_seconds += time.perf_counter() - began
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    async def _wait_for_enough(self) -> None:
        """Wait until a batch is worth beginning."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        end = asyncio.get_running_loop().time() + self._patience
        while len(self._waiting) < (self._playing if self._lockstep else min(self._playing, self._max_batch)):
            self._changed.clear()
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                self.out_of_step += self._lockstep
                return
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the change.
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _take_batch(self) -> list[Asked]:
        self._waiting = [(question, answer) for question, answer in self._waiting if not answer.done()]
        if self._lockstep:
            # The order in which questions came must not decide which of them share a batch.
            self._waiting.sort(key=lambda asked: asked[0].seed)
        batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
        return batch


@dataclass(frozen=True)
class RolloutWorkers:
    """What plays episodes."""

    play: Play
    inference: BatchedInference
    """Shared by all of them."""


@contextlib.asynccontextmanager
async def start_rollout_workers(
    provider: SessionProvider,
    sampler: ReplySampler,
    grammar: ActionGrammar,
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
    agent = VlmAgent(inference.ask, grammar, temperature=temperature)
    try:
        yield RolloutWorkers(TaskRunner(provider.open, agent, config, failed=failed).run_episode, inference)
    finally:
        await inference.close()
        await provider.close()
