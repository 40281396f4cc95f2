"""`View`: what the window refreshes when its models have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from PySide6.QtWidgets import QWidget

from palaestra.studio.model.revision import Revised
from palaestra.studio.qt.theme import Theme
from palaestra.studio.studio import Studio


class View(QWidget):
    """A widget that draws models. `refresh` is called when one of them has changed, while the view is visible."""

    def __init__(self, studio: Studio, theme: Theme, models: Sequence[Revised]) -> None:
        super().__init__()
        self.studio, self.theme = studio, theme
        self._models = tuple(models)
        self._drawn: tuple[int, ...] = ()
        self._drawn_at = 0.0
        self.min_interval_s = 0.0
        """Shortest time between two refreshes."""

    def refresh_if_changed(self) -> bool:
        """Refresh the view if a model has changed and someone can see it; whether it was refreshed."""
        revisions = tuple(model.revision for model in self._models)
        if revisions == self._drawn or not self.can_be_seen:
            return False
        now = time.monotonic()
        if now - self._drawn_at < self.min_interval_s:
            return False
        self._drawn, self._drawn_at = revisions, now
        self.refresh()
        return True

    @property
    def can_be_seen(self) -> bool:
        """Whether the view has a place in the window."""
        return self.isVisible()

    @property
    def is_outdated(self) -> bool:
        """Whether a model has changed since the view was refreshed."""
        return tuple(model.revision for model in self._models) != self._drawn

    def refresh(self) -> None:
        """Show what the models hold."""
        raise NotImplementedError


class Rotation:
    """Refreshes views one after the other, so that no tick of the timer draws them all."""

    def __init__(self) -> None:
        self._views: list[View] = []
        self._next = 0

    def add(self, *views: View) -> None:
        """Add views."""
        self._views += views

    def remove(self, view: View) -> None:
        """Forget a view."""
        self._views.remove(view)

    def clear(self) -> None:
        """Forget all views."""
        self._views.clear()

    @property
    def is_idle(self) -> bool:
        """Whether every view that can be seen shows what its models hold."""
        return not any(view.can_be_seen and view.is_outdated for view in self._views)

    def tick(self, on_error: Callable[[str], None]) -> None:
        """Refresh the next view that needs it."""
        for _ in range(len(self._views)):
            view = self._views[self._next % len(self._views)]
            self._next += 1
            try:
                if view.refresh_if_changed():
                    return
            except Exception as error:  # noqa: BLE001 - one broken view must not stop the others
                on_error(f"{type(view).__name__}: {type(error).__name__}: {error}")
                return
