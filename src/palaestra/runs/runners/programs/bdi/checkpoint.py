"""Checkpoints of an agent: tables, cached policies, learned beliefs and plans, without pickle.

step_1200/
    q_tables.npz     one array of values per skill; forbidden actions have minus infinity
    agent.json       environment, counters, skills, cached policies, learned beliefs, labels of the plans
    plans.asl        the text of the plans
    manifest.json    schema, kind `spade_bdi`, and size and SHA-256 of every other file; written last
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .skills import MAX_SKILLS, CachedPolicy, Skill, SkillLibrary

SCHEMA = 1
KIND = "spade_bdi"
TABLES, AGENT, PLANS, MANIFEST = "q_tables.npz", "agent.json", "plans.asl", "manifest.json"
_MAX_TABLE_BYTES = 1 << 30
_MAX_TEXT_BYTES = 64 << 20


class BadCheckpoint(Exception):
    """A checkpoint that is damaged, or that does not fit. `args` are the reason and the remedy."""


@dataclass(frozen=True)
class AgentState:
    """What a checkpoint says about an agent, except for its tables."""

    env_id: str
    env_kwargs: dict[str, Any]
    family: str
    states: int
    actions: int
    episode: int = 0
    env_step: int = 0
    beliefs: list[str] = field(default_factory=list)
    """Beliefs that the plans added, as AgentSpeak literals."""
    plans: list[str] = field(default_factory=list)
    """Labels of the plans."""


def save_checkpoint(path: str, state: AgentState, library: SkillLibrary, asl: str) -> str:
    """Write a checkpoint directory atomically and return the SHA-256 of its manifest."""
    tables = io.BytesIO()
    np.savez(tables, **{name: skill.q for name, skill in library.skills.items()})  # type: ignore[arg-type]
    agent = {
        "schema": SCHEMA,
        **asdict(state),
        "skills": {
            name: {"steps": skill.steps, "episodes": skill.episodes, "recent": list(skill.recent)}
            for name, skill in library.skills.items()
        },
        "policies": {name: asdict(policy) for name, policy in library.policies.items()},
        "q_learning": asdict(library.parameters),
    }
    contents = {TABLES: tables.getvalue(), AGENT: json.dumps(agent, indent=1).encode(), PLANS: asl.encode()}
    files = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    manifest = json.dumps({"schema": 2, "kind": KIND, "files": files}, indent=1).encode()
    parent, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(parent, f".{name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    try:
        for file_name, data in {**contents, MANIFEST: manifest}.items():
            with open(os.path.join(temporary, file_name), "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return hashlib.sha256(manifest).hexdigest()


def load_checkpoint(path: str, library: SkillLibrary, env_id: str, sha256: str = "") -> tuple[AgentState, str]:
    """Fill a library from a verified checkpoint; returns its state and the text of its plans.

    Raises `BadCheckpoint` if a byte differs from its hash, if it is of another environment than `env_id`, or if tables
    and library have different shapes.
    """
    state, agent, contents = read_checkpoint(path, sha256)
    remedy = f"Use it in {state.env_id} with the arguments {state.env_kwargs}"
    if state.env_id != env_id:
        raise BadCheckpoint(f"it was trained in {state.env_id}, and the environment is {env_id}", remedy)
    if (state.states, state.actions) != (library.states, library.actions):
        reason = (
            f"its tables have {state.states} states and {state.actions} actions, the environment has "
            f"{library.states} and {library.actions}"
        )
        raise BadCheckpoint(reason, remedy)
    try:
        _fill(library, agent, contents[TABLES])
    except (ValueError, KeyError, TypeError, AttributeError, OSError, zipfile.BadZipFile) as error:
        raise BadCheckpoint(f"its content cannot be used ({error})", "Use another checkpoint") from None
    return state, contents[PLANS].decode()


def read_checkpoint(path: str, sha256: str = "") -> tuple[AgentState, dict[str, Any], dict[str, bytes]]:
    """Verify a checkpoint; returns its state, the whole of agent.json, and the bytes of its files."""
    try:
        manifest = _read(os.path.join(path, MANIFEST), _MAX_TEXT_BYTES)
        if sha256 and hashlib.sha256(manifest).hexdigest() != sha256:
            raise BadCheckpoint("its manifest was changed meanwhile", "Load it again")
        described = json.loads(manifest)
        if described.get("kind") != KIND:
            raise BadCheckpoint(
                f"is not a checkpoint of a BDI agent (kind {described.get('kind')!r})", "Use another one"
            )
        contents = {}
        for name in (TABLES, AGENT, PLANS):
            data = _read(os.path.join(path, name), _MAX_TABLE_BYTES if name == TABLES else _MAX_TEXT_BYTES)
            if hashlib.sha256(data).hexdigest() != described["files"][name]["sha256"]:
                raise BadCheckpoint(f"{name} was changed or damaged: its SHA-256 differs", "Use another checkpoint")
            contents[name] = data
        agent = json.loads(contents[AGENT])
        if agent["schema"] > SCHEMA:
            raise BadCheckpoint(f"schema {agent['schema']} is newer than {SCHEMA}", "Upgrade palaestra")
        state = AgentState(**{name: agent[name] for name in AgentState.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path} cannot be read ({error})", "Give a checkpoint directory of a BDI agent") from None
    return state, agent, contents


def _fill(library: SkillLibrary, agent: dict[str, Any], tables: bytes) -> None:
    shape = (library.states, library.actions)
    with np.load(io.BytesIO(tables), allow_pickle=False) as arrays:
        if set(arrays.files) != set(agent["skills"]) or len(arrays.files) > MAX_SKILLS:
            raise ValueError("the tables are not those of its skills")
        for name in arrays.files:
            table = arrays[name]
            if table.shape != shape or table.dtype != np.float64 or np.isnan(table).any() or np.isposinf(table).any():
                raise ValueError(f"the table of {name} is not {shape[0]} x {shape[1]} finite numbers")
            counts = agent["skills"][name]
            recent = deque((float(value) for value in counts["recent"]), maxlen=library.parameters.confidence_window)
            skill: Skill = library.get(name)
            skill.q[:] = table
            skill.steps, skill.episodes, skill.recent = int(counts["steps"]), int(counts["episodes"]), recent
    for name, policy in agent["policies"].items():
        actions = tuple(int(action) for action in policy["actions"])
        if len(actions) != library.states or not all(0 <= action < library.actions for action in actions):
            raise ValueError(f"the policy {name} has not one action per state")
        library.policies[name] = CachedPolicy(
            actions, float(policy["confidence"]), float(policy["score"]), int(policy["episode"])
        )


def _read(path: str, limit: int) -> bytes:
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} has more than {limit:,} bytes")
    return data
