"""`ShareWorkers`: one `RolloutWorker` per share of the environments, on the nodes of a cluster.

Every worker fills the segments that it is sent in their order. A share of a segment is identified by the number of the
segment, the index of the worker and the worker itself: a lost worker is replaced, the replacement is sent the open
segments again, and a late result of the lost one is discarded and counted. A worker whose code raises an error or whose
step hangs is replaced as often as the configuration allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from palaestra.actor.cluster.rollout_worker import RolloutWorker, ShareOfSegment, WorkerSetup
from palaestra.env.vector import EpisodeEnd, Snapshot
from palaestra.errors import CollectorFailed
from palaestra.transport.ranks import Share
from palaestra.transport.ray_cluster import ActorRaised, LostActor, RayCluster, Ref, describe_failure
from palaestra.transport.source import EpisodeStats

HEARTBEAT_S = 2.0
"""Interval in which a worker is asked how long its step takes."""
POLL_S = 0.2
STOP_GRACE_S = 5.0
"""Time for workers to finish their step and to close their environments before they are ended."""


@dataclass
class OpenSegment:
    """A segment that is being collected."""

    number: int
    first_step: int
    """Steps of each environment before it."""
    num_steps: int
    slot: int
    version: int
    weights: Ref
    missing: set[int]
    """Shares that have not arrived, by their first environment."""
    episodes: list[EpisodeStats] = field(default_factory=list)
    truncated: list[tuple[int, EpisodeEnd]] = field(default_factory=list)
    shares_truncated: int = 0
    collect_seconds: float = 0.0
    idle_seconds: float = float("inf")

    def add(self, first: int, result: ShareOfSegment) -> None:
        """Add the report of a share."""
        self.missing.remove(first)
        self.episodes += result.episodes
        self.truncated += result.truncated
        self.shares_truncated += bool(result.truncated)
        self.collect_seconds = max(self.collect_seconds, result.collect_seconds)
        self.idle_seconds = min(self.idle_seconds, result.idle_seconds)


@dataclass
class ShareWorker:
    """The worker of a share, and its open calls."""

    share: Share
    state: Snapshot | None = None
    """State after its last result in exact mode; None before."""
    attempt: int = 0
    """How many times the share has started new episodes."""
    steps: int = 0
    """Steps of each of its environments up to its last result."""
    results: int = 0
    """Results since it started new episodes."""
    restarts: int = 0
    """Replacements since the last result."""
    handle: Any = None
    started: Ref = None
    """None after it has started."""
    deadline: float = 0.0
    calls: dict[Ref, OpenSegment] = field(default_factory=dict)
    heartbeat: Ref = None
    asked_at: float = 0.0

    def describe(self) -> str:
        """Its environments, for messages."""
        return f"environments {self.share.first}–{self.share.first + self.share.count - 1}"


class ShareWorkers:
    """Starts, feeds, replaces and ends the workers of all shares. Calls of one thread only."""

    def __init__(
        self,
        cluster: RayCluster,
        shares: Sequence[Share],
        *,
        make_setup: Callable[[ShareWorker], WorkerSetup],
        on_result: Callable[[ShareWorker, OpenSegment, ShareOfSegment], None],
        on_new_episodes: Callable[[ShareWorker], None],
        step_timeout: float | None,
        collector_restarts: int,
    ) -> None:
        """`step_timeout`: seconds after which a step counts as hung, None: never.

        `collector_restarts`: how many times a worker is replaced after an error of its code. `on_result` is called once
        for every share of a segment; `on_new_episodes` if the running episodes of a share are lost.
        """
        self.all = [ShareWorker(share) for share in shares]
        self._cluster, self._make_setup = cluster, make_setup
        self._on_result, self._on_new_episodes = on_result, on_new_episodes
        self._step_timeout, self._collector_restarts = step_timeout, collector_restarts
        self._frozen: Ref = None
        self._abandoned: list[Ref] = []
        self._errors = 0
        self.failures: list[str] = []
        """Why workers were replaced."""
        self.counts = dict.fromkeys(("lost_actors", "retried_segments", "discarded_results", "lost_episodes"), 0)

    def start(self, frozen: Ref) -> None:
        """Start every worker and wait for them; `frozen`: the weights that are not trained."""
        self._frozen = frozen
        for worker in self.all:
            self._start_worker(worker)
        self._cluster.wait_until_started([worker.started for worker in self.all], "actors.num_actors")
        for worker in self.all:
            self._check_start(worker)

    def send(self, segment: OpenSegment) -> None:
        """Have every worker fill its share of a segment."""
        for worker in self.all:
            self._call(worker, segment)

    def receive(self, timeout: float) -> None:
        """Receive results, at least one within `timeout` seconds, and replace workers that are lost."""
        calls = {ref: worker for worker in self.all for ref in worker.calls}
        for ref in self._cluster.wait(list(calls), timeout):
            worker = calls[ref]
            if ref not in worker.calls:
                continue  # the worker was replaced because of an earlier result
            try:
                result = self._cluster.get(ref)
            except LostActor as lost:
                self._replace(worker, f"the actor of {worker.describe()} was lost: {lost}")
            except ActorRaised as raised:
                failure = describe_failure(f"the actor of {worker.describe()} failed", raised)
                self._replace_failed(worker, failure, raised.error)
            else:
                segment = worker.calls.pop(ref)
                worker.restarts, worker.results = 0, worker.results + 1
                worker.state, worker.steps = result.state, segment.first_step + segment.num_steps
                self._on_result(worker, segment, result)
        self._cluster.raise_if_unreachable()
        self._count_late_results()
        for worker in self.all:
            if worker.started is not None:
                self._check_start(worker)
            elif self._step_timeout is not None and worker.calls:
                self._check_heartbeat(worker, self._step_timeout)

    def stop(self) -> None:
        """Close the environments of every worker if that is quick, then end it."""
        workers, closing = [worker for worker in self.all if worker.handle is not None], []
        for worker in workers:
            if worker.started is None and not self._cluster.has_failed:
                self._cluster.call(worker.handle.stop)
                closing.append(self._cluster.call(worker.handle.close))
        end = time.monotonic() + STOP_GRACE_S
        while closing and time.monotonic() < end:
            ready = self._cluster.wait(closing, POLL_S)
            closing = [ref for ref in closing if ref not in ready]
        for worker in workers:
            self._cluster.stop_actor(worker.handle)
            worker.handle, worker.started, worker.heartbeat, worker.calls = None, None, None, {}
        self._abandoned.clear()

    def _start_worker(self, worker: ShareWorker) -> None:
        gpus = self._cluster.config.num_gpus
        worker.handle = self._cluster.start_actor(RolloutWorker, self._make_setup(worker), self._frozen, gpus=gpus)
        worker.started = self._cluster.call(worker.handle.prepare)
        worker.deadline = time.monotonic() + self._cluster.config.start_timeout
        worker.heartbeat, worker.asked_at = None, time.monotonic()

    def _call(self, worker: ShareWorker, segment: OpenSegment) -> None:
        arguments = (segment.number, segment.num_steps, segment.version, segment.weights)
        ref = self._cluster.call(worker.handle.fill, *arguments)
        worker.calls[ref] = segment

    def _count_late_results(self) -> None:
        for ref in self._cluster.wait(self._abandoned, 0.0):
            self._abandoned.remove(ref)
            try:
                self._cluster.get(ref)
            except (LostActor, ActorRaised):
                continue
            self.counts["discarded_results"] += 1

    def _check_start(self, worker: ShareWorker) -> None:
        if self._cluster.wait([worker.started], 0.0):
            started, worker.started = worker.started, None
            try:
                _, exact = self._cluster.get(started)
            except LostActor as lost:
                self._replace(worker, f"the actor of {worker.describe()} was lost as it started: {lost}")
            except ActorRaised as raised:
                failure = describe_failure(f"the actor of {worker.describe()} could not start", raised)
                self._replace_failed(worker, failure, raised.error)
            else:
                if not exact:
                    self._lose_episodes(worker)
        elif time.monotonic() > worker.deadline:
            raise CollectorFailed(self._cluster.describe_pending(1, 1, "the replacement of a lost actor"))

    def _check_heartbeat(self, worker: ShareWorker, limit: float) -> None:
        now = time.monotonic()
        if worker.heartbeat is None:
            if now - worker.asked_at > HEARTBEAT_S:
                worker.heartbeat, worker.asked_at = self._cluster.call(worker.handle.seconds_in_step), now
            return
        if not self._cluster.wait([worker.heartbeat], 0.0):
            return
        heartbeat, worker.heartbeat = worker.heartbeat, None
        try:
            still = self._cluster.get(heartbeat)
        except (LostActor, ActorRaised):
            return  # the open call fails as well
        if still > limit:
            hung = CollectorFailed(
                f"the actor of {worker.describe()} hangs: its step has not ended for {still:.1f} s, and "
                f"trainer.step_timeout is {limit:g}. Look at what the environment waits for, or raise "
                "trainer.step_timeout."
            )
            self._replace_failed(worker, hung, None)

    def _replace_failed(self, worker: ShareWorker, failure: CollectorFailed, cause: BaseException | None) -> None:
        """Replace a worker whose code failed, with new episodes, if `trainer.collector_restarts` allows it."""
        if self._errors >= self._collector_restarts:
            raise failure from cause
        self._errors += 1
        # Its state leads to the same error.
        worker.state, worker.results = None, 1
        self._replace(worker, str(failure))

    def _replace(self, worker: ShareWorker, reason: str) -> None:
        """Start another worker for a share, and send it the open segments again."""
        self._cluster.raise_if_unreachable()
        limit, reason = self._cluster.config.restarts, reason.rstrip(".")
        if worker.restarts >= limit:
            raise CollectorFailed(
                f"{reason}, after {worker.restarts} replacements in a row (actors.restarts is {limit})."
            )
        worker.restarts += 1
        self.failures.append(reason)
        self.counts["lost_actors"] += 1
        self._cluster.stop_actor(worker.handle)
        again = sorted(worker.calls.values(), key=lambda segment: segment.number)
        self._abandoned += worker.calls
        worker.calls = {}
        if worker.state is None and worker.results:
            self._lose_episodes(worker)
        self._start_worker(worker)
        for segment in again:
            self.counts["retried_segments"] += 1
            self._call(worker, segment)

    def _lose_episodes(self, worker: ShareWorker) -> None:
        worker.attempt, worker.results = worker.attempt + 1, 0
        self.counts["lost_episodes"] += worker.share.count
        self._on_new_episodes(worker)
