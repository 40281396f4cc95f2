"""Signals between a parent and a worker process that there is something to do: numbers and two semaphores.

A question and an answer are one number each in shared memory, followed by a semaphore that wakes the other side. Waking
a sleeping process takes tens of microseconds, as long as several environments take to step, so a side that waits first
spins on the number for a moment. Spinning takes a core: it pays when the core is free and the other side is quick, and
is expensive otherwise. A spin without success is therefore followed by 1, 2, 4, … waits without one.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["WorkerSignals"]

SPIN_S = 1e-4
"""How long a side spins before it sleeps."""
MOST_SKIPPED = 1024
"""Most waits without spinning after spins without success."""

_ASKED, _ANSWERED, _MESSAGE, _SILENT = range(4)


class WorkerSignals:
    """The signals between one parent and one worker; pickled to the worker when its process is started."""

    def __init__(self, context: Any, *, spin: bool = True) -> None:
        """`context`: of multiprocessing; `spin=False` where processes outnumber cores."""
        self._memory = context.RawArray("q", 4)
        self._memory[_ANSWERED] = -1
        self._question, self._answer = context.Semaphore(0), context.Semaphore(0)
        self._spin = spin
        self._numbers = memoryview(self._memory).cast("B").cast("q")
        self._skips = self._skip = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_numbers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._numbers = memoryview(self._memory).cast("B").cast("q")

    # ------------------------------------------------------------------ the parent's side

    def ask(self, number: int, *, message: bool) -> None:
        """Ask question `number`: a step, or what comes through the pipe as a `message`."""
        self._numbers[_MESSAGE] = message
        self._numbers[_ASKED] = number
        self._question.release()

    @property
    def answered(self) -> int:
        """The last question that was answered; -1 before the worker is ready."""
        return self._numbers[_ANSWERED]

    @property
    def silent(self) -> bool:
        """Whether the answer is only that it is done, with nothing in the pipe."""
        return bool(self._numbers[_SILENT])

    def wait_for_answer(self, number: int, timeout: float) -> bool:
        """Whether question `number` was answered within `timeout` seconds."""
        return self._wait(_ANSWERED, number, self._answer, timeout)

    # ------------------------------------------------------------------ the worker's side

    def answer(self, number: int, *, silent: bool) -> None:
        """Answer question `number`; 0 says that the worker is ready."""
        self._numbers[_SILENT] = silent
        self._numbers[_ANSWERED] = number
        self._answer.release()

    @property
    def has_message(self) -> bool:
        """Whether the question is in the pipe."""
        return bool(self._numbers[_MESSAGE])

    def wait_for_question(self, number: int, timeout: float) -> bool:
        """Whether question `number` was asked within `timeout` seconds."""
        return self._wait(_ASKED, number, self._question, timeout)

    def _wait(self, place: int, number: int, semaphore: Any, timeout: float) -> bool:
        numbers = self._numbers
        if self._skip:
            self._skip -= 1
        elif self._spin:
            deadline = time.perf_counter() + SPIN_S
            while numbers[place] != number and time.perf_counter() < deadline:
                pass
            if numbers[place] == number:
                self._skips //= 2
            else:
                self._skips = min(MOST_SKIPPED, 2 * self._skips or 1)
                self._skip = self._skips
        # Taken even if the number is there already: it orders memory, and its count must not grow.
        semaphore.acquire(True, timeout)
        return numbers[place] == number
