"""A collector in a thread of this process: right for policies whose acting waits for a device or a server.

`palaestra.actor.collector_process` has the one in a process of its own. Both fill the segments that a queue grants, act
on the newest published weights, and write down in a pulse that they move (`SegmentFiller`).
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from palaestra.actor.collector import Collector, StopCollecting
from palaestra.errors import CollectorFailed
from palaestra.experience.buffer import RolloutBuffer
from palaestra.policy.weight_sync import LiveWeights
from palaestra.transport.queue import Claim, SegmentQueue
from palaestra.transport.source import EpisodeStats
from palaestra.transport.weights import WeightBoard

__all__ = ["CollectorThread", "SegmentFiller", "SegmentReport", "WeightSubscriber"]

START_GRACE_S = 120.0
"""A first step may have to compile kernels, load a model or start a simulator."""
STOP_GRACE_S = 5.0
"""How long a collector may take to finish its step before it is abandoned or killed."""

# Where each fact stands in a pulse, which the collector writes (but for STOP) and the learner reads.
MOVED_AT, STEPS, STOP = 0, 1, 2
"""When the last step began; how many each environment has taken since the start; whether to stop."""


class SegmentReport(NamedTuple):
    """What a collector reports about a segment that it filled."""

    episodes: list[EpisodeStats]
    collect_seconds: float
    idle_seconds: float
    moments: tuple[float, float, float] | None
    """Of the reward scale; None without one."""


class WeightSubscriber:
    """Keeps a copy of a policy at the published weights, and knows their version."""

    def __init__(self, policy: nn.Module, board: WeightBoard) -> None:
        self._weights, self._board = LiveWeights(policy), board
        self.version = -1

    def update(self, exact: int | None = None) -> int:
        """Take over the newest weights, or exactly version `exact`, unless they are here already."""
        wanted = self._board.newest if exact is None else exact
        if wanted != self.version:
            self.version = self._weights.write(lambda targets: self._board.read_into(targets, exact))
        return self.version


class SegmentFiller:
    """Fills one segment after the other with a collector whose policy a subscriber keeps up to date."""

    def __init__(self, collector: Collector, subscriber: WeightSubscriber, pulse: NDArray[np.float64]) -> None:
        self._collector, self._subscriber, self._pulse = collector, subscriber, pulse
        self._done = 0
        self._idle_from = time.monotonic()

    def fill(self, buffer: RolloutBuffer, exact: int | None) -> SegmentReport:
        """Collect into the buffer; `exact`: the version to act on, None: the newest. `StopCollecting` when told to."""
        began = time.monotonic()
        buffer.reset()  # should not even the first step be reached, none was taken
        try:
            self._collector.collect(buffer.num_steps, buffer, before_step=partial(self._before_step, exact))
        finally:
            self._pulse[STEPS] = self._done + buffer.position
        self._done += buffer.num_steps
        idle, self._idle_from = began - self._idle_from, time.monotonic()
        scale = self._collector.reward_scale
        moments = None if scale is None else scale.moments
        return SegmentReport(self._collector.episodes, self._idle_from - began, idle, moments)

    def _before_step(self, exact: int | None, t: int) -> int:
        self._pulse[STEPS] = self._done + t
        if self._done or t:  # the first step of all keeps its grace
            self._pulse[MOVED_AT] = time.monotonic()
        if self._pulse[STOP]:
            raise StopCollecting
        return self._subscriber.update(exact)


class CollectorThread:
    """Fills segments with a collector whose policy is a copy of the learner's."""

    def __init__(self, collector: Collector, queue: SegmentQueue, board: WeightBoard) -> None:
        self._collector, self._queue, self._board = collector, queue, board
        self._thread: threading.Thread | None = None
        self._pulse = np.zeros(3)
        self._acting = False

    def start(self) -> None:
        """Start the thread."""
        self._pulse[:] = time.monotonic() + START_GRACE_S, 0, 0
        # A daemon, because a thread that hangs cannot be ended and must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="palaestra-collector", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """The thread waits on the queue itself."""

    def seconds_in_step(self) -> float:
        """Seconds since the last step began, less the grace of a first step; 0 while there is nothing to do."""
        return time.monotonic() - float(self._pulse[MOVED_AT]) if self._acting else 0.0

    def stop(self) -> bool:
        """Ask the thread to end before its next step and wait for it; False if it hangs."""
        self._pulse[STOP] = 1.0
        if self._thread is not None:
            self._thread.join(STOP_GRACE_S)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        # Threads of arithmetic are counted per thread of ours, and a new one begins with all cores.
        torch.set_num_threads(torch.get_num_threads())
        segments = self._queue.ring.segments
        claim: Claim | None = None
        try:
            subscriber = WeightSubscriber(self._collector.policy, self._board)
            filler = SegmentFiller(self._collector, subscriber, self._pulse)
            while (claim := self._queue.claim()) is not None:
                # Whatever it did before, from here on it has something to do.
                self._pulse[MOVED_AT] = max(self._pulse[MOVED_AT], time.monotonic())
                self._acting = True
                report = filler.fill(segments[claim.slot], claim.version)
                self._acting = False
                slot, claim = claim.slot, None
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
                buffer = segments[claim.slot]
                self._queue.abandon(claim.slot, buffer.position * buffer.num_envs)
