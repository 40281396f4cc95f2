"""Batched inference: the requests of all actors are sampled in batches.

A batch starts when the sampler is free and enough actors wait, or shortly after the first request. In lockstep a batch
waits for every running actor, so that the same seeds give the same batches and the same numbers. Weights change between
batches, never within one. A sampler that batches by itself, such as one of inference engines, gets every request at
once instead (`ConcurrentInference`). `start_rollout_workers` connects sessions, agents and a sampler.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from palaestra.actor.agent import VlmAgent
from palaestra.actor.task_runner import ActorConfig, Play, TaskRunner
from palaestra.experience.trajectory import Trajectory
from palaestra.policy.codecs.grammar import ActionGrammar
from palaestra.policy.vlm.sampler import ConcurrentSampler, ReplyRequest, ReplySampler, SampledReply

if TYPE_CHECKING:
    # Training in environments imports this module too, without the packages of the extra `ui`.
    from palaestra.sessions.clients.provider import SessionProvider

STUCK_S = 5.0
"""In lockstep: how long a batch waits for an actor that sends no request, for example one that waits for a session.
After that the batch starts without it, at the cost of reproducibility."""
LINGER_S = 0.003
"""Otherwise: how long a batch waits for further requests after the first."""

PendingRequest: TypeAlias = tuple[ReplyRequest, asyncio.Future[SampledReply]]


class BatchedInference:
    """Samples replies to the requests of many actors with one sampler. Bound to one event loop."""

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
        self._waiting: list[PendingRequest] = []
        self._in_flight: list[PendingRequest] = []
        self._num_actors = 0
        self._changed = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="palaestra-inference")
        self._serving: asyncio.Task[None] | None = None
        self.busy_seconds = 0.0
        """Total time of the sampler."""
        self.out_of_step = 0
        """Batches in lockstep that did not wait for every actor."""

    def set_num_actors(self, count: int) -> None:
        """Set the number of running actors; batches wait for at most as many."""
        self._num_actors = count
        self._changed.set()

    async def sample_reply(self, request: ReplyRequest) -> SampledReply:
        """Sample a reply to a request, in the next batch."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        future: asyncio.Future[SampledReply] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._changed.set()
        return await future

    async def close(self) -> None:
        """Cancel all requests and wait until the sampler is idle."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for _, future in (*self._in_flight, *self._waiting):
            future.cancel()
        self._waiting.clear()
        await asyncio.to_thread(self._worker.shutdown)

    async def _serve(self) -> None:
        while True:
            await self._wait_for_enough()
            batch = self._in_flight = self._take_batch()
            if not batch:
                continue
            requests, began = [request for request, _ in batch], time.perf_counter()
            sample = partial(self._sampler.sample, requests, temperature=self._temperature)
            try:
                replies = await asyncio.get_running_loop().run_in_executor(self._worker, sample)
            except Exception as error:  # noqa: BLE001  raised in every actor of the batch
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            self.busy_seconds += time.perf_counter() - began
            for (_, future), reply in zip(batch, replies, strict=True):
                if not future.done():
                    future.set_result(reply)

    async def _wait_for_enough(self) -> None:
        """Wait until there are enough requests for a batch."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        end = asyncio.get_running_loop().time() + self._batch_timeout_s
        while len(self._waiting) < (self._num_actors if self._lockstep else min(self._num_actors, self._max_batch)):
            self._changed.clear()
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                self.out_of_step += self._lockstep
                return
            with contextlib.suppress(TimeoutError):
                # asyncio.wait_for in Python 3.11 loses a cancellation that coincides with the event.
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _take_batch(self) -> list[PendingRequest]:
        self._waiting = [pending for pending in self._waiting if not pending[1].done()]
        if self._lockstep:
            # Batches must not depend on the order of arrival.
            self._waiting.sort(key=lambda pending: pending[0].seed)
        batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
        return batch


class ConcurrentInference:
    """Sends each request to a sampler that batches by itself, at once. Bound to one event loop."""

    def __init__(self, sampler: ConcurrentSampler, *, temperature: float) -> None:
        self._sampler, self._temperature = sampler, temperature
        self._in_flight: set[asyncio.Future[SampledReply]] = set()
        self._busy_since = 0.0
        self._busy_s = 0.0

    @property
    def busy_seconds(self) -> float:
        """Total time with a request in flight."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._in_flight else 0.0)

    def set_num_actors(self, count: int) -> None:
        """Do nothing: no request waits for another."""

    async def sample_reply(self, request: ReplyRequest) -> SampledReply:
        """Sample a reply to a request."""
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        future = asyncio.wrap_future(self._sampler.submit(request, temperature=self._temperature))
        self._in_flight.add(future)
        try:
            return await future
        finally:
            self._in_flight.discard(future)
            if not self._in_flight:
                self._busy_s += time.perf_counter() - self._busy_since

    async def close(self) -> None:
        """Cancel all requests."""
        in_flight = list(self._in_flight)
        for future in in_flight:
            future.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)


class Inference(Protocol):
    """What a player needs to know of the inference of its episodes."""

    @property
    def busy_seconds(self) -> float:
        """Total time of the sampler."""

    def set_num_actors(self, count: int) -> None:
        """Set the number of running actors; batches wait for at most as many."""


@dataclass(frozen=True)
class RolloutWorkers:
    """The components that play episodes."""

    play: Play
    inference: Inference


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
    on_failed_attempt: Callable[[Trajectory], None] = lambda trajectory: None,
) -> AsyncIterator[RolloutWorkers]:
    """Start workers for the duration of the block; `temperature` overrides the actor's, 0 is greedy.

    `on_failed_attempt` is called with the trajectory of every failed attempt that is retried.
    """
    temperature = config.temperature if temperature is None else temperature
    inference: BatchedInference | ConcurrentInference
    if isinstance(sampler, ConcurrentSampler):
        inference = ConcurrentInference(sampler, temperature=temperature)
    else:
        inference = BatchedInference(sampler, temperature=temperature, max_batch=max_batch, lockstep=lockstep)
    agent = VlmAgent(inference.sample_reply, grammar, temperature=temperature)
    try:
        yield RolloutWorkers(
            TaskRunner(provider.open, agent, config, on_failed_attempt=on_failed_attempt).run_episode, inference
        )
    finally:
        await inference.close()
        await provider.close()
