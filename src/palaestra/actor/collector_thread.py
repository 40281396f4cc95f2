"""Asynchronous collection in a thread: for policies whose inference waits for a device or a server.

`palaestra.actor.collector_process` does the same in a process. Both fill the segments that a queue grants, act with the
newest published weights, and update a heartbeat (`SegmentFiller`).
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any, NamedTuple

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

START_GRACE_S = 120.0
"""Extra time for the first step, which may compile kernels, load a model or start a simulator."""
STOP_GRACE_S = 5.0
"""Time for a collector to finish its step before it is abandoned or killed."""

STEP_STARTED_AT, STEPS, STOP = 0, 1, 2
"""Indices of the heartbeat: start of the last step, steps per environment since the start, and the learner's request to
stop. The learner writes only STOP."""


class SegmentReport(NamedTuple):
    """A collector's report about a filled segment."""

    episodes: list[EpisodeStats]
    collect_seconds: float
    idle_seconds: float
    moments: tuple[float, float, float] | None
    """Moments of the reward scale; None without one."""


class WeightSubscriber:
    """Updates a copy of a policy to the published weights."""

    def __init__(self, policy: nn.Module, board: WeightBoard) -> None:
        self._weights, self._board = LiveWeights(policy), board
        self.version = -1

    def update(self, exact: int | None = None) -> int:
        """Load the newest weights, or exactly version `exact`, if not loaded already; returns the version."""
        wanted = self._board.newest if exact is None else exact
        if wanted != self.version:
            self.version = self._weights.write(lambda targets: self._board.read_into(targets, exact))
        return self.version


class SegmentFiller:
    """Fills segments with a collector, updating its policy before every step."""

    def __init__(self, collector: Collector, subscriber: WeightSubscriber, heartbeat: NDArray[np.float64]) -> None:
        self._collector, self._subscriber, self._heartbeat = collector, subscriber, heartbeat
        # A view of the same memory: its numbers are read and written several times faster than those of an array.
        self._beat: Any = heartbeat.data
        self._done = 0
        self._idle_from = time.monotonic()

    def fill(self, buffer: RolloutBuffer, exact: int | None) -> SegmentReport:
        """Collect into the buffer, with version `exact` (None: the newest). Raises `StopCollecting` on request."""
        began = time.monotonic()
        buffer.reset()  # position 0, in case the first step is not reached
        try:
            self._collector.collect(buffer.num_steps, buffer, before_step=partial(self._before_step, exact))
        finally:
            self._heartbeat[STEPS] = self._done + buffer.position
        self._done += buffer.num_steps
        idle, self._idle_from = began - self._idle_from, time.monotonic()
        scale = self._collector.reward_scale
        moments = None if scale is None else scale.moments
        return SegmentReport(self._collector.episodes, self._idle_from - began, idle, moments)

    def _before_step(self, exact: int | None, t: int) -> int:
        beat, steps = self._beat, self._done + t
        beat[STEPS] = steps
        if steps:  # the very first step keeps its extra time
            beat[STEP_STARTED_AT] = time.monotonic()
        if beat[STOP]:
            raise StopCollecting
        return self._subscriber.update(exact)


class CollectorThread:
    """Fills segments in a thread, with a copy of the learner's policy."""

    def __init__(self, collector: Collector, queue: SegmentQueue, board: WeightBoard) -> None:
        self._collector, self._queue, self._board = collector, queue, board
        self._thread: threading.Thread | None = None
        self._heartbeat = np.zeros(3)
        self._acting = False

    def start(self) -> None:
        """Start the thread."""
        self._heartbeat[:] = time.monotonic() + START_GRACE_S, 0, 0
        # A daemon: a hung thread cannot be ended and must not block the exit of the interpreter.
        self._thread = threading.Thread(target=self._run, name="palaestra-collector", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Do nothing: the thread waits on the queue."""

    def seconds_in_step(self) -> float:
        """Seconds since the last step started, less the extra time of the first step; 0 while idle."""
        return time.monotonic() - float(self._heartbeat[STEP_STARTED_AT]) if self._acting else 0.0

    def stop(self) -> bool:
        """Stop the thread before its next step; False if it hangs."""
        self._heartbeat[STOP] = 1.0
        if self._thread is not None:
            self._thread.join(STOP_GRACE_S)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        # The number of intra-op threads is per thread, and a new thread starts with all cores.
        torch.set_num_threads(torch.get_num_threads())
        segments = self._queue.ring.segments
        claim: Claim | None = None
        try:
            subscriber = WeightSubscriber(self._collector.policy, self._board)
            filler = SegmentFiller(self._collector, subscriber, self._heartbeat)
            while (claim := self._queue.claim()) is not None:
                # Waiting for the claim does not count as time in a step.
                self._heartbeat[STEP_STARTED_AT] = max(self._heartbeat[STEP_STARTED_AT], time.monotonic())
                self._acting = True
                report = filler.fill(segments[claim.slot], claim.version)
                self._acting = False
                slot, claim = claim.slot, None
                self._queue.deliver(slot, report)
        except StopCollecting:
            pass
        except BaseException as error:  # noqa: BLE001  raised again in the learner
            failure = CollectorFailed(f"the asynchronous collector failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._queue.fail(failure)
        finally:
            self._acting = False
            if claim is not None:
                buffer = segments[claim.slot]
                self._queue.abandon(claim.slot, buffer.position * buffer.num_envs)
