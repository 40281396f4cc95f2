"""`ActorPool`: keeps episodes running, replaces those that end or crash, and stops in bounded time.

One actor is one episode is one task of the event loop. The pool asks how many more may begin, asks for that many
orders, and hands over what comes of each exactly once. A crash of an actor is logged and its place filled again; a few
in a row, or a task that the sessions refuse, end the pool with the reason. `play_all` plays a list of orders;
`PoolThread` runs a pool in the background.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from palaestra.actor.task_runner import EpisodeOrder, Play
from palaestra.errors import CollectorFailed, PalaestraError, SessionRefused
from palaestra.experience.trajectory import Trajectory

__all__ = ["ActorPool", "PoolThread", "play_all"]

_log = logging.getLogger(__name__)

CRASHES = 3
"""Crashes in a row after which the pool gives up: the next one would crash as well."""
STOP_S = 10.0


class ActorPool:
    """Keeps as many episodes running as `free` allows."""

    def __init__(
        self,
        play: Play,
        *,
        next_order: Callable[[], EpisodeOrder | None],
        free: Callable[[int], int],
        deliver: Callable[[EpisodeOrder, Trajectory], None],
        on_crash: Callable[[EpisodeOrder, BaseException], None] = lambda order, error: None,
        set_players: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`next_order` gives None when there is nothing more; `free` is given how many are running.

        `set_players` is given how many play, each time that changes; one that ended counts until its place is filled.
        """
        self._play, self._next_order, self._free = play, next_order, free
        self._deliver, self._on_crash, self._set_players = deliver, on_crash, set_players
        self._running: dict[asyncio.Task[Trajectory], EpisodeOrder] = {}
        self._changed = asyncio.Event()
        self._crashes = 0

    async def run(self) -> None:
        """Play until there is nothing more to do; cancelling it stops every actor."""
        exhausted = False
        try:
            while True:
                self._changed.clear()
                while not exhausted and self._free(len(self._running)) > 0:
                    order = self._next_order()
                    if order is None:
                        exhausted = True
                    else:
                        self._begin(order)
                self._set_players(len(self._running))
                if exhausted and not self._running:
                    return
                await self._changed.wait()
                self._deliver_finished()
        finally:
            await self._stop()

    def wake(self) -> None:
        """More may begin than before."""
        self._changed.set()

    def _begin(self, order: EpisodeOrder) -> None:
        task = asyncio.ensure_future(self._play(order))
        task.add_done_callback(lambda _: self._changed.set())
        self._running[task] = order

    def _deliver_finished(self) -> None:
        """Hand over what is finished, in the order it was begun."""
        for task, order in [(task, order) for task, order in self._running.items() if task.done()]:
            del self._running[task]
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                self._crashes = 0
                self._deliver(order, task.result())
                continue
            self._crashes += 1
            _log.warning("the actor of episode %s crashed: %r", order.episode_id, error)
            self._on_crash(order, error)
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
    play: Play,
    orders: Sequence[EpisodeOrder],
    *,
    concurrent: int,
    stop: Callable[[], bool] = lambda: False,
    on_finished: Callable[[EpisodeOrder, Trajectory], None] = lambda order, trajectory: None,
    set_players: Callable[[int], None] = lambda count: None,
) -> list[Trajectory]:
    """Play every order once, at most `concurrent` at a time; begin no more after `stop`. In the order of `orders`."""
    waiting, finished = iter(orders), dict[str, Trajectory]()

    def deliver(order: EpisodeOrder, trajectory: Trajectory) -> None:
        finished[order.episode_id] = trajectory
        on_finished(order, trajectory)

    def raise_crash(order: EpisodeOrder, error: BaseException) -> None:
        raise error

    pool = ActorPool(
        play,
        next_order=lambda: None if stop() else next(waiting, None),
        free=lambda running: concurrent - running,
        deliver=deliver,
        on_crash=raise_crash,
        set_players=set_players,
    )
    await pool.run()
    return [finished[order.episode_id] for order in orders if order.episode_id in finished]


class PoolThread:
    """A pool in a thread and an event loop of its own."""

    def __init__(self, open_pool: Callable[[], AbstractAsyncContextManager[ActorPool]]) -> None:
        """`open_pool` makes the pool inside the loop and gives up there what it holds, when the pool is over."""
        self._open_pool = open_pool
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._pool: ActorPool | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="palaestra-actors", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def raise_if_failed(self) -> None:
        """Raise what ended the pool, if anything did."""
        if self._error is not None:
            if isinstance(self._error, PalaestraError):
                raise self._error
            raise CollectorFailed(f"the actors stopped: {self._error!r}.") from self._error

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

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._run_pool())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001  it surfaces in the thread that waits for experience
            self._error = error

    async def _run_pool(self) -> None:
        self._task = asyncio.current_task()
        async with self._open_pool() as self._pool:
            await self._pool.run()
