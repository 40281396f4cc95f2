"""The numbers of a run over all its attempts: what earlier ones came to, and what the present one adds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from palaestra.runs.record import RunEvent
from palaestra.runs.state.progress import Progress
from palaestra.strict_json import optional_number

__all__ = ["Numbers"]


@dataclass(frozen=True)
class Numbers:
    """How far a run had come when its last attempt ended."""

    env_step: int = 0
    episodes: int = 0
    episode_return: float | None = None

    @classmethod
    def before(cls, life: Iterable[RunEvent], attempt: int) -> Numbers:
        """What was written down at the end of the attempts before this one."""
        found = cls()
        for record in life:
            if record.attempt < attempt and "env_step" in record.facts:
                found = cls(
                    _count(record.facts["env_step"]),
                    _count(record.facts.get("episodes")),
                    optional_number(record.facts.get("episode_return")),
                )
        return found

    def steps_since(self, progress: Progress) -> int:
        """Steps that the present attempt has taken."""
        return max(0, progress.env_step - self.env_step)

    def and_then(self, progress: Progress) -> dict[str, Any]:
        """Columns of the row. A resumed trainer counts its steps on and its episodes anew."""
        mean = progress.episode_return
        return {
            "env_step": max(self.env_step, progress.env_step),
            "episodes": self.episodes + progress.episodes,
            "episode_return": self.episode_return if mean is None else mean,
        }


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0
