"""`ActorPool`: keeps episodes running concurrently, replaces finished and crashed ones, and stops in bounded time.

Each episode is one asyncio task. The pool starts as many requests as there are free slots and delivers every result
exactly once. A crash is logged and the slot is refilled; several crashes in a row, or a task that the sessions refuse,
end the pool with the error. `play_all` plays a list of requests; `PoolThread` runs a pool in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from palaestra.actor.task_runner import EpisodeRequest, Play
from palaestra.errors import CollectorFailed, PalaestraError, SessionRefused
from palaestra.experience.trajectory import Trajectory

_log = logging.getLogger(__name__)

MAX_CRASHES = 3
"""Consecutive crashes that end the pool."""
STOP_S = 10.0


class ActorPool:
    """Keeps as many episodes running as there are free slots."""

    def __init__(
        self,
        play: Play,
        *,
        next_request: Callable[[], EpisodeRequest | None],
        free_slots: Callable[[int], int],
        deliver: Callable[[EpisodeRequest, Trajectory], None],
        on_crash: Callable[[EpisodeRequest, BaseException], None] = lambda request, error: None,
        set_num_actors: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`next_request` returns None at the end; `free_slots` maps the number of running episodes to free slots.

        `set_num_actors` is called with the number of running episodes whenever free slots were filled.
        """
        self._play, self._next_request, self._free_slots = play, next_request, free_slots
        self._deliver, self._on_crash, self._set_num_actors = deliver, on_crash, set_num_actors
        self._running: dict[asyncio.Task[Trajectory], EpisodeRequest] = {}
        self._changed = asyncio.Event()
        self._crashes = 0

    async def run(self) -> None:
        """Play until there are no more requests. Cancelling stops every actor."""
        exhausted = False
        try:
            while True:
                self._changed.clear()
                while not exhausted and self._free_slots(len(self._running)) > 0:
                    request = self._next_request()
                    if request is None:
                        exhausted = True
                    else:
                        task = asyncio.ensure_future(self._play(request))
                        task.add_done_callback(lambda _: self._changed.set())
                        self._running[task] = request
                self._set_num_actors(len(self._running))
                if exhausted and not self._running:
                    return
                await self._changed.wait()
                self._deliver_finished()
        finally:
            await self._stop()

    def wake(self) -> None:
        """Check for free slots again."""
        self._changed.set()

    def _deliver_finished(self) -> None:
        """Deliver finished episodes in the order in which they were started."""
        for task, request in [(task, request) for task, request in self._running.items() if task.done()]:
            del self._running[task]
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                self._crashes = 0
                self._deliver(request, task.result())
                continue
            self._crashes += 1
            _log.warning("the actor of episode %s crashed: %r", request.episode_id, error)
            self._on_crash(request, error)
            if isinstance(error, SessionRefused) or self._crashes == MAX_CRASHES:
                raise error

    async def _stop(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            _, stuck = await asyncio.wait(self._running, timeout=STOP_S)
            for task in stuck:
                _log.warning("the actor of episode %s did not stop in time", self._running[task].episode_id)
        self._running.clear()


async def play_all(
    play: Play,
    requests: Sequence[EpisodeRequest],
    *,
    concurrent: int,
    stop: Callable[[], bool] = lambda: False,
    on_finished: Callable[[EpisodeRequest, Trajectory], None] = lambda request, trajectory: None,
    set_num_actors: Callable[[int], None] = lambda count: None,
) -> list[Trajectory]:
    """Play every request once, at most `concurrent` at a time, starting none after `stop`. Keeps the order."""
    waiting, finished = iter(requests), dict[str, Trajectory]()

    def deliver(request: EpisodeRequest, trajectory: Trajectory) -> None:
        finished[request.episode_id] = trajectory
        on_finished(request, trajectory)

    def raise_crash(request: EpisodeRequest, error: BaseException) -> None:
        raise error

    pool = ActorPool(
        play,
        next_request=lambda: None if stop() else next(waiting, None),
        free_slots=lambda running: concurrent - running,
        deliver=deliver,
        on_crash=raise_crash,
        set_num_actors=set_num_actors,
    )
    await pool.run()
    return [finished[request.episode_id] for request in requests if request.episode_id in finished]


class PoolThread:
    """Runs a pool in a thread with its own event loop."""

    def __init__(self, open_pool: Callable[[], AbstractAsyncContextManager[ActorPool]]) -> None:
        """`open_pool` builds the pool inside the event loop and releases its resources at the end."""
        self._open_pool = open_pool
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._pool: ActorPool | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="palaestra-actors", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def raise_if_failed(self) -> None:
        """Raise the error that ended the pool, if any."""
        if self._error is not None:
            if isinstance(self._error, PalaestraError):
                raise self._error
            raise CollectorFailed(f"the actors stopped: {self._error!r}.") from self._error

    def wake(self) -> None:
        """Check for free slots again."""
        if self._loop is not None and self._pool is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._pool.wake)

    def stop(self, within_s: float = 2 * STOP_S) -> bool:
        """Cancel every actor; returns whether all stopped in time."""
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
        except BaseException as error:  # noqa: BLE001  raised by raise_if_failed
            self._error = error

    async def _run_pool(self) -> None:
        self._task = asyncio.current_task()
        async with self._open_pool() as self._pool:
            await self._pool.run()
