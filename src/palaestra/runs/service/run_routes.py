"""Routes that list, start, stop, resume, archive and delete runs."""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
import asyncio
import os
from typing import Annotated, Literal

from fastapi import FastAPI, Query
from pydantic import AfterValidator, Field, StrictBool

from palaestra import __version__
from palaestra.errors import ConfigError
from palaestra.redaction import redact_secrets
from palaestra.runs.analysis.query import select_runs
from palaestra.runs.archive.retention import RetentionAction
from palaestra.runs.archive.schedule import RetentionReport, RetentionSchedule
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunEdit, RunEvent, RunRecord
from palaestra.runs.runner import LaunchPreview
from palaestra.runs.service.schemas import (
    CONFLICT,
    NOT_FOUND,
    NOT_FOUND_OR_CONFLICT,
    RUN_ID,
    AttemptNumber,
    FilterText,
    RequestBody,
    ResponseBody,
    RunId,
    RunIdText,
    StoredText,
    new_router,
)
from palaestra.runs.spec import RunSpec, find_text_fault
from palaestra.runs.supervisor.launch_planner import Preview
from palaestra.runs.supervisor.resume import ResumeRequest
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.wire import JsonObject, to_json


def _check_notes(text: str | None) -> str | None:
    fault = "" if text is None else find_text_fault(text, one_line=False)
    if fault:
        raise ValueError(fault)
    return text


_Tag = Annotated[StoredText, Field(min_length=1, max_length=100)]


class ServiceHealth(ResponseBody):
    """State and version of the service."""

    status: Literal["ok", "draining"]
    version: str
    pid: int


class PreflightBody(RequestBody):
    """A run to check."""

    spec: RunSpec


class StartBody(RequestBody):
    """A run to start."""

    spec: RunSpec
    consent: Annotated[str | None, Field(max_length=64)] = None
    """The digest of the command, for runners that execute foreign code."""
    run_id: Annotated[str | None, Field(pattern=RUN_ID, max_length=90)] = None
    """The run id of the preview; null assigns a new one."""


class StopBody(RequestBody):
    """How to stop a run."""

    grace_s: Annotated[float | None, Field(ge=0, le=3600)] = None
    """Seconds between the request to stop and a kill; null uses the runner's default."""


class ResumeBody(RequestBody):
    """How to resume a run."""

    consent: Annotated[str | None, Field(max_length=64)] = None
    """The digest of the command, for runners that execute foreign code."""
    checkpoint: Annotated[StoredText | None, Field(min_length=1, max_length=4096)] = None
    """Id of the checkpoint, a prefix of the id, its file name or its path; null: the newest undamaged one."""
    changes: Annotated[JsonObject, Field(default_factory=dict, max_length=100)]
    """Values by dotted key of the runner's configuration, such as `trainer.total_timesteps`."""
    on: Annotated[StoredText | None, Field(max_length=300)] = None
    """Another machine than before; null: the same one, empty: that of the service."""


class EditBody(RequestBody):
    """What people write about a run. Null leaves a field as it is."""

    name: Annotated[StoredText | None, Field(max_length=200)] = None
    """A title; empty removes it."""
    tags: Annotated[list[_Tag] | None, Field(max_length=100)] = None
    """All tags, which replace the current ones."""
    notes: Annotated[str | None, Field(max_length=20_000), AfterValidator(_check_notes)] = None
    """A text of any number of lines; empty removes it."""
    favorite: StrictBool | None = None
    """Whether the retention policy leaves the run alone."""

    def to_changes(self) -> RunEdit:
        """The fields that change. `ConfigError` if there are none, or if one holds a secret, which would be stored."""
        changes = RunEdit()
        if self.name is not None:
            changes["name"] = self.name.strip()
        if self.tags is not None:
            changes["tags"] = tuple(dict.fromkeys(self.tags))
        if self.notes is not None:
            changes["notes"] = self.notes
        if self.favorite is not None:
            changes["favorite"] = self.favorite
        if not changes:
            raise ConfigError("body", {}, "changes nothing", "Send name, tags, notes or favorite")
        for place, value in changes.items():
            if redact_secrets(value) != value:
                raise ConfigError(place, value, "holds a password or token and would be stored", "Leave it out")
        return changes


class DrainBody(RequestBody):
    """Whether to stop starting new runs."""

    on: StrictBool


class DrainResponse(ResponseBody):
    """Whether the service starts new runs."""

    draining: bool


