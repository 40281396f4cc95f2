"""Measures how long the thread of a Qt window does not answer, and why.

Another thread sends a queued signal every 5 ms. The latency of a ping counts from the moment at which it was due, so
that a pause of the whole process is not hidden by the pause of the sender. While a ping is late, the sender samples the
stack of the window's thread. The processor time of that thread and the time that it waited for a core (Linux, from
`/proc/self/task/<id>/schedstat`) separate work of the window from a machine that is busy otherwise.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, Qt, Signal, Slot

PERIOD_S = 0.005
LIMIT_S = 0.050
_SAMPLE_AFTER_S = 0.015
_ROOT = f"{Path(__file__).parents[1]}/"
_STACK_DEPTH = 14


@dataclass
class Block:
    """A time longer than the limit in which the window did not answer."""

    start: float
    latency_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of the window's thread."""
    waited_s: float = 0.0
    """Time that the thread was ready to run and had no core."""
    sender_late_s: float = 0.0
    """How late the ping itself was sent: the sender had no core or no interpreter lock either."""
    collection_s: float = 0.0
    """Garbage collections in that time, in any thread."""
    stacks: Counter[str] = field(default_factory=Counter)

    @property
    def cause(self) -> str:
        """What most of the time went to: `work`, `no core`, `garbage collection` or `interpreter lock`."""
        parts = {
            "garbage collection": self.collection_s,
            "no core": max(self.waited_s, self.sender_late_s),
            "work": self.cpu_s - self.collection_s,
        }
        name, longest = max(parts.items(), key=lambda item: item[1])
        return name if longest > self.latency_s / 3 else "interpreter lock"

    def to_json(self) -> dict[str, Any]:
        """For the results."""
        stacks = [{"samples": count, "stack": text.splitlines()} for text, count in self.stacks.most_common(2)]
        milliseconds = {
            name: round(1e3 * getattr(self, f"{name}_s"), 1)
            for name in ("latency", "cpu", "waited", "sender_late", "collection")
        }
        return {"at_s": round(self.start, 2), "cause": self.cause, "milliseconds": milliseconds, "stacks": stacks}


class EventLoopProbe(QObject):
    """Made and stopped by the thread of the window, which it measures between `start` and `stop`."""

    _ping = Signal(float)

    def __init__(self) -> None:
        super().__init__()
        self.latencies: list[float] = []
        self.blocks: list[Block] = []
        self.collections: list[tuple[float, float, int]] = []
        self._window_thread = threading.get_ident()
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self._collection_start = 0.0
        self._thread = threading.Thread(target=self._send_pings, name="event-loop-probe", daemon=True)
        self._ping.connect(self._answer, Qt.ConnectionType.QueuedConnection)

    def start(self) -> None:
        """Begin to measure."""
        gc.callbacks.append(self._note_collection)
        self._began = time.perf_counter()
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """End, and return the result."""
        self._stopped.set()
        self._thread.join()
        gc.callbacks.remove(self._note_collection)
        ordered = sorted(self.latencies)
        return {
            "pings": len(ordered),
            "p50_ms": 1e3 * ordered[len(ordered) // 2],
            "p99_ms": 1e3 * ordered[int(0.99 * len(ordered))],
            "max_ms": 1e3 * ordered[-1],
            "over_50_ms": len(self.blocks),
            "causes": dict(Counter(block.cause for block in self.blocks)),
            "longest_collection_ms": 1e3 * max((end - start for start, end, _ in self.collections), default=0.0),
            "blocks": [block.to_json() for block in sorted(self.blocks, key=lambda block: -block.latency_s)[:20]],
        }

    @Slot(float)
    def _answer(self, due: float) -> None:
        self.latencies.append(time.perf_counter() - due)
        self._answered.set()

    def _send_pings(self) -> None:
        due = time.perf_counter() + PERIOD_S
        while not self._stopped.is_set():
            time.sleep(max(0.0, due - time.perf_counter()))
            self._measure(due)
            # A block longer than the period is one block and not several.
            due = max(due + PERIOD_S, time.perf_counter())

    def _measure(self, due: float) -> None:
        cpu, waited = self._read_usage()
        sent = time.perf_counter()
        self._answered.clear()
        self._ping.emit(due)
        block = Block(due - self._began)
        while not self._answered.wait(_SAMPLE_AFTER_S if not block.stacks else PERIOD_S):
            if self._stopped.is_set():
                return
            frame = sys._current_frames().get(self._window_thread)
            if frame is not None:
                stack = "".join(traceback.format_stack(frame)[-_STACK_DEPTH:])
                block.stacks[stack.replace(_ROOT, "")] += 1
        block.latency_s = self.latencies[-1]
        if block.latency_s > LIMIT_S:
            new_cpu, new_waited = self._read_usage()
            block.cpu_s, block.waited_s, block.sender_late_s = new_cpu - cpu, new_waited - waited, sent - due
            end = due + block.latency_s
            block.collection_s = sum(min(last, end) - max(first, due) for first, last, _ in self.collections
                                     if last > due and first < end)  # fmt: skip
            self.blocks.append(block)

    def _read_usage(self) -> tuple[float, float]:
        """Processor time of the window's thread, and the time that it waited for a core."""
        try:
            running, waiting, _ = self._schedstat.read_text().split()
        except OSError:
            return time.clock_gettime(time.pthread_getcpuclockid(self._window_thread)), 0.0
        return int(running) / 1e9, int(waiting) / 1e9

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_start = time.perf_counter()
        else:
            self.collections.append((self._collection_start, time.perf_counter(), info["generation"]))


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
