"""One run, or several side by side, in words for a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from palaestra.cli.runs_table import aligned, became, duration, sized, steps, why
from palaestra.cli.terminal import printable, shortened
from palaestra.files.atomic import read_json
from palaestra.files.run_directory import Attempt
from palaestra.runs.checkpoints.listing import all_checkpoints
from palaestra.runs.process.resource_usage import ResourcePeaks, ResourceSample, read_peaks, read_samples
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunRecord
from palaestra.runs.state.event_log import attempt_outcomes, duration_s
from palaestra.runs.tools.wandb import tracking_of
from palaestra.runs.video.clip import Pace
from palaestra.runs.video.recording import film_pace
from palaestra.runs.wire import to_json
from palaestra.strict_json import json_number

__all__ = ["comparison_table", "shown", "shown_data", "slowed"]

_LAST_LINES = 20
_LAST_HAPPENINGS = 8
_METRICS = 16
_LONGEST_NAME = 60
_LONGEST_LINE = 1000


def shown_data(reading: RunReader, name: str) -> dict[str, Any]:
    """Everything `runs show` knows, as plain data."""
    record = reading.run(name)
    if record.archived or not reading.home.run(record.run_id).path.is_dir():
        return {"run": to_json(record)}
    recent = reading.recent_metrics(record.run_id, 1)
    return {
        "run": to_json(record),
        "directory": str(reading.home.run(record.run_id).path),
        "life": [to_json(happening) for happening in reading.life(record.run_id)],
        "metrics": {key: points[-1].value for key, points in recent.items() if points},
        "checkpoints": [to_json(one) for one in all_checkpoints(reading.home, run_id=record.run_id)],
        "command": reading.document(record.run_id, "command"),
    }


def shown(reading: RunReader, name: str) -> list[str]:
    """Lines for a terminal."""
    record = reading.run(name)
    lines = aligned([(title, text) for title, text in _facts(reading, record) if text])
    if record.archived:
        return [*lines, f"It is archived; unpack it with: palaestra runs restore {record.run_id}"]
    if not reading.home.run(record.run_id).path.is_dir():
        return [*lines, "! Its directory is gone: this line is all that is left of it."]
    for alarm in record.alarms:
        lines.append(printable(f"! {alarm.code}: {alarm.text}"))
    lines += _life(reading, record) + _numbers(reading, record) + _checkpoints(reading, record)
    if record.phase.has_ended and record.phase != "succeeded":
        last = reading.last_lines(record.run_id, _LAST_LINES).text.splitlines()
        lines += ["", "Last lines of its output:", *(f"  {_line(line)}" for line in last)] if last else []
    return lines


def _facts(reading: RunReader, record: RunRecord) -> list[tuple[str, str]]:
    paths = reading.home.run(record.run_id)
    took = duration_s(record.started, record.ended, time.time())
    agent = record.agent_id if record.agent_id != record.runner else ""
    process = record.trainer if record.phase.has_process else None
    return [
        ("run", record.run_id),
        ("phase", became(record)),
        ("agent", agent or record.runner),
        ("env", shortened(record.env_id, _LONGEST_NAME)),
        ("attempt", str(record.attempt) if record.attempt > 1 else ""),
        ("earlier", "" if record.archived else _earlier_attempts(reading, record)),
        ("started", _at(record.started)),
        ("ended", _at(record.ended) if record.phase.has_ended else ""),
        ("elapsed", duration(took) if record.started is not None else ""),
        ("steps", steps(record)),
        ("episodes", f"{record.episodes:,}" if record.episodes else ""),
        (
            "return",
            f"{_number(record.episode_return, ',.2f')} (last 100 episodes)"
            if record.episode_return is not None
            else "",
        ),
        ("seed", "" if record.seed is None else str(record.seed)),
        ("tags", shortened(", ".join(record.tags), 4 * _LONGEST_NAME)),
        ("process", f"{process.pid}" if process is not None else ""),
        ("machine", _machine(reading, record)),
        ("tracking", _tracking(reading, record)),
        ("filming", _filming(reading, record)),
        ("size", sized(record.bytes_on_disk) if record.bytes_on_disk else ""),
        ("directory", "" if record.archived else str(paths.path)),
    ]


def _earlier_attempts(reading: RunReader, record: RunRecord) -> str:
    """How the attempts before this one ended."""
    if record.attempt < 2 or not reading.home.run(record.run_id).path.is_dir():
        return ""
    ended = attempt_outcomes(reading.life(record.run_id)).items()
    return "; ".join(f"attempt {number} {one.phase}" for number, one in ended if number < record.attempt)


def _tracking(reading: RunReader, record: RunRecord) -> str:
    if record.archived:
        return record.tracking_url
    found = tracking_of(reading.home.run(record.run_id), record.tracking_url)
    if found.sync_command:
        return f"kept on disk; upload it with: {found.sync_command}   ({found.remedy})"
    return found.url or ("uploaded to W&B" if found.state == "uploaded" else "")


def _filming(reading: RunReader, record: RunRecord) -> str:
    pace = None if record.archived else film_pace(reading.home.run(record.run_id))
    return "" if pace is None else slowed(pace)


def slowed(pace: Pace) -> str:
    """What filming cost the trainer."""
    return (
        f"{pace.slowdown:.2f} times slower while it filmed "
        f"({pace.sps_with:,.0f} instead of {pace.sps_without:,.0f} steps a second)"
    )


def _machine(reading: RunReader, record: RunRecord) -> str:
    if not record.attempt or record.archived:
        return ""
    attempt = reading.home.run(record.run_id).attempt(record.attempt)
    if record.phase.has_ended:
        peaks = read_peaks(attempt)
        return f"at most {_use(peaks)}" if peaks is not None else _use_at_exit(attempt)
    samples = read_samples(attempt, 1)
    return _use(samples[-1]) if samples else ""


def _use(use: ResourceSample | ResourcePeaks) -> str:
    gpus = "".join(f", GPU {index} {busy:.0f} % and {used:,.0f} MB" for index, busy, used in use.gpus)
    many = "es" if use.processes != 1 else ""
    return f"{use.cpu_percent:.0f} % of a core, {use.rss_mb:,.0f} MB, {use.processes} process{many}{gpus}"


def _use_at_exit(attempt: Attempt) -> str:
    """Peak memory as counted by the kernel, for a run that ended before the first sample."""
    rss_kb = (read_json(attempt.exit) or {}).get("max_rss_kb")
    return f"at most {rss_kb / 1024:,.0f} MB in one process" if isinstance(rss_kb, int | float) else ""


def _life(reading: RunReader, record: RunRecord) -> list[str]:
    life = reading.life(record.run_id)[-_LAST_HAPPENINGS:]
    rows = [(f"  {_at(one.time)}", one.happening.replace("_", " "), why(one.happening, one.reason)) for one in life]
    return ["", "What happened:", *aligned(rows)] if rows else []


def _numbers(reading: RunReader, record: RunRecord) -> list[str]:
    recent = {name: points[-1] for name, points in reading.recent_metrics(record.run_id, 1).items() if points}
    rows = [
        (f"  {shortened(name, _LONGEST_NAME)}", _number(point.value, ".6g"))
        for name, point in list(recent.items())[:_METRICS]
    ]
    more = [f"  and {len(recent) - len(rows)} more"] if len(recent) > len(rows) else []
    return ["", "Last numbers:", *aligned(rows, right=[False, True]), *more] if rows else []


def _checkpoints(reading: RunReader, record: RunRecord) -> list[str]:
    found = all_checkpoints(reading.home, run_id=record.run_id)
    rows = [
        (f"  {one.checkpoint_id}", one.shown_step, sized(one.size_bytes), "best" if one.best else "", one.path)
        for one in found[:5]
    ]
    more = [f"  and {len(found) - len(rows)} more"] if len(found) > len(rows) else []
    return ["", "Checkpoints:", *aligned(rows, right=[False, True, True]), *more] if rows else []


def comparison_table(found: Mapping[str, Any]) -> list[str]:
    """Rows of facts, of differing keys and of metrics; a column for every run."""
    columns = found["runs"]
    rows = [["", *(column["run"]["run_id"] for column in columns)]]
    for title, key in (("runner", "runner"), ("env", "env_id"), ("phase", "phase")):
        rows.append([title, *(_value(column["run"][key]) for column in columns)])
    rows.append(["steps", *(f"{column['run']['env_step']:,}" for column in columns)])
    rows.append(["return", *(_number(column["run"]["episode_return"]) for column in columns)])
    rows.append(["elapsed", *(duration(column["elapsed_s"]) for column in columns)])
    if len({column["script_sha256"] for column in columns}) > 1:
        rows.append(["script", *(column["script_sha256"][:12] for column in columns)])
    blank = ["" for _ in rows[0]]
    if found["configuration"]:
        rows += [blank, ["CONFIGURED DIFFERENTLY", *blank[1:]]]
        rows += [
            [shortened(key, _LONGEST_NAME), *(_value(value) for value in values)]
            for key, values in found["configuration"].items()
        ]
    if found["metrics"]:
        rows += [blank, ["LAST NUMBERS", *blank[1:]]]
        rows += [
            [shortened(name, _LONGEST_NAME), *(_number(value) for value in values)]
            for name, values in found["metrics"].items()
        ]
    return aligned(rows)


def _line(text: str) -> str:
    """A line of output, with its tabs as blanks."""
    return printable(text.expandtabs()[:_LONGEST_LINE])


def _number(value: float | str | None, spec: str = "") -> str:
    """A number in few characters; NaN and the infinities by the names they have in JSON."""
    if value is None or isinstance(value, str):
        return value or "–"
    if not math.isfinite(value):
        return str(json_number(value))
    return format(value, spec or (",.4g" if abs(value) < 1000 else ",.1f"))


def _value(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _at(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
