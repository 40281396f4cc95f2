"""Text of `runs show` and `runs compare` for terminals."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from typing import Any

from palaestra.cli.runs.table import format_phase, format_reason, format_steps
from palaestra.cli.terminal import (
    Column,
    color_state,
    emphasize,
    format_bytes,
    format_columns,
    format_duration,
    format_table,
    format_time,
    sanitize_line,
    shorten,
)
from palaestra.files.run_directory import Attempt
from palaestra.redaction import redact_secrets
from palaestra.runs.checkpoints.catalogue import list_checkpoints
from palaestra.runs.comparison import final_metrics, flatten, read_configuration
from palaestra.runs.process.resource_usage import ResourceSample, read_peaks, read_samples
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunRecord
from palaestra.runs.state.attempt_files import count_lines, read_status
from palaestra.runs.state.event_log import attempt_outcomes, duration_s
from palaestra.runs.tools.wandb import read_tracking
from palaestra.runs.video.clip import RecordingOverhead, measure_recording_overhead
from palaestra.strict_json import json_number

_MAX_OUTPUT_LINES = 20
_MAX_EVENTS = 8
_MAX_METRICS = 16
_MAX_CONFIGURATION = 24
_MAX_NAME = 60
_MAX_LINE = 1000


def run_details(reader: RunReader, name: str) -> dict[str, Any]:
    """The JSON document of `runs show`."""
    record = reader.run(name)
    if record.archived or not reader.home.run(record.run_id).path.is_dir():
        return {"run": record}
    recent = reader.recent_metrics(record.run_id, 1)
    return {
        "run": record,
        "directory": str(reader.home.run(record.run_id).path),
        "events": reader.events(record.run_id),
        "metrics": {key: points[-1].value for key, points in recent.items() if points},
        "mean_metrics": _read_metrics(reader, record),
        "checkpoints": list_checkpoints(reader.home, run_id=record.run_id),
        "command": reader.document(record.run_id, "command"),
        "config": redact_secrets(reader.document(record.run_id, "resolved")),
        "source": _describe_source(reader, record),
    }


def _describe_source(reader: RunReader, record: RunRecord) -> dict[str, Any] | None:
    """The stored code and environment of the newest attempt, without the lists of files; None if there is none."""
    from palaestra.runs.reproducibility.source_recorder import read_source

    source = read_source(reader.home.run(record.run_id).attempt(max(1, record.attempt)))
    if source is None:
        return None
    code = {key: value for key, value in vars(source.code).items() if key != "files"}
    return {"code": code, "environment": vars(source.environment)}


def format_run(reader: RunReader, name: str) -> list[str]:
    """The lines of `runs show`."""
    record = reader.run(name)
    fields = [(title, text) for title, text in _get_fields(reader, record) if text]
    lines = [
        color_state(line, str(record.phase)) if title == "phase" else line
        for (title, _), line in zip(fields, format_columns(fields), strict=True)
    ]
    if record.archived:
        return [*lines, f"Archived. Restore it with: palaestra runs restore {record.run_id}"]
    if not reader.home.run(record.run_id).path.is_dir():
        return [*lines, "! The run directory is missing; only this record is left."]
    lines += [emphasize(sanitize_line(f"! {alarm.code}: {alarm.text}"), "33") for alarm in record.alarms]
    if record.notes:
        lines += ["", "Notes:", *(f"  {sanitize_line(line)}" for line in record.notes.splitlines())]
    metrics = _format_metrics(reader, record) or _explain_missing_metrics(reader, record)
    lines += _format_configuration(reader, record) + _format_events(reader, record) + metrics
    lines += _format_checkpoints(reader, record)
    if record.phase.has_ended and record.phase != "succeeded":
        last = reader.last_lines(record.run_id, _MAX_OUTPUT_LINES).text.splitlines()
        lines += ["", "Last output:", *(f"  {_format_line(line)}" for line in last)] if last else []
    return lines


def _get_fields(reader: RunReader, record: RunRecord) -> list[tuple[str, str]]:
    paths = reader.home.run(record.run_id)
    elapsed_s = duration_s(record.started, record.ended, time.time())
    agent = record.agent_id if record.agent_id != record.runner else ""
    process = record.trainer if record.phase.has_process else None
    return [
        ("run", record.run_id),
        ("name", sanitize_line(record.name)),
        ("favorite", "yes" if record.favorite else ""),
        ("phase", format_phase(record)),
        ("agent", agent or record.runner),
        ("env", shorten(record.env_id, _MAX_NAME)),
        ("host", shorten(sanitize_line(record.host), _MAX_NAME)),
        ("attempt", str(record.attempt) if record.attempt > 1 else ""),
        ("earlier", "" if record.archived else _format_earlier_attempts(reader, record)),
        ("started", format_time(record.started)),
        ("ended", format_time(record.ended) if record.phase.has_ended else ""),
        ("elapsed", format_duration(elapsed_s) if record.started is not None else ""),
        ("steps", format_steps(record)),
        ("episodes", f"{record.episodes:,}" if record.episodes else ""),
        (
            "return",
            f"{_format_number(record.episode_return, ',.2f')} (last 100 episodes)"
            if record.episode_return is not None
            else "",
        ),
        ("seed", "" if record.seed is None else str(record.seed)),
        ("tags", shorten(", ".join(record.tags), 4 * _MAX_NAME)),
        ("process", f"{process.pid}" if process is not None else ""),
        *_format_source(reader, record),
        ("resources", _format_resources(reader, record)),
        ("tracking", _format_tracking(reader, record)),
        ("video", _format_video(reader, record)),
        ("size", format_bytes(record.bytes_on_disk) if record.bytes_on_disk else ""),
        ("directory", "" if record.archived else str(paths.path)),
    ]


def _format_earlier_attempts(reader: RunReader, record: RunRecord) -> str:
    """The outcomes of the earlier attempts."""
    if record.attempt < 2 or not reader.home.run(record.run_id).path.is_dir():
        return ""
    attempts = attempt_outcomes(reader.events(record.run_id)).items()
    return "; ".join(f"attempt {number} {event.phase}" for number, event in attempts if number < record.attempt)


def _format_source(reader: RunReader, record: RunRecord) -> list[tuple[str, str]]:
    """The command, the code and the environment of the newest attempt, in one line each."""
    if record.archived or not record.attempt or not reader.home.run(record.run_id).path.is_dir():
        return [("code", record.code_version)]
    from palaestra.runs.reproducibility.source_recorder import read_source

    argv = reader.document(record.run_id, "command").get("argv")
    command = shlex.join(map(str, argv)) if isinstance(argv, list) else ""
    source = read_source(reader.home.run(record.run_id).attempt(record.attempt))
    code, environment = ("", "") if source is None else (source.code.description, source.environment.description)
    texts = (("code", code), ("system", environment))
    # The command is whole, so that it can be copied.
    return [("command", command), *((title, shorten(text, 3 * _MAX_NAME)) for title, text in texts)]


def _format_tracking(reader: RunReader, record: RunRecord) -> str:
    if record.archived:
        return record.tracking_url
    tracking = read_tracking(reader.home.run(record.run_id), record.tracking_url)
    if tracking.sync_command:
        return f"stored on disk; upload it with: {tracking.sync_command}   ({tracking.remedy})"
    return tracking.url or ("uploaded to W&B" if tracking.state == "uploaded" else "")


def _format_video(reader: RunReader, record: RunRecord) -> str:
    pace = None if record.archived else measure_recording_overhead(reader.home.run(record.run_id))
    return "" if pace is None else format_slowdown(pace)


def format_slowdown(pace: RecordingOverhead) -> str:
    """How much video recording slows the trainer down."""
    return (
        f"{pace.slowdown:.2f} times slower while recording "
        f"({pace.sps_with:,.0f} instead of {pace.sps_without:,.0f} steps per second)"
    )


def _format_resources(reader: RunReader, record: RunRecord) -> str:
    if not record.attempt or record.archived:
        return ""
    attempt = reader.home.run(record.run_id).attempt(record.attempt)
    if record.phase.has_ended:
        peaks = read_peaks(attempt)
        return f"peak {_format_usage(peaks)}" if peaks is not None else _format_usage_at_exit(attempt)
    samples = read_samples(attempt, 1)
    return _format_usage(samples[-1]) if samples else ""


def _format_usage(usage: ResourceSample) -> str:
    gpus = "".join(f", GPU {index} {busy:.0f} % and {used:,.0f} MB" for index, busy, used in usage.gpus)
    plural = "es" if usage.processes != 1 else ""
    return f"{usage.cpu_percent:.0f} % of a core, {usage.rss_mb:,.0f} MB, {usage.processes} process{plural}{gpus}"


def _format_usage_at_exit(attempt: Attempt) -> str:
    """Peak memory according to the kernel, for a run that ended before the first sample."""
    exit_ = read_status(attempt).exit
    return "" if exit_ is None else f"peak {exit_.max_rss_kb / 1024:,.0f} MB in one process"


def _format_events(reader: RunReader, record: RunRecord) -> list[str]:
    rows = [
        (
            f"  {format_time(event.time)}",
            event.kind.replace("_", " "),
            format_reason(event.kind, event.reason),
        )
        for event in reader.events(record.run_id)[-_MAX_EVENTS:]
    ]
    return ["", emphasize("Events:"), *format_columns(rows)] if rows else []


def _format_metrics(reader: RunReader, record: RunRecord) -> list[str]:
    """The same numbers as in `runs compare`."""
    metrics = _read_metrics(reader, record)
    rows = [
        (f"  {shorten(name, _MAX_NAME)}", _format_number(value)) for name, value in list(metrics.items())[:_MAX_METRICS]
    ]
    more = [f"  and {len(metrics) - len(rows)} more"] if len(metrics) > len(rows) else []
    title = emphasize("Metrics (mean of the last 100 episodes, or of the last 10 updates):")
    return ["", title, *format_columns(rows, align_right=[False, True]), *more] if rows else []


def _read_metrics(reader: RunReader, record: RunRecord) -> dict[str, float]:
    """The mean of the last 100 episodes or the last 10 updates of every metric."""
    return {name: value for name, value in final_metrics(reader, record.run_id).items() if value is not None}


def _format_configuration(reader: RunReader, record: RunRecord) -> list[str]:
    """What the user gave; for a run without a request, all values."""
    run = reader.home.run(record.run_id)
    every_value = read_configuration(run, run.attempt(max(1, record.attempt)))
    config = reader.document(record.run_id, "spec").get("config")
    given = flatten(config) if isinstance(config, Mapping) else {}  # the file may be damaged
    values = redact_secrets(given or every_value)
    rows = [
        (f"  {shorten(key, _MAX_NAME)}", shorten(_format_value(value), _MAX_NAME))
        for key, value in list(values.items())[:_MAX_CONFIGURATION]
    ]
    hidden = max(0, len(every_value.keys() | values.keys()) - len(rows))
    more = [f"  and {hidden} more values (--json has all)"] if hidden else []
    return ["", emphasize("Configuration:"), *format_columns(rows), *more] if rows else []


def _explain_missing_metrics(reader: RunReader, record: RunRecord) -> list[str]:
    """What was looked for in a program that has ended without metrics; empty for other runners."""
    if record.runner != "script" or not record.phase.has_ended or not record.attempt:
        return []
    from palaestra.cli.runs.explain import format_missing_metrics

    attempt = reader.home.run(record.run_id).attempt(record.attempt)
    directory = str(reader.document(record.run_id, "command").get("cwd", ""))
    return format_missing_metrics(directory, count_lines(attempt.stdout))


def _format_checkpoints(reader: RunReader, record: RunRecord) -> list[str]:
    records = list_checkpoints(reader.home, run_id=record.run_id)
    rows = [
        (
            f"  {checkpoint.checkpoint_id}",
            checkpoint.step_text,
            format_bytes(checkpoint.size_bytes),
            "best" if checkpoint.best else "",
            checkpoint.path,
        )
        for checkpoint in records[:5]
    ]
    more = [f"  and {len(records) - len(rows)} more"] if len(records) > len(rows) else []
    return (
        ["", emphasize("Checkpoints:"), *format_columns(rows, align_right=[False, True, True]), *more] if rows else []
    )


def format_comparison(comparison: Mapping[str, Any]) -> list[str]:
    """The lines of `runs compare`: one column per run; facts, configuration differences, evaluations, metrics."""
    columns = comparison["runs"]
    rows = []
    for title, key in (("runner", "runner"), ("env", "env_id"), ("phase", "phase")):
        rows.append([title, *(_format_value(column["run"][key]) for column in columns)])
    rows.append(["steps", *(f"{column['run']['env_step']:,}" for column in columns)])
    rows.append(["return", *(_format_number(column["run"]["episode_return"]) for column in columns)])
    rows.append(["elapsed", *(format_duration(column["elapsed_s"]) for column in columns)])
    if len({column["script_sha256"] for column in columns}) > 1:
        rows.append(["script", *(column["script_sha256"][:12] for column in columns)])
    blank = ["" for _ in ("", *columns)]
    if comparison["configuration"]:
        rows += [blank, ["CONFIGURATION", *blank[1:]]]
        rows += [
            [shorten(key, _MAX_NAME), *(_format_value(value) for value in values)]
            for key, values in comparison["configuration"].items()
        ]
    for title, key in (("EVALUATIONS", "evaluations"), ("LATEST METRICS", "metrics")):
        if comparison[key]:
            rows += [blank, [title, *blank[1:]]]
            rows += [
                [shorten(name, _MAX_NAME), *(_format_number(value) for value in values)]
                for name, values in comparison[key].items()
            ]
    ids = [Column(column["run"]["run_id"], min_width=12) for column in columns]
    return format_table([Column("", min_width=16), *ids], rows)


def _format_line(text: str) -> str:
    """A sanitized line of output, with tabs as spaces."""
    return sanitize_line(text.expandtabs()[:_MAX_LINE])


def _format_number(value: float | str | None, spec: str = "") -> str:
    """A short number; NaN and the infinities as in our JSON."""
    if value is None or isinstance(value, str):
        return value or "–"
    if not math.isfinite(value):
        return str(json_number(value))
    return format(value, spec or (",.4g" if abs(value) < 1000 else ",.1f"))


def _format_value(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"
