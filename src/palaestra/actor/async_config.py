"""What a user may say about collecting in the background."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from palaestra.config import Section
from palaestra.experience.slots import Overflow

__all__ = ["AsyncConfig"]


class AsyncConfig(Section):
    """How experience is collected while the learner learns."""

    collector: Literal["thread", "process"] = "thread"
    """Where the background collector runs. `thread`: right when acting waits (a remote or GPU model). `process`: right
    when acting or the environment keeps a core busy; needs `env.id`, not environment objects."""

    max_staleness: int = Field(default=1, ge=0, le=1000)
    """How many updates old the weights behind a step may be when it is learned from. 1 overlaps collecting and learning
    fully; more smooths out uneven times; 0 takes turns and equals synchronous training."""

    overflow: Overflow = "block"
    """When the learner falls behind: `block` makes the collector wait; `overwrite_oldest` keeps it acting and drops the
    oldest unread segment (counted in `dropped_steps`)."""

    reproducible: bool = False
    """Act on weights exactly `max_staleness` updates old, whatever the timing: same seed, same numbers, still in
    parallel. Otherwise on the newest weights, looked for before every step."""

    step_timeout: float = Field(default=60.0, gt=0, le=86_400)
    """Seconds after which a step that has not ended counts as hung, and training ends with an error."""

    collector_restarts: int = Field(default=0, ge=0)
    """How often a collector that died or hangs is replaced, with fresh episodes, before training ends with an error."""
