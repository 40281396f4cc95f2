"""Collecting all the while: a source whose segments are filled by somebody else, in a thread or in another process.

`BackgroundSource` is the learner's side: it publishes weights, takes segments, and turns a collector that raised, died
or hangs into a `CollectorFailed` for whoever waits or learns. The other side is a `Filler`: `ThreadFiller` here, for
policies that wait; `palaestra.actor.process` for those that keep a core busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import nn

from palaestra.actor.collector import BeforeStep, Collector, Episode, StopCollecting
from palaestra.actor.source import Segment
from palaestra.errors import CollectorFailed
from palaestra.policy.live import LiveWeights
from palaestra.transport.queue import Claim, SegmentQueue
from palaestra.transport.weights import WeightBoard

__all__ = ["BackgroundSource", "Filled", "Filler", "Following", "ThreadFiller"]

LOOK_AFTER_S = 0.2
"""How often a waiting learner looks whether the collector still moves."""
START_GRACE_S = 120.0
"""A first step may have to compile kernels, load a model or start a simulator."""
HANG_CONFIRMED_S = 0.5
"""How long a step that has taken too long is watched before it counts as hung: after a pause of the whole machine, or
of the learner alone, the collector only has to be given the time to say that it moves."""
STOP_GRACE_S = 5.0
"""How long a collector may take to finish the step it is in before it is left behind or killed."""


class Filled(NamedTuple):
    """What a filler says about a segment it has filled."""

    episodes: list[Episode]
    collect_seconds: float
    idle_seconds: float
    scale_state: tuple[float, float, float] | None


class Filler(Protocol):
    """Fills the segments that the queue grants."""

    def start(self, *, afresh: bool = False) -> None:
        """Begin; `afresh`: with new episodes, because the last filler did not end well."""

    def room(self) -> None:
        """A slot has become free."""

    def unmoved_for(self) -> float:
        """Seconds since the last step, 0 while there is nothing to do; less the grace of a first step."""

    def stop(self) -> bool:
        """End in bounded time; whether nothing of it is left."""


class BackgroundSource:
    """Segments from a filler, weights to it."""

    def __init__(
        self,
        policy: nn.Module,
        queue: SegmentQueue,
        board: WeightBoard,
        filler: Filler,
        *,
        step_timeout: float,
        restarts: int = 0,
        failures: list[str] | None = None,
    ) -> None:
        """`restarts`: how many times a collector that failed is replaced before anybody hears of it.

        `failures`: what befell earlier ones, of another source.
        """
        self._weights, self._queue, self._board, self._filler = LiveWeights(policy), queue, board, filler
        self._step_timeout, self._restarts = step_timeout, restarts
        self._version = 0
        self._suspected_at: float | None = None
        self.failures: list[str] = [] if failures is None else failures
        """What befell the collectors that were replaced."""

    def start(self, version: int, num_segments: int) -> None:
        """Begin to collect up to `num_segments`, the policy being at `version`."""
        # Nobody reads before the filler starts, and the weights may have changed without a new number.
        self._board.clear()
        self._suspected_at = None
        self._publish(version)
        self._queue.open(version, num_segments)
        self._filler.start()

    def take(self) -> Segment:
        """Wait for the next segment, however long it takes, as long as the collector moves."""
        while True:
            self.heed()
            self._filler.room()  # what was too stale has made some
            taken = self._queue.take(self._version, LOOK_AFTER_S)
            if taken is not None:
                said: Filled = taken.report
                return Segment(
                    self._queue.ring.segments[taken.slot], said.episodes, said.collect_seconds, said.idle_seconds,
                    taken.slot, taken.queue_depth, said.scale_state,
                )  # fmt: skip

    def give_back(self, segment: Segment, version: int) -> None:
        """Publish first: a collector that finds room must find the weights that made it."""
        self._publish(version)
        self._queue.release(segment.slot)
        self._filler.room()

    def put_back(self, segment: Segment) -> None:
        """The segment was not learned from after all: it comes first when somebody takes again."""
        said = Filled(list(segment.episodes), segment.collect_seconds, segment.idle_seconds, segment.scale_state)
        self._queue.put_back(segment.slot, said)

    def heed(self) -> None:
        """Raise when the collector has failed or not moved for too long, unless it can be replaced."""
        still = self._filler.unmoved_for()
        if self._hangs(still):
            self._queue.fail(
                CollectorFailed(
                    f"the background collector hangs: its step has not ended for {still:.1f} s, and "
                    f"trainer.step_timeout is {self._step_timeout:g}. Look at what the environment or the policy waits "
                    "for, or raise trainer.step_timeout."
                )
            )
        try:
            self._queue.heed()
        except CollectorFailed as failure:
            if len(self.failures) >= self._restarts or not self._filler.stop():
                raise
            self.failures.append(str(failure))
            self._suspected_at = None
            self._queue.reopen()
            self._filler.start(afresh=True)

    def _hangs(self, still: float) -> bool:
        now = time.monotonic()
        if still <= self._step_timeout:
            self._suspected_at = None
        elif self._suspected_at is None:
            self._suspected_at = now
        return self._suspected_at is not None and now - self._suspected_at > HANG_CONFIRMED_S

    def metrics(self) -> dict[str, float]:
        """What was thrown away so far, and how often the collector was replaced."""
        dropped = float(self._queue.ring.dropped_steps)
        return {"dropped_steps": dropped, "collector_restarts": float(len(self.failures))}

    def stop(self) -> bool:
        """Send the filler home; unread segments stay for a later start. Whether nothing of it is left."""
        self._queue.close()
        return self._filler.stop()

    def _publish(self, version: int) -> None:
        self._version = version
        if version > self._board.newest:
            self._board.publish(version, self._weights.read())


class Following:
    """A policy's copy that follows the published weights, and knows which it has."""

    def __init__(self, policy: nn.Module, board: WeightBoard) -> None:
        self._weights, self._board = LiveWeights(policy), board
        self.version = -1

    def forget(self) -> None:
        """Whatever is here, look again."""
        self.version = -1

    def renew(self, exact: int | None = None) -> int:
        """Take over the newest weights, or exactly those asked for, if they are not here already."""
        wanted = self._board.newest if exact is None else exact
        if wanted != self.version:
            self.version = self._weights.write(lambda targets: self._board.read_into(targets, exact))
        return self.version


