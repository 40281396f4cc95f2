"""Gymnasium environments as ours: N copies stepped together, with autoreset and truncation done right.

`make_env` turns the `env` section of a configuration into a `VectorEnv`; `as_vector_env` does the same for whatever is
at hand. An implementation of your own is done when `palaestra.env.conformance.check` passes.
"""

from palaestra.env.catalogue import EnvConfig, as_vector_env, known_environments, make_env
from palaestra.env.preflight import inspect_env
from palaestra.env.spaces import allocate_row
from palaestra.env.vector import Ended, Snapshot, StepRow, VectorEnv

__all__ = [
    "Ended",
    "EnvConfig",
    "Snapshot",
    "StepRow",
    "VectorEnv",
    "allocate_row",
    "as_vector_env",
    "inspect_env",
    "known_environments",
    "make_env",
]
