"""`ActorPool`: keeps episodes running, replaces those that end or crash, drains, and stops in bounded time.

One actor is one episode is one task of the event loop. The pool asks how many more may begin, asks for that many
orders, and hands over what comes of each exactly once. A crash of an actor is counted and its place filled again; a few
in a row, or a task that the sessions refuse, end the pool with the reason. `play_all` runs a list to its end;
`PoolThread` runs a pool behind a learner's back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from palaestra.actor.task_runner import EpisodeOrder
from palaestra.errors import CollectorFailed, PalaestraError, SessionRefused
from palaestra.experience.trajectory import Trajectory

__all__ = ["ActorPool", "PoolStatistics", "PoolThread", "play_all"]

_log = logging.getLogger(__name__)

Play: TypeAlias = Callable[[EpisodeOrder], Awaitable[Trajectory]]
CRASHES = 3
"""Crashes in a row after which the pool gives up: the next one would crash as well."""
STOP_S = 10.0


@dataclass(frozen=True)
class PoolStatistics:
    """What the pool has done so far."""

    begun: int = 0
    finished: int = 0
    crashed: int = 0
    running: int = 0


class ActorPool:
    """Keeps as many episodes running as `free` allows."""

    def __init__(
        self,
        play: Play,
        *,
        next_order: Callable[[], EpisodeOrder | None],
        free: Callable[[int], int],
        deliver: Callable[[EpisodeOrder, Trajectory], None],
        crashed: Callable[[EpisodeOrder, BaseException], None] = lambda order, error: None,
        present: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`next_order` gives None when there is nothing more; `free` is told how many are running.

        `present` is told how many are playing, each time that changes; one that ended counts until its place is filled.
        """
        self._play, self._next_order, self._free = play, next_order, free
        self._deliver, self._crashed, self._present = deliver, crashed, present
        self._running: dict[asyncio.Task[Trajectory], EpisodeOrder] = {}
        self._news = asyncio.Event()
        self._draining = False
        self._crashes = 0
        self._statistics = PoolStatistics()

    @property
    def statistics(self) -> PoolStatistics:
        """A snapshot."""
        return replace(self._statistics, running=len(self._running))

    async def run(self) -> None:
        """Until there is nothing more to do, or `drain`; cancelling it stops every actor."""
        exhausted = False
        try:
            while True:
                self._news.clear()
                while not (exhausted or self._draining) and self._free(len(self._running)) > 0:
                    order = self._next_order()
                    if order is None:
                        exhausted = True
                        break
                    self._begin(order)
                self._present(len(self._running))
                if not self._running and (exhausted or self._draining):
                    return
                await self._news.wait()
                self._settle()
        finally:
            await self._stop()

    def wake(self) -> None:
        """More may begin than before."""
        self._news.set()

    def drain(self) -> None:
        """Begin nothing more; `run` returns when the last one is over."""
        self._draining = True
        self._news.set()

    def _begin(self, order: EpisodeOrder) -> None:
        task = asyncio.ensure_future(self._play(order))
        task.add_done_callback(lambda _: self._news.set())
        self._running[task] = order
        self._statistics = replace(self._statistics, begun=self._statistics.begun + 1)

    def _settle(self) -> None:
        """Hand over what is finished, in the order it was begun."""
        for task, order in [(task, order) for task, order in self._running.items() if task.done()]:
            del self._running[task]
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                self._crashes = 0
                self._statistics = replace(self._statistics, finished=self._statistics.finished + 1)
                self._deliver(order, task.result())
                continue
            self._crashes += 1
            self._statistics = replace(self._statistics, crashed=self._statistics.crashed + 1)
            _log.warning("the actor of episode %s crashed: %r", order.episode_id, error)
            self._crashed(order, error)
            if isinstance(error, SessionRefused) or self._crashes == CRASHES:
                raise error

    async def _stop(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            _, stuck = await asyncio.wait(self._running, timeout=STOP_S)
            for task in stuck:
                _log.warning("the actor of episode %s does not stop and is left behind", self._running[task].episode_id)
        self._running.clear()


async def play_all(
    play: Play, orders: Sequence[EpisodeOrder], *, concurrent: int,
    heard: Callable[[EpisodeOrder, Trajectory], None] = lambda order, trajectory: None,
    present: Callable[[int], None] = lambda count: None,
) -> list[Trajectory]:  # fmt: skip
    """Every order played once, at most `concurrent` at a time; the trajectories in the order of the orders."""
    waiting, made = iter(orders), dict[str, Trajectory]()

    def deliver(order: EpisodeOrder, trajectory: Trajectory) -> None:
        made[order.episode_id] = trajectory
        heard(order, trajectory)

    def crashed(order: EpisodeOrder, error: BaseException) -> None:
        raise error

    pool = ActorPool(
        play, next_order=lambda: next(waiting, None), free=lambda running: concurrent - running, deliver=deliver,
        crashed=crashed, present=present,
    )  # fmt: skip
    await pool.run()
    return [made[order.episode_id] for order in orders]


class PoolThread:
    """A pool in a thread and an event loop of its own. Whatever ends it surfaces at the next `check`."""

    def __init__(self, build: Callable[[], Awaitable[ActorPool]], *, closing: Callable[[], Awaitable[None]]) -> None:
        """`build` makes the pool inside the loop; `closing` gives up there what it holds, when the pool is over."""
        self._build, self._closing = build, closing
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._pool: ActorPool | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="palaestra-actors", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the pool, if anything did."""
        if self._error is not None:
            if isinstance(self._error, PalaestraError):
                raise self._error
            raise CollectorFailed(f"the actors stopped: {self._error!r}.") from self._error

    @property
    def alive(self) -> bool:
        """Whether anything can still come."""
        return self._thread.is_alive()

    @property
    def statistics(self) -> PoolStatistics:
        """A snapshot."""
        return PoolStatistics() if self._pool is None else self._pool.statistics

    def wake(self) -> None:
        """More may begin than before."""
        if self._loop is not None and self._pool is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._pool.wake)

    def stop(self, within_s: float = 2 * STOP_S) -> bool:
        """Cancel every actor; whether everything has ended in time."""
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _live(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._lived())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001  it surfaces in the thread that waits for experience
            self._error = error

    async def _lived(self) -> None:
        self._task = asyncio.current_task()
        try:
            self._pool = await self._build()
            await self._pool.run()
        finally:
            await self._closing()
