"""Monitors one live attempt until it has ended: its first output, the numbers of its row, its alarms."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from palaestra.runs.phase import Phase, PhaseEvent
from palaestra.runs.process.attempt_process import AttemptProcess
from palaestra.runs.remote.remote_process import RemoteProcess
from palaestra.runs.state.alarms import AlarmLimits, AlarmMonitor, merge_alarms
from palaestra.runs.state.progress import AttemptProgress, RunTotals
from palaestra.runs.supervisor.state_writer import RunStateWriter

_STARTING_POLL_S = 0.1
"""Poll interval of a run that has not shown its first output."""

_ROW_INTERVAL_S = 2.0
"""Minimum time between two updates of the numbers of a row."""


class AttemptMonitor:
    """Polls the progress of one attempt and records what changes."""

    def __init__(
        self,
        state: RunStateWriter,
        process: AttemptProcess | RemoteProcess,
        progress: Callable[[], AttemptProgress | None],
        limits: AlarmLimits,
        *,
        poll_s: float,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        totals_before: RunTotals,
        drift: str,
        on_stall: Callable[[], object],
    ) -> None:
        self._state, self._process, self._progress = state, process, progress
        self._poll_s, self._clock, self._monotonic = poll_s, clock, monotonic
        self._totals_before, self._on_stall = totals_before, on_stall
        self._alarms = AlarmMonitor(limits, monotonic(), drift=drift)
        self._row_updated = -_ROW_INTERVAL_S
        self._wake_up = asyncio.Event()

    def wake(self) -> None:
        """Poll now if the run is starting: telemetry arrived."""
        if self._state.phase is Phase.STARTING:
            self._wake_up.set()

    async def run(self) -> None:
        """Poll until no process of the attempt is left."""
        ended = asyncio.ensure_future(self._process.wait())
        ended.add_done_callback(lambda _: self._wake_up.set())
        try:
            while not ended.done():
                await self._poll()
                starting = self._state.phase is Phase.STARTING
                pause = min(_STARTING_POLL_S, self._poll_s) if starting else self._poll_s
                # Not wait_for: in Python 3.11 it swallows a cancellation that arrives together with the result.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake_up.wait()
                self._wake_up.clear()
            ended.result()
        finally:
            ended.cancel()

    async def _poll(self) -> None:
        progress = self._progress()
        if progress is None:
            return
        now = self._monotonic()
        if self._state.phase is Phase.STARTING and (progress.seq or progress.output_bytes):
            await self._state.advance(PhaseEvent.FIRST_SIGN)
        steps = self._totals_before.new_steps(progress)
        process = self._process
        self._alarms.update(
            progress,
            steps,
            now,
            watchdog_gone=process.watchdog_gone,
            unreachable=process.unreachable,
            is_visible=process.is_visible,
        )
        await self._update_alarms(now)
        if now - self._row_updated >= _ROW_INTERVAL_S:
            self._row_updated = now
            columns = self._totals_before.columns_with(progress)
            columns["tracking_url"] = progress.tracking_url or self._state.record.tracking_url
            await self._state.update(**columns)

    async def _update_alarms(self, now: float) -> None:
        before = self._state.record.alarms
        alarms = merge_alarms(before, self._alarms.alarms(now, self._clock()))
        if alarms == before:
            return
        codes, earlier = {alarm.code for alarm in alarms}, {alarm.code for alarm in before}
        await self._state.update(alarms=alarms)
        for alarm in alarms:
            if alarm.code not in earlier:
                await self._state.note("alarm", reason=alarm.text, code=alarm.code)
        for alarm in before:
            if alarm.code not in codes:
                await self._state.note("alarm_over", reason=alarm.text, code=alarm.code)
        if "stalled" in codes - earlier:
            self._on_stall()
