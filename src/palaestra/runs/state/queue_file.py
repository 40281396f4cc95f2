"""What a supervisor says about its queue, for whoever looks without asking it; and whether it drains, for the next one.

Holds nothing that cannot be lost: without it a run waits without a word, and nothing drains.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from palaestra.files.atomic import read_json, write_json
from palaestra.files.home import Home
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.record import RunRecord

__all__ = ["QueueFile", "waiting_reason"]

_NOBODY = "waits for a service; palaestra serve starts one"
_log = logging.getLogger(__name__)


def waiting_reason(row: RunRecord, why: str) -> str:
    """The reason of a queued run: what it will do, if that is recorded, and what it waits for."""
    return "; ".join(text for text in (row.reason, why) if text)


class QueueFile:
    """`service/queue.json`. One process writes it; anybody reads it."""

    def __init__(self, home: Home) -> None:
        self._path = home.service / "queue.json"
        self._written: dict[str, Any] | None = None
        self._seen: tuple[int, int] | None = None
        self._known: dict[str, Any] = {}

    def write(self, draining: bool, reasons: Mapping[str, str]) -> None:
        """Say it, unless it was said already."""
        common = Counter(reasons.values()).most_common(1)
        # Thousands wait for the same thing; it is said once.
        otherwise = common[0][0] if common else ""
        others = {run_id: reason for run_id, reason in reasons.items() if reason != otherwise}
        said = {"schema": 1, "draining": draining, "reason": otherwise, "reasons": others}
        if said == self._written:
            return
        me = ProcessIdentity.of(os.getpid())
        try:
            self._path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            write_json(self._path, {**said, "by": asdict(me) if me else None}, durable=False)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, error)
            return
        self._written = said

    def draining(self) -> bool:
        """Whether the last one who wrote it started nothing new."""
        return (read_json(self._path) or {}).get("draining") is True

    def reason(self, run_id: str) -> str:
        """Why a run waits; empty when nobody has said so."""
        try:
            found = os.stat(self._path)
        except OSError:
            return _NOBODY
        version = (found.st_ino, found.st_mtime_ns)
        if version != self._seen:
            self._known, self._seen = read_json(self._path) or {}, version
        by = ProcessIdentity.from_json(self._known.get("by"))
        if by is None or not by.is_alive():
            return _NOBODY
        reasons = self._known.get("reasons")
        other = reasons.get(run_id) if isinstance(reasons, dict) else None
        return str(other or self._known.get("reason") or "")
