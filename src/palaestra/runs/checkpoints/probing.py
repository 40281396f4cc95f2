"""What an environment is here, asked of a process of its own: its name, its spaces, its time limit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from palaestra.config import closest_names
from palaestra.errors import UnknownEnvironment
from palaestra.runs.process.interpreter import choose_python, probe
from palaestra.runs.runner import Machine
from palaestra.runs.spec import RunSpec

__all__ = ["environment_signature"]


def environment_signature(env_id: str, place: str, *, needed: bool) -> Mapping[str, Any]:
    """An environment as gymnasium makes it here; its name alone when it cannot and that is not `needed`."""
    machine = Machine(environment=dict(os.environ), free_disk_bytes=0)
    found = probe(choose_python(RunSpec()), machine, env_id=env_id).env
    if found.get("made"):
        return dict(found["signature"])
    if not needed:
        return {"env_id": env_id}
    close = closest_names(env_id, found.get("known", ()))
    remedy = f"Nearest: {', '.join(close)}" if close else "palaestra envs lists those that can"
    raise UnknownEnvironment(place, env_id, f"cannot be made here ({str(found.get('reason', ''))[:200]})", remedy)
