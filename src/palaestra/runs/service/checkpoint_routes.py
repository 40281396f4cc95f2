"""Routes that list, verify, import and deploy checkpoints."""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import FastAPI, Path, Query
from fastapi.responses import StreamingResponse
from pydantic import Field

from palaestra.errors import CheckpointError
from palaestra.files.home import Home
from palaestra.runs.artifacts import CHECKPOINT_SHA256, CONTENT_SHA256, CheckpointStream
from palaestra.runs.checkpoints import catalogue
from palaestra.runs.checkpoints import deploy as deployment_store
from palaestra.runs.checkpoints.catalogue import get_checkpoint
from palaestra.runs.checkpoints.deploy import Deployment, deploy, withdraw
from palaestra.runs.checkpoints.files import verify
from palaestra.runs.checkpoints.import_checkpoint import Provenance, import_checkpoint
from palaestra.runs.checkpoints.signature import probe_environment
from palaestra.runs.reader import RunReader
from palaestra.runs.record import CheckpointRecord, CheckpointVerification
from palaestra.runs.service.schemas import (
    NOT_FOUND,
    FilterText,
    RequestBody,
    RunIdText,
    StoredText,
    new_router,
)
from palaestra.runs.store.registry import Registry
from palaestra.runs.wire import JsonObject, to_json

_CheckpointId = Annotated[
    str,
    Path(
        pattern=r"^[0-9a-f]+$", min_length=1, max_length=64, description="A checkpoint id, or a unique prefix of one."
    ),
]


def _describe_bytes() -> dict[int | str, JsonObject]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    text = {"schema": {"type": "string"}}
    content = {kind: binary for kind in ("application/octet-stream", "application/x-tar")}
    headers = {CHECKPOINT_SHA256: text, CONTENT_SHA256: text}
    return {200: {"description": "the checkpoint", "content": content, "headers": headers}}


class ImportBody(RequestBody):
    """A checkpoint to import."""

    path: Annotated[StoredText, Field(min_length=1, max_length=4096)]
    """Path on the service's machine."""
    agent_id: Annotated[StoredText, Field(max_length=200)] = ""
    env_id: Annotated[StoredText, Field(max_length=200)] = ""
    env_step: Annotated[int | None, Field(ge=0, lt=2**63)] = None


class DeployBody(RequestBody):
    """Where to deploy a checkpoint."""

    env_id: Annotated[StoredText | None, Field(max_length=200)] = None
    """Null uses the environment that it was trained in."""


class WithdrawBody(RequestBody):
    """Which deployment to withdraw."""

    env_id: Annotated[StoredText, Field(min_length=1, max_length=200)]


def add_checkpoint_routes(app: FastAPI, reader: RunReader, registry: Registry) -> None:
    """Add the routes to the application."""
    checkpoints_router = new_router("checkpoints")

    home = reader.home

    @checkpoints_router.get(
        "/checkpoints", operation_id="checkpoints", responses=NOT_FOUND, response_model=list[CheckpointRecord]
    )
    def list_checkpoints(
        run: Annotated[RunIdText | None, Query(description="A run id, or a unique prefix of one.")] = None,
        agent: FilterText = None,
        env: FilterText = None,
    ) -> list[JsonObject]:
        """Checkpoints that match all filters, newest first."""
        run_id = None if run is None else reader.run(run).run_id
        return [
            to_json(record) for record in catalogue.list_checkpoints(home, run_id=run_id, agent_id=agent, env_id=env)
        ]

    @checkpoints_router.get("/checkpoints/{checkpoint_id}", response_model=CheckpointRecord)
    def show_checkpoint(checkpoint_id: _CheckpointId) -> JsonObject:
        """One checkpoint."""
        return to_json(get_checkpoint(home, checkpoint_id))

    @checkpoints_router.get(
        "/checkpoints/{checkpoint_id}/bytes", response_class=StreamingResponse, responses=_describe_bytes()
    )
    def checkpoint_bytes(checkpoint_id: _CheckpointId) -> StreamingResponse:
        """A checkpoint as one stream: the bytes of its file, or a tar of its directory. Equal ones have equal bytes.

        `X-Checkpoint-SHA256` is the hash of the checkpoint, `X-Content-SHA256` that of the bytes that are sent; for a
        file they are the same, and other bytes are damaged.
        """
        record = get_checkpoint(home, checkpoint_id)
        try:
            stream = CheckpointStream(FilePath(record.path))
            digest = stream.digest() if stream.is_directory else record.sha256
        except OSError as error:
            raise CheckpointError("checkpoint", record.checkpoint_id, f"cannot be read ({error})") from None
        headers = {"content-length": str(stream.size), CHECKPOINT_SHA256: record.sha256, CONTENT_SHA256: digest}
        return StreamingResponse(stream.read(), headers=headers, media_type=stream.media_type)

    @checkpoints_router.post("/checkpoints/{checkpoint_id}/verify", response_model=CheckpointVerification)
    def verify_checkpoint(checkpoint_id: _CheckpointId) -> JsonObject:
        """Read every byte of a checkpoint and compare its hash with the saved one."""
        record = get_checkpoint(home, checkpoint_id)
        verdict = verify(record)
        record = replace(record, verified=verdict.verified_time)
        registry.put_checkpoint(record)
        return to_json(CheckpointVerification(record, verdict.fits, verdict.problem))

    @checkpoints_router.post(
        "/checkpoints/import", status_code=201, operation_id="import_checkpoint", response_model=CheckpointRecord
    )
    def import_file(body: ImportBody) -> JsonObject:
        """Copy a checkpoint from the service's machine, after checking that it holds only weights and no code."""
        signature = probe_environment(body.env_id, "env_id", required=False) if body.env_id else {}
        provenance = Provenance(
            agent_id=body.agent_id, env_id=body.env_id, env_step=body.env_step, env_signature=signature
        )
        record = import_checkpoint(home, FilePath(body.path), provenance)
        registry.put_checkpoint(record)
        return to_json(record)

    app.include_router(checkpoints_router)
    _add_deployment_routes(app, home)


def _add_deployment_routes(app: FastAPI, home: Home) -> None:
    checkpoints_router = new_router("checkpoints")

    @checkpoints_router.post("/checkpoints/{checkpoint_id}/deploy", response_model=Deployment)
    def deploy_checkpoint(checkpoint_id: _CheckpointId, body: DeployBody) -> JsonObject:
        """Deploy a checkpoint in an environment, after it has played an episode there."""
        record = get_checkpoint(home, checkpoint_id)
        env_id = body.env_id or record.env_id
        if not env_id:
            raise CheckpointError("checkpoint", record.checkpoint_id, "it names no environment", "Give env_id")
        signature = probe_environment(env_id, "env_id", required=env_id != record.env_id)
        return to_json(deploy(home, record, signature))

    @checkpoints_router.get("/deployments", operation_id="deployments", response_model=list[Deployment])
    def list_deployments() -> list[JsonObject]:
        """The current deployment of every environment."""
        return [to_json(deployment) for deployment in deployment_store.list_deployments(home)]

    @checkpoints_router.post("/deployments/back", response_model=Deployment | None)
    def withdraw_deployment(body: WithdrawBody) -> JsonObject | None:
        """Restore the previous deployment of an environment; null when there was none."""
        previous = withdraw(home, body.env_id)
        return None if previous is None else to_json(previous)

    app.include_router(checkpoints_router)