class GcBody(RequestBody):
    """How to apply the retention policy."""

    dry_run: StrictBool = True
    """Report what would be removed without removing it."""


def add_run_routes(app: FastAPI, supervisor: Supervisor, reader: RunReader, retention: RetentionSchedule) -> None:
    """Add the routes to the application."""
    _add_read_routes(app, supervisor, reader)
    _add_control_routes(app, supervisor, reader)
    _add_retention_routes(app, supervisor, reader, retention)


def _add_read_routes(app: FastAPI, supervisor: Supervisor, reader: RunReader) -> None:
    service_router = new_router("service")
    runs_router = new_router("runs")

    @service_router.get("/health")
    async def health() -> ServiceHealth:
        """Whether the service answers. Needs no token."""
        return ServiceHealth(status="draining" if supervisor.draining else "ok", version=__version__, pid=os.getpid())

    @runs_router.get("/runs", responses=NOT_FOUND, response_model=list[RunRecord])
    def list_runs(
        phase: Annotated[list[Phase] | None, Query(max_length=len(Phase))] = None,
        runner: FilterText = None,
        env: FilterText = None,
        tag: FilterText = None,
        agent: FilterText = None,
        search: FilterText = None,
        where: Annotated[str, Query(max_length=2000)] = "",
        sort: Annotated[str, Query(max_length=200)] = "",
        archived: bool = False,
        before: Annotated[RunIdText | None, Query()] = None,
        limit: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
    ) -> list[JsonObject]:
        """Runs that match all filters, newest first. For the next page, `before` is the last run of this page.

        Every word of `search` must occur in the id, name, agent, environment, host, a tag, the notes or the reason.
        `where` is a query such as `env=CartPole-v1 and return>400`. `sort` is a field, a configuration key or a metric:
        the largest come first, with `:asc` after it the smallest.
        """
        selected = bool(where.strip() or sort.strip())
        records = reader.runs(
            phases=phase,
            runner=runner,
            env_id=env,
            tag=tag,
            agent_id=agent,
            search=(search or "").split(),
            archived=archived,
            before=before,
            limit=None if selected else limit,
        )
        if selected:
            records = select_runs(reader, records, where=where, sort=sort, limit=limit)
        return [to_json(_newest(supervisor, record)) for record in records]

    @runs_router.get("/runs/{run_id}", responses=NOT_FOUND, response_model=RunRecord)
    def show_run(run_id: RunId) -> JsonObject:
        """One run in its current state."""
        record = reader.run(run_id)
        if supervisor.ring(record.run_id) is None:
            # The run may have ended since its row was read; its final row was written before the ring was removed.
            record = reader.run(record.run_id)
        return to_json(_newest(supervisor, record))

    @runs_router.get("/runs/{run_id}/life", responses=NOT_FOUND, response_model=list[RunEvent])
    def event_log(run_id: RunId) -> list[JsonObject]:
        """The events of a run, in order."""
        return [to_json(event) for event in reader.events(run_id)]

    @runs_router.get("/runs/{run_id}/spec", responses=NOT_FOUND)
    def spec(run_id: RunId) -> JsonObject:
        """The spec that the run was started with; empty for a run of `palaestra train` alone."""
        return reader.document(run_id, "spec")

    @runs_router.get("/runs/{run_id}/command", responses=NOT_FOUND)
    def command(run_id: RunId, attempt: AttemptNumber = None) -> JsonObject:
        """The command of an attempt (default: the newest), with secrets redacted."""
        return reader.document(run_id, "command", attempt)

    @runs_router.get("/runs/{run_id}/resolved", responses=NOT_FOUND)
    def resolved(run_id: RunId, attempt: AttemptNumber = None) -> JsonObject:
        """The configuration of an attempt (default: the newest) with all values."""
        return reader.document(run_id, "resolved", attempt)

    app.include_router(service_router)
    app.include_router(runs_router)


