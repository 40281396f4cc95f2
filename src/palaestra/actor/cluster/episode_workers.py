"""Episodes on screens on a Ray cluster: actors that play, and one actor that samples replies for all of them.

`EpisodeWorker` runs `TaskRunner`s beside each other and asks `SamplerWorker`, which batches the requests of all
episodes and gets its weights from the object store. `ClusterEpisodes` is their driver: it gives an episode to the
worker with the fewest, and returns one trajectory for it. If a worker or the sampler is lost, it is replaced, and its
episodes are played again with the same id, task and seed.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import numpy.typing as npt
import torch
from torch import Tensor

from palaestra.actor.agent import VlmAgent
from palaestra.actor.inference import BatchedInference, RolloutWorkers
from palaestra.actor.task_runner import ActorConfig, EpisodeRequest, TaskRunner
from palaestra.errors import CollectorFailed, ConfigError, PalaestraError, SessionRefused
from palaestra.experience.trajectory import Trajectory
from palaestra.policy.codecs.grammar import ActionGrammar
from palaestra.policy.vlm.config import ModelConfig
from palaestra.policy.vlm.policy import VLMPolicy
from palaestra.policy.vlm.sampler import LocalSampler, ReplyRequest, SampledReply
from palaestra.sessions.clients.provider import ServerAddresses, SessionAddress, SessionProvider, open_provider
from palaestra.sessions.environment_config import EnvironmentConfig
from palaestra.transport.object_store import ObjectStorePublisher
from palaestra.transport.ray_cluster import (
    ActorRaised,
    LostActor,
    LostPeer,
    RayCluster,
    Ref,
    describe_failure,
)

WATCH_S = 0.5
"""Interval in which the driver looks at the head."""
CLOSE_TIMEOUT_S = 10.0
CONCURRENT_CALLS = 10_000
Arrays = dict[str, npt.NDArray[Any]]


# ---------------------------------------------------------------------- on the nodes


@dataclass(frozen=True)
class SamplerSetup:
    """Everything that a sampler needs besides the trained weights."""

    model: ModelConfig
    seed: int
    threads: int
    temperature: float
    max_batch: int
    lockstep: bool


class _NewestWeights:
    """A sampler that loads the newest weights before a batch, in the thread that samples."""

    def __init__(self, policy: VLMPolicy, threads: int) -> None:
        self._policy, self._sampler = policy, LocalSampler(policy, threads=threads)
        self._lock = threading.Lock()
        self._waiting: tuple[int, Arrays] | None = None

    def put(self, version: int, arrays: Arrays) -> None:
        """Load these weights before the next batch. Called by another thread."""
        with self._lock:
            self._waiting = (version, arrays)

    def sample(self, requests: Any, *, temperature: float) -> list[SampledReply]:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            version, arrays = waiting
            self._policy.load_trainable_state({name: torch.tensor(array) for name, array in arrays.items()})
            self._policy.publish(version)
        return self._sampler.sample(requests, temperature=temperature)


class SamplerWorker:
    """Samples replies to the requests of all episodes, in batches."""

    def __init__(self, setup: SamplerSetup) -> None:
        self._setup = setup
        self._inference: BatchedInference
        self._ready = asyncio.Event()

    async def prepare(self) -> int:
        """Load the model; returns the process id."""
        setup = self._setup
        policy = await asyncio.to_thread(VLMPolicy.from_config, setup.model, seed=setup.seed)
        self._newest = _NewestWeights(policy, setup.threads)
        self._inference = BatchedInference(
            self._newest, temperature=setup.temperature, max_batch=setup.max_batch, lockstep=setup.lockstep
        )
        self._ready.set()
        return os.getpid()

    async def load(self, version: int, arrays: Arrays) -> None:
        """Use these weights from the next batch on."""
        await self._ready.wait()
        self._newest.put(version, arrays)

    async def set_num_actors(self, count: int) -> float:
        """Set the number of running episodes; returns the time that sampling has taken so far."""
        await self._ready.wait()
        self._inference.set_num_actors(count)
        return self._inference.busy_seconds

    async def sample_reply(self, request: ReplyRequest) -> SampledReply:
        """Sample a reply to a request, in the next batch."""
        return await self._inference.sample_reply(request)


@dataclass(frozen=True)
class EpisodeSetup:
    """Everything that an episode worker needs."""

    environment: EnvironmentConfig
    sessions: SessionAddress
    grammar: ActionGrammar
    actor: ActorConfig


@dataclass(frozen=True)
class EpisodeResult:
    """Result of an episode on a worker."""

    trajectory: Trajectory | None
    failed_attempts: list[Trajectory]
    refusal: tuple[str, str, int] | None = None
    """Code, text and status of a `SessionRefused`, which cannot be pickled."""


class EpisodeWorker:
    """Plays any number of episodes at the same time."""

    def __init__(self, setup: EpisodeSetup) -> None:
        self._setup = setup
        self._provider: SessionProvider | None = None

    async def prepare(self) -> int:
        """Open the provider of sessions; returns the process id."""
        setup = self._setup
        self._provider = open_provider(setup.environment, setup.sessions, session_type=setup.actor.session_type)
        return os.getpid()

    async def play(self, request: EpisodeRequest, sampler: Any) -> EpisodeResult:
        """Play an episode with the replies of a sampler, which is the handle of a `SamplerWorker`."""
        assert self._provider is not None
        failed: list[Trajectory] = []

        async def sample_reply(reply: ReplyRequest) -> SampledReply:
            answer: SampledReply = await sampler.sample_reply.remote(reply)
            return answer

        setup = self._setup
        agent = VlmAgent(sample_reply, setup.grammar, temperature=setup.actor.temperature)
        runner = TaskRunner(self._provider.open, agent, setup.actor, on_failed_attempt=failed.append)
        try:
            return EpisodeResult(await runner.run_episode(request), failed)
        except SessionRefused as refusal:
            return EpisodeResult(None, failed, (refusal.code, str(refusal), refusal.status))

    async def close(self) -> None:
        """Close every session."""
        if self._provider is not None:
            await self._provider.close()


# ---------------------------------------------------------------------- the driver


@dataclass(eq=False)
class _Remote:
    """An actor and the number of episodes that it plays."""

    handle: Any
    started: Ref
    running: int = 0
    restarts: int = 0
    """Consecutive replacements without a result in between."""
    is_ready: bool = False


@dataclass(eq=False)
class ClusterEpisodes:
    """Plays episodes on a cluster. `start_workers` starts the actors, `publish` gives the sampler new weights."""

    cluster: RayCluster
    sampler_setup: SamplerSetup
    episode_setup: EpisodeSetup
    concurrent: int
    """Number of concurrent episodes."""
    failures: list[str] = field(default_factory=list)
    """Why actors were replaced."""
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("lost_actors", "retried_episodes", "lost_samplers"), 0)
    )

    def __post_init__(self) -> None:
        self._publisher = ObjectStorePublisher(self.cluster, _copy_state)
        self._publisher.on_publish = self._send_weights
        self._sampler: _Remote | None = None
        self._workers: list[_Remote] = []
        self._unconfirmed: list[Ref] = []
        self._num_episodes = 0
        self._watch: asyncio.Task[None]
        self._on_failed_attempt: Callable[[Trajectory], None]
        self.busy_seconds = 0.0
        """Total time of the sampler, as of the last start or end of an episode."""

    # Used as a `WeightPublisher`.

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Put new weights into the object store; the sampler uses them from its next batch on."""
        self._publisher.publish(version, weights)

    def close(self) -> None:
        """Forget the weights. The actors end with `start_workers`."""
        self._publisher.close()

    # Used as the inference of `RolloutWorkers`.

    def set_num_actors(self, count: int) -> None:
        """Set the number of running episodes, for which batches wait."""
        self._num_episodes = count
        if self._sampler is not None:
            self._unconfirmed.append(self.cluster.call(self._sampler.handle.set_num_actors, count))

    @asynccontextmanager
    async def start_workers(self, on_failed_attempt: Callable[[Trajectory], None]) -> AsyncIterator[RolloutWorkers]:
        """Start sampler and workers for the duration of the block."""
        self._on_failed_attempt = on_failed_attempt
        self._watch = asyncio.create_task(self._watch_head())
        try:
            self._sampler = self._start_sampler()
            count = _number_of_workers(self.cluster.config.num_actors, self.concurrent, self.episode_setup)
            self._workers = [self._start_worker(index, count) for index in range(count)]
            try:
                for remote in (self._sampler, *self._workers):
                    await self._wait_until_started(remote, "an actor of the run")
            except LostActor as lost:
                raise CollectorFailed(f"an actor of the run was lost while it started: {lost}.") from None
            yield RolloutWorkers(self.play, self)
        finally:
            self._watch.cancel()
            await self._stop_all()

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """Play an episode on any worker; again on another one if that is lost."""
        while True:
            worker, sampler = min(self._workers, key=lambda remote: remote.running), self._sampler
            assert sampler is not None
            worker.running += 1
            try:
                await self._wait_until_started(sampler, "the replacement of the sampler")
                await self._wait_until_started(worker, "the replacement of an actor")
                await self._confirm()
                play = self.cluster.call(worker.handle.play, request, sampler.handle)
                result: EpisodeResult = await self._reply(play)
            except LostPeer as lost:
                self._replace_sampler(sampler, str(lost))
            except LostActor as lost:
                self._replace_worker(worker, str(lost))
            except ActorRaised as raised:
                if isinstance(raised.error, PalaestraError):
                    raise raised.error from None
                raise describe_failure("an actor on the Ray cluster failed", raised) from raised.error
            else:
                worker.restarts = sampler.restarts = 0
                return self._unpack(result)
            finally:
                worker.running -= 1
            self.counts["retried_episodes"] += 1

    def _unpack(self, result: EpisodeResult) -> Trajectory:
        for failed in result.failed_attempts:
            self._on_failed_attempt(failed)
        if result.refusal is not None:
            code, text, status = result.refusal
            raise SessionRefused(code, text, status=status)
        assert result.trajectory is not None
        return result.trajectory

    async def _confirm(self) -> None:
        """Wait until the sampler knows the number of episodes and the newest weights, before an episode needs them."""
        while self._unconfirmed:
            ref = self._unconfirmed[0]
            with suppress(LostActor):  # found by the episodes
                busy = await self._reply(ref)
                if isinstance(busy, float):
                    self.busy_seconds = max(self.busy_seconds, busy)
            if self._unconfirmed and self._unconfirmed[0] is ref:
                del self._unconfirmed[0]

    async def _reply(self, ref: Ref) -> Any:
        """The value of a reference, unless the head is lost before."""
        call = asyncio.ensure_future(self.cluster.get_soon(ref))
        try:
            await asyncio.wait({call, self._watch}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                self._watch.result()  # raises
            return await call
        finally:
            call.cancel()

    async def _watch_head(self) -> None:
        while True:
            self.cluster.raise_if_unreachable()
            await asyncio.sleep(WATCH_S)

    # ------------------------------------------------------------------ starting and replacing

    def _start_sampler(self) -> _Remote:
        gpus = self.cluster.config.num_gpus
        handle = self.cluster.start_actor(SamplerWorker, self.sampler_setup, gpus=gpus, concurrency=CONCURRENT_CALLS)
        self._unconfirmed = [self.cluster.call(handle.set_num_actors, self._num_episodes)]
        if (newest := self._publisher.newest) >= 0:
            self._unconfirmed.append(self.cluster.call(handle.load, newest, self._publisher.ref(newest)))
        return _Remote(handle, self.cluster.call(handle.prepare))

    def _start_worker(self, index: int, count: int) -> _Remote:
        setup, sessions = self.episode_setup, self.episode_setup.sessions
        if isinstance(sessions, ServerAddresses) and setup.environment.dialect == "query":
            # Each server is one screen, so no two workers may use it.
            setup = replace(setup, sessions=replace(sessions, urls=sessions.urls[index::count]))
        handle = self.cluster.start_actor(EpisodeWorker, setup, concurrency=CONCURRENT_CALLS)
        return _Remote(handle, self.cluster.call(handle.prepare))

    def _send_weights(self, version: int, ref: Ref) -> None:
        if self._sampler is not None:
            self._unconfirmed.append(self.cluster.call(self._sampler.handle.load, version, ref))

    async def _wait_until_started(self, remote: _Remote, what: str) -> None:
        if remote.is_ready:
            return
        timeout = self.cluster.config.start_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._reply(remote.started)
        except TimeoutError:
            raise CollectorFailed(self.cluster.describe_pending(1, 1, what)) from None
        except ActorRaised as raised:
            raise describe_failure(f"{what} could not start", raised) from raised.error
        except LostActor as lost:
            raise (LostPeer if remote is self._sampler else LostActor)(str(lost)) from None
        remote.is_ready = True

    def _replace_sampler(self, lost: _Remote, reason: str) -> None:
        if self._sampler is not lost:
            return  # another episode has replaced it
        self._count_loss(lost, f"the sampler was lost: {reason}")
        self.counts["lost_samplers"] += 1
        self._sampler = self._start_sampler()
        self._sampler.restarts = lost.restarts + 1

    def _replace_worker(self, lost: _Remote, reason: str) -> None:
        if lost not in self._workers:
            return
        self._count_loss(lost, f"an actor that played {lost.running} episodes was lost: {reason}")
        index = self._workers.index(lost)
        self._workers[index] = self._start_worker(index, len(self._workers))
        self._workers[index].restarts = lost.restarts + 1

    def _count_loss(self, lost: _Remote, reason: str) -> None:
        limit = self.cluster.config.restarts
        if lost.restarts >= limit:
            raise CollectorFailed(
                f"{reason}, after {lost.restarts} replacements in a row (actors.restarts is {limit})."
            )
        self.cluster.stop_actor(lost.handle)
        self.failures.append(reason)
        self.counts["lost_actors"] += 1

    async def _stop_all(self) -> None:
        """Close every session if that is quick, then end the actors."""
        if not self.cluster.has_failed:
            closing = [
                self.cluster.get_soon(self.cluster.call(worker.handle.close))
                for worker in self._workers
                if worker.is_ready
            ]
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await asyncio.gather(*closing, return_exceptions=True)
        for remote in (*self._workers, *([] if self._sampler is None else [self._sampler])):
            self.cluster.stop_actor(remote.handle)
        self._workers, self._sampler = [], None


def _copy_state(weights: Mapping[str, Tensor]) -> Arrays:
    return {name: tensor.detach().float().cpu().numpy() for name, tensor in weights.items()}


def _number_of_workers(wanted: int, concurrent: int, setup: EpisodeSetup) -> int:
    sessions = setup.sessions
    servers = len(sessions.urls) if isinstance(sessions, ServerAddresses) else concurrent
    return min(wanted, concurrent, servers)


def check_sessions(cluster: RayCluster, environment: EnvironmentConfig) -> None:
    """Raise `ConfigError` if the nodes of the cluster cannot reach the sessions, before a gateway is started."""
    if cluster.is_one_machine():
        return
    nodes = ", ".join(cluster.node_addresses())
    if environment.url is None and not environment.session_servers:
        reason = f"the gateway that training starts listens on this machine only, and the actors run on {nodes}"
        remedy = "Start one that they can reach (palaestra gateway host=…), and set environment.gateway to its URL"
        raise ConfigError("environment.gateway", None, reason, remedy)
    key = "session_servers" if environment.session_servers else "gateway"
    for url in environment.session_servers or (str(environment.url),):
        host = urlsplit(url).hostname or ""
        if host == "localhost" or host.startswith("127.") or host == "::1":
            reason = f"is an address of this machine only, and the actors run on {nodes}"
            raise ConfigError(f"environment.{key}", url, reason, "Use an address that every node can reach")
