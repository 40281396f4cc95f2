"""Experience: rollouts and their buffers, trajectories and their archive."""

from typing import TYPE_CHECKING

from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import ArraySpec, Columns
from palaestra.experience.vla_buffer import VLABuffer
from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.experience.rollout import Rollout, combine_rollouts

__all__ = ["ArraySpec", "Columns", "Rollout", "RolloutBuffer", "VLABuffer", "combine_rollouts"]

# Importing tensordict takes over a second; compiled runs do not need it.
__getattr__, __dir__ = lazy_attributes(__name__, {"Rollout": "rollout", "combine_rollouts": "rollout"})
