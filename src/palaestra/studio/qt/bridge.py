"""Wakes the thread of the window when something has arrived, at most once at a time."""

from __future__ import annotations

import threading

from PySide6.QtCore import QObject, Qt, Signal


class Bridge(QObject):
    """`wake` may be called from any thread; `woken` is emitted in the thread of the window.

    Many wakes before the window reacts are one signal, so that no number of messages fills its queue.
    """

    woken = Signal()
    _queued = Signal()

    def __init__(self) -> None:
        super().__init__()
        self._is_pending = threading.Event()
        self._queued.connect(self._deliver, Qt.ConnectionType.QueuedConnection)

    def wake(self) -> None:
        """Let the window look, soon."""
        if not self._is_pending.is_set():
            self._is_pending.set()
            self._queued.emit()

    def _deliver(self) -> None:
        self._is_pending.clear()
        self.woken.emit()
