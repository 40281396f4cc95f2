"""Vector environments: N copies of one Gymnasium environment stepped together, with correct autoreset and truncation.

`make_env` builds a `VectorEnv` from the `env` section of a configuration; `as_vector_env` also accepts environment
objects. Run `palaestra.env.conformance.check` on your own implementation of `VectorEnv`.
"""

from palaestra.env.inspection import inspect_env
from palaestra.env.make import EnvConfig, as_vector_env, known_environments, make_env
from palaestra.env.spaces import allocate_row
from palaestra.env.vector import EpisodeEnd, Snapshot, StepRow, VectorEnv

__all__ = [
    "EnvConfig",
    "EpisodeEnd",
    "Snapshot",
    "StepRow",
    "VectorEnv",
    "allocate_row",
    "as_vector_env",
    "inspect_env",
    "known_environments",
    "make_env",
]
