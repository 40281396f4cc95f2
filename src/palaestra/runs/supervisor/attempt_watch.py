"""Watches one live attempt: its first sign, the numbers of its row, its alarms, until nothing of it lives."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from palaestra.runs.phase import Happening, Phase
from palaestra.runs.process.child import Child
from palaestra.runs.state.alarms import Limits, Signs, Watch, alarms, noticed, still_the_same
from palaestra.runs.state.totals import Numbers
from palaestra.runs.supervisor.state_writer import RunStateWriter

if TYPE_CHECKING:
    from palaestra.runs.state.progress import Progress

__all__ = ["AttemptWatch", "signs_of"]

_STARTING_EVERY_S = 0.1
"""How often a run that has not shown itself yet is looked at."""

_ROW_EVERY_S = 2.0
"""How often the numbers of a row are written at most."""


def signs_of(progress: Progress) -> Signs:
    """What ingestion knows of a run, as its alarms see it."""
    return Signs(
        bytes_seen=progress.output_bytes + progress.source_bytes,
        events=progress.seq,
        env_step=progress.env_step,
        episodes=progress.episodes,
        episode_lines=progress.episode_lines,
        tracebacks=progress.tracebacks,
        dropped=progress.dropped,
        first_dropped=progress.first_dropped,
        points_left_out=progress.points_left_out,
        non_finite=progress.non_finite,
        disk_full=progress.disk_full,
        problem=progress.problem,
    )


class AttemptWatch:
    """Looks at one attempt until it has ended."""

    def __init__(
        self,
        book: RunStateWriter,
        child: Child,
        progress: Callable[[], Progress | None],
        limits: Limits,
        *,
        every_s: float,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        before: Numbers = Numbers(),  # noqa: B008 - it is frozen
        drift: str = "",
        stalled: Callable[[], None] = lambda: None,
    ) -> None:
        self._book, self._child, self._progress = book, child, progress
        self._limits, self._every_s = limits, every_s
        self._clock, self._monotonic = clock, monotonic
        self._before, self._drift, self._stalled = before, drift, stalled
        self._watch = Watch.begin(monotonic())
        self._row_at = -_ROW_EVERY_S
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Something came in; a run that is starting has shown itself."""
        if self._book.phase is Phase.STARTING:
            self._woken.set()

    async def until_ended(self) -> None:
        """Look now and then, and return when nothing of the attempt lives."""
        ended = asyncio.ensure_future(self._child.ended())
        ended.add_done_callback(lambda _: self._woken.set())
        try:
            while not ended.done():
                await self.look()
                starting = self._book.phase is Phase.STARTING
                pause = min(_STARTING_EVERY_S, self._every_s) if starting else self._every_s
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with what it waits for.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._woken.wait()
                self._woken.clear()
            ended.result()
        finally:
            ended.cancel()

    async def look(self) -> None:
        """One look."""
        progress = self._progress()
        if progress is None:
            return
        now = self._monotonic()
        if self._book.phase is Phase.STARTING and (progress.seq or progress.output_bytes):
            await self._book.happened(Happening.FIRST_SIGN)
        steps = self._before.steps_since(progress)
        signs = replace(signs_of(progress), env_step=steps, warden_gone=self._child.warden_gone, drift=self._drift)
        self._watch = noticed(self._watch, signs, now)
        await self._sound(now)
        if now - self._row_at >= _ROW_EVERY_S:
            self._row_at = now
            url = progress.tracking_url or self._book.record.tracking_url
            await self._book.update(**self._before.and_then(progress), tracking_url=url)

    async def _sound(self, now: float) -> None:
        before = self._book.record.alarms
        found = still_the_same(before, alarms(self._watch, now, self._clock(), self._limits))
        codes, earlier = {alarm.code for alarm in found}, {alarm.code for alarm in before}
        if found == before:
            return
        await self._book.update(alarms=found)
        for alarm in found:
            if alarm.code not in earlier:
                await self._book.noted("alarm", reason=alarm.text, code=alarm.code)
        for alarm in before:
            if alarm.code not in codes:
                await self._book.noted("alarm_over", reason=alarm.text, code=alarm.code)
        if "stalled" in codes - earlier:
            self._stalled()