class ThreadFiller:
    """Fills segments in a thread of this process, with a collector whose policy is a copy of the learner's."""

    def __init__(
        self, collector: Collector, queue: SegmentQueue, following: Following, start_afresh: Callable[[], None]
    ) -> None:
        """`following` keeps the collector's policy up to date; `start_afresh` makes it begin other episodes."""
        self._collector, self._queue, self._following = collector, queue, following
        self._start_afresh = start_afresh
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._moved_at = 0.0
        self._acting = self._warm = False

    def start(self, *, afresh: bool = False) -> None:
        """Start the thread."""
        if afresh:
            self._start_afresh()
        self._following.forget()
        self._stopping = False
        self._warm = False
        # A daemon, because a thread that hangs cannot be ended and must not keep the interpreter from leaving.
        self._thread = threading.Thread(target=self._run, name="palaestra-collector", daemon=True)
        self._thread.start()

    def room(self) -> None:
        """The thread waits on the queue itself."""

    def unmoved_for(self) -> float:
        """Seconds since the last step began."""
        return time.monotonic() - self._moved_at if self._acting else 0.0

    def stop(self) -> bool:
        """Ask the thread to leave before its next step and wait for it, but not for ever: False if it hangs."""
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
                said = Filled(self._collector.episodes, ended - began, began - idle_from, scale)
                slot, claim, idle_from = claim.slot, None, ended
                self._queue.deliver(slot, said)
        except StopCollecting:
            pass
        except BaseException as error:  # noqa: BLE001  whatever it was, the learner has to hear of it
            failure = CollectorFailed(f"the background collector failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._queue.fail(failure)
        finally:
            self._acting = False
            if claim is not None:
                buffer = self._queue.ring.segments[claim.slot]
                self._queue.give_up(claim.slot, buffer.position * buffer.num_envs)

    def _fill(self, claim: Claim) -> None:
        buffer = self._queue.ring.segments[claim.slot]
        buffer.reset()  # should not even the first step be reached, none was taken
        self._moved_at = time.monotonic() + START_GRACE_S
        self._acting = True
        self._collector.collect(buffer.num_steps, buffer, before_step=self._before_step(claim))

    def _before_step(self, claim: Claim) -> BeforeStep:
        following, exact = self._following, claim.version

        def before(t: int) -> int:
            if self._stopping:
                raise StopCollecting
            self._moved_at = time.monotonic() + (0.0 if self._warm else START_GRACE_S)
            self._warm = True
            return following.renew(exact)

        return before
