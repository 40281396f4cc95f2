"""Routes that list, verify, import and deploy checkpoints."""

# Annotations are evaluated here: FastAPI reads them.
from dataclasses import asdict, replace
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import FastAPI, Path, Query

from palaestra.errors import CheckpointError
from palaestra.runs.checkpoints.deploying import Deployment, deploy, deployments, withdraw
from palaestra.runs.checkpoints.hashing import verify
from palaestra.runs.checkpoints.importing import Provenance, import_checkpoint
from palaestra.runs.checkpoints.listing import all_checkpoints, get_checkpoint
from palaestra.runs.checkpoints.probing import environment_signature
from palaestra.runs.reader import RunReader
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.service.answers import RunName, errors
from palaestra.runs.service.documents import (
    CheckpointDocument,
    Deploying,
    DeploymentDocument,
    GoingBack,
    Importing,
    VerdictDocument,
)
from palaestra.runs.store.registry import Registry
from palaestra.runs.wire import to_json

__all__ = ["add_checkpoint_routes"]

_Word = Annotated[str | None, Query(max_length=200)]
_CheckpointId = Annotated[
    str, Path(pattern=r"^[0-9a-f]+$", min_length=1, max_length=64, description="Its id, or how it begins.")
]


def add_checkpoint_routes(app: FastAPI, reading: RunReader, registry: Registry) -> None:
    """Add them."""
    home = reading.home

    @app.get("/checkpoints", operation_id="checkpoints", tags=["checkpoints"], responses=errors(404))
    def checkpoints(
        run: Annotated[RunName | None, Query(description="A run's id, or a prefix of it.")] = None,
        agent: _Word = None,
        env: _Word = None,
    ) -> list[CheckpointDocument]:
        """Checkpoints that fit, newest first."""
        run_id = None if run is None else reading.run(run).run_id
        return [_document(one) for one in all_checkpoints(home, run_id=run_id, agent_id=agent, env_id=env)]

    @app.get("/checkpoints/{checkpoint_id}", operation_id="show_checkpoint", tags=["checkpoints"])
    def show_checkpoint(checkpoint_id: _CheckpointId) -> CheckpointDocument:
        """One checkpoint."""
        return _document(get_checkpoint(home, checkpoint_id))

    @app.post("/checkpoints/{checkpoint_id}/verify", operation_id="verify_checkpoint", tags=["checkpoints"])
    def verify_checkpoint(checkpoint_id: _CheckpointId) -> VerdictDocument:
        """Read every byte and compare it with what was saved."""
        record = get_checkpoint(home, checkpoint_id)
        verdict = verify(record)
        record = replace(record, verified=verdict.verified)
        registry.put_checkpoint(record)
        return VerdictDocument(checkpoint=_document(record), fits=verdict.fits, problem=verdict.problem)

    @app.post("/checkpoints/import", status_code=201, operation_id="import_checkpoint", tags=["checkpoints"])
    def take_in(asked: Importing) -> CheckpointDocument:
        """Copy a checkpoint of the service's machine, once it is certain that it is weights and nothing that runs."""
        signature = environment_signature(asked.env_id, "env_id", needed=False) if asked.env_id else {}
        known = Provenance(
            agent_id=asked.agent_id, env_id=asked.env_id, env_step=asked.env_step, env_signature=signature
        )
        record = import_checkpoint(home, FilePath(asked.path), known)
        registry.put_checkpoint(record)
        return _document(record)

    @app.post("/checkpoints/{checkpoint_id}/deploy", operation_id="deploy_checkpoint", tags=["checkpoints"])
    def deploy_checkpoint(checkpoint_id: _CheckpointId, asked: Deploying) -> DeploymentDocument:
        """Make a checkpoint the one that acts in an environment, once it has played an episode there."""
        record = get_checkpoint(home, checkpoint_id)
        env_id = asked.env_id or record.env_id
        if not env_id:
            raise CheckpointError("checkpoint", record.checkpoint_id, "it says no environment", "Give env_id")
        signature = environment_signature(env_id, "env_id", needed=env_id != record.env_id)
        return _deployment(deploy(home, record, signature))

    @app.get("/deployments", operation_id="deployments", tags=["checkpoints"])
    def listed() -> list[DeploymentDocument]:
        """What acts in every environment."""
        return [_deployment(now) for now in deployments(home)]

    @app.post("/deployments/back", operation_id="withdraw_deployment", tags=["checkpoints"])
    def back(asked: GoingBack) -> DeploymentDocument | None:
        """Bring back what acted in an environment before; null when nothing did, and nothing does any more."""
        before = withdraw(home, asked.env_id)
        return None if before is None else _deployment(before)


def _document(record: CheckpointRecord) -> CheckpointDocument:
    return CheckpointDocument.model_validate(to_json(record))


def _deployment(now: Deployment) -> DeploymentDocument:
    return DeploymentDocument.model_validate(asdict(now))
