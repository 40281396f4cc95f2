"""Experience: rollouts and their buffers, trajectories and their archive.

Names are imported when first asked for: trajectories need no torch, and importing tensordict takes over a second.
"""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.experience.buffer import RolloutBuffer
    from palaestra.experience.columns import ArraySpec, Columns
    from palaestra.experience.rollout import Rollout, combine_rollouts
    from palaestra.experience.vla_buffer import VLABuffer

__all__ = ["ArraySpec", "Columns", "Rollout", "RolloutBuffer", "VLABuffer", "combine_rollouts"]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "ArraySpec": "columns",
        "Columns": "columns",
        "Rollout": "rollout",
        "RolloutBuffer": "buffer",
        "VLABuffer": "vla_buffer",
        "combine_rollouts": "rollout",
    },
)
