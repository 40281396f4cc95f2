"""What was experienced: rollouts, the buffers they are collected in, and how they are combined and kept on disk."""

from typing import TYPE_CHECKING, Any

from palaestra.experience.buffer import ArraySpec, RolloutBuffer
from palaestra.experience.columns import Columns
from palaestra.experience.vla_buffer import VLABuffer

if TYPE_CHECKING:
    from palaestra.experience.rollout import Rollout, combine_rollouts

__all__ = ["ArraySpec", "Columns", "Rollout", "RolloutBuffer", "VLABuffer", "combine_rollouts"]


def __getattr__(name: str) -> Any:
    # tensordict takes over a second to import; a run that stays on the compiled path never needs it.
    if name in ("Rollout", "combine_rollouts"):
        from palaestra.experience import rollout

        return getattr(rollout, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
