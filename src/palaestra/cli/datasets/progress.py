"""Progress of a command on standard error: a bar on a terminal, one plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from palaestra.cli.terminal import format_bytes
from palaestra.telemetry.progress import PLAIN_LINE_EVERY_S, can_redraw


class UpdateProgress(Protocol):
    """Called with what is done and with the total, 0 if that is unknown. A bar shows the note beside them."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show the progress."""


@contextmanager
def show_progress(
    title: str, unit: str, clock: Callable[[], float] = time.monotonic, *, only_on_terminal: bool = False
) -> Iterator[UpdateProgress]:
    """Show the progress of the block in a unit such as `steps`; `bytes` are shown as sizes.

    `only_on_terminal` prints no plain lines either.
    """
    if can_redraw(sys.stderr):
        with _show_bar(title, unit) as update:
            yield update
    elif only_on_terminal:
        yield lambda done, total, note="": None
    else:
        yield _PlainLines(title, unit, clock)


class _PlainLines:
    """Prints a line when ten seconds have passed since the start or the last line."""

    def __init__(self, title: str, unit: str, clock: Callable[[], float]) -> None:
        self._title, self._unit, self._clock = title, unit, clock
        self._printed = clock()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        if self._clock() - self._printed < PLAIN_LINE_EVERY_S:
            return
        self._printed = self._clock()
        if self._unit == "bytes":
            amount = format_bytes(done) + (f" of {format_bytes(total)}" if total else "")
        else:
            amount = f"{done:,}" + (f" of {total:,}" if total else "") + f" {self._unit}"
        print(f"{self._title}: {amount}", file=sys.stderr, flush=True)


@contextmanager
def _show_bar(title: str, unit: str) -> Iterator[UpdateProgress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TextColumn(unit))
    if unit == "bytes":
        columns = (DownloadColumn(), TransferSpeedColumn())
    note_column = TextColumn("{task.fields[note]}")
    all_columns = (TextColumn("{task.description}"), BarColumn(), *columns, note_column, TimeRemainingColumn())
    with Progress(*all_columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, note="")

        def update(done: int, total: int, note: str = "") -> None:
            bar.update(task, completed=done, total=max(done, total) if total else None, note=note)

        yield update
