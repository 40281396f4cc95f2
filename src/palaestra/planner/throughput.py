"""Throughput and staleness of a run, from the times of its parts: a simulation of the training loop.

Sessions alternate between an environment step and a reply; replies are sampled in batches; finished episodes wait for
the learner; the staleness bound stops new episodes, as in `actor.episode_source`. Vector environments are the same
network with one session whose episodes are segments of the ring. The times are the only input: no model is loaded.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field

from palaestra.config import Section

LINGER_S = 0.003
"""How long a batch of replies waits for further requests (`actor.inference.LINGER_S`)."""
MAX_TURNS = 15_000
"""Simulated turns, about: a fraction of a second of computing."""
MIN_UPDATES = 8
"""Simulated updates, at least."""
MAX_RETRIES = 3
"""Retries of an episode whose session fails (`actor.retries`)."""


class Times(Section):
    """The section `times`: measured times of the parts, in seconds, with one GPU (or one core) each."""

    session_step: float = Field(default=0.5, ge=0)
    """From an action to the next screenshot."""
    session_variation: float = Field(default=0.3, ge=0, le=3)
    """Standard deviation of a session step divided by its mean."""
    session_reset: float = Field(default=0.0, ge=0)
    """Opening a session and loading its task, per episode."""
    inference_batch: float = Field(default=1.0, ge=0)
    """Part of the time of a batch of replies that does not depend on its size."""
    inference_reply: float = Field(default=0.0, ge=0)
    """Additional time of a batch per reply in it."""
    update: float = Field(default=0.0, ge=0)
    """Part of the time of an update that does not depend on the number of episodes."""
    update_episode: float = Field(default=0.5, ge=0)
    """Time of an update per episode in it."""
    overhead: float = Field(default=0.0, ge=0)
    """Per update: publishing weights, logging, checkpoints."""
    turns: float = Field(default=10.0, ge=1)
    """Mean number of replies per episode; for vector environments, steps per rollout."""
    turns_variation: float = Field(default=0.0, ge=0, le=3)
    """Standard deviation of the length of an episode divided by its mean."""
    failure_rate: float = Field(default=0.0, ge=0, lt=1)
    """Probability that the session of an episode fails; the episode is then retried."""

    def inference(self, replies: int) -> float:
        """Seconds of a batch of replies."""
        return self.inference_batch + self.inference_reply * replies


class Setup(Section):
    """The section `setup`: concurrency, batches and collection. Keys mean the same as in a training configuration."""

    sessions: int = Field(default=2, ge=1, le=1_000_000)
    """Concurrent sessions (`actor_pool.target_concurrent_actors`)."""
    batch_size: int = Field(default=32, ge=1)
    """Episodes per update."""
    collection: Literal["synchronous", "asynchronous"] = "synchronous"
    """Whether playing and learning alternate or overlap."""
    max_staleness: int = Field(default=1, ge=0)
    """With `asynchronous`: maximum number of updates between the start of an episode and learning from it."""
    max_batch: int = Field(default=64, ge=1)
    """Maximum replies per batch (`inference.max_batch`)."""
    rows: int = Field(default=1, ge=1)
    """Environments that one session steps at once: `env.num_envs` of a vector environment, 1 on screens."""


@dataclass(frozen=True)
class Throughput:
    """Rates of a run in its steady state."""

    update_seconds: float
    """Mean time from one update to the next."""
    episodes_per_second: float
    turns_per_second: float
    staleness: float
    """Mean number of updates between sampling a reply and learning from it."""
    staleness_max: int
    dropped_share: float
    """Share of the finished episodes that exceeded the bound."""
    retried_share: float
    """Share of the attempts that failed and were repeated."""
    learner_utilisation: float
    sampler_utilisation: float
    session_utilisation: float
    """Share of the sessions that play."""
    mean_batch: float
    """Mean number of replies sampled at a time."""


@dataclass(eq=False)
class _Episode:
    turns: int
    attempt_turns: int
    """Turns of this attempt; fewer than `turns` if its session will fail."""
    versions: list[int] = field(default_factory=list)
    retries: int = 0


@dataclass(eq=False)
class _Job:
    """A computation on the shared devices."""

    seconds: float
    """Of computing that are left, at full speed."""
    action: Callable[[], None]


def simulate(
    times: Times,
    setup: Setup,
    *,
    samplers: int = 1,
    learner_speed: float = 1.0,
    shared_compute: float | None = None,
    updates: int | None = None,
    seed: int = 0,
) -> Throughput:
    """Simulate updates until the rates are steady.

    `samplers`: replicas that sample replies. `learner_speed`: how many times faster than measured an update is, on
    more GPUs. `shared_compute`: number of devices (or cores) that samplers and learner share; None: each has its own.
    """
    # A large system behaves as several small ones side by side: simulate one of them.
    turns = MIN_UPDATES * setup.batch_size * times.turns
    parts = max(1, min(int(turns / MAX_TURNS), samplers * setup.max_batch // 4, setup.batch_size))
    size = max(1, round(setup.batch_size / parts))
    share = size / setup.batch_size
    replicas = math.ceil(samplers * share - 1e-9)
    # A part of a sampler answers fewer requests at a time.
    fraction = samplers * share / replicas
    part = setup.model_copy(
        update={
            "sessions": max(1, round(setup.sessions * share)),
            "batch_size": size,
            "max_batch": max(1, round(setup.max_batch * fraction)),
        }
    )
    scaled = times.model_copy(
        update={
            "update_episode": times.update_episode / share,
            "inference_reply": times.inference_reply / fraction,
        }
    )
    wanted = updates or max(MIN_UPDATES, min(40, int(MAX_TURNS / (size * times.turns))))
    result = _Simulation(scaled, part, replicas, learner_speed, shared_compute, seed).run(wanted)
    return replace(
        result,
        episodes_per_second=result.episodes_per_second / share,
        turns_per_second=result.turns_per_second / share,
        mean_batch=result.mean_batch / fraction,
    )


class _Simulation:
    """The state of the simulated run."""

    def __init__(
        self, times: Times, setup: Setup, samplers: int, learner_speed: float, shared: float | None, seed: int
    ) -> None:
        self.times, self.setup, self.samplers, self.learner_speed = times, setup, samplers, learner_speed
        self.shared, self.rng = shared, random.Random(seed)
        self.asynchronous = setup.collection == "asynchronous"
        self.now, self.version, self.running, self.started, self.rejected = 0.0, 0, 0, 0, 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.jobs: list[_Job] = []
        self.number = 0
        self.waiting: deque[_Episode] = deque()
        self.first_wait: float | None = None
        self.free_samplers, self.learning = samplers, False
        self.finished: deque[_Episode] = deque()
        self.orders = 0
        """Synchronous: episodes of the present batch that have not started."""
        self.totals = dict.fromkeys(
            ("turns", "episodes", "dropped", "failed", "attempts", "lag", "lagged", "replies", "batches"), 0.0
        )
        self.busy = {"learner": 0.0, "sampler": 0.0, "sessions": 0.0}
        self.max_lag = 0
        self.updates: list[float] = []

    def run(self, wanted: int) -> Throughput:
        """Simulate `wanted` updates; the first quarter, in which the pipeline fills, is not counted."""
        warm_up, counting = max(1, wanted // 4), False
        self._next_batch()
        while len(self.updates) < wanted:
            self._advance()
            if len(self.updates) == warm_up and not counting:
                counting, self.max_lag = True, 0
                self.totals, self.busy = dict.fromkeys(self.totals, 0.0), dict.fromkeys(self.busy, 0.0)
        return self._result(warm_up)

    def _result(self, warm_up: int) -> Throughput:
        span = max(self.updates[-1] - self.updates[warm_up - 1], 1e-12)
        count, t = len(self.updates) - warm_up, self.totals
        return Throughput(
            update_seconds=span / count,
            episodes_per_second=t["episodes"] / span,
            turns_per_second=t["turns"] / span,
            staleness=t["lag"] / max(1.0, t["lagged"]),
            staleness_max=self.max_lag,
            dropped_share=t["dropped"] / max(1.0, t["episodes"] + t["dropped"]),
            retried_share=t["failed"] / max(1.0, t["attempts"]),
            learner_utilisation=min(1.0, self.busy["learner"] / span),
            sampler_utilisation=min(1.0, self.busy["sampler"] / span / self.samplers),
            session_utilisation=min(1.0, self.busy["sessions"] / span / self.setup.sessions),
            mean_batch=t["replies"] / max(1.0, t["batches"]),
        )

    # ------------------------------------------------------------------ time

    def _advance(self) -> None:
        """Go to the next event or the end of the next computation."""
        speed = 1.0 if self.shared is None else min(1.0, self.shared / max(1, len(self.jobs)))
        job = min(self.jobs, key=lambda one: one.seconds) if self.jobs else None
        ends = math.inf if job is None else self.now + job.seconds / speed
        if self.events and self.events[0][0] <= ends:
            moment, _, action = heapq.heappop(self.events)
        else:
            assert job is not None, "the simulated run stands still"
            moment, action = ends, job.action
            self.jobs.remove(job)
        passed = moment - self.now
        self.now = moment
        self.busy["learner"] += passed * self.learning
        self.busy["sampler"] += passed * (self.samplers - self.free_samplers)
        self.busy["sessions"] += passed * self.running
        for one in self.jobs:
            one.seconds -= passed * speed
        action()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.now + seconds, self.number, action))

    def _compute(self, seconds: float, action: Callable[[], None]) -> None:
        """Compute for `seconds`, on a device of its own or sharing the devices with other computations."""
        if self.shared is None:
            self._after(seconds, action)
        else:
            self.jobs.append(_Job(seconds, action))

    # ------------------------------------------------------------------ sessions

    def _next_batch(self) -> None:
        if not self.asynchronous:
            self.orders = self.setup.batch_size
        self._start_episodes()

    def _start_episodes(self) -> None:
        while self.running < self.setup.sessions and self._may_start():
            self.started += 1
            self.running += 1
            self.orders -= not self.asynchronous
            turns = self._draw_length()
            self._start_attempt(_Episode(turns, turns))

    def _may_start(self) -> bool:
        s = self.setup
        if not self.asynchronous:
            return self.orders > 0
        return (s.max_staleness + self.version + 1) * s.batch_size - (self.started - self.rejected) > 0

    def _draw_length(self) -> int:
        mean, variation = self.times.turns, self.times.turns_variation
        drawn = mean if variation == 0 else self.rng.gammavariate(variation**-2, mean * variation**2)
        return int(max(1.0, drawn) + self.rng.random())

    def _start_attempt(self, episode: _Episode) -> None:
        fails = episode.retries < MAX_RETRIES and self.rng.random() < self.times.failure_rate
        episode.attempt_turns = self.rng.randint(1, episode.turns) if fails else episode.turns + 1
        episode.versions = []
        self.totals["attempts"] += 1
        self._after(self.times.session_reset, lambda: self._request(episode))

    def _step(self, episode: _Episode) -> None:
        """The session performs an action."""
        mean, variation = self.times.session_step, self.times.session_variation
        seconds = mean if variation == 0 or mean == 0 else self.rng.gammavariate(variation**-2, mean * variation**2)
        self._after(seconds, lambda: self._finish_step(episode))

    def _finish_step(self, episode: _Episode) -> None:
        self.totals["turns"] += 1
        if len(episode.versions) >= episode.attempt_turns:
            self.totals["failed"] += 1
            episode.retries += 1
            self._start_attempt(episode)
        elif len(episode.versions) < episode.turns:
            self._request(episode)
        else:
            self.running -= 1
            self.finished.append(episode)
            self._learn_if_ready()
            self._start_episodes()
            self._sample_if_ready()

    # ------------------------------------------------------------------ replies

    def _request(self, episode: _Episode) -> None:
        self.waiting.append(episode)
        if self.first_wait is None and self.asynchronous:
            self.first_wait = self.now
            self._after(LINGER_S, self._sample_if_ready)
        self._sample_if_ready()

    def _sample_if_ready(self) -> None:
        while self.free_samplers and self.waiting:
            limit = self.setup.max_batch
            if not self.asynchronous:
                enough = self.running
            elif self.first_wait is not None and self.now - self.first_wait >= LINGER_S - 1e-9:
                enough = 1
            else:
                enough = min(-(-self.running // self.samplers), limit)
            if len(self.waiting) < enough:
                return
            share = limit if self.asynchronous else min(limit, -(-len(self.waiting) // self.free_samplers))
            self._sample(share)
            self.first_wait = self.now if self.waiting else None
            while not self.asynchronous and self.free_samplers and self.waiting:  # the rest of a lockstep round
                self._sample(share)

    def _sample(self, limit: int) -> None:
        batch = [self.waiting.popleft() for _ in range(min(limit, len(self.waiting)))]
        self.free_samplers -= 1
        self.totals["replies"] += len(batch)
        self.totals["batches"] += 1
        version = self.version

        def finish() -> None:
            self.free_samplers += 1
            for episode in batch:
                episode.versions.append(version)
                self._step(episode)
            if self.waiting and self.asynchronous:
                self.first_wait = self.now - LINGER_S
            self._sample_if_ready()

        self._compute(self.times.inference(len(batch) * self.setup.rows), finish)

    # ------------------------------------------------------------------ learning

    def _learn_if_ready(self) -> None:
        size = self.setup.batch_size
        if self.learning or len(self.finished) < size:
            return
        batch: list[_Episode] = []
        while self.finished and len(batch) < size:
            episode = self.finished.popleft()
            if self.asynchronous and self.version - episode.versions[0] > self.setup.max_staleness:
                self.totals["dropped"] += 1
                self.rejected += 1
            else:
                batch.append(episode)
        if len(batch) < size:
            self.finished.extendleft(reversed(batch))
            self._start_episodes()
            return
        for episode in batch:
            lags = [self.version - version for version in episode.versions]
            self.totals["lag"] += sum(lags)
            self.totals["lagged"] += len(lags)
            self.max_lag = max(self.max_lag, *lags)
        self.learning = True
        seconds = self.times.update + self.times.update_episode * size * self.setup.rows
        self._compute(seconds / self.learner_speed, self._finish_learning)

    def _finish_learning(self) -> None:
        self._after(self.times.overhead, self._finish_update)

    def _finish_update(self) -> None:
        self.learning = False
        self.version += 1
        self.updates.append(self.now)
        self.totals["episodes"] += self.setup.batch_size
        self._learn_if_ready()
        self._next_batch()
        self._sample_if_ready()
