"""Finds the checkpoint of a policy that is to act in a play, checks it, and plans the process in which it acts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from palaestra.config import parse_section
from palaestra.errors import CheckpointError, ConfigError
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.runs.checkpoints.catalogue import get_checkpoint
from palaestra.runs.checkpoints.files import BDI_FORMAT, PalaestraCheckpoint, detect_format, digest_path, verify
from palaestra.runs.checkpoints.pickle_scan import scan
from palaestra.runs.checkpoints.signature import find_dataset_mismatch, find_incompatibilities
from palaestra.runs.play.plays import PolicyLaunch
from palaestra.runs.play.protocol import LoadPolicy
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import PolicyStatus
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.runner import Machine, PlayableRunner, PolicyPlan, PolicyRequest, Runner
from palaestra.runs.spec import RunSpec

RANDOM = "random"
"""Name of the policy that acts at random."""
_LIST_CHECKPOINTS = "palaestra checkpoints list shows all checkpoints"
_RUNNER_OF_FORMAT = {"palaestra": "palaestra", "sb3_zip": "sb3", "torch_zip": "cleanrl", BDI_FORMAT: "spade-bdi"}
"""Runners of imported checkpoints whose agent does not name one."""
_SCANNED_FORMATS = ("sb3_zip", "torch_zip")
"""Formats with a pickle of weights, which is checked before a process reads it."""


class PolicyPlanner:
    """Plans the policies of plays."""

    def __init__(self, home: Home, get_runner: Callable[[str], Awaitable[Runner]]) -> None:
        self._home, self._get_runner = home, get_runner

    async def plan(self, request: LoadPolicy, play: PlaySpec) -> PolicyLaunch:
        """Plan a policy. `ConfigError` when it cannot act in this play; a result may also ask for consent."""
        if request.checkpoint == RANDOM:
            status = PolicyStatus(state="loading", name="random actions", checkpoint=RANDOM)
            return PolicyLaunch(status=status)
        record = await asyncio.to_thread(self._find, request.checkpoint, play)
        await asyncio.to_thread(_check, record, play)
        runner = await self._get_runner(_runner_name(record))
        if not runner.capabilities.offline_inference:
            remedy = "Choose a checkpoint of another trainer"
            raise CheckpointError(
                "checkpoint", record.checkpoint_id, f"checkpoints of {runner.name} cannot play", remedy
            )
        playable: PlayableRunner = runner  # type: ignore[assignment]  # its capabilities say so
        machine = Machine(environment=dict(os.environ), free_disk_bytes=0)
        source = await asyncio.to_thread(self._policy_request, record, request.deterministic, play)
        plan = await asyncio.to_thread(playable.plan_policy, source, machine)
        status = PolicyStatus(
            state="loading", name=_describe(record), checkpoint=record.checkpoint_id, agent_id=record.agent_id
        )
        return _launch_policy(plan, request.consent, status)

    def _find(self, name: str, play: PlaySpec) -> CheckpointRecord:
        try:
            path = play.invoked_from / Path(name).expanduser()
            is_path = path.exists()
        except (OSError, RuntimeError, ValueError) as error:  # too long, or in the home of an unknown user
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError("checkpoint", name, f"is no readable path ({reason})", _LIST_CHECKPOINTS) from None
        if not is_path:
            return get_checkpoint(self._home, name)
        form = detect_format(path)
        if form == BDI_FORMAT:
            return _describe_bdi_checkpoint(path)
        if form != "palaestra":
            remedy = f"Import it first: palaestra checkpoints import {name}"
            raise CheckpointError("checkpoint", name, "is a file that is not registered", remedy)
        own = PalaestraCheckpoint.read(path)
        digest = digest_path(path)
        return CheckpointRecord(
            checkpoint_id=digest.sha256[:16],
            run_id="",
            agent_id="palaestra/",
            env_id="" if own is None else own.env_id,
            attempt=0,
            env_step=None if own is None else own.env_step,
            path=str(path.resolve()),
            sha256=digest.sha256,
            size_bytes=digest.size_bytes,
            format="palaestra",
            created=path.stat().st_mtime,
            offline_dataset={} if own is None else own.offline_dataset,
        )

    def _policy_request(self, record: CheckpointRecord, deterministic: bool, play: PlaySpec) -> PolicyRequest:
        spec, command = None, {}
        if record.run_id:
            run = self._home.run(record.run_id)
            stored = read_json(run.spec)
            try:
                spec = None if stored is None else parse_section(RunSpec, stored)
            except ConfigError as error:
                reason = f"the spec of its run {record.run_id} is damaged ({error})"
                raise CheckpointError("checkpoint", record.checkpoint_id, reason, "Choose another checkpoint") from None
            command = read_json(run.attempt(record.attempt).command) or {}
        return PolicyRequest(
            checkpoint=record,
            spec=spec,
            command=command,
            deterministic=deterministic,
            env_id=play.env_id or "",
            parameters=play.parameters,
            unsafe=scan(Path(record.path)).reason if record.format in _SCANNED_FORMATS else "",
        )


def _describe_bdi_checkpoint(path: Path) -> CheckpointRecord:
    """A checkpoint of a BDI agent that no run has registered, such as a named one."""
    agent = read_json(path / "agent.json") or {}
    try:
        digest = digest_path(path)
        env_id, env_step = str(agent["env_id"]), int(agent["env_step"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = f"its files cannot be read ({error})"
        raise CheckpointError("checkpoint", str(path), reason, "Choose another checkpoint") from None
    return CheckpointRecord(
        checkpoint_id=digest.sha256[:16],
        run_id="",
        agent_id="spade-bdi/bdi",
        env_id=env_id,
        attempt=0,
        env_step=env_step,
        path=str(path.resolve()),
        sha256=digest.sha256,
        size_bytes=digest.size_bytes,
        format=BDI_FORMAT,
        created=path.stat().st_mtime,
    )


def _launch_policy(plan: PolicyPlan, consent: str, status: PolicyStatus) -> PolicyLaunch:
    """The launch of a plan, or of its alternative, if the user agreed to the foreign code in it."""
    extended = plan.alternative
    if extended is not None and consent == extended.digest():
        plan = extended
    elif extended is not None:
        note = f"It acts as in training if you agree to execute {extended.foreign_code}."
        status = replace(status, notes=(note,), digest=extended.digest())
    if plan.foreign_code and consent != plan.digest():
        text = f"Loading it executes code that is not part of palaestra: {plan.foreign_code}"
        return PolicyLaunch(status=replace(status, state="needs_consent", text=text, digest=plan.digest()))
    command = {"argv": list(plan.argv), "environment": dict(plan.environment), "cwd": plan.cwd}
    return PolicyLaunch(status=status, command=command)


def _check(record: CheckpointRecord, play: PlaySpec) -> None:
    """Refuse a checkpoint that is damaged, or that was trained elsewhere."""
    verdict = verify(record)
    if not verdict.fits:
        raise CheckpointError("checkpoint", record.checkpoint_id, verdict.problem, "Choose another checkpoint")
    trained, here = record.env_id.removeprefix("compiled/"), (play.env_id or "").removeprefix("compiled/")
    # A model for screens acts in every task.
    mismatch = find_dataset_mismatch(record.offline_dataset, here, play.parameters)
    reasons = [mismatch] if mismatch else find_incompatibilities({"env_id": trained}, {"env_id": here}) if here else []
    if reasons:
        remedy = f"Switch to {record.env_id}, or choose a checkpoint that was trained in {play.env_id}"
        if trained == here:
            arguments = json.dumps(record.offline_dataset.get("env_kwargs"))
            remedy = f"Start the play with the parameters {arguments}, or choose another checkpoint"
        raise CheckpointError("checkpoint", record.checkpoint_id, "; ".join(reasons), remedy)


def _runner_name(record: CheckpointRecord) -> str:
    runner, slash, _ = record.agent_id.partition("/")
    return runner if slash else _RUNNER_OF_FORMAT.get(record.format, record.agent_id or "palaestra")


def _describe(record: CheckpointRecord) -> str:
    algorithm = record.agent_id.partition("/")[2] or record.agent_id or record.format
    return f"{algorithm}, {record.step_text} steps" if record.env_step is not None else algorithm
