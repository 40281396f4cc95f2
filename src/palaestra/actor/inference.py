"""Batched inference: questions of all actors are collected and answered together.

A batch begins as soon as the sampler is free and enough actors wait, or a moment after the first one asked; whoever
asks meanwhile is in the next one. In lockstep a batch waits for every actor that is playing, so that the same seeds
give the same batches and the same numbers. Weights change between batches, never within one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from palaestra.policy.vlm.sampler import Answer, Question, Sampler

__all__ = ["BatchedInference", "InferenceStatistics"]

STUCK_S = 5.0
"""In lockstep: how long a batch waits for an actor that does not ask, such as one that waits for a session while the
others hold them all. Going on without it costs repeatability, waiting for ever would cost the run."""


@dataclass(frozen=True)
class InferenceStatistics:
    """What has been answered so far."""

    batches: int = 0
    answered: int = 0
    busy_s: float = 0.0
    """Time in which the sampler worked."""
    tokens: int = 0
    out_of_step: int = 0
    """Batches in lockstep that went on without somebody."""


class BatchedInference:
    """The desk between many actors and one sampler. Belongs to the event loop it is used in."""

    def __init__(
        self, sampler: Sampler, *, temperature: float, max_batch: int = 64, lockstep: bool = False,
        linger_s: float = 0.003, stuck_s: float = STUCK_S,
    ) -> None:  # fmt: skip
        self._sampler, self._temperature = sampler, temperature
        self._max_batch, self._lockstep, self._linger_s, self._stuck_s = max_batch, lockstep, linger_s, stuck_s
        self._waiting: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._under_way: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._playing = 0
        self._news = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="palaestra-inference")
        self._serving: asyncio.Task[None] | None = None
        self.statistics = InferenceStatistics()

    def present(self, count: int) -> None:
        """So many actors play now; batches are not held up for more."""
        self._playing = count
        self._news.set()

    async def ask(self, question: Question) -> Answer:
        """The answer, when its batch is done."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        self._news.set()
        return await answer

    async def close(self) -> None:
        """Answer nothing more: whoever still waits is cancelled. Returns when the sampler is at rest."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for _, answer in (*self._under_way, *self._waiting):
            answer.cancel()
        self._waiting.clear()
        await asyncio.to_thread(self._worker.shutdown)

    async def _serve(self) -> None:
        while True:
            await self._enough()
            batch = self._under_way = self._taken()
            if not batch:
                continue
            questions = [question for question, _ in batch]
            begun = time.perf_counter()
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._worker, self._answer, questions)
            except Exception as error:  # noqa: BLE001  everybody who asked is told
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            self._count(answers, time.perf_counter() - begun)
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    def _answer(self, questions: list[Question]) -> list[Answer]:
        return self._sampler.answer(questions, temperature=self._temperature)

    async def _enough(self) -> None:
        """Wait until a batch is worth beginning."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        patience = self._stuck_s if self._lockstep else self._linger_s
        end = asyncio.get_running_loop().time() + patience
        while len(self._waiting) < min(self._playing, self._max_batch if not self._lockstep else self._playing):
            self._news.clear()
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                self._late()
                return
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the news.
                async with asyncio.timeout(left):
                    await self._news.wait()

    def _taken(self) -> list[tuple[Question, asyncio.Future[Answer]]]:
        self._waiting = [(question, answer) for question, answer in self._waiting if not answer.done()]
        if self._lockstep:
            # Whoever came first by the clock must not decide who shares a batch with whom.
            self._waiting.sort(key=lambda asked: asked[0].seed)
        batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
        return batch

    def _late(self) -> None:
        if self._lockstep:
            known = self.statistics
            self.statistics = InferenceStatistics(
                known.batches, known.answered, known.busy_s, known.tokens, known.out_of_step + 1
            )

    def _count(self, answers: Sequence[Answer], seconds: float) -> None:
        known = self.statistics
        self.statistics = InferenceStatistics(
            known.batches + 1, known.answered + len(answers), known.busy_s + seconds,
            known.tokens + sum(len(answer.sampled.token_ids) for answer in answers), known.out_of_step,
        )  # fmt: skip
