"""Batched inference: the questions of all actors are answered in batches.

A batch starts when the sampler is free and enough actors wait, or shortly after the first question. In lockstep a batch
waits for every running actor, so that the same seeds give the same batches and the same numbers. Weights change between
batches, never within one. `start_rollout_workers` connects sessions, agents and a sampler.
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
from palaestra.sessions.clients.provider import SessionProvider

STUCK_S = 5.0
"""In lockstep: how long a batch waits for an actor that asks nothing, for example one waiting for a session that others
hold. After that the batch starts without it, at the cost of reproducibility."""
LINGER_S = 0.003
"""Otherwise: how long a batch waits for further questions after the first."""

Asked: TypeAlias = tuple[ReplyRequest, asyncio.Future[SampledReply]]


class BatchedInference:
    """Answers the questions of many actors with one sampler. Bound to one event loop."""

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
        self._batch_timeout_s = stuck_s if lockstep else LINGER_S
        self._waiting: list[Asked] = []
        self._in_flight: list[Asked] = []
        self._playing = 0
        self._changed = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="palaestra-inference")
        self._serving: asyncio.Task[None] | None = None
        self.busy_seconds = 0.0
        """Total time of the sampler."""
        self.out_of_step = 0
        """Batches in lockstep that did not wait for every actor."""

    def set_players(self, count: int) -> None:
        """Set the number of running actors; batches wait for at most as many."""
        self._playing = count
        self._changed.set()

    async def ask(self, question: ReplyRequest) -> SampledReply:
        """The answer to a question, after its batch."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        answer: asyncio.Future[SampledReply] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        self._changed.set()
        return await answer

    async def close(self) -> None:
        """Cancel all questions and wait until the sampler is idle."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for _, answer in (*self._in_flight, *self._waiting):
            answer.cancel()
        self._waiting.clear()
        await asyncio.to_thread(self._worker.shutdown)

    async def _serve(self) -> None:
        while True:
            await self._wait_for_enough()
            batch = self._in_flight = self._take_batch()
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
        """Wait until there are enough questions for a batch."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        end = asyncio.get_running_loop().time() + self._batch_timeout_s
        while len(self._waiting) < (self._playing if self._lockstep else min(self._playing, self._max_batch)):
            self._changed.clear()
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                self.out_of_step += self._lockstep
                return
            with contextlib.suppress(TimeoutError):
                # asyncio.wait_for in Python 3.11 loses a cancellation that coincides with the event.
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _take_batch(self) -> list[Asked]:
        self._waiting = [(question, answer) for question, answer in self._waiting if not answer.done()]
        if self._lockstep:
            # Batches must not depend on the order of arrival.
            self._waiting.sort(key=lambda asked: asked[0].seed)
        batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
        return batch


@dataclass(frozen=True)
class RolloutWorkers:
    """The components that play episodes."""

    play: Play
    inference: BatchedInference


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
    """Start workers for the duration of the block; `temperature` overrides the actor's, 0 is greedy.

    `failed` is called with the trajectory of every failed attempt that is retried.
    """
    temperature = config.temperature if temperature is None else temperature
    inference = BatchedInference(sampler, temperature=temperature, max_batch=max_batch, lockstep=lockstep)
    agent = VlmAgent(inference.ask, grammar, temperature=temperature)
    try:
        yield RolloutWorkers(TaskRunner(provider.open, agent, config, failed=failed).run_episode, inference)
    finally:
        await inference.close()
        await provider.close()
