"""Routes that list, start, show, stop, resume and put away runs."""

# Annotations are evaluated here: FastAPI reads them.
import asyncio
import os
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query

from palaestra import __version__
from palaestra.runs.comparison import compare
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunRecord
from palaestra.runs.service.answers import RunId, RunName, errors
from palaestra.runs.service.documents import (
    Comparison,
    Doomed,
    Drain,
    DrainState,
    Gc,
    Health,
    LifeDocument,
    PreviewDocument,
    Resume,
    RunDocument,
    Start,
    Stop,
    Submission,
)
from palaestra.runs.supervisor.preflight import Preview
from palaestra.runs.supervisor.resume import ResumeRequest
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.wire import to_json

__all__ = ["add_run_routes"]

_Word = Annotated[str | None, Query(max_length=200)]


def add_run_routes(app: FastAPI, supervisor: Supervisor, reading: RunReader) -> None:
    """Add them."""
    _add_reading(app, supervisor, reading)
    _add_changing(app, supervisor, reading)
    _add_keeping(app, supervisor, reading)


def _add_reading(app: FastAPI, supervisor: Supervisor, reading: RunReader) -> None:
    @app.get("/health", operation_id="health", tags=["service"])
    async def health() -> Health:
        """Whether the service answers. Needs no token."""
        return Health(status="draining" if supervisor.draining else "ok", version=__version__, pid=os.getpid())

    @app.get("/runs", operation_id="list_runs", tags=["runs"], responses=errors(404), response_model=list[RunDocument])
    def list_runs(
        phase: Annotated[list[Phase] | None, Query(max_length=len(Phase))] = None,
        runner: _Word = None,
        env: _Word = None,
        tag: _Word = None,
        agent: _Word = None,
        search: _Word = None,
        archived: bool = False,
        before: Annotated[RunName | None, Query()] = None,
        limit: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
    ) -> Any:
        """Runs that fit, newest first; for the next page, `before` is the last run of this one.

        `search` finds runs of which every word is part of the id, the agent, the environment, a tag or the reason.
        """
        rows = reading.runs(
            phases=phase, runner=runner, env_id=env, tag=tag, agent_id=agent, search=(search or "").split(),
            archived=archived, before=before, limit=limit,
        )  # fmt: skip
        return [to_json(_newest(supervisor, row)) for row in rows]

    @app.get("/runs/{run_id}", operation_id="show_run", tags=["runs"], responses=errors(404))
    def show_run(run_id: RunId) -> RunDocument:
        """One run as it is at the moment."""
        row = reading.run(run_id)
        if supervisor.ring(row.run_id) is None:
            # The run may have ended since its row was read; its final row was written before the ring was removed.
            row = reading.run(row.run_id)
        return _document(_newest(supervisor, row))

    @app.get("/runs/{run_id}/life", operation_id="life", tags=["runs"], responses=errors(404))
    def life(run_id: RunId) -> list[LifeDocument]:
        """What happened to a run, in order."""
        return [LifeDocument.model_validate(to_json(record)) for record in reading.life(run_id)]

    @app.get("/runs/{run_id}/spec", operation_id="spec", tags=["runs"], responses=errors(404))
    def spec(run_id: RunId) -> dict[str, Any]:
        """What was asked for; empty for a run that `palaestra train` made alone."""
        return reading.document(run_id, "spec")

    @app.get("/runs/{run_id}/command", operation_id="command", tags=["runs"], responses=errors(404))
    def command(run_id: RunId, attempt: Annotated[int | None, Query(ge=1, lt=2**31)] = None) -> dict[str, Any]:
        """Exactly what was executed, secrets hidden: of the newest attempt when none is named."""
        return reading.document(run_id, "command", attempt)

    @app.get("/compare", operation_id="compare", tags=["runs"], responses=errors(404), response_model=Comparison)
    def compared(run: Annotated[list[RunName], Query(min_length=2, max_length=50)]) -> Any:
        """Runs side by side."""
        return compare(reading, run)


