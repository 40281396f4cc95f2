"""Behaviour of checkpoints that other trainers saved: Stable-Baselines3, CleanRL and runners of packages.

They act in a process of their own, as in plays (`train.play.policies`), one observation at a time. The run service is
not needed; its registry is read if there is one.
"""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from palaestra.config import parse_section
from palaestra.env.make import EnvConfig
from palaestra.env.spaces import ActionLayout
from palaestra.env.vector import Array, Flags, Observation, Space
from palaestra.errors import CheckpointError, ConfigError, ConsentRequired
from palaestra.files.atomic import read_json
from palaestra.files.checkpoint import MANIFEST, checkpoint_kind
from palaestra.files.home import Home
from palaestra.files.run_directory import find_checkpoint
from palaestra.runs.checkpoints.catalogue import get_checkpoint, list_checkpoints
from palaestra.runs.play.policy_planner import PolicyPlanner
from palaestra.runs.play.protocol import LoadPolicy, Message
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.reader import RunReader
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.runner import Runner
from palaestra.runs.runners.corl.offline_data import read_settings
from palaestra.runs.runners.registry import get_runner
from palaestra.train.play.environment import PolicyInput
from palaestra.train.play.policies import PolicyProcess, command_from_json

_LISTS = "palaestra runs list and palaestra checkpoints list show them"


def find_policy(name: str, home: Home, option: str = "--checkpoint") -> Path | CheckpointRecord:
    """A checkpoint of palaestra by path or run, or the record of a foreign one by its id, run or path.

    Of a run, the best checkpoint is used if the run has one, else the newest. `option` is the place of its errors.
    """
    try:
        path = find_checkpoint(name, home.runs)
    except ConfigError as error:
        record = _find_record(name, home) or _find_record_of_path(Path(name), home)
        if record is None:
            raise _unknown_policy(name, option, error) from None
        return Path(record.path) if record.format == "palaestra" else record
    kind = (read_json(path / MANIFEST) or {}).get("kind")
    if checkpoint_kind(path) is not None or not isinstance(kind, str):
        return path  # ours, or damaged, which loading reports
    record = _find_record_of_path(path, home)
    if record is None:
        reason = f"was written by {kind!r} and is no checkpoint of {home.path}"
        raise CheckpointError(option, name, reason, f"Give the id or run of one that is; {_LISTS}")
    return record


def _unknown_policy(name: str, option: str, error: ConfigError) -> ConfigError:
    """The error about a name that is no checkpoint, with the option and where to look."""
    if Path(name).exists():
        remedy = f"Import it and give its id: palaestra checkpoints import {shlex.quote(name)}"
        return CheckpointError(option, name, "is a path, but no checkpoint of palaestra", remedy)
    if error.place != "run" or isinstance(error, CheckpointError):
        return type(error)(option, name, error.reason, _LISTS)
    if error.reason != "no such run":
        return ConfigError(option, name, error.reason, error.remedy)
    nearest = f"{error.remedy}; " if error.remedy.startswith("Nearest") else ""
    return ConfigError(option, name, "there is no such run or checkpoint", nearest + _LISTS)


def _find_record_of_path(path: Path, home: Home) -> CheckpointRecord | None:
    if not path.exists():
        return None
    return next((row for row in list_checkpoints(home) if Path(row.path).resolve() == path.resolve()), None)


def _find_record(name: str, home: Home) -> CheckpointRecord | None:
    try:
        run_id = RunReader(home).run(name).run_id
    except ConfigError:
        try:
            return get_checkpoint(home, name)
        except ConfigError:
            return None
    records = list_checkpoints(home, run_id=run_id)
    return next((record for record in records if record.best), records[0] if records else None)


