"""Where a learner's episodes come from: played when asked for, or all the time behind its back.

Both have one face. `EpisodesInTurn` plays exactly what is needed, in lockstep, and then rests: the same seed gives the
same episodes. `EpisodesInBackground` keeps a pool going within the bound on staleness and hands over what has come.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from palaestra.actor.capacity import Capacity
from palaestra.actor.inference import InferenceStatistics
from palaestra.actor.pool import ActorPool, Play, PoolThread
from palaestra.actor.task_runner import EpisodeOrder
from palaestra.actor.task_sampler import TaskSampler
from palaestra.experience.trajectory import Trajectory

__all__ = ["EpisodeOrders", "EpisodesInBackground", "EpisodesInTurn", "Hall", "Played"]

WAIT_S = 0.2
"""How often a learner that waits for episodes looks whether the actors still live."""


@dataclass(frozen=True)
class Played:
    """An episode that is over."""

    order: EpisodeOrder
    trajectory: Trajectory


class EpisodeOrders:
    """Orders one after the other, `group_size` at a time for the same task and seed."""

    def __init__(self, sampler: TaskSampler, *, group_size: int, seed: int) -> None:
        self._sampler, self._size, self._seed = sampler, group_size, seed
        self._waiting: list[EpisodeOrder] = []
        self.number = 0
        """Of the next order."""

    def next(self) -> EpisodeOrder:
        """The next order."""
        if not self._waiting:
            choice, task = self._sampler.draw()
            first = self.number
            self._waiting = [
                EpisodeOrder(
                    f"e{number:08d}", task, _seed(self._seed, number), f"g{first:08d}" if self._size > 1 else "",
                    choice.key,
                )
                for number in range(first, first + self._size)
            ]  # fmt: skip
            self.number += self._size
        return self._waiting.pop(0)

    def state(self) -> dict[str, Any]:
        """Where it stands, and the sampler with it; a group that was begun is not taken up again."""
        return {"number": self.number, "sampler": self._sampler.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.number = int(state["number"])
        self._sampler.load_state(state["sampler"])
        self._waiting = []


class Hall(Protocol):
    """Everything that is needed to play, opened in an event loop."""

    @property
    def play(self) -> Play:
        """Plays one order."""

    def present(self, count: int) -> None:
        """So many actors are playing."""

    @property
    def statistics(self) -> InferenceStatistics:
        """Of inference."""


OpenHall = Callable[[Callable[[Trajectory], None]], AbstractAsyncContextManager[Hall]]
"""Opens a hall, given who is told of sessions that broke."""


class EpisodesInTurn:
    """Plays when asked, and rests in between."""

    def __init__(self, open_hall: OpenHall, orders: EpisodeOrders, *, concurrent: int) -> None:
        self._orders, self._concurrent = orders, concurrent
        self._open = open_hall
        self._runner = asyncio.Runner()
        self._hall: Hall | None = None
        self._closing: AbstractAsyncContextManager[Hall] | None = None
        self.broken: list[Trajectory] = []
        """Episodes whose session broke and that were tried again."""

    def gather(self, need: int, *, stop: Callable[[], bool] = lambda: False) -> list[Played]:
        """`need` episodes, in the order they were ordered; fewer when `stop` says so meanwhile."""
        return self._runner.run(self._gathered([self._orders.next() for _ in range(need)], stop))

    def rejected(self, count: int) -> None:
        """Nothing to do: what is missing is asked for."""

    def advanced(self, version: int) -> None:
        """Nothing to do: whoever plays next plays with the newest weights."""

    @property
    def statistics(self) -> InferenceStatistics:
        """Of inference."""
        return InferenceStatistics() if self._hall is None else self._hall.statistics

    def close(self) -> None:
        """Give everything up."""
        if self._closing is not None:
            self._runner.run(self._closing.__aexit__(None, None, None))
            self._closing = None
        self._runner.close()

    async def _gathered(self, orders: Sequence[EpisodeOrder], stop: Callable[[], bool]) -> list[Played]:
        if self._hall is None:
            self._closing = self._open(self.broken.append)
            self._hall = await self._closing.__aenter__()
        waiting, made = iter(orders), dict[str, Played]()

        def crashed(order: EpisodeOrder, error: BaseException) -> None:
            raise error

        pool = ActorPool(
            self._hall.play, next_order=lambda: None if stop() else next(waiting, None),
            free=lambda running: self._concurrent - running, present=self._hall.present, crashed=crashed,
            deliver=lambda order, trajectory: made.update({order.episode_id: Played(order, trajectory)}),
        )  # fmt: skip
        await pool.run()
        return [made[order.episode_id] for order in orders if order.episode_id in made]


class EpisodesInBackground:
    """Plays all the time, within the bound on staleness."""

    def __init__(self, open_hall: OpenHall, orders: EpisodeOrders, capacity: Capacity, *, version: int = 0) -> None:
        self._open, self._orders, self._capacity = open_hall, orders, capacity
        self._version, self._rejected = version, 0
        # Counted since the very first update, or a resumed run would begin a burst of episodes that come too late.
        self._begun = capacity.accepted_at(version)
        self._came: queue.SimpleQueue[Played] = queue.SimpleQueue()
        self._hall: Hall | None = None
        self._closing: AbstractAsyncContextManager[Hall] | None = None
        self.broken: list[Trajectory] = []
        self._thread = PoolThread(self._build, closing=self._close)
        self._thread.start()

    def gather(self, need: int, *, stop: Callable[[], bool] = lambda: False) -> list[Played]:
        """What has come, at least one and at most `need`; nothing when `stop` says so meanwhile."""
        came: list[Played] = []
        while not came and not stop():
            self._thread.check()
            try:
                came.append(self._came.get(timeout=WAIT_S))
            except queue.Empty:
                continue
        while came and len(came) < need and not self._came.empty():
            came.append(self._came.get())
        return came

    def rejected(self, count: int) -> None:
        """So many teach nothing; others may be played in their place."""
        self._rejected += count
        self._thread.wake()

    def advanced(self, version: int) -> None:
        """The learner has taken a batch."""
        self._version = version
        self._thread.wake()

    @property
    def statistics(self) -> InferenceStatistics:
        """Of inference."""
        return InferenceStatistics() if self._hall is None else self._hall.statistics

    def waiting(self) -> int:
        """Episodes that nobody has taken yet."""
        return self._came.qsize()

    def close(self) -> None:
        """Stop every actor."""
        self._thread.stop()

    def _free(self, running: int) -> int:
        accepted = self._begun - self._rejected - running
        return self._capacity.free(running=running, accepted=accepted, version=self._version)

    def _next(self) -> EpisodeOrder:
        self._begun += 1
        return self._orders.next()

    async def _build(self) -> ActorPool:
        self._closing = self._open(self.broken.append)
        self._hall = await self._closing.__aenter__()
        return ActorPool(
            self._hall.play, next_order=self._next, free=self._free, present=self._hall.present,
            deliver=lambda order, trajectory: self._came.put(Played(order, trajectory)),
            crashed=lambda order, error: self.rejected(1),
        )  # fmt: skip

    async def _close(self) -> None:
        if self._closing is not None:
            await self._closing.__aexit__(None, None, None)


def _seed(run: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"episode {run} {number}".encode()).digest()[:6], "big")
