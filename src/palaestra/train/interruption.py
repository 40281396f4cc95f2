"""Ctrl-C, SIGTERM and a closed terminal: the first asks training to finish its update and save, the second leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interruption"]


class Interruption:
    """Whether the run was asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def watching(self, say: Callable[[str], None]) -> Iterator[None]:
        """Catch the signals inside the block; the handlers found are put back afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread alone
            return

        def first(number: int, frame: FrameType | None) -> None:
            self.requested = True
            for each in caught:
                signal.signal(each, signal.SIG_DFL)
            say("Stopping: this update is finished and saved first. Ctrl-C again leaves at once.")

        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # A signal found ignored (nohup, a job in the background) stays ignored: whoever started us meant it.
        caught = [each for each in wanted if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.signal(each, first) for each in caught}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
