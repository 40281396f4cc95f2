"""A request as it is meant where it is made: what this shell's environment says and the service's may not.

A service is started by whichever shell needs it first and keeps that environment. What decides who trains must come
from the shell in which the run is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from palaestra.runs.spec import RunSpec

__all__ = ["as_meant_here"]


def as_meant_here(spec: RunSpec, environment: Mapping[str, str]) -> RunSpec:
    """With the checkout and the interpreter that the environment names, where the request names none."""
    if spec.runner != "cleanrl":
        return spec
    given = spec.config.get("checkout") or spec.checkout or environment.get("PALAESTRA_CLEANRL")
    if not isinstance(given, str) or not given:
        return spec
    checkout = (spec.invoked_from / Path(given).expanduser()).resolve()
    filled = {} if spec.config.get("checkout") or spec.checkout else {"checkout": str(checkout)}
    place = environment.get("UV_PROJECT_ENVIRONMENT")
    if spec.python is None and place:
        # uv takes it for a directory of the project.
        python = checkout / place / "bin" / "python"
        filled |= {"python": str(python)} if python.is_file() else {}
    return spec.model_copy(update=filled) if filled else spec
