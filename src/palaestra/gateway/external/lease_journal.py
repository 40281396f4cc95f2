"""`LeaseJournal`: the leases of a gateway on disk, so that the next gateway of its name can adopt the sessions.

One line of JSON for every lease that begins or ends, written with one call, so that a killed gateway leaves at most one
incomplete line. A line that cannot be written is a warning, because the gateway works without it: a lease that is
missing here is an orphan that the next gateway removes, and one that has ended is found to have no session. The file
holds session tokens and is readable by its user only; it is locked, because two gateways of one name would close each
other's sessions.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from palaestra.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedLease:
    """A lease as it was when the session was opened."""

    session_id: str
    session_type: str
    ttl_s: float
    token: str


class LeaseJournal:
    """The open leases of the gateway `name`, in a file of the state directory."""

    def __init__(self, state_dir: Path, name: str) -> None:
        """Open the file and read what an earlier gateway left. `ConfigError` when another one uses it."""
        self._path = state_dir / f"leases-{name}.jsonl"
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("gateway.state_dir", str(state_dir), f"cannot be used ({error.strerror})") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            reason = f"another gateway of this name runs, and holds {self._path}"
            raise ConfigError("gateway.name", name, reason, "Choose another name, or stop that gateway") from None
        self.open = _replay(self._path.read_bytes())
        """The leases that have begun and not ended, by session id."""
        self._rewrite()

    def begin(self, lease: SavedLease) -> None:
        """Record a lease."""
        self.open[lease.session_id] = lease
        self._write({"begin": asdict(lease)})

    def end(self, session_id: str) -> None:
        """Record the end of a lease. Does nothing for one that was not recorded."""
        if self.open.pop(session_id, None) is None:
            return
        if self._num_lines > 1000 + 4 * len(self.open):
            self._rewrite()
        else:
            self._write({"end": session_id})

    def close(self, *, keep: bool = False) -> None:
        """Release the file; `keep`: with its leases for the next gateway, else remove it."""
        if not keep or not self.open:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._file)

    def _rewrite(self) -> None:
        """Write the open leases only. In place, because the file is locked."""
        os.ftruncate(self._file, 0)
        self._num_lines = 0
        for lease in self.open.values():
            self._write({"begin": asdict(lease)})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._num_lines += 1
        # A line begins with a line break, so that it does not continue an incomplete one.
        data = b"\n" + json.dumps(line).encode()
        try:
            written = os.write(self._file, data)
        except OSError as error:
            _log.warning("%s cannot be written (%s)", self._path, error.strerror)
            return
        if written < len(data):
            _log.warning("%s cannot be written (only %d of %d bytes)", self._path, written, len(data))


def _replay(data: bytes) -> dict[str, SavedLease]:
    leases: dict[str, SavedLease] = {}
    for line in data.splitlines():
        # The last line may be incomplete.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            if "end" in entry:
                leases.pop(entry["end"], None)
            else:
                lease = SavedLease(**entry["begin"])
                leases[lease.session_id] = lease
    return leases
