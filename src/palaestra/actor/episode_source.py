"""`EpisodeSource`: batches of episodes on screens, in complete groups.

`SynchronousPlayer` plays the episodes of a batch in lockstep on demand: the same seed gives the same episodes.
`AsynchronousPlayer` keeps a pool of actors running within the staleness bound. The learner selects the episodes of a
group to learn from (`admit`); groups without a learning signal are replaced a bounded number of times.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from palaestra.actor.inference import RolloutWorkers
from palaestra.actor.pool import ActorPool, PoolThread, play_all
from palaestra.actor.task_runner import EpisodeRequest
from palaestra.errors import CollectorFailed
from palaestra.experience.groups import Groups, pack_trajectories, unpack_trajectories, whole_groups
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.sessions.task_sampler import TaskSampler
from palaestra.transport.source import Batch, ExperienceSource, SavedState, Timing, TrainingProgress

POLL_S = 0.2
"""Interval in which a waiting learner checks that the actors still run."""
MAX_FAILED_BATCHES = 3
"""Consecutive batches without a working session after which a run fails."""

Stop: TypeAlias = Callable[[], bool]
StartWorkers: TypeAlias = Callable[[Callable[[Trajectory], None]], AbstractAsyncContextManager[RolloutWorkers]]
"""Starts workers; the argument is called with the trajectories of failed sessions."""


class EpisodeScheduler:
    """Draws tasks and returns episode requests, `group_size` for each task and seed."""

    def __init__(self, sampler: TaskSampler, *, group_size: int, seed: int) -> None:
        self.sampler, self.group_size, self._seed = sampler, group_size, seed
        self._waiting: list[EpisodeRequest] = []
        self.number = 0
        """Number of the next group's first request."""

    def next(self) -> EpisodeRequest:
        """The next request."""
        if not self._waiting:
            choice, task = self.sampler.draw()
            first, size = self.number, self.group_size
            group = f"g{first:08d}" if size > 1 else ""
            self._waiting = [
                EpisodeRequest(f"e{number:08d}", task, _episode_seed(self._seed, number), group, choice.key)
                for number in range(first, first + size)
            ]
            self.number += size
        return self._waiting.pop(0)

    def state(self) -> dict[str, Any]:
        """Its state and that of the sampler. An incomplete group is not continued."""
        return {"number": self.number, "sampler": self.sampler.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.number = int(state["number"])
        self.sampler.load_state(state["sampler"])
        self._waiting = []


def _episode_seed(run: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"episode {run} {number}".encode()).digest()[:6], "big")


class PlayedEpisode(NamedTuple):
    """A finished episode."""

    request: EpisodeRequest
    trajectory: Trajectory


class Player:
    """Plays episodes."""

    def __init__(self, start_workers: StartWorkers, scheduler: EpisodeScheduler) -> None:
        self._start_workers, self._scheduler = start_workers, scheduler
        self._workers: RolloutWorkers | None = None
        self.failed_attempts: list[Trajectory] = []
        """Attempts whose session failed and that were retried."""

    def take(self, need: int, stop: Stop) -> list[PlayedEpisode]:
        """At most `need` episodes; fewer after `stop`."""
        raise NotImplementedError

    def allow_more(self, count: int) -> None:
        """Allow `count` further episodes to replace episodes that are not learned from."""

    def set_version(self, version: int) -> None:
        """Set the version of the learner."""

    def busy_seconds(self) -> float:
        """Total time of the sampler."""
        return 0.0 if self._workers is None else self._workers.inference.busy_seconds

    def close(self) -> None:
        """Stop every actor."""
        raise NotImplementedError


