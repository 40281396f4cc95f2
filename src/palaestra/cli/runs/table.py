"""Text of run records for terminals: the table of `runs list`, and one line about a run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from palaestra.cli.terminal import Column, format_duration, format_table, sanitize_line, shorten
from palaestra.intervals import format_return
from palaestra.runs.phase import Phase
from palaestra.runs.record import LASTING_ALARMS, RunRecord
from palaestra.runs.state.event_log import duration_s

_COLUMNS = (
    Column("RUN", min_width=24),
    Column("FAV"),
    Column("RUNNER", drop_order=2),
    Column("HOST", min_width=8, drop_order=1),
    Column("ENV", min_width=10),
    Column("PHASE"),
    Column("STEPS", align_right=True),
    Column("RETURN", align_right=True),
    Column("ELAPSED", align_right=True, drop_order=3),
    Column("NOTE", min_width=12),
)
_MAX_NOTE = 60
_MAX_NAME = 40


def format_runs(records: Sequence[RunRecord]) -> list[str]:
    """A line of titles, and one line per run. Favorites and other machines have a column if there are any."""
    now = time.time()
    unused = {"HOST"} if not any(record.host for record in records) else set()
    unused |= {"FAV"} if not any(record.favorite for record in records) else set()
    columns = [column for column in _COLUMNS if column.title not in unused]
    rows = [
        (
            record.run_id,
            *(["*" if record.favorite else ""] if "FAV" not in unused else []),
            record.runner,
            *([shorten(sanitize_line(record.host), _MAX_NAME)] if "HOST" not in unused else []),
            shorten(record.env_id, _MAX_NAME),
            str(record.phase),
            format_steps(record),
            "" if record.episode_return is None else format_return(record.episode_return),
            format_duration(duration_s(record.started, record.ended, now)) if record.started is not None else "",
            format_note(record),
        )
        for record in records
    ]
    return format_table(columns, rows)


def format_note(record: RunRecord) -> str:
    """What matters about a run besides its phase: an alarm, the reason of a failure."""
    failed = record.phase.has_ended and record.phase is not Phase.SUCCEEDED
    if record.alarms and not failed:
        text = f"! {record.alarms[0].text}"
    elif record.code == "no_episodes" or record.code in LASTING_ALARMS:
        text = f"! {record.reason}"
    elif record.phase in (Phase.SUCCEEDED, Phase.RUNNING) or record.reason == str(record.phase):
        text = "" if record.supervised else "started without the service"
    else:
        text = record.reason
    text = sanitize_line(" ".join(text.split()))
    return text if len(text) <= _MAX_NOTE else text[: _MAX_NOTE - 1] + "…"


def format_steps(record: RunRecord) -> str:
    """`128,000/500,000`."""
    if not record.env_step and record.total_steps is None:
        return ""
    return f"{record.env_step:,}" + (f"/{record.total_steps:,}" if record.total_steps else "")


def format_outcome(record: RunRecord) -> str:
    """Id, phase, reason and duration of a run on one line."""
    duration = ""
    if record.started is not None:
        duration = f" after {format_duration(duration_s(record.started, record.ended, time.time()))}"
    return sanitize_line(f"{record.run_id} {format_phase(record, '{} ({})')}{duration}")


def format_phase(record: RunRecord, template: str = "{}: {}") -> str:
    """Phase and reason without repetition: `failed: exit code 3`, but `killed (SIGKILL)`."""
    if record.reason in ("", "done"):
        return str(record.phase)
    if record.reason.startswith(str(record.phase)):
        return record.reason
    return template.format(record.phase, record.reason)


def format_reason(kind: str, reason: str) -> str:
    """The reason of an event without repeating its name: `SIGKILL` for `killed`."""
    name = kind.replace("_", " ")
    if name == "stop asked":
        reason = reason.removeprefix("asked to stop")
    rest = reason.removeprefix(name).strip()
    return rest[1:-1] if rest.startswith("(") and rest.endswith(")") else rest.removeprefix(":").strip()
