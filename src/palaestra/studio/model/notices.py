"""Notices: short messages that fade, with at most one action each. Nothing in the studio asks in a modal window."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from palaestra.studio.model.revision import Revised

Level: TypeAlias = Literal["info", "success", "warning", "error"]
_SHOWN_S: dict[Level, float] = {"info": 5.0, "success": 5.0, "warning": 10.0, "error": 20.0}
_MAX_SHOWN = 5
_MAX_KEPT = 200


@dataclass(frozen=True)
class Notice:
    """One message."""

    number: int
    level: Level
    text: str
    detail: str = ""
    """The remedy, or where to look."""
    created: float = 0.0
    action: str = ""
    """Label of the button; empty without one."""
    perform: Callable[[], None] | None = None
    key: str = ""
    """A newer notice with the same key replaces this one."""
    lasting: bool = False
    """Stays until it is dismissed or replaced."""


class Notices(Revised):
    """The notices of a window: those that are shown, and a history."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._count = 0
        self.history: list[Notice] = []
        self._shown: list[Notice] = []

    def add(
        self,
        level: Level,
        text: str,
        detail: str = "",
        *,
        action: str = "",
        perform: Callable[[], None] | None = None,
        key: str = "",
        lasting: bool = False,
    ) -> None:
        """Show a notice. A repetition of one that is shown starts its time again, and is one entry of the history."""
        key = key or f"{level} {text}"
        self._count += 1
        notice = Notice(self._count, level, text, detail, self._clock(), action, perform, key, lasting)
        repeated = {old.number for old in self._shown if old.key == key and old.text == text}
        self._shown = [*(old for old in self._shown if old.key != key), notice]
        if len(self._shown) > _MAX_SHOWN:
            # A lasting notice gives way only to other lasting ones.
            self._shown.remove(next((old for old in self._shown[:-1] if not old.lasting), self._shown[0]))
        self.history = [*(old for old in self.history if old.number not in repeated), notice][-_MAX_KEPT:]
        self.touch()

    def dismiss(self, *, number: int = 0, key: str = "") -> None:
        """Remove a notice by its number or its key."""
        kept = [notice for notice in self._shown if notice.number != number and (not key or notice.key != key)]
        if len(kept) != len(self._shown):
            self._shown = kept
            self.touch()

    def age_of(self, notice: Notice) -> float:
        """Seconds since a notice was added."""
        return self._clock() - notice.created

    def visible(self) -> list[Notice]:
        """The notices to show now, oldest first."""
        now = self._clock()
        kept = [one for one in self._shown if one.lasting or now - one.created < _SHOWN_S[one.level]]
        if len(kept) != len(self._shown):
            self._shown = kept
            self.touch()
        return list(kept)
