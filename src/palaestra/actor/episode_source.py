"""Episodes on screens as a source of experience: a batch is enough episodes to learn from, in whole groups.

`SynchronousPlayer` plays exactly what is needed, in lockstep, and then rests: the same seed gives the same episodes.
`BackgroundPlayer` keeps a pool of actors going within the bound on staleness and hands over what has come. The learner
decides what of a group is worth learning from (`admit`); what teaches nothing is replaced a bounded number of times.
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
from palaestra.actor.task_runner import EpisodeOrder
from palaestra.errors import CollectorFailed
from palaestra.experience.groups import Groups, pack_trajectories, unpack_trajectories, whole_groups
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.sessions.task_sampler import TaskSampler
from palaestra.transport.source import Batch, SavedState, Timing, TrainingProgress

__all__ = ["BackgroundPlayer", "EpisodeOrders", "EpisodeSource", "Played", "Player", "SynchronousPlayer", "free_places"]

POLL_S = 0.2
"""How often a learner that waits for episodes checks whether the actors still run."""
BROKEN_BATCHES = 3
"""Batches in a row in which every screen broke, after which a run ends: it would play them all and learn nothing."""

Stop: TypeAlias = Callable[[], bool]
StartWorkers: TypeAlias = Callable[[Callable[[Trajectory], None]], AbstractAsyncContextManager[RolloutWorkers]]
"""Starts what plays, given where trajectories of broken sessions go."""


class EpisodeOrders:
    """Orders one after the other, `group_size` at a time for the same task and seed."""

    def __init__(self, sampler: TaskSampler, *, group_size: int, seed: int) -> None:
        self.sampler, self.group_size, self._seed = sampler, group_size, seed
        self._waiting: list[EpisodeOrder] = []
        self.number = 0
        """Of the next order."""

    def next(self) -> EpisodeOrder:
        """The next order."""
        if not self._waiting:
            choice, task = self.sampler.draw()
            first, size = self.number, self.group_size
            group = f"g{first:08d}" if size > 1 else ""
            self._waiting = [
                EpisodeOrder(f"e{number:08d}", task, _episode_seed(self._seed, number), group, choice.key)
                for number in range(first, first + size)
            ]
            self.number += size
        return self._waiting.pop(0)

    def state(self) -> dict[str, Any]:
        """Where it stands, and the sampler with it; a group that was begun is not continued."""
        return {"number": self.number, "sampler": self.sampler.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.number = int(state["number"])
        self.sampler.load_state(state["sampler"])
        self._waiting = []


def _episode_seed(run: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"episode {run} {number}".encode()).digest()[:6], "big")


class Played(NamedTuple):
    """An episode that is over."""

    order: EpisodeOrder
    trajectory: Trajectory


class Player:
    """Has episodes played."""

    def __init__(self, start_workers: StartWorkers, orders: EpisodeOrders) -> None:
        self._start_workers, self._orders = start_workers, orders
        self._workers: RolloutWorkers | None = None
        self.broken: list[Trajectory] = []
        """Episodes whose session broke and that were tried again."""

    def take(self, need: int, stop: Stop) -> list[Played]:
        """At most `need` episodes; fewer, or none, when `stop` says so meanwhile."""
        raise NotImplementedError

    def make_room(self, count: int) -> None:
        """So many episodes teach nothing; others may be played in their place."""

    def set_version(self, version: int) -> None:
        """The learner has released a batch and is at `version`."""

    def busy_seconds(self) -> float:
        """Time in which the sampler has worked so far."""
        return 0.0 if self._workers is None else self._workers.inference.busy_seconds

    def close(self) -> None:
        """Stop every actor."""
        raise NotImplementedError


class SynchronousPlayer(Player):
    """Plays when asked, with the newest weights, and rests in between."""

    def __init__(self, start_workers: StartWorkers, orders: EpisodeOrders, *, concurrent: int) -> None:
        super().__init__(start_workers, orders)
        self._concurrent = concurrent
        self._runner, self._resources = asyncio.Runner(), AsyncExitStack()

    def take(self, need: int, stop: Stop) -> list[Played]:
        """`need` episodes, in the order of their orders; fewer when `stop` says so meanwhile."""
        orders = [self._orders.next() for _ in range(need)]
        finished = {one.episode_id: one for one in self._runner.run(self._play(orders, stop))}
        return [Played(order, finished[order.episode_id]) for order in orders if order.episode_id in finished]

    async def _play(self, orders: Sequence[EpisodeOrder], stop: Stop) -> list[Trajectory]:
        if self._workers is None:
            self._workers = await self._resources.enter_async_context(self._start_workers(self.broken.append))
        workers = self._workers
        return await play_all(
            workers.play, orders, concurrent=self._concurrent, stop=stop, set_players=workers.inference.set_players
        )

    def close(self) -> None:
        """Release sessions and sampler."""
        if self._workers is not None:
            self._runner.run(self._resources.aclose())
        self._runner.close()


def free_places(
    *, running: int, accepted: int, version: int, concurrent: int, batch_size: int, max_staleness: int
) -> int:
    """How many more episodes may begin: as many as there is room for, and as can still be learned from in time.

    An episode that begins now is learned from when the learner has taken everything before it. So that its weights are
    then at most `max_staleness` updates old, no more may be under way or waiting than `max_staleness + 1` batches
    beyond what the learner has taken. An episode that takes much longer than the others can still come too late; it is
    dropped and counted. `accepted` counts the episodes kept for learning since the very first update, those learned
    from included.
    """
    in_time = (max_staleness + version + 1) * batch_size - (accepted + running)
    return max(0, min(concurrent - running, in_time))


class BackgroundPlayer(Player):
    """Plays all the time, within the bound on staleness."""

    def __init__(
        self,
        start_workers: StartWorkers,
        orders: EpisodeOrders,
        *,
        concurrent: int,
        batch_size: int,
        max_staleness: int,
        version: int = 0,
    ) -> None:
        super().__init__(start_workers, orders)
        self._bounds = {"concurrent": concurrent, "batch_size": batch_size, "max_staleness": max_staleness}
        self._version, self._rejected = version, 0
        # Counted since the very first update, or a resumed run would begin a burst of episodes that come too late.
        self._begun = version * batch_size
        self._finished: queue.SimpleQueue[Played] = queue.SimpleQueue()
        self._thread = PoolThread(self._open_pool)
        self._thread.start()

    def take(self, need: int, stop: Stop) -> list[Played]:
        """What has come, at least one and at most `need`; nothing when `stop` says so meanwhile."""
        played: list[Played] = []
        while not played and not stop():
            self._thread.raise_if_failed()
            with suppress(queue.Empty):
                played.append(self._finished.get(timeout=POLL_S))
        while played and len(played) < need and not self._finished.empty():
            played.append(self._finished.get())
        return played

    def make_room(self, count: int) -> None:
        """So many teach nothing; others may be played in their place."""
        self._rejected += count
        self._thread.wake()

    def set_version(self, version: int) -> None:
        """The learner has released a batch."""
        self._version = version
        self._thread.wake()

    def close(self) -> None:
        """Stop every actor."""
        self._thread.stop()

    def _free(self, running: int) -> int:
        accepted = self._begun - self._rejected - running
        return free_places(running=running, accepted=accepted, version=self._version, **self._bounds)

    def _next_order(self) -> EpisodeOrder:
        self._begun += 1
        return self._orders.next()

    @asynccontextmanager
    async def _open_pool(self) -> AsyncIterator[ActorPool]:
        async with self._start_workers(self.broken.append) as self._workers:
            yield ActorPool(
                self._workers.play,
                next_order=self._next_order,
                free=self._free,
                deliver=lambda order, trajectory: self._finished.put(Played(order, trajectory)),
                on_crash=lambda order, error: self.make_room(1),
                set_players=self._workers.inference.set_players,
            )


@dataclass
class _Collected:
    """The episodes of one batch, and what became of them."""

    began: float
    played: list[Played] = field(default_factory=list)
    broken: int = 0
    dropped_stale: int = 0

    def unbroken(self) -> list[Played]:
        """Those whose session held to the end: only they say something about the policy."""
        return [one for one in self.played if one.trajectory.outcome is not Outcome.ENVIRONMENT_FAILED]

    def metrics(self, *, busy_s: float) -> dict[str, float]:
        unbroken = self.unbroken()
        held = [one.trajectory for one in unbroken]
        turns = [turn for one in held for turn in one.turns]
        seconds = max(time.perf_counter() - self.began, 1e-9)
        metrics = {
            "episodes_per_second": len(self.played) / seconds,
            "collect_seconds": seconds,
            "environment_failures": float(self.broken + len(self.played) - len(held)),
            "inference_utilisation": busy_s / seconds,
            "dropped_stale": float(self.dropped_stale),
        }
        if held:
            metrics |= {
                "success_rate": sum(one.success for one in held) / len(held),
                "episode_return": sum(one.total_reward() for one in held) / len(held),
                "episode_length": len(turns) / len(held),
                "unreadable_share": sum(turn.action is None for turn in turns) / max(1, len(turns)),
                "truncated_share": sum(one.outcome is Outcome.TRUNCATED for one in held) / len(held),
            }
        successes: dict[str, list[bool]] = {}
        for order, trajectory in unbroken:
            successes.setdefault(order.key, []).append(trajectory.success)
        return metrics | {f"success_rate/{key}": sum(own) / len(own) for key, own in sorted(successes.items())}


class EpisodeSource:
    """Batches of trajectories from a player."""

    def __init__(
        self,
        orders: EpisodeOrders,
        admit: Callable[[Sequence[Trajectory]], Sequence[Trajectory]],
        *,
        batch_size: int,
        max_refills: int | None = None,
        max_staleness: int = 0,
        sessions: str = "The sessions",
    ) -> None:
        """`admit` gives what of a complete group is worth learning from; nothing: play another in its place.

        `max_refills`: how many times the missing part of a batch is played again; None: 3 with groups, else none.
        `sessions` names where they come from, for errors.
        """
        self._orders, self._admit = orders, admit
        self._size, self._max_staleness = batch_size, max_staleness
        self._refills = (3 if orders.group_size > 1 else 0) if max_refills is None else max_refills
        self._groups = Groups(orders.group_size)
        self._ready: list[Trajectory] = []
        """Admitted and not yet learned from."""
        self._player: Player | None = None
        self._broken_batches = 0
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
        """Have `player` play from now on.

        `record` is given every trajectory, those of broken sessions included; `finished` every episode with its number.
        """
        self._player, self._version, self._stop = player, version, stop
        self._record, self._finished = record, finished

    def next_batch(self) -> Batch[list[Trajectory]] | None:
        """Play until there is enough to learn from; None when stopped before."""
        player = self._require_player()
        collected, busy = _Collected(time.perf_counter()), player.busy_seconds()
        batch = self._collect(player, collected)
        if self._stop() and len(batch) < self._size:
            self._ready = batch + self._ready
            return None
        self._raise_without_screens(collected)
        metrics = collected.metrics(busy_s=player.busy_seconds() - busy)
        return Batch(batch, metrics=metrics, origin=collected)

    def _collect(self, player: Player, collected: _Collected) -> list[Trajectory]:
        """A batch of episodes, what teaches nothing replaced a bounded number of times."""
        limit = self._size * (1 + self._refills)
        # Admitted episodes count towards the batch when what is dropped is replaced, else all of them do.
        counted = len(self._ready)
        while counted < self._size and len(collected.played) < limit and not self._stop():
            need = min(self._size - counted, limit - len(collected.played))
            for one in player.take(need, self._stop):
                counted += self._take_in(one, player, collected)
            while player.broken:
                collected.broken += 1
                self._record(player.broken.pop(0))
        batch, self._ready = whole_groups(self._ready, self._size)
        return batch

    def _take_in(self, played: Played, player: Player, collected: _Collected) -> int:
        """Sort an episode into its group; how many more count towards the batch."""
        trajectory = played.trajectory
        self.progress.add(1)
        self.progress.episodes += 1
        collected.played.append(played)
        self._finished(self.progress.steps, trajectory)
        self._record(trajectory)
        stale = trajectory.learnable and self._version - trajectory.versions[0] > self._max_staleness
        collected.dropped_stale += stale
        lost = stale or not trajectory.learnable
        group = self._groups.lose(trajectory.group) if lost else self._groups.add(trajectory)
        admitted = list(self._admit(group)) if group else []
        self._ready += admitted
        if not self._refills:
            return 1
        # Each lost one at once: of a group that is lost as a whole nothing is ever handed over.
        player.make_room(lost + len(group) - len(admitted))
        return len(admitted)

    def _raise_without_screens(self, collected: _Collected) -> None:
        played = collected.played
        self._broken_batches = self._broken_batches + 1 if played and not collected.unbroken() else 0
        if self._broken_batches >= BROKEN_BATCHES:
            raise CollectorFailed(
                f"in {self._broken_batches} batches in a row every screen broke, {len(played)} in the last one "
                f"({played[-1].trajectory.reason.rstrip('.')}). {self._sessions} may be gone, or the browsers there."
            )

    def release(self, batch: Batch[list[Trajectory]], version: int) -> None:
        """Report the episodes to the sampler of tasks, and let the player go on."""
        player, collected = self._require_player(), batch.origin
        self.progress.updates += 1
        if version == self._version:
            # No new version makes room for more episodes, so those that taught nothing have to.
            player.make_room(len(batch.experience) if self._refills else len(collected.played))
        self._version = version
        player.set_version(version)
        for order, trajectory in collected.unbroken():
            self._orders.sampler.report(order.key, trajectory.success)

    def requeue(self, batch: Batch[list[Trajectory]]) -> None:
        """The episodes come first in the next batch."""
        self._ready = [*batch.experience, *self._ready]

    def raise_if_failed(self) -> None:
        """A failure of the actors ends the wait for the next batch."""

    def metrics(self, batch: Batch[list[Trajectory]], timing: Timing) -> dict[str, float]:
        """How the episodes of the batch went, and how many there were in all."""
        return {**batch.metrics, "episodes": float(self.progress.episodes)}

    def state(self) -> SavedState:
        """Episodes that were played and not yet learned from, and where the orders stand."""
        waiting = [*self._ready, *self._groups.waiting()]
        return SavedState(
            pack_trajectories(waiting, "waiting"), {"orders": self._orders.state(), "ready": len(self._ready)}
        )

    def load_state(self, state: SavedState) -> bool:
        """Go on from there."""
        self._orders.load_state(state.facts["orders"])
        waiting, ready = unpack_trajectories(state.tensors, "waiting"), int(state.facts["ready"])
        self._ready = waiting[:ready]
        for trajectory in waiting[ready:]:
            self._groups.add(trajectory)
        # Episodes in flight were lost with the process: release the incomplete groups.
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
            raise CollectorFailed("EpisodeSource: nobody plays. Call open(player) before the first batch.")
        return self._player
