"""A collector in a thread of this process: right for policies whose acting waits for a device or a server.

`BackgroundCollector` is what `palaestra.actor.asynchronous` drives; `palaestra.actor.collector_process` has the one in
a process of its own. Both fill the segments that a queue grants and act on the newest published weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import nn

from palaestra.actor.collector import BeforeStep, Collector, StopCollecting
from palaestra.errors import CollectorFailed
from palaestra.policy.live import LiveWeights
from palaestra.transport.queue import Claim, SegmentQueue
from palaestra.transport.source import Episode
from palaestra.transport.weights import WeightBoard

__all__ = ["BackgroundCollector", "CollectorThread", "SegmentReport", "WeightSubscriber"]

START_GRACE_S = 120.0
"""A first step may have to compile kernels, load a model or start a simulator."""
STOP_GRACE_S = 5.0
"""How long a collector may take to finish its step before it is abandoned or killed."""


class SegmentReport(NamedTuple):
    """What a collector reports about a segment that it filled."""

    episodes: list[Episode]
    collect_seconds: float
    idle_seconds: float
    scale_state: tuple[float, float, float] | None


class BackgroundCollector(Protocol):
    """Fills the segments that the queue grants."""

    def start(self, *, fresh: bool = False) -> None:
        """Begin; `fresh`: with new episodes, because the collector before failed."""

    def wake(self) -> None:
        """A slot has become free."""

    def seconds_in_step(self) -> float:
        """Seconds since the last step began, less the grace of a first step; 0 while there is nothing to do."""

    def stop(self) -> bool:
        """End in bounded time; whether nothing of it is left."""


class WeightSubscriber:
    """Keeps a copy of a policy at the published weights, and knows their version."""

    def __init__(self, policy: nn.Module, board: WeightBoard) -> None:
        self._weights, self._board = LiveWeights(policy), board
        self.version = -1

    def reset(self) -> None:
        """Read the board again, whatever is here."""
        self.version = -1

    def update(self, exact: int | None = None) -> int:
        """Take over the newest weights, or exactly version `exact`, unless they are here already."""
        wanted = self._board.newest if exact is None else exact
        if wanted != self.version:
            self.version = self._weights.write(lambda targets: self._board.read_into(targets, exact))
        return self.version


class CollectorThread:
    """Fills segments with a collector whose policy is a copy of the learner's."""

    def __init__(
        self, collector: Collector, queue: SegmentQueue, subscriber: WeightSubscriber, restart: Callable[[], None]
    ) -> None:
        """`subscriber` keeps the collector's policy up to date; `restart` makes it begin other episodes."""
        self._collector, self._queue, self._subscriber = collector, queue, subscriber
        self._restart = restart
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._moved_at = 0.0
        self._acting = self._warm = False

    def start(self, *, fresh: bool = False) -> None:
        """Start the thread."""
        if fresh:
            self._restart()
        self._subscriber.reset()
        self._stopping = False
        self._warm = False
        # A daemon, because a thread that hangs cannot be ended and must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="palaestra-collector", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """The thread waits on the queue itself."""

    def seconds_in_step(self) -> float:
        """Seconds since the last step began."""
        return time.monotonic() - self._moved_at if self._acting else 0.0

    def stop(self) -> bool:
        """Ask the thread to end before its next step and wait for it; False if it hangs."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(STOP_GRACE_S)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        claim: Claim | None = None
        # Threads of arithmetic are counted per thread of ours, and a new one begins with all cores.
        torch.set_num_threads(torch.get_num_threads())
        try:
            idle_from = time.monotonic()
            while (claim := self._queue.claim()) is not None:
                began = time.monotonic()
                self._fill(claim)
                self._acting = False
                ended = time.monotonic()
                scale = self._collector.scale_state()
                report = SegmentReport(self._collector.episodes, ended - began, began - idle_from, scale)
                slot, claim, idle_from = claim.slot, None, ended
                self._queue.deliver(slot, report)
        except StopCollecting:
            pass
        except BaseException as error:  # noqa: BLE001  raised again in the learner
            failure = CollectorFailed(f"the background collector failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._queue.fail(failure)
        finally:
            self._acting = False
            if claim is not None:
                buffer = self._queue.ring.segments[claim.slot]
                self._queue.abandon(claim.slot, buffer.position * buffer.num_envs)

    def _fill(self, claim: Claim) -> None:
        buffer = self._queue.ring.segments[claim.slot]
        buffer.reset()  # should not even the first step be reached, none was taken
        self._moved_at = time.monotonic() + START_GRACE_S
        self._acting = True
        self._collector.collect(buffer.num_steps, buffer, before_step=self._before_step(claim))

    def _before_step(self, claim: Claim) -> BeforeStep:
        subscriber, exact = self._subscriber, claim.version

        def before(t: int) -> int:
            if self._stopping:
                raise StopCollecting
            self._moved_at = time.monotonic() + (0.0 if self._warm else START_GRACE_S)
            self._warm = True
            return subscriber.update(exact)

        return before