class SynchronousPlayer(Player):
    """Plays on demand, with the newest weights."""

    def __init__(self, start_workers: StartWorkers, scheduler: EpisodeScheduler, *, concurrent: int) -> None:
        super().__init__(start_workers, scheduler)
        self._concurrent = concurrent
        self._runner, self._resources = asyncio.Runner(), AsyncExitStack()

    def take(self, need: int, stop: Stop) -> list[PlayedEpisode]:
        """`need` episodes, in the order of their requests; fewer after `stop`."""
        requests = [self._scheduler.next() for _ in range(need)]
        finished = {one.episode_id: one for one in self._runner.run(self._play(requests, stop))}
        return [
            PlayedEpisode(request, finished[request.episode_id])
            for request in requests
            if request.episode_id in finished
        ]

    async def _play(self, requests: Sequence[EpisodeRequest], stop: Stop) -> list[Trajectory]:
        if self._workers is None:
            self._workers = await self._resources.enter_async_context(self._start_workers(self.failed_attempts.append))
        workers = self._workers
        return await play_all(
            workers.play,
            requests,
            concurrent=self._concurrent,
            stop=stop,
            set_num_actors=workers.inference.set_num_actors,
        )

    def close(self) -> None:
        """Release the workers."""
        if self._workers is not None:
            self._runner.run(self._resources.aclose())
        self._runner.close()


def free_slots(
    *, running: int, accepted: int, version: int, concurrent: int, batch_size: int, max_staleness: int
) -> int:
    """Number of episodes that may start, by concurrency and by the staleness bound.

    An episode is learned from after all episodes before it. For its weights to be at most `max_staleness` updates old
    by then, at most `max_staleness + 1` batches may be in flight or waiting beyond what the learner has taken. An
    episode that takes much longer than the others may still be too late; it is dropped and counted. `accepted` counts
    the episodes kept for learning since the first update, including those already learned from.
    """
    in_time = (max_staleness + version + 1) * batch_size - (accepted + running)
    return max(0, min(concurrent - running, in_time))


class AsynchronousPlayer(Player):
    """Plays continuously, within the staleness bound."""

    def __init__(
        self,
        start_workers: StartWorkers,
        scheduler: EpisodeScheduler,
        *,
        concurrent: int,
        batch_size: int,
        max_staleness: int,
        version: int = 0,
    ) -> None:
        super().__init__(start_workers, scheduler)
        self._bounds = {"concurrent": concurrent, "batch_size": batch_size, "max_staleness": max_staleness}
        self._version, self._rejected = version, 0
        # Counted since the first update: a resumed run must not start a burst of episodes that are too late.
        self._started = version * batch_size
        self._finished: queue.SimpleQueue[PlayedEpisode] = queue.SimpleQueue()
        self._thread = PoolThread(self._open_pool)
        self._thread.start()

    def take(self, need: int, stop: Stop) -> list[PlayedEpisode]:
        """Finished episodes, at least one and at most `need`; none after `stop`."""
        played: list[PlayedEpisode] = []
        while not played and not stop():
            self._thread.raise_if_failed()
            with suppress(queue.Empty):
                played.append(self._finished.get(timeout=POLL_S))
        while played and len(played) < need and not self._finished.empty():
            played.append(self._finished.get())
        return played

    def allow_more(self, count: int) -> None:
        """Allow `count` further episodes."""
        self._rejected += count
        self._thread.wake()

    def set_version(self, version: int) -> None:
        """Set the version of the learner."""
        self._version = version
        self._thread.wake()

    def close(self) -> None:
        """Stop every actor."""
        self._thread.stop()

    def _free_slots(self, running: int) -> int:
        accepted = self._started - self._rejected - running
        return free_slots(running=running, accepted=accepted, version=self._version, **self._bounds)

    def _next_request(self) -> EpisodeRequest:
        self._started += 1
        return self._scheduler.next()

    @asynccontextmanager
    async def _open_pool(self) -> AsyncIterator[ActorPool]:
        async with self._start_workers(self.failed_attempts.append) as self._workers:
            yield ActorPool(
                self._workers.play,
                next_request=self._next_request,
                free_slots=self._free_slots,
                deliver=lambda request, trajectory: self._finished.put(PlayedEpisode(request, trajectory)),
                on_crash=lambda request, error: self.allow_more(1),
                set_num_actors=self._workers.inference.set_num_actors,
            )


