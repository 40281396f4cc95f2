"""`ClusterSource`: rollouts from collectors on a Ray cluster, each of which steps a share of the environments.

A segment of the ring is granted to all workers at once, with one version of the weights, and is complete when every
share has arrived. The queue bounds staleness and the number of segments in flight. In exact mode (synchronous or
reproducible collection) the rollouts are those of one local collector, bit for bit, also after a worker was replaced:
the replacement continues from the state of the last result. All calls are made in the learner's thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from palaestra.actor.asynchronous import AsyncConfig
from palaestra.actor.cluster.env_share import divide
from palaestra.actor.cluster.rollout_worker import FinalValues, ShareOfSegment, WorkerSetup, to_saved_state
from palaestra.actor.cluster.share_workers import OpenSegment, ShareWorker, ShareWorkers
from palaestra.actor.collector import RewardScale, attempt_seed, stream_base
from palaestra.actor.collector_process import SharedLayout
from palaestra.actor.collector_thread import SegmentReport
from palaestra.actor.compatibility import buffer_shape
from palaestra.actor.policy_actor import Compiled
from palaestra.actor.synchronous import rollout_metrics
from palaestra.env.make import EnvConfig
from palaestra.env.vector import Snapshot, VectorEnv
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.vla_buffer import VLABuffer
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.weight_sync import serialize_structure
from palaestra.transport.object_store import ObjectStorePublisher
from palaestra.transport.queue import SegmentQueue, TakenSegment
from palaestra.transport.ray_cluster import RayCluster
from palaestra.transport.source import Batch, ExperienceSource, SavedState, Timing, TrainingProgress

POLL_S = 0.2
"""Interval in which a waiting learner checks the workers."""


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
        self._cluster, self._policy, self._env = cluster, policy, env
        # An actor uses the cores that are reserved for it, not all of its node.
        num_workers = env_config.num_workers or max(1, int(cluster.config.num_cpus))
        self._env_config = env_config.model_copy(update={"num_workers": num_workers})
        self._is_synchronous = config is None
        self._config = config or AsyncConfig(max_staleness=0)
        self.is_exact = self._is_synchronous or self._config.reproducible
        """Whether the rollouts are those of one local collector, bit for bit."""
        self._seed, self._compiled, self._torch_threads = seed, compiled, torch_threads
        self._first_stream = stream_base(seed)
        self._scale = None if discount is None else RewardScale(env.num_envs, discount)
        self._workers = ShareWorkers(
            cluster,
            divide(env.num_envs, cluster.config.num_actors),
            make_setup=self._make_setup,
            on_result=self._store,
            on_new_episodes=self._start_new_streams,
            step_timeout=None if config is None else config.step_timeout,
            collector_restarts=self._config.collector_restarts,
        )
        self._open: dict[int, OpenSegment] = {}
        self._attempt = self._num_steps = self._claimed_steps = self._next_number = self._version = 0
        self._ring: VLABuffer | None = None
        self._queue: SegmentQueue
        self._layout: SharedLayout
        self._running = False
        self._values: FinalValues | None = None
        self.progress = TrainingProgress()
        depth = self._config.max_staleness + 2
        self.publisher = ObjectStorePublisher(cluster, lambda weights: weights.read(), depth=depth)

    @property
    def failures(self) -> list[str]:
        """Why workers were replaced."""
        return self._workers.failures

    @property
    def num_shares(self) -> int:
        """Number of workers."""
        return len(self._workers.all)

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
        self._values = FinalValues(self._policy, self._compiled)
        self.publisher.clear()
        self._version, self._running, self._claimed_steps = version, True, self._num_steps
        try:
            for worker in self._workers.all:
                worker.steps = self._num_steps
            self._workers.start(self._cluster.put(frozen))
        except BaseException:
            self.close()
            raise
        self._queue.open(version, num_segments)

    def _make_setup(self, worker: ShareWorker) -> WorkerSetup:
        seed = attempt_seed(self._seed, worker.attempt)
        return WorkerSetup(
            env=self._env_config,
            share=worker.share,
            exact=self.is_exact,
            mask_size=self._env.mask_size,
            layout=self._layout,
            structure=self._structure,
            arguments={"seed": seed, "compiled": self._compiled, "first_stream": 0},
            num_steps=worker.steps,
            state=worker.state,
            attempt=worker.attempt + 1,
            torch_threads=self._torch_threads,
            device="cuda" if self._cluster.config.num_gpus else "cpu",
        )

    # ------------------------------------------------------------------ batches

    def next_batch(self) -> Batch[RolloutBuffer]:
        """Wait for the next complete segment; raises if collection fails."""
        while True:
            self._grant()
            # A synchronous learner is at the version that it has published last.
            version = self.publisher.newest if self._is_synchronous else self._version
            segment = self._queue.take(version, 0.0)
            if segment is not None:
                return self._make_batch(segment)
            self._workers.receive(POLL_S)

    def _grant(self) -> None:
        """Give the segments that the queue allows to every worker, with the newest weights or those of the claim."""
        assert self._ring is not None
        while (claim := self._queue.claim(0.0)) is not None:
            version = self.publisher.newest if claim.version is None else claim.version
            segment = OpenSegment(
                number=self._next_number,
                first_step=self._claimed_steps,
                num_steps=self._ring.segment_length,
                slot=claim.slot,
                version=version,
                weights=self.publisher.ref(version),
                missing={worker.share.first for worker in self._workers.all},
            )
            self._open[segment.number] = segment
            self._next_number += 1
            self._claimed_steps += segment.num_steps
            self._workers.send(segment)

    def _store(self, worker: ShareWorker, segment: OpenSegment, result: ShareOfSegment) -> None:
        """Store the share of a worker; the last one completes the segment."""
        assert self._ring is not None
        self._ring.segments[segment.slot].write_environments(worker.share.part, result.arrays)
        segment.add(worker.share.first, result)
        if not segment.missing:
            del self._open[segment.number]
            self._deliver(segment)

    def _deliver(self, segment: OpenSegment) -> None:
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
            **{name: float(count) for name, count in self._workers.counts.items()},
        }

    def raise_if_failed(self) -> None:
        """Raise if collection has failed; replaces lost workers. Called during long updates."""
        if self._running:
            self._workers.receive(0.0)

    def _start_new_streams(self, worker: ShareWorker) -> None:
        """The running episodes of a share are lost: its streams end, and others begin."""
        self._first_stream = stream_base(self._seed)
        if self._scale is not None:
            self._scale.running[worker.share.part] = 0.0

    # ------------------------------------------------------------------ state

    def state(self) -> SavedState:
        """Counters, and in synchronous mode the state of every share. Needs no connection."""
        states = [worker.state for worker in self._workers.all]
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
                saved = to_saved_state(state)
                tensors |= {f"share{index}/{name}": tensor for name, tensor in saved.tensors.items()}
        return SavedState(tensors, facts)

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`; False if the environments start new episodes."""
        facts = state.facts
        self._num_steps = int(facts["num_steps"])
        shares = facts.get("cluster", [])
        exact = not facts["started"] or (self._is_synchronous and len(shares) == self.num_shares)
        self._attempt = 0 if exact else int(facts.get("attempt", 1))
        for index, worker in enumerate(self._workers.all):
            worker.attempt, worker.state = self._attempt, None
            if exact and facts["started"]:
                prefix = f"share{index}/"
                tensors = {k.removeprefix(prefix): v for k, v in state.tensors.items() if k.startswith(prefix)}
                worker.state = Snapshot({name: tensor.numpy() for name, tensor in tensors.items()}, shares[index])
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
        self._workers.stop()
        for segment in self._open.values():
            self._queue.abandon(segment.slot, 0)
        self._open.clear()
