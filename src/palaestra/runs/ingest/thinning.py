"""Fewer records of trainers that report every gradient step: one per metric and stretch of steps."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Thinning"]

_MOST_NAMES = 2_000


class Thinning:
    """Keeps the first value of each metric in every stretch of `every` steps; with 1, all of them."""

    def __init__(self, every: int, stretches: Mapping[str, int] | None = None) -> None:
        self._every = every
        self.stretches = dict(stretches or {})
        """In which stretch each metric was kept last; give it to the next one to go on alike."""

    def keeps(self, name: str, step: int) -> bool:
        """Whether this value is kept."""
        if self._every == 1:
            return True
        stretch = step // self._every
        if self.stretches.get(name) == stretch:
            return False
        if name in self.stretches or len(self.stretches) < _MOST_NAMES:
            self.stretches[name] = stretch
        return True
