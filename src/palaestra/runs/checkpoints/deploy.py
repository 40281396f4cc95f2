"""Deploys checkpoints: selects the one that acts in an environment.

A deployment has two phases. First, the bytes are verified, the spaces compared, and one episode is played in a separate
process. Only then is the file that names the deployed checkpoint replaced; it also stores the previous deployment. A
deployed checkpoint is copied to `checkpoints/`, so it is independent of its run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from palaestra.errors import CheckpointError
from palaestra.files.atomic import read_json, write_json
from palaestra.files.home import Home
from palaestra.runs.checkpoints.files import verify
from palaestra.runs.checkpoints.import_checkpoint import Provenance, copy_out_of_run
from palaestra.runs.checkpoints.signature import find_dataset_mismatch, find_incompatibilities
from palaestra.runs.process.eval_process import eval_command, last_error, run_eval
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.wire import API_SCHEMA, JsonObject, from_json

_PLACE = "checkpoint"
_WARM_UP_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The checkpoint that acts in an environment."""

    __pydantic_config__ = API_SCHEMA

    env_id: str
    checkpoint_id: str
    path: str
    sha256: str
    agent_id: str
    deployed: float
    command: tuple[str, ...]
    """Command that evaluates it."""
    evaluation: JsonObject = field(default_factory=dict)
    """Report of the warm-up episode."""
    previous: JsonObject | None = None
    """The deployment it replaced; `withdraw` restores it."""


def deploy(
    home: Home,
    record: CheckpointRecord,
    env_signature: JsonObject,
    *,
    clock: Callable[[], float] = time.time,
    timeout_s: float = _WARM_UP_TIMEOUT_S,
) -> Deployment:
    """Deploy a checkpoint. Raises `CheckpointError` when a check fails; the current deployment then stays."""
    if record.format != "palaestra":
        remedy = "Only checkpoints of palaestra can be deployed; load this one into a play instead"
        raise CheckpointError(_PLACE, record.checkpoint_id, f"is of the format {record.format}", remedy)
    verdict = verify(record, clock)
    if not verdict.fits:
        raise CheckpointError(_PLACE, record.checkpoint_id, verdict.problem, "Deploy another checkpoint")
    env_id = str(env_signature.get("env_id") or record.env_id)
    reasons = find_incompatibilities(
        {"env_id": record.env_id, **record.env_signature}, {**env_signature, "env_id": env_id}
    )
    # A deployment has no arguments of its own: it is for the environment as it is registered.
    mismatch = find_dataset_mismatch(record.offline_dataset, env_id, {})
    if reasons := [mismatch] if mismatch else reasons:
        remedy = f"Switch to {record.env_id}, or deploy a checkpoint that was trained in {env_id}"
        if record.env_id == env_id:
            remedy = f"Deploy a checkpoint that was trained in {env_id} with its default arguments, or play this one"
        raise CheckpointError(_PLACE, record.checkpoint_id, "; ".join(reasons), remedy)
    evaluation = _warm_up(record, timeout_s)
    ready = Deployment(
        env_id=env_id,
        checkpoint_id=record.checkpoint_id,
        path=record.path,
        sha256=record.sha256,
        agent_id=record.agent_id,
        deployed=clock(),
        command=eval_command(record.path),
        evaluation=evaluation,
    )
    with _deployment_lock(home):
        provenance = Provenance(agent_id=record.agent_id, env_id=record.env_id, env_signature=record.env_signature)
        return _replace_deployment(home, _keep_copy(home, ready, provenance))


def get_deployment(home: Home, env_id: str) -> Deployment | None:
    """Return the deployment of an environment; None when there is none."""
    return _parse_deployment(read_json(_deployment_file(home, env_id)))


def list_deployments(home: Home) -> list[Deployment]:
    """Return all deployments, sorted by environment."""
    files = home.deployed.glob("[!.]*.json")
    deployments = [deployment for file in files if (deployment := _parse_deployment(read_json(file))) is not None]
    return sorted(deployments, key=lambda deployment: deployment.env_id)


def find_deployed_paths(home: Home) -> dict[Path, Deployment]:
    """Map the path of every deployed checkpoint, and of those that `withdraw` would restore, to its deployment."""
    paths: dict[Path, Deployment] = {}
    for deployment in list_deployments(home):
        for used in (_parse_deployment(deployment.previous), deployment):
            if used is not None and Path(used.path).exists():
                paths[Path(used.path).resolve()] = deployment
    return paths


def withdraw(home: Home, env_id: str) -> Deployment | None:
    """Restore the previous deployment of an environment; without one, deploy nothing and return None."""
    with _deployment_lock(home):
        current = get_deployment(home, env_id)
        if current is None:
            reason = "nothing is deployed there"
            raise CheckpointError("environment", env_id, reason, "palaestra checkpoints deployed lists deployments")
        previous = _parse_deployment(current.previous)
        if previous is None:
            _deployment_file(home, env_id).unlink(missing_ok=True)
        else:
            previous = _keep_copy(home, previous)
            write_json(_deployment_file(home, env_id), {"schema": 1, **asdict(previous)})
    return previous


def _replace_deployment(home: Home, new: Deployment) -> Deployment:
    previous = get_deployment(home, new.env_id)
    if previous is not None and previous.sha256 == new.sha256:
        previous = _parse_deployment(previous.previous)  # deployed again: keep the one before it
    if previous is not None:
        with contextlib.suppress(CheckpointError):
            previous = _keep_copy(home, previous)
        # Only one step back is kept.
        stored = {"schema": 1, **asdict(previous), "previous": None, "command": list(previous.command)}
        new = replace(new, previous=stored)
    write_json(_deployment_file(home, new.env_id), {"schema": 1, **asdict(new)})
    return new


def _keep_copy(home: Home, deployment: Deployment, provenance: Provenance | None = None) -> Deployment:
    """Copy the checkpoint out of its run. Raises `CheckpointError` when it is missing or damaged."""
    provenance = provenance or Provenance(agent_id=deployment.agent_id, env_id=deployment.env_id)
    kept = copy_out_of_run(home, Path(deployment.path), deployment.sha256, provenance)
    return replace(deployment, path=kept.path, command=eval_command(kept.path))


def _warm_up(record: CheckpointRecord, timeout_s: float) -> JsonObject:
    """Play one episode in a separate process and return its report."""
    try:
        process = run_eval(record.path, timeout_s=timeout_s)
    except TimeoutError:
        reason = f"played no episode within {timeout_s:.0f} s"
        remedy = f"Try {' '.join(eval_command(record.path))} --episodes 1 --json"
        raise CheckpointError(_PLACE, record.checkpoint_id, reason, remedy) from None
    try:
        if process.returncode:
            raise ValueError
        report: JsonObject = json.loads(process.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        reason = f"could not be played (exit code {process.returncode}: {last_error(process)})"
        raise CheckpointError(_PLACE, record.checkpoint_id, reason, "The previous deployment stays active") from None
    return report


def _deployment_file(home: Home, env_id: str) -> Path:
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", env_id).lstrip(".") or "_"
    if safe != env_id:
        safe += "." + hashlib.sha256(env_id.encode()).hexdigest()[:8]
    return home.deployed / f"{safe}.json"


@contextlib.contextmanager
def _deployment_lock(home: Home) -> Iterator[None]:
    """Prevent concurrent changes of deployments in this state directory."""
    directory = home.deployed
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _parse_deployment(data: JsonObject | None) -> Deployment | None:
    if data is None or data.get("schema") != 1:
        return None
    try:
        return from_json(Deployment, data)
    except TypeError:
        return None