def read_env_kwargs(record: CheckpointRecord, home: Home) -> dict[str, Any]:
    """Arguments of the environment that a checkpoint was trained in; empty if none are recorded."""
    documents = [record.offline_dataset, read_json(Path(record.path) / "agent.json")]  # the latter of a BDI agent
    if record.run_id:
        run = home.run(record.run_id)
        attempt = run.attempt(record.attempt)
        documents += [
            read_json(attempt.resolved),
            read_json(run.resolved),
            read_settings(read_json(attempt.command) or {}),
        ]
    for document in documents:
        kwargs = (document or {}).get("env_kwargs")
        if isinstance(kwargs, dict):
            return kwargs
    return {}


class ForeignBehaviour:
    """Acts with a checkpoint of another trainer in one environment. `option` is the place of its errors."""

    def __init__(
        self,
        record: CheckpointRecord,
        home: Home,
        env: EnvConfig,
        space: Space,
        *,
        deterministic: bool,
        trust: bool,
        option: str = "--checkpoint",
    ) -> None:
        self._record, self._deterministic, self._option = record, deterministic, option
        self._layout, self._space = ActionLayout(space), space
        play = parse_section(PlaySpec, {"env_id": env.id, "parameters": env.kwargs, "mode": "agent"}, place="--env")
        planner = PolicyPlanner(home, _load_runner)
        launch = asyncio.run(planner.plan(LoadPolicy(record.checkpoint_id, deterministic), play))
        if launch.status.state == "needs_consent":
            if not trust:
                raise ConsentRequired(f"{launch.status.text}. Agree with --trust.", launch.status.digest)
            request = LoadPolicy(record.checkpoint_id, deterministic, launch.status.digest)
            launch = asyncio.run(planner.plan(request, play))
        if launch.command is None:
            raise CheckpointError(option, record.checkpoint_id, launch.status.text or "cannot act")
        self._process = PolicyProcess(command_from_json(launch.command))
        try:
            self._receive("ready")
        except BaseException:
            self.close()
            raise

    def begin(self, seed: int) -> None:
        """Begin an episode: policies with a memory forget it."""
        self._process.begin("", seed)

    def act(self, observation: Observation, mask: Flags | None, rng: np.random.Generator) -> Array:
        """The action of the process for each observation."""
        named = observation if isinstance(observation, dict) else {"": observation}
        actions = self._layout.empty(len(next(iter(named.values()))))
        for i in range(len(actions)):
            allowed = None if mask is None else mask[i].astype(int).tolist()
            self._process.ask(PolicyInput({name: array[i] for name, array in named.items()}, action_mask=allowed))
            action = np.asarray(self._receive("action").header.get("action"))
            if action.dtype.kind not in "biuf" or action.size != actions[i].size:
                reason = f"answered {action.tolist()!r}, which is not an action of {self._space}"
                raise CheckpointError(self._option, self._record.checkpoint_id, reason, "Choose another checkpoint")
            actions[i] = action.reshape(actions[i].shape)
        # As a play does: these policies may overshoot the bounds.
        return self._layout.clip(actions)

    def describe(self) -> dict[str, Any]:
        """The checkpoint and its digest."""
        return {
            "policy": "checkpoint",
            "checkpoint": self._record.checkpoint_id,
            "checkpoint_sha256": self._record.sha256,
            "algorithm": self._record.agent_id,
            "trained_steps": self._record.env_step,
            "deterministic": self._deterministic,
        }

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _receive(self, kind: str) -> Message:
        """The next message of the process, which must be of this kind."""
        place, name = self._option, self._record.checkpoint_id
        while True:
            try:
                messages = list(self._process.read())
            except EOFError as error:
                raise CheckpointError(
                    place, name, f"it cannot act ({error})", "Play it in the studio to see why"
                ) from None
            for message in messages:
                if message.type == "failed":
                    text = str(message.header.get("text", "it cannot act")).rstrip(".")
                    raise CheckpointError(place, name, text, str(message.header.get("remedy", "")))
                if message.type == kind:
                    return message


async def _load_runner(name: str) -> Runner:
    return get_runner(name)
