"""`palaestra envs` and `palaestra schema`: what there is."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from palaestra.errors import ConfigError

__all__ = ["envs", "schema"]


def envs(
    contains: Annotated[str, typer.Argument(help="Only ids that contain this.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the environments that can be named in env.id."""
    from palaestra.env.make import known_environments

    found = [entry for entry in known_environments() if contains.lower() in entry.id.lower()]
    if as_json:
        print(json.dumps([asdict(entry) for entry in found]))
        return
    for entry in found:
        note = "" if entry.installed else f"   needs: {entry.remedy}"
        print(f"{entry.id}{note}")


def schema(
    name: Annotated[str, typer.Argument(help="ppo, env, policy, trainer, telemetry …; run or ui for the whole.")] = "",
) -> None:
    """Print the JSON Schema of a configuration section: every key, its default and what it does."""
    from palaestra.config import closest_names
    from palaestra.learner.registry import ALGORITHMS
    from palaestra.train.config import SECTIONS
    from palaestra.train.screen_config import SCREEN_SECTIONS

    on_trajectories = {f"ui_{name}": cls.config_class for name, cls in ALGORITHMS["trajectories"].items()}
    known: dict[str, Any] = {**SECTIONS, **SCREEN_SECTIONS, **on_trajectories}
    if not name:
        print("\n".join(known))
        return
    if name not in known:
        close = closest_names(name, known, count=1)
        remedy = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}"
        raise ConfigError("schema", name, "no such section", remedy)
    print(json.dumps(known[name].model_json_schema(), indent=2))
