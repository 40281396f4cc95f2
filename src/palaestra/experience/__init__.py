"""What was experienced: rollouts, the buffers they are collected in, and how they are combined and kept on disk."""

from typing import TYPE_CHECKING

from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import ArraySpec, Columns
from palaestra.experience.vla_buffer import VLABuffer
from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.experience.rollout import Rollout, combine_rollouts

__all__ = ["ArraySpec", "Columns", "Rollout", "RolloutBuffer", "VLABuffer", "combine_rollouts"]

# tensordict takes over a second to import; a run that stays on the compiled path never needs it.
__getattr__, __dir__ = lazy_attributes(__name__, {"Rollout": "rollout", "combine_rollouts": "rollout"})
