"""Which checkpoint acts in an environment: exchanged in two phases, so that there is always one that works.

First everything that can go wrong is tried: the bytes are verified, the spaces compared, and a process of its own plays
one episode. Only then is the file that names the deployed checkpoint replaced, with the one before inside it. What is
deployed lies in `checkpoints/`, whatever becomes of the run that made it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import palaestra
from palaestra.errors import CheckpointError
from palaestra.files.atomic import read_json, write_json
from palaestra.files.home import Home
from palaestra.runs.checkpoints.hashing import verify
from palaestra.runs.checkpoints.importing import Provenance, keep_checkpoint
from palaestra.runs.checkpoints.signature import compatible
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.wire import API_SCHEMA

__all__ = ["Deployment", "deploy", "deployed", "deployments", "in_use", "withdraw"]

PLACE = "checkpoint"
WARM_UP_S = 300.0
_ROOT = str(Path(palaestra.__file__).parents[1])


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What acts in an environment."""

    __pydantic_config__ = API_SCHEMA

    env_id: str
    checkpoint_id: str
    path: str
    sha256: str
    agent_id: str
    deployed: float
    command: tuple[str, ...]
    """Plays it."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """How the warm-up went."""
    previous: dict[str, Any] | None = None
    """What it replaced; `withdraw` brings that back."""


def deploy(
    home: Home,
    record: CheckpointRecord,
    env_signature: Mapping[str, Any],
    *,
    clock: Callable[[], float] = time.time,
    limit_s: float = WARM_UP_S,
) -> Deployment:
    """Make a checkpoint the one that acts. `CheckpointError` for whatever is in the way; then nothing has changed."""
    if record.format != "palaestra":
        remedy = "Only checkpoints of palaestra can be played here; use the trainer it comes from"
        raise CheckpointError(PLACE, record.checkpoint_id, f"is of the format {record.format}", remedy)
    verdict = verify(record, clock)
    if not verdict.fits:
        raise CheckpointError(PLACE, record.checkpoint_id, verdict.problem, "Deploy another one")
    env_id = str(env_signature.get("env_id") or record.env_id)
    reasons = compatible({"env_id": record.env_id, **record.env_signature}, {**env_signature, "env_id": env_id})
    if reasons:
        remedy = f"Switch to {record.env_id}, or deploy one that was trained in {env_id}"
        raise CheckpointError(PLACE, record.checkpoint_id, "; ".join(reasons), remedy)
    evaluation = _warm_up(record, (*_player(record.path), "--episodes", "1", "--json"), limit_s)
    ready = Deployment(
        env_id=env_id,
        checkpoint_id=record.checkpoint_id,
        path=record.path,
        sha256=record.sha256,
        agent_id=record.agent_id,
        deployed=clock(),
        command=_player(record.path),
        evaluation=evaluation,
    )
    with _held(home):
        known = Provenance(agent_id=record.agent_id, env_id=record.env_id, env_signature=record.env_signature)
        return _exchanged(home, _lasting(home, ready, known))


def deployed(home: Home, env_id: str) -> Deployment | None:
    """What acts in an environment; None when nothing was deployed there."""
    return _understood(read_json(_note(home, env_id)))


def deployments(home: Home) -> list[Deployment]:
    """What acts in every environment, by the environment's name."""
    notes = home.deployed.glob("[!.]*.json")
    found = [now for note in notes if (now := _understood(read_json(note))) is not None]
    return sorted(found, key=lambda now: now.env_id)


def in_use(home: Home) -> dict[Path, Deployment]:
    """Where the checkpoints lie that are deployed, or would be again after `withdraw`, with what acts there now."""
    found: dict[Path, Deployment] = {}
    for now in deployments(home):
        for one in (_understood(now.previous), now):
            if one is not None and Path(one.path).exists():
                found[Path(one.path).resolve()] = now
    return found


def withdraw(home: Home, env_id: str) -> Deployment | None:
    """Bring back what was deployed before; None when there was nothing, and nothing is deployed any more."""
    with _held(home):
        now = deployed(home, env_id)
        if now is None:
            reason = "nothing is deployed there"
            raise CheckpointError("environment", env_id, reason, "palaestra checkpoints deployed lists what is")
        before = _understood(now.previous)
        if before is None:
            _note(home, env_id).unlink(missing_ok=True)
        else:
            before = _lasting(home, before)
            write_json(_note(home, env_id), {"schema": 1, **asdict(before)})
    return before


def _exchanged(home: Home, ready: Deployment) -> Deployment:
    before = deployed(home, ready.env_id)
    if before is not None and before.sha256 == ready.sha256:
        before = _understood(before.previous)  # deployed once more; the way back stays
    if before is not None:
        with contextlib.suppress(CheckpointError):
            before = _lasting(home, before)
    # One step back is kept, not the whole history.
    changes = {"previous": None} if before is None else {"previous": None, "command": list(before.command)}
    previous = None if before is None else {"schema": 1, **asdict(before), **changes}
    final = replace(ready, previous=previous)
    write_json(_note(home, ready.env_id), {"schema": 1, **asdict(final)})
    return final


def _lasting(home: Home, one: Deployment, known: Provenance | None = None) -> Deployment:
    """The same, lying where no run's end can take it away. `CheckpointError` when it is gone or damaged."""
    known = known or Provenance(agent_id=one.agent_id, env_id=one.env_id)
    kept = keep_checkpoint(home, Path(one.path), one.sha256, known)
    return replace(one, path=kept.path, command=_player(kept.path))


def _player(path: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "palaestra", "eval", path)


def _warm_up(record: CheckpointRecord, command: tuple[str, ...], limit_s: float) -> dict[str, Any]:
    """One episode in a process of its own; what it reported."""
    environment = {**os.environ, "PYTHONPATH": _ROOT}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, complaints = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        reason = f"played no episode within {limit_s:.0f} s"
        raise CheckpointError(PLACE, record.checkpoint_id, reason, f"Try {' '.join(command)}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        if process.returncode:
            raise ValueError
        report: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        said = (complaints.strip().splitlines() or ["it said nothing"])[-1]
        reason = f"could not be played (exit code {process.returncode}: {said[:300]})"
        raise CheckpointError(PLACE, record.checkpoint_id, reason, "What was deployed before stays") from None
    return report


def _note(home: Home, env_id: str) -> Path:
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", env_id).lstrip(".") or "_"
    if safe != env_id:
        safe += "." + hashlib.sha256(env_id.encode()).hexdigest()[:8]
    return home.deployed / f"{safe}.json"


@contextlib.contextmanager
def _held(home: Home) -> Iterator[None]:
    """Nobody else exchanges a deployment of this state directory meanwhile."""
    directory = home.deployed
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _understood(data: dict[str, Any] | None) -> Deployment | None:
    if data is None or data.get("schema") != 1:
        return None
    try:
        return Deployment(**{**{k: v for k, v in data.items() if k != "schema"}, "command": tuple(data["command"])})
    except (TypeError, KeyError):
        return None