def _add_control_routes(app: FastAPI, supervisor: Supervisor, reader: RunReader) -> None:
    runs_router = new_router("runs")
    service_router = new_router("service")

    @runs_router.post("/preflight", response_model=LaunchPreview)
    async def preflight(body: PreflightBody) -> JsonObject:
        """The findings of a preflight and the command that a start would execute. Changes nothing."""
        return to_json(_launch_preview(await supervisor.preview(body.spec)))

    @runs_router.post("/runs", status_code=201, responses=CONFLICT, response_model=RunRecord)
    async def start_run(body: StartBody) -> JsonObject:
        """Queue a run, under the id of its preview if that is given."""
        return to_json(await supervisor.submit(body.spec, body.consent, body.run_id))

    @runs_router.patch("/runs/{run_id}", responses=NOT_FOUND_OR_CONFLICT, response_model=RunRecord)
    async def update_run(run_id: RunId, body: EditBody) -> JsonObject:
        """Change the name, tags and notes of a run, in any phase. An archived run has to be restored first."""
        return to_json(await supervisor.edit(await _full_id(reader, run_id), body.to_changes()))

    @runs_router.post("/runs/{run_id}/stop", responses=NOT_FOUND_OR_CONFLICT, response_model=RunRecord)
    async def stop_run(run_id: RunId, body: StopBody) -> JsonObject:
        """Stop a run. Returns when all its processes have ended.

        The run is still `stopping` in the response if its machine cannot be reached: then the stop is pending.
        """
        return to_json(await supervisor.stop(await _full_id(reader, run_id), grace_s=body.grace_s))

    @runs_router.post("/runs/{run_id}/resume", responses=NOT_FOUND_OR_CONFLICT, response_model=RunRecord)
    async def resume_run(run_id: RunId, body: ResumeBody) -> JsonObject:
        """Queue a run that has ended again, from its newest undamaged checkpoint or from another of its checkpoints.

        The `reason` of the response names the checkpoint and says why newer ones were skipped.
        """
        request = ResumeRequest(body.checkpoint, body.changes, body.on)
        return to_json(await supervisor.resume(await _full_id(reader, run_id), body.consent, request))

    @service_router.post("/drain")
    async def drain(body: DrainBody) -> DrainResponse:
        """Stop or continue starting queued runs. Running runs are not affected."""
        await supervisor.drain(body.on)
        return DrainResponse(draining=supervisor.draining)

    app.include_router(runs_router)
    app.include_router(service_router)


def _add_retention_routes(
    app: FastAPI, supervisor: Supervisor, reader: RunReader, retention: RetentionSchedule
) -> None:
    archive_router = new_router("archive")

    @archive_router.post("/runs/{run_id}/archive", responses=NOT_FOUND_OR_CONFLICT, response_model=RunRecord)
    async def archive_run(run_id: RunId) -> JsonObject:
        """Pack a run that has ended."""
        return to_json(await supervisor.archive(await _full_id(reader, run_id)))

    @archive_router.post("/runs/{run_id}/restore", responses=NOT_FOUND_OR_CONFLICT, response_model=RunRecord)
    async def restore_run(run_id: RunId) -> JsonObject:
        """Unpack an archived run, or restore a deleted one."""
        return to_json(await supervisor.restore(run_id))

    @archive_router.delete("/runs/{run_id}", responses=NOT_FOUND_OR_CONFLICT, response_model=RunRecord)
    async def delete_run(run_id: RunId) -> JsonObject:
        """Move a run that has ended to the trash. It can be restored until the retention policy purges it."""
        full_id = await _full_id(reader, run_id)
        record = supervisor.get_run(full_id)
        await supervisor.delete(full_id)
        return to_json(record)

    @archive_router.get("/gc", operation_id="retention_report", response_model=RetentionReport)
    def report() -> JsonObject:
        """When the retention policy is applied automatically, and what it did the last time."""
        return to_json(retention.read_report())

    @archive_router.post("/gc", response_model=list[RetentionAction])
    async def gc(body: GcBody) -> list[JsonObject]:
        """The actions of the retention policy; a dry run only plans them."""
        return [to_json(action) for action in await supervisor.gc(dry_run=body.dry_run)]

    app.include_router(archive_router)


async def _full_id(reader: RunReader, prefix: str) -> str:
    return (await asyncio.to_thread(reader.run, prefix)).run_id


def _newest(supervisor: Supervisor, record: RunRecord) -> RunRecord:
    """The record in the supervisor's memory for a live run: its row in the registry is up to two seconds old."""
    return record if supervisor.ring(record.run_id) is None else supervisor.get_run(record.run_id)


def _launch_preview(preview: Preview) -> LaunchPreview:
    plan = preview.plan
    return LaunchPreview(
        findings=preview.findings,
        command=None if plan is None else plan.to_redacted_dict(),
        environment={} if plan is None else plan.environment_changes(os.environ),
        run_id=None if plan is None else plan.paths.run_id,
        digest=None if plan is None else plan.digest(),
        needs_consent=preview.needs_consent,
    )
