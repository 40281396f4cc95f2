"""Collects garbage in the thread of the window, in small portions."""

from __future__ import annotations

import gc

from PySide6.QtCore import QObject, QTimer

_EVERY_MS = 500
_FREEZE_AFTER_MS = 3000
_THRESHOLDS = (1000, 10, 20)
"""Number of new objects, and of collections of the generation before, that lead to a collection of a generation."""


class GarbageCollector(QObject):
    """Takes the place of Python's automatic collections, from its creation until `close`.

    These run in any thread that makes objects, and stop all threads: a full one keeps the window from drawing for a
    tenth of a second, and one in the thread of a stream deletes widgets outside the thread of the window. What exists
    some seconds after the start, mostly modules, is never looked at again.
    """

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        gc.disable()
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.collect)
        self._timer.start(_EVERY_MS)
        QTimer.singleShot(_FREEZE_AFTER_MS, self, gc.freeze)

    def collect(self) -> int:
        """Collect the oldest generation that is due; returns its number, or -1 if none is."""
        counts = gc.get_count()
        due = [number for number, limit in enumerate(_THRESHOLDS) if counts[number] >= limit]
        if not due:
            return -1
        gc.collect(due[-1])
        return due[-1]

    def close(self) -> None:
        """Collect automatically again."""
        self._timer.stop()
        gc.unfreeze()
        gc.enable()
