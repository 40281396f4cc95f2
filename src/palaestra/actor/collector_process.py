"""Asynchronous collection in a process: for environments and policies that keep a CPU core busy.

Both processes map the same ring, weight board and heartbeat onto one block of anonymous shared memory. The pipe carries
claims, segment reports and tracebacks, never tensors. Only the parent keeps counters and no lock is shared, so a killed
child loses nothing but its unfinished segment, whose steps the parent counts. A child exits if its parent is gone.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from palaestra.actor.collector import Collector, StopCollecting
from palaestra.actor.collector_thread import (
    START_GRACE_S,
    STEP_STARTED_AT,
    STEPS,
    STOP,
    STOP_GRACE_S,
    SegmentFiller,
    SegmentReport,
    WeightSubscriber,
)
from palaestra.env.make import EnvConfig, make_env
from palaestra.env.vector import VectorEnv
from palaestra.errors import CollectorFailed, PalaestraError
from palaestra.experience.vla_buffer import VLABuffer
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.weight_sync import LiveWeights, deserialize_structure, policy_tensors, serialize_structure
from palaestra.processes.children import UNGUARDED_EXIT, UNGUARDED_REMEDY, is_picklable, start_process
from palaestra.processes.shared_memory import SharedArrays
from palaestra.processes.threads import limit_threads
from palaestra.transport.queue import SegmentQueue
from palaestra.transport.weights import WeightBoard

PARENT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent to the whole process group; only the parent reacts to them."""


@dataclass(frozen=True)
class SharedLayout:
    """Layout of the shared memory, for both processes."""

    ring: dict[str, Any]
    """Arguments of `VLABuffer`."""
    depth: int
    """Depth of the weight board."""
    live: tuple[tuple[int, ...], ...]
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool, bool], ...]
    """Shape, type, is parameter, is frozen: for every tensor of the policy."""

    @classmethod
    def of(cls, policy: nn.Module, ring: dict[str, Any], depth: int) -> SharedLayout:
        """The layout for a policy and the ring it needs."""
        live = tuple(array.shape for array in LiveWeights(policy).read())
        untrained = {id(p) for p in FlatParameters.of(policy).untrained}
        tensors = tuple(
            (tuple(t.shape), t.dtype, isinstance(t, nn.Parameter), id(t) in untrained) for t in policy_tensors(policy)
        )
        return cls(ring, depth, live, tensors)

    def allocate(self, memory: SharedArrays) -> tuple[VLABuffer, WeightBoard, NDArray[np.float64], list[NDArray[Any]]]:
        """Ring, board, heartbeat and the frozen weights (as bytes)."""
        ring = VLABuffer(memory=memory, **self.ring)
        board = WeightBoard([np.empty(shape, np.uint8) for shape in self.live], self.depth, memory=memory)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _, fixed in self.tensors if fixed]
        frozen = [memory((size,), np.uint8) for size in sizes]
        return ring, board, memory((3,), np.float64), frozen


@dataclass(frozen=True)
class CollectorSetup:
    """Arguments of a collector process besides memory and policy."""

    env: EnvConfig
    arguments: dict[str, Any]
    """Arguments of `Collector` besides environment and policy."""
    moments: tuple[float, float, float] | None
    """Moments of the reward scale so far."""
    num_steps: int
    """Steps taken by each stream before."""
    torch_threads: int
    device: str
    """Device of the collector's policy."""


