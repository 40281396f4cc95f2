"""What the BDI agent of the current run believes and intends: the newest snapshot, or an earlier one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QFont, QImage, QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QListWidget,
    QListWidgetItem,
    QProgressBar,
    QSizePolicy,
    QSlider,
    QTabWidget,
    QTreeWidget,
    QTreeWidgetItem,
    QWidget,
)

from palaestra.studio.model.details import BeliefSnapshot
from palaestra.studio.qt.parts import Badge, Elided, EmptyState, column, frame, label, push_button, row
from palaestra.studio.qt.theme import Theme, monospace_font
from palaestra.studio.qt.view import View
from palaestra.studio.studio import Studio

_PROGRESS_STEPS = 1000
_MAP_HEIGHT = 12
"""Pixels of an action in the map of action values."""


class ValueMap(QWidget):
    """Action values as colours: a column for each state, a row for each action."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._low, self._high = QColor(theme.raised), QColor(theme.success)
        self._values: Sequence[Sequence[float]] = ()
        self._image: QImage | None = None
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName("Action values by state")

    def set_values(self, values: Sequence[Sequence[float]]) -> None:
        """Show a table with a row for each state."""
        if values == self._values:
            return
        self._values, self._image = values, self._draw(values) if values else None
        self.setFixedHeight(_MAP_HEIGHT * len(values[0]) if values else 0)
        self.update()

    def _draw(self, values: Sequence[Sequence[float]]) -> QImage:
        low, high = min(map(min, values)), max(map(max, values))
        image = QImage(len(values), len(values[0]), QImage.Format.Format_RGB32)
        channels = list(zip(self._low.getRgb()[:3], self._high.getRgb()[:3], strict=True))  # type: ignore[index]
        for state, row_values in enumerate(values):
            for action, value in enumerate(row_values):
                share = (value - low) / (high - low) if high > low else 0.0
                image.setPixelColor(state, action, QColor(*(round(a + (b - a) * share) for a, b in channels)))
        return image

    def paintEvent(self, event: QPaintEvent) -> None:
        """Draw the map as wide as the widget."""
        if self._image is not None:
            painter = QPainter(self)
            painter.drawImage(self.rect(), self._image)
            painter.end()


class BeliefsView(View):
    """Beliefs, intentions, chosen plan and confidence. Its tab is shown only for runners that report them."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.browser.beliefs])
        self.min_interval_s = 0.1
        self._tabs: QTabWidget | None = None
        self._agent, self._moment = Elided("", "heading", Qt.TextElideMode.ElideMiddle), label("", "muted")
        self.plan = Badge(theme)
        self._confidence = QProgressBar()
        self._confidence.setRange(0, _PROGRESS_STEPS)
        self._confidence.setTextVisible(False)
        self._confidence.setAccessibleName("Confidence")
        self._confidence_text = label("", "muted")
        self.intentions = QTreeWidget()
        self.intentions.setColumnCount(2)
        self.intentions.setHeaderLabels(["goal", "plan"])
        self.intentions.setRootIsDecorated(False)
        self.intentions.setAccessibleName("Intentions")
        self.intentions.setColumnWidth(0, 170)
        self.intentions.setMaximumHeight(150)
        self.beliefs = QListWidget()
        self.beliefs.setAccessibleName("Beliefs")
        self.beliefs.setFont(monospace_font())
        self._value_title, self.values = label("", "caption"), ValueMap(theme)
        self.history = QSlider(Qt.Orientation.Horizontal)
        self.history.setAccessibleName("History of the beliefs")
        model = studio.browser.beliefs
        self.history.valueChanged.connect(model.seek)
        self._follow = push_button("Newest", lambda: model.seek(len(model)), tip="Follow the run")
        self._empty = EmptyState(theme, "info", "No beliefs yet", "The agent has reported none so far.")
        content = column(
            row(self._agent, self.plan),
            self._moment,
            row(label("confidence", "muted"), self._confidence, self._confidence_text),
            label("Intentions", "caption"),
            self.intentions,
            label("Beliefs", "caption"),
            self.beliefs,
            self._value_title,
            self.values,
            row(self.history, self._follow),
            spacing=6,
            margins=(12, 10, 12, 10),
        )
        self._content = frame(content)
        self.setLayout(column(self._empty, self._content))

    def add_to(self, tabs: QTabWidget) -> None:
        """Become a tab that is hidden until the runner of the current run is known to report beliefs."""
        self._tabs = tabs
        tabs.addTab(self, "Beliefs")
        tabs.setTabVisible(tabs.indexOf(self), False)

    def refresh_if_changed(self) -> bool:
        """Follow the choice of the run also while hidden."""
        if self._tabs is not None:
            index, wanted = self._tabs.indexOf(self), self.studio.shows_beliefs
            if self._tabs.isTabVisible(index) != wanted:
                self._tabs.setTabVisible(index, wanted)
        return super().refresh_if_changed()

    def refresh(self) -> None:
        """Show the snapshot."""
        model = self.studio.browser.beliefs
        snapshot = model.current
        self._empty.setVisible(snapshot is None)
        self._content.setVisible(snapshot is not None)
        if snapshot is None:
            return
        self._agent.set_text(snapshot.agent)
        clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
        self._moment.setText(" · ".join(part for part in (snapshot.moment, clock) if part))
        self.plan.setVisible(bool(snapshot.plan))
        self.plan.set(snapshot.plan, "info", "The plan that chose the last action")
        self._show_confidence(snapshot.confidence)
        self._show_lists(snapshot)
        self.values.set_values(model.q_values)
        for widget in (self.values, self._value_title):
            widget.setVisible(bool(model.q_values))
        if model.q_values:
            self._value_title.setText(
                f"Action values · {len(model.q_values)} states × {len(model.q_values[0])} actions"
            )
        self.history.blockSignals(True)
        self.history.setRange(0, max(0, len(model) - 1))
        self.history.setValue(model.position)
        self.history.blockSignals(False)
        self._follow.setEnabled(not model.is_following)

    def _show_confidence(self, confidence: float | None) -> None:
        self._confidence.setValue(round(_PROGRESS_STEPS * (confidence or 0.0)))
        self._confidence.setEnabled(confidence is not None)
        self._confidence_text.setText("unknown" if confidence is None else f"{100 * confidence:.0f} %")

    def _show_lists(self, snapshot: BeliefSnapshot) -> None:
        self.intentions.clear()
        for intention in snapshot.intentions:
            item = QTreeWidgetItem([intention.goal, intention.plan])
            for place, text in enumerate((intention.goal, intention.plan)):
                item.setToolTip(place, text)
            self.intentions.addTopLevelItem(item)
        new = self.studio.browser.beliefs.new_beliefs()
        position = self.beliefs.verticalScrollBar().value()
        self.beliefs.clear()
        for text in snapshot.beliefs:
            entry = QListWidgetItem(text)
            if text in new:
                font = QFont(self.beliefs.font())
                font.setBold(True)
                entry.setFont(font)
                entry.setForeground(QColor(self.theme.accent))
                entry.setToolTip("New since the snapshot before")
            self.beliefs.addItem(entry)
        self.beliefs.verticalScrollBar().setValue(position)