@dataclass
class _Collection:
    """The episodes of one batch."""

    started_at: float
    played: list[PlayedEpisode] = field(default_factory=list)
    failed_attempts: int = 0
    dropped_stale: int = 0

    def valid(self) -> list[PlayedEpisode]:
        """The episodes without an environment failure."""
        return [one for one in self.played if one.trajectory.outcome is not Outcome.ENVIRONMENT_FAILED]

    def metrics(self, *, busy_s: float) -> dict[str, float]:
        valid = self.valid()
        trajectories = [one.trajectory for one in valid]
        turns = [turn for one in trajectories for turn in one.turns]
        seconds = max(time.perf_counter() - self.started_at, 1e-9)
        metrics = {
            "episodes_per_second": len(self.played) / seconds,
            "collect_seconds": seconds,
            "environment_failures": float(self.failed_attempts + len(self.played) - len(trajectories)),
            "inference_utilisation": busy_s / seconds,
            "dropped_stale": float(self.dropped_stale),
        }
        if trajectories:
            metrics |= {
                "success_rate": sum(one.success for one in trajectories) / len(trajectories),
                "episode_return": sum(one.total_reward() for one in trajectories) / len(trajectories),
                "episode_length": len(turns) / len(trajectories),
                "unreadable_share": sum(turn.action is None for turn in turns) / max(1, len(turns)),
                "truncated_share": sum(one.outcome is Outcome.TRUNCATED for one in trajectories) / len(trajectories),
            }
        successes: dict[str, list[bool]] = {}
        for request, trajectory in valid:
            successes.setdefault(request.key, []).append(trajectory.success)
        return metrics | {f"success_rate/{key}": sum(own) / len(own) for key, own in sorted(successes.items())}


