"""`ClusterSource`: rollouts from collectors on a Ray cluster, each of which steps a share of the environments.

A segment of the ring is granted to all workers at once, with one version of the weights, and is complete when every
share has arrived. The queue bounds staleness and the number of segments in flight. A share of a segment is identified
by the number of the segment, the index of the worker and the worker's incarnation: a lost worker is replaced, its open
segments are collected again by the replacement, and late results of the lost one are discarded. In exact mode
(synchronous or reproducible collection) the replacement continues from the state of the last result, so that the
rollouts are those of one local collector. All calls are made in the learner's thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from palaestra.actor.asynchronous import AsyncConfig
from palaestra.actor.cluster.env_share import Share, divide
from palaestra.actor.cluster.rollout_worker import FinalValues, RolloutWorker, ShareOfSegment, WorkerSetup
from palaestra.actor.collector import RewardScale, attempt_seed, stream_base
from palaestra.actor.collector_process import SharedLayout
from palaestra.actor.collector_thread import SegmentReport
from palaestra.actor.compatibility import buffer_shape
from palaestra.actor.policy_actor import Compiled
from palaestra.actor.synchronous import rollout_metrics
from palaestra.env.make import EnvConfig
from palaestra.env.vector import EpisodeEnd, VectorEnv
from palaestra.errors import CollectorFailed, ConfigError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.vla_buffer import VLABuffer
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.weight_sync import serialize_structure
from palaestra.transport.queue import SegmentQueue, TakenSegment
from palaestra.transport.ray_cluster import (
    ActorRaised,
    LostActor,
    ObjectStorePublisher,
    RayCluster,
    Ref,
    describe_failure,
)
from palaestra.transport.source import Batch, EpisodeStats, ExperienceSource, SavedState, Timing, TrainingProgress

POLL_S = 0.2
"""Interval in which a waiting learner checks the workers."""
HEARTBEAT_S = 2.0
"""Interval in which a worker is asked how long its step takes."""
STOP_GRACE_S = 5.0


@dataclass
class _Segment:
    """A segment that is being collected."""

    number: int
    first_step: int
    """Steps of each environment before it."""
    slot: int
    version: int
    weights: Ref
    missing: set[int]
    """Shares that have not arrived."""
    episodes: list[EpisodeStats] = field(default_factory=list)
    truncated: list[tuple[int, EpisodeEnd]] = field(default_factory=list)
    shares_truncated: int = 0
    collect_seconds: float = 0.0
    idle_seconds: float = float("inf")


@dataclass
class _Worker:
    """A worker and its open calls."""

    share: Share
    state: SavedState | None = None
    """State after its last result in exact mode; None before."""
    attempt: int = 0
    """Number of workers that this share has had with other episodes."""
    restarts: int = 0
    """Replacements since the last result."""
    steps: int = 0
    """Steps of each of its environments up to its last result."""
    results: int = 0
    """Results of its running episodes' streams."""
    handle: Any = None
    started: Ref = None
    deadline: float = 0.0
    calls: dict[Ref, _Segment] = field(default_factory=dict)
    heartbeat: Ref = None
    asked_at: float = 0.0


