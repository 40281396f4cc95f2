"""Whoever writes the series of an attempt, alone: a service, or a reader that finds them behind the journal."""

from __future__ import annotations

import errno
import fcntl
import os

from palaestra.files.run_directory import Attempt

__all__ = ["SeriesBusy", "SeriesLock"]


class SeriesBusy(OSError):
    """Somebody else writes these series at the moment."""


class SeriesLock:
    """Held from its making until `close`, or until the process is gone. Making it raises `SeriesBusy`."""

    def __init__(self, attempt: Attempt) -> None:
        attempt.path.mkdir(parents=True, exist_ok=True)
        # Beside the series and not among them: whoever cannot trust them empties their directory.
        path = attempt.path / ".series.lock"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise SeriesBusy(errno.EBUSY, "somebody else writes the series", str(path)) from None

    def close(self) -> None:
        """Let the next one in. Harmless when repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