class EpisodeSource(ExperienceSource[list[Trajectory]]):
    """Returns batches of trajectories from a player. `next_batch` raises failures of the actors."""

    def __init__(
        self,
        scheduler: EpisodeScheduler,
        admit: Callable[[Sequence[Trajectory]], Sequence[Trajectory]],
        *,
        batch_size: int,
        max_refills: int | None = None,
        max_staleness: int = 0,
        sessions: str = "The sessions",
    ) -> None:
        """`admit` selects the episodes of a complete group to learn from; empty: another group replaces it.

        `max_refills`: how many times the missing part of a batch is played again; None: 3 with groups, else 0.
        `sessions` describes the session provider in errors.
        """
        self._scheduler, self._admit = scheduler, admit
        self._size, self._max_staleness = batch_size, max_staleness
        self._refills = (3 if scheduler.group_size > 1 else 0) if max_refills is None else max_refills
        self._groups = Groups(scheduler.group_size)
        self._ready: list[Trajectory] = []
        """Admitted episodes that were not learned from yet."""
        self._player: Player | None = None
        self._failed_batches = 0
        self._version = 0
        self._sessions = sessions
        self.progress = TrainingProgress()

    def open(
        self,
        player: Player,
        *,
        version: int,
        stop: Stop = lambda: False,
        record: Callable[[Trajectory], None] = lambda trajectory: None,
        finished: Callable[[int, Trajectory], None] = lambda number, trajectory: None,
    ) -> None:
        """Play with `player` from now on.

        `record` is called with every trajectory, including failed attempts; `finished` with every episode and its
        number.
        """
        self._player, self._version, self._stop = player, version, stop
        self._record, self._finished = record, finished

    def next_batch(self) -> Batch[list[Trajectory]] | None:
        """Play until a batch is complete; None if stopped before."""
        player = self._require_player()
        collected, busy = _Collection(time.perf_counter()), player.busy_seconds()
        batch = self._collect(player, collected)
        if self._stop() and len(batch) < self._size:
            self._ready = batch + self._ready
            return None
        self._raise_if_sessions_fail(collected)
        metrics = collected.metrics(busy_s=player.busy_seconds() - busy)
        return Batch(batch, metrics=metrics, origin=collected)

    def _collect(self, player: Player, collected: _Collection) -> list[Trajectory]:
        """Play a batch, replacing groups without a learning signal a bounded number of times."""
        limit = self._size * (1 + self._refills)
        # With refills only admitted episodes count towards the batch, otherwise all do.
        counted = len(self._ready)
        while counted < self._size and len(collected.played) < limit and not self._stop():
            need = min(self._size - counted, limit - len(collected.played))
            for one in player.take(need, self._stop):
                counted += self._add_episode(one, player, collected)
            while player.failed_attempts:
                collected.failed_attempts += 1
                self._record(player.failed_attempts.pop(0))
        batch, self._ready = whole_groups(self._ready, self._size)
        return batch

    def _add_episode(self, played: PlayedEpisode, player: Player, collected: _Collection) -> int:
        """Add an episode to its group; returns how many more episodes count towards the batch."""
        trajectory = played.trajectory
        self.progress.add(1)
        self.progress.episodes += 1
        collected.played.append(played)
        self._finished(self.progress.steps, trajectory)
        self._record(trajectory)
        stale = trajectory.learnable and self._version - trajectory.versions[0] > self._max_staleness
        collected.dropped_stale += stale
        lost = stale or not trajectory.learnable
        group = self._groups.mark_lost(trajectory.group) if lost else self._groups.add(trajectory)
        admitted = list(self._admit(group)) if group else []
        self._ready += admitted
        if not self._refills:
            return 1
        # Lost episodes are replaced at once: a group whose members are all lost is never released.
        player.allow_more(lost + len(group) - len(admitted))
        return len(admitted)

    def _raise_if_sessions_fail(self, collected: _Collection) -> None:
        played = collected.played
        self._failed_batches = self._failed_batches + 1 if played and not collected.valid() else 0
        if self._failed_batches >= MAX_FAILED_BATCHES:
            raise CollectorFailed(
                f"every session failed in {self._failed_batches} consecutive batches, {len(played)} in the last one "
                f"({played[-1].trajectory.reason.rstrip('.')}). {self._sessions} or their browsers may be unavailable."
            )

    def release(self, batch: Batch[list[Trajectory]], version: int) -> None:
        """Report the results to the task sampler, and allow further episodes."""
        player, collected = self._require_player(), batch.origin
        self.progress.updates += 1
        if version == self._version:
            # Without a new version, episodes that were not learned from must be replaced explicitly.
            player.allow_more(len(batch.experience) if self._refills else len(collected.played))
        self._version = version
        player.set_version(version)
        for request, trajectory in collected.valid():
            self._scheduler.sampler.report(request.key, trajectory.success)

    def requeue(self, batch: Batch[list[Trajectory]]) -> None:
        """Put the episodes first in the next batch."""
        self._ready = [*batch.experience, *self._ready]

    def metrics(self, batch: Batch[list[Trajectory]], timing: Timing) -> dict[str, float]:
        """Metrics of the batch, and the total number of episodes."""
        return {**batch.metrics, "episodes": float(self.progress.episodes)}

    def state(self) -> SavedState:
        """Episodes that were not learned from yet, and the state of the scheduler."""
        waiting = [*self._ready, *self._groups.waiting()]
        return SavedState(
            pack_trajectories(waiting, "waiting"), {"orders": self._scheduler.state(), "ready": len(self._ready)}
        )

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`."""
        self._scheduler.load_state(state.facts["orders"])
        waiting, ready = unpack_trajectories(state.tensors, "waiting"), int(state.facts["ready"])
        self._ready = waiting[:ready]
        for trajectory in waiting[ready:]:
            self._groups.add(trajectory)
        # Episodes in flight were lost with the process; release the incomplete groups.
        for group in self._groups.drain():
            self._ready += self._admit(group)
        return True

    def close(self) -> None:
        """Stop every actor."""
        if self._player is not None:
            self._player.close()
            self._player = None

    def _require_player(self) -> Player:
        if self._player is None:
            raise CollectorFailed("EpisodeSource has no player. Call open(player) before the first batch.")
        return self._player
