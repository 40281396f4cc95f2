"""A program that lives no longer than we do, and what it printed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.redaction import is_secret_name
from palaestra.runs.process import tool_watchdog as tool_keeper

__all__ = ["ToolProcess"]

_LOOK_EVERY_S = 0.05


class ToolProcess:
    """One running tool. It ends with `stop`, or with this process, however that comes about."""

    def __init__(self, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.argv, self._log = tuple(argv), log
        given = os.environ if environment is None else environment
        # A viewer has no use for our tokens, and whatever it prints lies in a file.
        plain = {name: value for name, value in given.items() if not is_secret_name(name)}
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", tool_keeper.__file__, *argv],
                stdin=subprocess.PIPE, stdout=output, stderr=output, env=plain, start_new_session=True,
            )  # fmt: skip

    @property
    def lives(self) -> bool:
        """Whether it is still there."""
        return self._process.poll() is None

    def said(self, pattern: re.Pattern[str], timeout_s: float) -> re.Match[str]:
        """Wait until it prints this; `ConfigError` with its last line when it ends instead, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while True:
            lives = self.lives
            text = self._log.read_text(errors="replace")
            found = pattern.search(text)
            if found is not None:
                return found
            if not lives or time.monotonic() > deadline:
                how = f"said nothing of use within {timeout_s:.0f} s" if lives else "ended at once"
                last = (text.strip().splitlines() or ["it printed nothing"])[-1]
                self.stop()
                raise ConfigError("tool", " ".join(self.argv[:3]), f"{how}: {last[:300]}", f"See {self._log}")
            time.sleep(_LOOK_EVERY_S)

    def stop(self) -> None:
        """End it and everything below it; returns when it is gone."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(4 * tool_keeper.GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