class CollectorProcess:
    """Fills segments in another process; every start creates a new one."""

    def __init__(
        self,
        policy: nn.Module,
        layout: SharedLayout,
        block: Any,
        queue: SegmentQueue,
        next_setup: Callable[[], CollectorSetup],
    ) -> None:
        self._layout, self._block, self._queue, self._next_setup = layout, block, queue, next_setup
        _, _, self._heartbeat, self._frozen = layout.allocate(SharedArrays(block))
        self._fixed = FlatParameters.of(policy).untrained
        self._structure = serialize_structure(policy)
        self._process: Any = None
        self._pipe: Connection | None = None
        self._listener: threading.Thread | None = None
        self._sending = threading.Lock()
        self._granted: list[int] = []
        self._delivered = 0

    @property
    def pid(self) -> int | None:
        """Process id; None if it is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; its environments start new episodes."""
        context = multiprocessing.get_context("spawn")
        for memory, tensor in zip(self._frozen, self._fixed, strict=True):
            np.copyto(memory, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        self._heartbeat[:] = time.monotonic() + START_GRACE_S, 0, 0
        self._granted, self._delivered = [], 0
        ours, theirs = context.Pipe()
        args = (theirs, self._block, self._layout, self._structure, self._next_setup())
        # Not a daemon, because its environments may start processes.
        self._process = context.Process(target=_run_child, args=args, name="palaestra-collector")
        self._pipe = ours
        self._listener = threading.Thread(
            target=self._listen, args=(ours, self._process), name="palaestra-collector-listener", daemon=True
        )
        # Blocked until the child ignores them, so that Ctrl-C during its imports does not kill it. Starting the
        # resource tracker unblocks signals, so it must run before.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
        try:
            start_process(self._process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._listener.start()
        self.wake()

    def wake(self) -> None:
        """Send the claims that the queue grants to the child."""
        with self._sending:
            while self._pipe is not None and self._may_grant() and (claim := self._queue.claim(0.0)) is not None:
                if not self._granted:
                    # Idle time does not count as time in a step.
                    self._heartbeat[STEP_STARTED_AT] = max(self._heartbeat[STEP_STARTED_AT], time.monotonic())
                self._granted.append(claim.slot)
                with contextlib.suppress(OSError):  # the listener reports a dead child
                    self._pipe.send(claim)

    def _may_grant(self) -> bool:
        # Claims are sent in advance, so that the child never waits; but a segment to overwrite is chosen late.
        return self._queue.ring.overflow == "block" or not self._granted

    def seconds_in_step(self) -> float:
        """As `CollectorThread.seconds_in_step`."""
        return time.monotonic() - float(self._heartbeat[STEP_STARTED_AT]) if self._granted else 0.0

    def stop(self) -> bool:
        """Stop the process, by force after a timeout, and release unfinished segments."""
        process, pipe, listener = self._process, self._pipe, self._listener
        if process is None or pipe is None or listener is None:
            return True
        self._heartbeat[STOP] = 1.0
        with self._sending, contextlib.suppress(OSError):
            pipe.send(None)
        try:
            # The listener ends with the process. It is not running if the start was interrupted.
            if listener.ident is not None:
                listener.join(STOP_GRACE_S)
        finally:
            if process.is_alive():
                process.kill()
                process.join()
            if listener.ident is not None:
                listener.join()
        with self._sending:
            self._pipe = self._process = self._listener = None
        pipe.close()
        process.close()
        return True

    def _listen(self, pipe: Connection, process: Any) -> None:
        """Receive messages until the child exits, then release its unfinished segments."""
        failure: CollectorFailed | None = None
        while True:
            wait([pipe, process.sentinel])
            try:
                # Read the remaining messages before handling the exit.
                if not pipe.poll():
                    break
                kind, *rest = pipe.recv()
            except (EOFError, OSError):
                break
            except Exception as error:  # noqa: BLE001  an error of a class that only the child can import
                kind, rest = "failed", [None, f"its error message cannot be read ({error})", ""]
            if kind != "filled":
                failure = _failure(*rest)
                continue
            try:
                self._deliver(*rest)
            except Exception as error:  # noqa: BLE001  otherwise the learner would wait forever
                failure = CollectorFailed(f"a message of the asynchronous collector is invalid: {error}")
                failure.__cause__ = error
                process.kill()
                break
        process.join()
        if self._heartbeat[STOP] == 0.0 and failure is None:
            failure = CollectorFailed(
                f"the asynchronous collector (process {process.pid}) died: {_exit_reason(process.exitcode)}"
            )
        self._release_unfilled()
        if failure is not None:
            self._queue.fail(failure)

    def _deliver(
        self, slot: int, first_stream: int, first_env_step: int, reward_scale: float, report: SegmentReport
    ) -> None:
        buffer = self._queue.ring.segments[slot]
        buffer.position = buffer.num_steps
        buffer.first_stream, buffer.first_env_step, buffer.reward_scale = first_stream, first_env_step, reward_scale
        self._granted.remove(slot)
        self._delivered += buffer.num_steps
        self._queue.deliver(slot, report)
        self.wake()

    def _release_unfilled(self) -> None:
        """Release granted slots that were not filled; the child was working on the first of them."""
        steps = (int(self._heartbeat[STEPS]) - self._delivered) * self._queue.ring.num_envs
        while self._granted:
            self._queue.abandon(self._granted.pop(0), steps)
            steps = 0


# ---------------------------------------------------------------------- the child


def _run_child(pipe: Connection, block: Any, layout: SharedLayout, structure: bytes, setup: CollectorSetup) -> None:
    for number in PARENT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)
    env: VectorEnv | None = None
    try:
        ring, board, heartbeat, frozen = layout.allocate(SharedArrays(block))
        threading.Thread(target=_exit_with_parent, args=(heartbeat,), daemon=True).start()
        policy = deserialize_structure(structure, build_tensors(layout, frozen)).to(setup.device)
        subscriber = WeightSubscriber(policy, board)
        subscriber.update()
        env = make_env(setup.env)
        with limit_threads(setup.torch_threads):
            collector = Collector(env, policy, **setup.arguments)
            collector.num_steps = setup.num_steps
            if collector.reward_scale is not None and setup.moments is not None:
                collector.reward_scale.moments = setup.moments
            filler = SegmentFiller(collector, subscriber, heartbeat)
            gc.collect()
            gc.freeze()  # what exists now stays; traversing it again and again would take time from acting
            while (claim := pipe.recv()) is not None:
                buffer = ring.segments[claim.slot]
                report = filler.fill(buffer, claim.version)
                facts = (claim.slot, buffer.first_stream, buffer.first_env_step, buffer.reward_scale, report)
                pipe.send(("filled", *facts))
    except (EOFError, StopCollecting):
        pass  # stopped, or the parent is gone
    except BaseException as error:  # noqa: BLE001  raised in the learner
        cause = error if isinstance(error, PalaestraError) and is_picklable(error) else None
        with contextlib.suppress(OSError):
            pipe.send(("failed", cause, f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        if env is not None:
            env.close()


def _exit_with_parent(heartbeat: NDArray[np.float64]) -> None:
    """After the parent exits, stop before the next step, or exit the process if the step hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    heartbeat[STOP] = 1.0
    time.sleep(STOP_GRACE_S)
    os._exit(1)


def build_tensors(layout: SharedLayout, frozen: list[NDArray[Any]]) -> list[Tensor]:
    """The policy's tensors: frozen ones in shared memory, others allocated here and filled from the board."""
    waiting = iter(frozen)
    tensors: list[Tensor] = []
    for shape, dtype, is_parameter, fixed in layout.tensors:
        tensor = torch.from_numpy(next(waiting)).view(dtype).view(shape) if fixed else torch.zeros(shape, dtype=dtype)
        tensors.append(nn.Parameter(tensor, requires_grad=not fixed) if is_parameter else tensor)
    return tensors


def _failure(cause: BaseException | None, line: str, trace: str) -> CollectorFailed:
    failure = CollectorFailed(f"the asynchronous collector failed: {line}")
    failure.add_note(f"In the collector's process:\n{trace.rstrip()}")
    failure.__cause__ = cause
    return failure


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code}, {signal.Signals(-code).name}. Check the system's out-of-memory log."
    if code == UNGUARDED_EXIT:
        return f"the script starts a collector when it is imported, and the collector imports it. {UNGUARDED_REMEDY}."
    return (
        f"exit code {code}, without an error message. See its output above; a script that trains must do so under "
        "if __name__ == '__main__', and an environment must not exit the process."
    )
