"""Signals between a parent process and a worker: request numbers in shared memory and two semaphores.

A request and its completion are one number each in shared memory, followed by a semaphore that wakes the other side.
Waking a sleeping process takes tens of microseconds, as long as several environment steps, so a side that waits first
spins on the number for a moment. Spinning pays only if a core is free and the other side is fast: after a spin without
success, the next 1, 2, 4, … waits do not spin.
"""

from __future__ import annotations

import time
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Semaphore
from typing import Any

_SPIN_S = 1e-4
"""Seconds of spinning before sleeping."""
_MAX_SKIPPED = 1024
"""Most consecutive waits without spinning."""

_REQUESTED, _DONE, _HAS_MESSAGE, _IS_EMPTY = range(4)


class WorkerSignals:
    """The signals between one parent and one worker; pickled to the worker when its process is started."""

    def __init__(self, context: BaseContext, *, spin: bool = True) -> None:
        """Pass `spin=False` if there are more processes than cores."""
        self._memory = context.RawArray("q", 4)
        self._memory[_DONE] = -1
        self._request_ready, self._done_ready = context.Semaphore(0), context.Semaphore(0)
        self._spin = spin
        self._numbers = memoryview(self._memory).cast("B").cast("q")
        self._skip_count = self._skips_left = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_numbers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._numbers = memoryview(self._memory).cast("B").cast("q")

    # ------------------------------------------------------------------ the parent's side

    def send_request(self, number: int, *, has_message: bool) -> None:
        """Send request `number`: a step, or the command in the pipe if `has_message`."""
        self._numbers[_HAS_MESSAGE] = has_message
        self._numbers[_REQUESTED] = number
        self._request_ready.release()

    @property
    def last_done(self) -> int:
        """Number of the last completed request; -1 before the worker is ready."""
        return self._numbers[_DONE]

    @property
    def is_result_empty(self) -> bool:
        """Whether the completed request has no result in the pipe."""
        return bool(self._numbers[_IS_EMPTY])

    def wait_until_done(self, number: int, timeout: float) -> bool:
        """Whether request `number` was completed within `timeout` seconds."""
        return self._wait(_DONE, number, self._done_ready, timeout)

    def wake_parent(self) -> None:
        """End a running `wait_until_done` without a result. May be called by another thread."""
        self._done_ready.release()

    # ------------------------------------------------------------------ the worker's side

    def report_done(self, number: int, *, empty: bool) -> None:
        """Report that request `number` is completed; 0 means that the worker is ready."""
        self._numbers[_IS_EMPTY] = empty
        self._numbers[_DONE] = number
        self._done_ready.release()

    @property
    def has_message(self) -> bool:
        """Whether the command is in the pipe."""
        return bool(self._numbers[_HAS_MESSAGE])

    def wait_for_request(self, number: int, timeout: float) -> bool:
        """Whether request `number` arrived within `timeout` seconds."""
        return self._wait(_REQUESTED, number, self._request_ready, timeout)

    def _wait(self, place: int, number: int, semaphore: Semaphore, timeout: float) -> bool:
        numbers = self._numbers
        if self._skips_left:
            self._skips_left -= 1
        elif self._spin:
            deadline = time.perf_counter() + _SPIN_S
            while numbers[place] != number and time.perf_counter() < deadline:
                pass
            if numbers[place] == number:
                self._skip_count //= 2
            else:
                self._skip_count = min(_MAX_SKIPPED, 2 * self._skip_count or 1)
                self._skips_left = self._skip_count
        # Acquire even if the number has arrived: this orders memory and keeps the semaphore's count at zero.
        semaphore.acquire(True, timeout)
        return numbers[place] == number
