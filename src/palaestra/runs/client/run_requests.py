"""Requests about runs: start, stop, resume, list, follow, compare, archive and delete them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from palaestra.errors import ConfigError
from palaestra.runs.client.requests import ServiceRequests, quote
from palaestra.runs.client.server_events import ServerEvent, ServerEvents
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunEvent, RunRecord
from palaestra.runs.runner import LaunchPreview
from palaestra.runs.spec import RunSpec, find_value_fault, resolve_environment, run_name
from palaestra.runs.wire import JsonObject, from_json, upgrade_names
from palaestra.telemetry.event import Record, decode

if TYPE_CHECKING:
    from palaestra.runs.archive.retention import RetentionAction
    from palaestra.runs.archive.schedule import RetentionReport
    from palaestra.runs.comparison import Comparison
    from palaestra.runs.differences.run_diff import RunDifference

_FIRST_POLL_S, _MAX_POLL_S = 0.02, 0.5


class RunRequests(ServiceRequests):
    """What the client can do with runs."""

    def start_run(
        self,
        config: RunSpec | Mapping[str, object] | str | Path,
        *,
        runner: str = "palaestra",
        consent: bool = False,
        **spec: object,
    ) -> str:
        """Queue a run and return its id. `consent` agrees to a command that executes foreign code."""
        run_spec = _build_spec(config, runner, spec)
        if not consent:
            return self.submit(run_spec).run_id
        preview = self.prepare_training(run_spec)
        return self.submit(run_spec, preview.digest, preview.run_id).run_id

    def prepare_training(self, spec: RunSpec) -> LaunchPreview:
        """The findings of a preflight and the command that a start would execute. Changes nothing."""
        return from_json(LaunchPreview, self.request("POST", "/preflight", {"spec": _spec_to_json(spec)}))

    def submit(self, spec: RunSpec, consent: str | None = None, run_id: str | None = None) -> RunRecord:
        """Queue a run. `consent` and `run_id` are the digest and the run id of its preview."""
        return self._run_request("/runs", {"spec": _spec_to_json(spec), "consent": consent, "run_id": run_id})

    def stop_run(self, run_id: str, *, grace_s: float | None = None) -> RunRecord:
        """Stop a run. Returns when all its processes have ended."""
        return self._run_request(f"/runs/{quote(run_id)}/stop", {"grace_s": grace_s})

    def resume_run(
        self,
        run_id: str,
        consent: str | None = None,
        *,
        checkpoint: str | None = None,
        changes: Mapping[str, object] | None = None,
        on: str | None = None,
    ) -> RunRecord:
        """Queue a run that has ended again, from its newest undamaged checkpoint or from `checkpoint`.

        `changes` are values by dotted key, such as {"trainer.total_timesteps": 200_000}. `on` is another machine than
        the one it ran on; empty for that of the service.
        """
        body = {"consent": consent, "checkpoint": checkpoint, "changes": _changes_to_json(changes or {}), "on": on}
        return self._run_request(f"/runs/{quote(run_id)}/resume", body)

    def run(self, run_id: str) -> RunRecord:
        """A run in its current state."""
        return from_json(RunRecord, self.request("GET", f"/runs/{quote(run_id)}"))

    def runs(self, **filters: object) -> list[RunRecord]:
        """Runs that match the filters of `GET /runs`, newest first."""
        return [from_json(RunRecord, row) for row in self.request("GET", "/runs", None, **filters)]

    def wait(
        self, run_id: str, *, phases: Collection[Phase] | None = None, timeout_s: float | None = None
    ) -> RunRecord:
        """Wait until a run has ended or is in one of the phases; `TimeoutError` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll_s = _FIRST_POLL_S
        while True:
            record = self.run(run_id)
            if record.phase.has_ended or record.phase in (phases or ()):
                return record
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{run_id} is {record.phase} after {timeout_s} s")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)

    def update_run(
        self,
        run_id: str,
        *,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        favorite: bool | None = None,
    ) -> RunRecord:
        """Change the title, tags and notes of a run, or mark it as a favorite; None leaves a field as it is."""
        body = {"name": name, "tags": None if tags is None else list(tags), "notes": notes, "favorite": favorite}
        return from_json(RunRecord, self.request("PATCH", f"/runs/{quote(run_id)}", body))

    def run_events(self, run_id: str) -> list[RunEvent]:
        """What has happened to a run, in order."""
        return [_read_run_event(row) for row in self.request("GET", f"/runs/{quote(run_id)}/life")]

    def run_spec(self, run_id: str) -> JsonObject:
        """The spec that a run was started with; empty for a run of `palaestra train` alone."""
        return dict(self.request("GET", f"/runs/{quote(run_id)}/spec"))

    def run_command(self, run_id: str, attempt: int | None = None) -> JsonObject:
        """The command of an attempt (default: the newest), with secrets redacted."""
        return dict(self.request("GET", f"/runs/{quote(run_id)}/command", attempt=attempt))

    def resolved(self, run_id: str, attempt: int | None = None) -> JsonObject:
        """The configuration of an attempt (default: the newest) with all values."""
        return dict(self.request("GET", f"/runs/{quote(run_id)}/resolved", attempt=attempt))

    def compare(self, run_ids: Sequence[str]) -> Comparison:
        """Two to fifty runs side by side."""
        from palaestra.runs.comparison import Comparison

        return from_json(Comparison, self.request("GET", "/compare", run=list(run_ids)))

    def diff_runs(self, first: str, second: str) -> RunDifference:
        """How the second run differs from the first in configuration, code, packages, machine and variables."""
        from palaestra.runs.differences.run_diff import RunDifference

        return from_json(RunDifference, self.request("GET", "/diff", run=[first, second]))

    def archive_run(self, run_id: str) -> RunRecord:
        """Pack a run that has ended."""
        return self._run_request(f"/runs/{quote(run_id)}/archive", {})

    def restore_run(self, run_id: str) -> RunRecord:
        """Unpack an archived run, or restore a deleted one."""
        return self._run_request(f"/runs/{quote(run_id)}/restore", {})

    def delete_run(self, run_id: str) -> RunRecord:
        """Move a run that has ended to the trash, from which it can be restored for some days."""
        return from_json(RunRecord, self.request("DELETE", f"/runs/{quote(run_id)}"))

    def gc(self, *, dry_run: bool = True) -> list[RetentionAction]:
        """Apply the retention policy, or list what it would do."""
        from palaestra.runs.archive.retention import RetentionAction

        return [from_json(RetentionAction, row) for row in self.request("POST", "/gc", {"dry_run": dry_run})]

    def retention_report(self) -> RetentionReport:
        """When the retention policy is applied automatically, and what it did the last time."""
        from palaestra.runs.archive.schedule import RetentionReport

        return from_json(RetentionReport, self.request("GET", "/gc"))

    def drain(self, on: bool) -> bool:
        """Stop or continue starting queued runs; returns whether the service drains."""
        return bool(self.request("POST", "/drain", {"on": on})["draining"])

    def stream_log(
        self, run_id: str, *, offset: int = 0, follow: bool = True, attempt: int | None = None
    ) -> Iterator[str]:
        """Lines of a run's output, without line ends; with `follow`, until the run has ended."""
        path = f"/runs/{quote(run_id)}/log"
        if follow:
            for text in self.watch_log(run_id, offset=offset, attempt=attempt):
                yield from text.splitlines()
            return
        while True:
            chunk = self.request("GET", path, offset=offset, attempt=attempt)
            if chunk["offset"] <= offset:
                return
            yield from chunk["text"].splitlines()
            offset = chunk["offset"]

    def stream_events(self, run_id: str, *, after: str = "", follow: bool = True) -> Iterator[Record | RunEvent]:
        """All events and journal records of a run, in order and each once; with `follow`, until the run has ended.

        `after` is the id of an event of the HTTP API.
        """
        query = {"after": after, "follow": follow}

        def convert(event: ServerEvent) -> Record | RunEvent:
            return decode(event.data) if event.kind == "event" else _read_run_event(json.loads(event.data))

        yield from self._stream(f"/runs/{quote(run_id)}/events", query, convert, after)

    def watch_log(self, run_id: str, *, offset: int = 0, attempt: int | None = None) -> ServerEvents[str]:
        """Parts of a run's output as they are written, until the run has ended; can be closed from any thread."""
        path = f"/runs/{quote(run_id)}/log/stream"
        return self._stream(path, {"offset": offset, "attempt": attempt}, lambda event: json.loads(event.data)["text"])

    def watch_runs(self) -> ServerEvents[tuple[str, RunEvent]]:
        """Run id and event of all runs from now on; ends with the connection. List the runs after it has begun."""

        def convert(event: ServerEvent) -> tuple[str, RunEvent]:
            data = json.loads(event.data)
            return str(data.pop("run_id")), _read_run_event(data)

        return self._stream("/stream", {}, convert, resumes=False)

    def _run_request(self, path: str, body: Mapping[str, object]) -> RunRecord:
        return from_json(RunRecord, self.request("POST", path, body))


def _build_spec(config: RunSpec | Mapping[str, object] | str | Path, runner: str, fields: JsonObject) -> RunSpec:
    from palaestra.config import parse_section

    if isinstance(config, RunSpec):
        return config.model_copy(update=fields) if fields else config
    data: JsonObject = {"runner": runner, **fields}
    if isinstance(config, Mapping):
        data["config"] = dict(config)
    else:
        from palaestra.config.packaged import read_runner_config

        source = read_runner_config(str(config), runner)
        data["config"], data["config_text"] = source.apply_overrides([]), source.text
        data.setdefault("name", run_name(source.data.get("name"), source.path))
    return parse_section(RunSpec, data, place="spec")


def _spec_to_json(spec: RunSpec) -> JsonObject:
    return resolve_environment(spec, os.environ).model_dump(mode="json")


def _changes_to_json(changes: Mapping[str, object]) -> Any:
    """Changed keys as JSON; dates become text, as in the configuration of a new run."""
    for key, value in changes.items():
        fault = find_value_fault(value)
        if fault:
            raise ConfigError(key, value, fault)
    return to_jsonable_python(dict(changes))


def _read_run_event(data: JsonObject) -> RunEvent:
    return from_json(RunEvent, upgrade_names(data))