def _add_changing(app: FastAPI, supervisor: Supervisor, reading: RunReader) -> None:
    @app.post("/preflight", operation_id="preflight", tags=["runs"])
    async def preflight(asked: Submission) -> PreviewDocument:
        """What a start would find and execute. Changes nothing."""
        return _preview(await supervisor.preview(asked.spec))

    @app.post("/runs", status_code=201, operation_id="start_run", tags=["runs"], responses=errors(409))
    async def start_run(asked: Start) -> RunDocument:
        """Queue a run; under the id of its preview, when that is sent."""
        return _document(await supervisor.submit(asked.spec, asked.consent, asked.run_id))

    @app.post("/runs/{run_id}/stop", operation_id="stop_run", tags=["runs"], responses=errors(404, 409))
    async def stop_run(run_id: RunId, asked: Stop) -> RunDocument:
        """End a run. Answers when nothing of it lives."""
        return _document(await supervisor.stop(await _full(reading, run_id), grace_s=asked.grace_s))

    @app.post("/runs/{run_id}/resume", operation_id="resume_run", tags=["runs"], responses=errors(404, 409))
    async def resume_run(run_id: RunId, asked: Resume) -> RunDocument:
        """Queue a run that has ended again, from its newest undamaged checkpoint or from another of its own.

        The reason in the answer names the checkpoint and says why newer ones were skipped.
        """
        request = ResumeRequest(asked.checkpoint, asked.changes)
        return _document(await supervisor.resume(await _full(reading, run_id), asked.consent, request))

    @app.post("/drain", operation_id="drain", tags=["service"])
    async def drain(asked: Drain) -> DrainState:
        """Start nothing new, or start again. What runs goes on."""
        await supervisor.drain(asked.on)
        return DrainState(draining=supervisor.draining)


def _add_keeping(app: FastAPI, supervisor: Supervisor, reading: RunReader) -> None:
    @app.post("/runs/{run_id}/archive", operation_id="archive_run", tags=["keeping"], responses=errors(404, 409))
    async def archive_run(run_id: RunId) -> RunDocument:
        """Pack a run that has ended."""
        return _document(await supervisor.archive(await _full(reading, run_id)))

    @app.post("/runs/{run_id}/restore", operation_id="restore_run", tags=["keeping"], responses=errors(404, 409))
    async def restore_run(run_id: RunId) -> RunDocument:
        """Unpack an archived run, or bring back a deleted one."""
        return _document(await supervisor.restore(run_id))

    @app.delete("/runs/{run_id}", operation_id="delete_run", tags=["keeping"], responses=errors(404, 409))
    async def delete_run(run_id: RunId) -> RunDocument:
        """Throw a run that has ended away. It can be restored until the retention policy purges it."""
        full = await _full(reading, run_id)
        record = supervisor.known(full)
        await supervisor.delete(full)
        return _document(record)

    @app.post("/gc", operation_id="gc", tags=["keeping"])
    async def gc(asked: Gc) -> list[Doomed]:
        """What the retention policy does away with; done only when it is not a dry run."""
        return [Doomed.model_validate(asdict(doom)) for doom in await supervisor.gc(dry_run=asked.dry_run)]


async def _full(reading: RunReader, name: str) -> str:
    return (await asyncio.to_thread(reading.run, name)).run_id


def _newest(supervisor: Supervisor, row: RunRecord) -> RunRecord:
    """The supervisor knows a run that is not over better than its row, which is written every two seconds."""
    return row if supervisor.ring(row.run_id) is None else supervisor.known(row.run_id)


def _document(record: RunRecord) -> RunDocument:
    return RunDocument.model_validate(to_json(record))


def _preview(preview: Preview) -> PreviewDocument:
    plan = preview.plan
    return PreviewDocument.model_validate(
        {
            "findings": [asdict(finding) for finding in preview.findings],
            "command": plan.redacted() if plan is not None else None,
            "environment": plan.environment_changes(os.environ) if plan is not None else {},
            "run_id": plan.paths.run_id if plan is not None else None,
            "digest": plan.digest() if plan is not None else None,
            "needs_consent": preview.needs_consent,
        }
    )