class ClusterSource(ExperienceSource[RolloutBuffer]):
    """Returns segments that workers on a cluster have collected."""

    def __init__(
        self,
        cluster: RayCluster,
        config: AsyncConfig | None,
        policy: nn.Module,
        env: VectorEnv,
        *,
        seed: int,
        compiled: Compiled,
        discount: float | None,
        env_config: EnvConfig,
        torch_threads: int = 1,
    ) -> None:
        """`config`: settings of asynchronous collection, None: synchronous. Other arguments as `AsynchronousSource`."""
        self._cluster, self._policy, self._env, self._env_config = cluster, policy, env, env_config
        self._is_synchronous = config is None
        self._config = config or AsyncConfig(max_staleness=0)
        if self._config.overflow != "block":
            reason = "the segments of a cluster are granted to all actors together, and never overwritten"
            raise ConfigError("trainer.overflow", self._config.overflow, reason, "Use trainer.overflow=block")
        self.is_exact = self._is_synchronous or self._config.reproducible
        """Whether the rollouts are those of one local collector, bit for bit."""
        self._seed, self._compiled, self._torch_threads = seed, compiled, torch_threads
        self._first_stream = stream_base(seed)
        self._scale = None if discount is None else RewardScale(env.num_envs, discount)
        self._workers = [_Worker(share) for share in divide(env.num_envs, cluster.config.num_actors)]
        self._open: dict[int, _Segment] = {}
        self._abandoned: list[Ref] = []
        self._attempt = self._num_steps = self._claimed_steps = self._next_number = self._version = 0
        self._ring: VLABuffer | None = None
        self._queue: SegmentQueue
        self._layout: SharedLayout
        self._running = False
        self._values: FinalValues | None = None
        self.progress = TrainingProgress()
        depth = self._config.max_staleness + 2
        self.publisher = ObjectStorePublisher(cluster, lambda weights: weights.read(), depth=depth)
        self.failures: list[str] = []
        """Why workers were replaced."""
        self.raised = 0
        """Workers that were replaced because their code raised an error or hung."""
        self.counts = dict.fromkeys(("lost_actors", "retried_segments", "discarded_results", "lost_episodes"), 0)

    @property
    def num_shares(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @property
    def default_segments(self) -> int:
        """Number of segments of the ring unless `buffer_size` is given."""
        return self._config.max_staleness + 1

    def start(self, version: int, rollout_length: int, num_segments: int, *, buffer_size: int | None = None) -> None:
        """Start the workers and prepare to collect `num_segments` segments, with the learner at `version`."""
        self.close()
        size = buffer_size or self.default_segments * rollout_length
        shape = buffer_shape(self._env, self._policy)
        self._ring = VLABuffer(size, segment_length=rollout_length, overflow="block", **shape)
        limits: dict[str, Any] = {
            "max_staleness": self._config.max_staleness,
            "reproducible": self._config.reproducible,
        }
        self._queue = SegmentQueue(self._ring, **limits)
        self._layout = SharedLayout.of(self._policy, {}, 2)
        self._structure = serialize_structure(self._policy)
        fixed = FlatParameters.of(self._policy).untrained
        frozen = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for tensor in fixed]
        self._frozen = self._cluster.put(frozen)
        self._values = FinalValues(self._policy, self._compiled)
        self.publisher.clear()
        self._version, self._running, self._claimed_steps = version, True, self._num_steps
        try:
            for worker in self._workers:
                worker.steps = self._num_steps
                self._start_worker(worker)
            self._cluster.wait_until_started([worker.started for worker in self._workers], "actors.num_actors")
            for index, worker in enumerate(self._workers):
                self._check_start(index, worker)
        except BaseException:
            self.close()
            raise
        self._queue.open(version, num_segments)

    def _start_worker(self, worker: _Worker) -> None:
        device = "cuda" if self._cluster.config.num_gpus else "cpu"
        seed = attempt_seed(self._seed, worker.attempt)
        arguments = {"seed": seed, "compiled": self._compiled, "first_stream": 0}
        setup = WorkerSetup(
            self._env_config,
            worker.share,
            self.is_exact,
            self._env.mask_size,
            self._layout,
            self._structure,
            arguments,
            worker.steps,
            worker.state,
            worker.attempt + 1,
            self._torch_threads,
            device,
        )
        worker.handle = self._cluster.start_actor(
            RolloutWorker, setup, self._frozen, gpus=self._cluster.config.num_gpus
        )
        worker.started = worker.handle.prepare.remote()
        worker.deadline = time.monotonic() + self._cluster.config.start_timeout
        worker.heartbeat, worker.asked_at = None, time.monotonic()

    # ------------------------------------------------------------------ batches

    def next_batch(self) -> Batch[RolloutBuffer]:
        """Wait for the next complete segment; raises if collection fails."""
        while True:
            self._grant()
            segment = self._queue.take(self._version, 0.0)
            if segment is not None:
                return self._make_batch(segment)
            self._receive(POLL_S)

    def _grant(self) -> None:
        """Give the segments that the queue allows to every worker, with the newest weights or those of the claim."""
        assert self._ring is not None
        while (claim := self._queue.claim(0.0)) is not None:
            version = self.publisher.newest if claim.version is None else claim.version
            number, first, weights = self._next_number, self._claimed_steps, self.publisher.ref(version)
            segment = _Segment(number, first, claim.slot, version, weights, set(range(len(self._workers))))
            self._open[number] = segment
            self._next_number += 1
            self._claimed_steps += self._ring.segment_length
            for worker in self._workers:
                self._send(worker, segment)

    def _send(self, worker: _Worker, segment: _Segment) -> None:
        assert self._ring is not None
        call = worker.handle.fill.remote
        worker.calls[call(segment.number, self._ring.segment_length, segment.version, segment.weights)] = segment

    def _receive(self, timeout: float) -> None:
        """Receive results, and replace workers that are lost."""
        calls = {ref: index for index, worker in enumerate(self._workers) for ref in worker.calls}
        for ref in self._cluster.wait(list(calls), timeout):
            index = calls[ref]
            worker = self._workers[index]
            if ref not in worker.calls:
                continue  # of a worker that was replaced by an earlier result
            try:
                result = self._cluster.get(ref)
            except LostActor as lost:
                self._replace(index, f"an actor of environments {_range(worker.share)} was lost: {lost}")
            except ActorRaised as raised:
                self._replace_failed(
                    index, describe_failure("an actor on the Ray cluster failed", raised), raised.error
                )
            else:
                worker.restarts = 0
                self._store(index, worker.calls.pop(ref), result)
        self._check_workers()

    def _store(self, index: int, segment: _Segment, result: ShareOfSegment) -> None:
        assert self._ring is not None
        worker = self._workers[index]
        worker.state, worker.results = result.state, worker.results + 1
        worker.steps = segment.first_step + self._ring.segment_length
        self._ring.segments[segment.slot].write_environments(worker.share.own, result.arrays)
        segment.episodes += result.episodes
        segment.truncated += result.truncated
        segment.shares_truncated += bool(result.truncated)
        segment.collect_seconds = max(segment.collect_seconds, result.collect_seconds)
        segment.idle_seconds = min(segment.idle_seconds, result.idle_seconds)
        segment.missing.remove(index)
        if not segment.missing:
            del self._open[segment.number]
            self._deliver(segment)

    def _deliver(self, segment: _Segment) -> None:
        """Complete a segment whose shares have all arrived."""
        assert self._ring is not None
        assert self._values is not None
        buffer = self._ring.segments[segment.slot]
        buffer.position, buffer.is_fresh = buffer.num_steps, self._is_synchronous
        buffer.first_stream, buffer.first_env_step = self._first_stream, segment.first_step
        if self.is_exact and segment.shares_truncated > 1:
            # One collector would have evaluated them in one batch.
            segment.truncated.sort(key=lambda item: (item[0], item[1].index))
            weights = self._cluster.get(segment.weights)
            self._values.fill(buffer, segment.version, weights, segment.truncated)
        if self._scale is not None:
            ended = buffer.terminated | buffer.truncated
            buffer.reward_scale = self._scale.update(buffer.reward, ended, buffer.valid)
        segment.episodes.sort(key=lambda episode: (episode.env_step, episode.env_index))
        moments = None if self._scale is None else self._scale.moments
        report = SegmentReport(segment.episodes, segment.collect_seconds, segment.idle_seconds, moments)
        self._num_steps = buffer.first_env_step + buffer.num_steps
        self._queue.deliver(segment.slot, report)

    def _make_batch(self, segment: TakenSegment) -> Batch[RolloutBuffer]:
        buffer, report = self._queue.ring.segments[segment.slot], segment.report
        steps = buffer.num_steps * buffer.num_envs
        self.progress.add(steps, report.episodes)
        busy = report.collect_seconds
        metrics = {
            "collect_seconds": busy,
            "queue_depth": float(segment.queue_depth),
            "collector_utilisation": busy / max(busy + report.idle_seconds, 1e-9),
        }
        return Batch(buffer, report.episodes, steps, metrics, segment)

    def release(self, batch: Batch[RolloutBuffer], version: int) -> None:
        """Free the slot. Asynchronous workers get further segments at once."""
        self._version = version
        self.progress.updates += 1
        self._queue.release(batch.origin.slot)
        if self._running and not self._is_synchronous:
            self._grant()

    def requeue(self, batch: Batch[RolloutBuffer]) -> None:
        """Make the segment the oldest unread one again. Its episodes are already counted."""
        self.progress.add(-batch.steps)
        self._queue.requeue(batch.origin.slot, batch.origin.report._replace(episodes=[]))

    def metrics(self, batch: Batch[RolloutBuffer], timing: Timing) -> dict[str, float]:
        """Counters, durations, the latest episodes, utilisation, and lost actors."""
        return {
            **rollout_metrics(self.progress, batch, timing),
            "wait_seconds": timing.waited,
            "learner_utilisation": 1.0 - timing.waited / max(timing.total, 1e-9),
            "dropped_steps": float(self._queue.ring.dropped_steps),
            **{name: float(count) for name, count in self.counts.items()},
        }

    # ------------------------------------------------------------------ failures

    def raise_if_failed(self) -> None:
        """Raise if collection has failed; replaces lost workers. Called during long updates."""
        if self._running:
            self._receive(0.0)

    def _check_workers(self) -> None:
        """Check the head, actors that do not start, and steps that do not end; count late results."""
        self._cluster.raise_if_unreachable()
        late = self._cluster.wait(self._abandoned, 0.0)
        for ref in late:
            self._abandoned.remove(ref)
            try:
                self._cluster.get(ref)
            except (LostActor, ActorRaised):
                continue
            self.counts["discarded_results"] += 1
        for index, worker in enumerate(self._workers):
            if worker.started is not None:
                self._check_start(index, worker)
            elif not self._is_synchronous and worker.calls:
                self._check_heartbeat(index, worker)

    def _check_start(self, index: int, worker: _Worker) -> None:
        if self._cluster.wait([worker.started], 0.0):
            started, worker.started = worker.started, None
            try:
                _, exact = self._cluster.get(started)
            except LostActor as lost:
                self._replace(index, f"an actor of environments {_range(worker.share)} was lost as it started: {lost}")
            except ActorRaised as raised:
                self._replace_failed(index, describe_failure("an actor could not start", raised), raised.error)
            else:
                if not exact:
                    self._count_new_episodes(worker)
        elif time.monotonic() > worker.deadline:
            self._cluster.wait_until_started([worker.started], "the replacement of a lost actor")

    def _check_heartbeat(self, index: int, worker: _Worker) -> None:
        now = time.monotonic()
        if worker.heartbeat is None:
            if now - worker.asked_at > HEARTBEAT_S:
                ask = worker.handle.seconds_in_step.options(concurrency_group="control")
                worker.heartbeat, worker.asked_at = ask.remote(), now
            return
        if not self._cluster.wait([worker.heartbeat], 0.0):
            return
        heartbeat, worker.heartbeat = worker.heartbeat, None
        try:
            still = self._cluster.get(heartbeat)
        except (LostActor, ActorRaised):
            return  # the open call fails as well
        if still > self._config.step_timeout:
            hung = CollectorFailed(
                f"an actor on the Ray cluster hangs: a step of environments {_range(worker.share)} has not ended for "
                f"{still:.1f} s, and trainer.step_timeout is {self._config.step_timeout:g}. Look at what the "
                "environment waits for, or raise trainer.step_timeout."
            )
            self._replace_failed(index, hung, None)

    def _replace_failed(self, index: int, failure: CollectorFailed, cause: BaseException | None) -> None:
        """Replace a worker whose code failed, with new episodes, if `trainer.collector_restarts` allows it."""
        if self.raised >= self._config.collector_restarts:
            raise failure from cause
        self.raised += 1
        worker = self._workers[index]
        worker.state = None
        self._replace(index, str(failure), new_episodes=True)

    def _replace(self, index: int, reason: str, *, new_episodes: bool = False) -> None:
        """Start another worker for a share, and send it the open segments again."""
        self._cluster.raise_if_unreachable()
        worker, config = self._workers[index], self._cluster.config
        if worker.restarts >= config.restarts:
            raise CollectorFailed(
                f"{reason.rstrip('.')}, after {worker.restarts} replacements in a row (actors.restarts is "
                f"{config.restarts})."
            )
        worker.restarts += 1
        self.failures.append(reason.rstrip("."))
        self.counts["lost_actors"] += 1
        self._cluster.stop_actor(worker.handle)
        again = sorted(worker.calls.values(), key=lambda segment: segment.number)
        self._abandoned += worker.calls
        worker.calls = {}
        if new_episodes or (worker.state is None and worker.results):
            self._count_new_episodes(worker)
        self._start_worker(worker)
        for segment in again:
            self.counts["retried_segments"] += 1
            self._send(worker, segment)

    def _count_new_episodes(self, worker: _Worker) -> None:
        """The running episodes of a share are lost: its streams end, and others begin."""
        worker.attempt, worker.results = worker.attempt + 1, 0
        self.counts["lost_episodes"] += worker.share.count
        self._first_stream = stream_base(self._seed)
        if self._scale is not None:
            self._scale.running[worker.share.own] = 0.0

    # ------------------------------------------------------------------ state

    def state(self) -> SavedState:
        """Counters, and in synchronous mode the state of every share. Needs no connection."""
        states = [worker.state for worker in self._workers]
        started = self._num_steps > 0
        exact = self._is_synchronous and all(state is not None and state.facts["exact"] for state in states)
        facts: dict[str, Any] = {
            "started": started,
            "exact": not started,  # for a local collector; `cluster` is for this class
            "num_steps": self._num_steps,
            "attempt": self._attempt + 1,
            "rng": np.random.default_rng(np.random.SeedSequence([self._seed, 1])).bit_generator.state,
            "env": {},
        }
        tensors: dict[str, torch.Tensor] = {}
        if self._scale is not None:
            facts["reward_scale"] = list(self._scale.moments)
            tensors["reward_scale/running"] = torch.from_numpy(self._scale.running.copy())
        if started and exact:
            facts["cluster"] = [state.facts for state in states if state is not None]
            for index, state in enumerate(states):
                assert state is not None
                tensors |= {f"share{index}/{name}": tensor for name, tensor in state.tensors.items()}
        return SavedState(tensors, facts)

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`; False if the environments start new episodes."""
        facts = state.facts
        self._num_steps = int(facts["num_steps"])
        shares = facts.get("cluster", [])
        exact = not facts["started"] or (self._is_synchronous and len(shares) == len(self._workers))
        self._attempt = 0 if exact else int(facts.get("attempt", 1))
        for index, worker in enumerate(self._workers):
            worker.attempt, worker.state = self._attempt, None
            if exact and facts["started"]:
                prefix = f"share{index}/"
                tensors = {k.removeprefix(prefix): v for k, v in state.tensors.items() if k.startswith(prefix)}
                worker.state = SavedState(tensors, shares[index])
        if self._scale is not None and "reward_scale" in facts:
            self._scale.moments = tuple(facts["reward_scale"])
            running = state.tensors["reward_scale/running"].numpy().copy()
            self._scale.running = running if exact else np.zeros_like(running)
        return exact

    def close(self) -> None:
        """End every worker. Unread segments are dropped."""
        if not self._running:
            return
        self._running = False
        self._queue.close()
        self._stop_gracefully([worker for worker in self._workers if worker.handle is not None])
        for segment in self._open.values():
            self._queue.abandon(segment.slot, 0)
        self._open.clear()
        self._abandoned.clear()

    def _stop_gracefully(self, workers: Sequence[_Worker]) -> None:
        """Close the environments of every worker if that is quick, then end it."""
        closing = []
        for worker in workers:
            if worker.started is None and not self._cluster.has_failed:
                worker.handle.stop.options(concurrency_group="control").remote()
                closing.append(worker.handle.close.remote())
        end = time.monotonic() + STOP_GRACE_S
        while closing and time.monotonic() < end:
            closing = [ref for ref in closing if ref not in self._cluster.wait(closing, POLL_S)]
        for worker in workers:
            self._cluster.stop_actor(worker.handle)
            worker.handle, worker.started, worker.heartbeat, worker.calls = None, None, None, {}


def _range(share: Share) -> str:
    return f"{share.first}–{share.first + share.count - 1}"
