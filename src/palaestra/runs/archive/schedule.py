"""Applies the retention policy at regular times while a service runs, and keeps a report of the last time.

`service/retention.json` holds the report. A service that starts after the policy was due applies it at once, so that
services which exit when they are idle apply it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from palaestra.files.atomic import read_json, write_json
from palaestra.files.home import Home
from palaestra.runs.archive.retention import RetentionAction
from palaestra.runs.wire import API_SCHEMA, JsonObject, from_json, to_json

_log = logging.getLogger(__name__)
_MAX_SLEEP_S = 60.0
"""The clock is read this often: a computer may be suspended, or its clock set."""
_MAX_REPORTED = 200
"""Actions that a report lists; the log has all of them."""


@dataclass(frozen=True, kw_only=True)
class RetentionReport:
    """When the retention policy is applied automatically, and what it did the last time."""

    __pydantic_config__ = API_SCHEMA

    every_h: float | None = None
    """Hours between two times; null: never."""
    last: float | None = None
    """Unix time of the last time; null: it was never applied automatically."""
    next: float | None = None
    """Unix time of the next time; null: never."""
    num_actions: int = 0
    """Actions of the last time, failed ones included."""
    num_failed: int = 0
    bytes: int = 0
    """Size of what was archived or removed."""
    actions: tuple[RetentionAction, ...] = ()
    """The first 200 actions of the last time."""
    error: str = ""
    """Why the policy could not be applied the last time; empty if it was."""


class RetentionSchedule:
    """Calls `apply` every `every_h` hours. Use from one event loop."""

    def __init__(
        self,
        home: Home,
        every_h: float | None,
        apply: Callable[[], Awaitable[list[RetentionAction]]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._every_h = home.service / "retention.json", every_h
        self._apply, self._clock = apply, clock
        self._task: asyncio.Task[None] | None = None
        self.is_busy = False
        """Whether the policy is being applied at the moment."""

    def start(self) -> None:
        """Apply the policy when it is due, from now on. Without `every_h`, never."""
        if self._every_h is not None:
            self._task = asyncio.create_task(self._run(self._every_h * 3600))

    async def close(self) -> None:
        """Stop. An action that has begun is completed by its thread or by the next service."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def read_report(self) -> RetentionReport:
        """The report of the last time, and when the next one is due."""
        try:
            return self._build_report(self._read())
        except (AttributeError, TypeError, ValueError):  # the file is damaged, or of another version
            return self._build_report({})

    def _build_report(self, document: JsonObject) -> RetentionReport:
        last = document.get("last")
        due = None if self._every_h is None else self._find_due(self._every_h * 3600)
        actions = tuple(from_json(RetentionAction, row) for row in document.get("actions", ()))
        counts = {name: int(document.get(name, 0)) for name in ("num_actions", "num_failed", "bytes")}
        error = str(document.get("error", ""))
        return RetentionReport(every_h=self._every_h, last=last, next=due, actions=actions, error=error, **counts)

    async def _run(self, every_s: float) -> None:
        while True:
            wait_s = self._find_due(every_s) - self._clock()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, _MAX_SLEEP_S))
                continue
            self.is_busy = True
            try:
                self._record(await self._apply())
            except Exception as error:  # noqa: BLE001 - a failure must not end the service; the next time tries again
                _log.exception("the retention policy could not be applied")
                with contextlib.suppress(OSError):
                    self._write([], error=str(error) or type(error).__name__)
                await asyncio.sleep(min(every_s, _MAX_SLEEP_S))
            finally:
                self.is_busy = False

    def _find_due(self, every_s: float) -> float:
        last, now = self._read().get("last"), self._clock()
        # A time in the future was written by a clock that was wrong.
        return now if last is None or last > now else max(now, last + every_s)

    def _record(self, actions: list[RetentionAction]) -> None:
        failed = [action for action in actions if action.failed]
        for action in actions:
            outcome = f"failed: {action.failed}" if action.failed else f"{action.bytes} bytes"
            _log.info("retention: %s %s (%s): %s", action.action, action.run_id, action.why, outcome)
        _log.info("retention: applied %d of %d actions", len(actions) - len(failed), len(actions))
        self._write(actions)

    def _write(self, actions: list[RetentionAction], error: str = "") -> None:
        report = {
            "schema": 1,
            "last": self._clock(),
            "num_actions": len(actions),
            "num_failed": sum(1 for action in actions if action.failed),
            "bytes": sum(action.bytes for action in actions if not action.failed),
            "actions": to_json(actions[:_MAX_REPORTED]),
            "error": error,
        }
        write_json(self._path, report, durable=False)

    def _read(self) -> JsonObject:
        document = read_json(self._path) or {}
        is_time = isinstance(document.get("last"), int | float)
        return document if is_time and isinstance(document.get("actions"), list) else {}
