"""Runs in words and columns, for terminals. Imports nothing but the standard library and rows."""

from __future__ import annotations

import time
from collections.abc import Sequence

from palaestra.cli.terminal import printable, shortened
from palaestra.runs.phase import Phase
from palaestra.runs.record import LASTING_ALARMS, RunRecord
from palaestra.runs.state.event_log import duration_s

__all__ = ["aligned", "became", "duration", "note", "one_line", "run_table", "sized", "steps", "why"]

_HEAD = ("RUN", "RUNNER", "ENV", "PHASE", "STEPS", "RETURN", "ELAPSED", "NOTE")
_RIGHT = frozenset({"STEPS", "RETURN", "ELAPSED"})
_LONGEST_NOTE = 60
_LONGEST_NAME = 40


def run_table(rows: Sequence[RunRecord]) -> list[str]:
    """One line per run, under a line of titles."""
    now = time.time()
    cells = [
        (
            row.run_id,
            row.runner,
            shortened(row.env_id, _LONGEST_NAME),
            str(row.phase),
            steps(row),
            "" if row.episode_return is None else f"{row.episode_return:,.1f}",
            duration(duration_s(row.started, row.ended, now)) if row.started is not None else "",
            note(row),
        )
        for row in rows
    ]
    return aligned([_HEAD, *cells], right=[title in _RIGHT for title in _HEAD])


def aligned(rows: Sequence[Sequence[str]], right: Sequence[bool] = ()) -> list[str]:
    """Columns as wide as their widest cell, of letters that a terminal only draws."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    to_the_right = [*right, *[False] * (len(widths) - len(right))]
    return [
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, to_the_right, strict=True)
        ).rstrip()
        for row in rows
    ]


def note(row: RunRecord) -> str:
    """What a person should know of a run beyond its phase."""
    failed = row.phase.has_ended and row.phase is not Phase.SUCCEEDED
    if row.alarms and not failed:
        text = f"! {row.alarms[0].text}"
    elif row.code == "no_episodes" or row.code in LASTING_ALARMS:
        text = f"! {row.reason}"
    elif row.phase in (Phase.SUCCEEDED, Phase.RUNNING) or row.reason == str(row.phase):
        text = "" if row.supervised else "started without the service"
    else:
        text = row.reason
    text = printable(" ".join(text.split()))
    return text if len(text) <= _LONGEST_NOTE else text[: _LONGEST_NOTE - 1] + "…"


def steps(row: RunRecord) -> str:
    """`128,000/500,000`."""
    if not row.env_step and row.total_steps is None:
        return ""
    return f"{row.env_step:,}" + (f"/{row.total_steps:,}" if row.total_steps else "")


def one_line(row: RunRecord) -> str:
    """What became of a run."""
    took = f" after {duration(duration_s(row.started, row.ended, time.time()))}" if row.started is not None else ""
    return printable(f"{row.run_id} {became(row, '{} ({})')}{took}")


def became(row: RunRecord, words: str = "{}: {}") -> str:
    """The phase of a run and why, once: `failed: exit code 3`, but `killed (SIGKILL)`."""
    if row.reason in ("", "done"):
        return str(row.phase)
    return row.reason if row.reason.startswith(str(row.phase)) else words.format(row.phase, row.reason)


def why(happening: str, reason: str) -> str:
    """A reason beside what happened, without saying that twice: `SIGKILL` beside `killed`."""
    words = happening.replace("_", " ")
    if words == "stop asked":
        reason = reason.removeprefix("asked to stop")
    rest = reason.removeprefix(words).strip()
    return rest[1:-1] if rest.startswith("(") and rest.endswith(")") else rest.removeprefix(":").strip()


def duration(seconds: float) -> str:
    """`0:01:12`, and days in front of it when there are some."""
    whole = int(seconds)
    days, rest = divmod(whole, 86_400)
    shown = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {shown}" if days else shown


def sized(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
