"""The page of UI agents' episodes: screens with the places that the model chose, its words, and the group."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QImage, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import (
    QListWidget,
    QListWidgetItem,
    QPlainTextEdit,
    QSizePolicy,
    QSplitter,
    QWidget,
)

from palaestra.runs.trajectories import TrajectoryTurn
from palaestra.runs.wire import JsonObject
from palaestra.studio.model.trajectories import screen_of
from palaestra.studio.qt.parts import (
    Badge,
    Elided,
    EmptyState,
    FlowLayout,
    SearchField,
    add_step_keys,
    clear_layout,
    column,
    frame,
    icon_button,
    label,
    push_button,
    row,
)
from palaestra.studio.qt.theme import Theme, monospace_font
from palaestra.studio.qt.view import Rotation, View
from palaestra.studio.studio import Studio

_FILE = Qt.ItemDataRole.UserRole
_TONES = {
    "success": "success",
    "failure": "danger",
    "truncated": "warning",
    "unreadable": "warning",
    "environment_failed": "muted",
}


class ScreenView(QWidget):
    """A screenshot with the points of an action."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._image: QImage | None = None
        self._points: list[tuple[float, float]] = []
        self.setMinimumSize(200, 160)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName("Screen")

    def show_screen(self, image: QImage | None, points: list[tuple[float, float]]) -> None:
        """Show a screenshot, and the points of the action on it."""
        self._image, self._points = image, points
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        """Draw the screenshot and the points."""
        painter = QPainter(self)
        painter.fillRect(self.rect(), QColor(self._theme.window))
        if self._image is None or self._image.isNull():
            return
        width, height = self._image.width(), self._image.height()
        scale = min((self.width() - 8) / width, (self.height() - 8) / height)
        area = QRectF(
            (self.width() - width * scale) / 2, (self.height() - height * scale) / 2, width * scale, height * scale
        )
        painter.setRenderHint(QPainter.RenderHint.SmoothPixmapTransform, scale < 1 or scale != int(scale))
        painter.drawImage(area, self._image)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        places = [QPointF(area.x() + x * scale, area.y() + y * scale) for x, y in self._points]
        for first, second in pairwise(places):
            painter.setPen(QPen(QColor(self._theme.accent), 2))
            painter.drawLine(first, second)
        for place in places:
            painter.setPen(QPen(QColor("#ffffff"), 4))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawEllipse(place, 9, 9)
            painter.setPen(QPen(QColor(self._theme.accent), 2))
            painter.drawEllipse(place, 9, 9)
            painter.setBrush(QColor(self._theme.accent))
            painter.drawEllipse(place, 2.5, 2.5)


class TrajectoriesPage(View):
    """The episodes of a run's model on screens."""

    def __init__(self, studio: Studio, theme: Theme, rotation: Rotation) -> None:
        browser = studio.trajectories
        super().__init__(studio, theme, [browser.model, studio.browser.runs])
        self._search = SearchField(theme, "Search: task, outcome, instruction")
        self._search.textChanged.connect(browser.model.set_search)
        self.list = QListWidget()
        self.list.setAccessibleName("Episodes")
        self.list.setProperty("role", "entries")
        self.list.currentItemChanged.connect(lambda item, _: self._open(item))
        refresh = icon_button(theme, "refresh", browser.refresh, tip="Read the list again")
        self._empty = EmptyState(theme, "screen", "No episodes", "")
        left = QWidget()
        left.setLayout(
            column(frame(row(self._search, refresh, margins=(10, 8, 10, 8)), "bar"), self._empty, self.list, spacing=0)
        )
        self.viewer = TrajectoryViewer(studio, theme)
        splitter = QSplitter(Qt.Orientation.Horizontal)
        splitter.addWidget(left)
        splitter.addWidget(self.viewer)
        splitter.setSizes([340, 900])
        splitter.setChildrenCollapsible(False)
        self.setLayout(column(splitter))
        rotation.add(self.viewer)
        add_step_keys(self, lambda by: browser.model.seek(browser.model.turn + by))

    def refresh(self) -> None:
        """Show the list of the current run."""
        browser = self.studio.trajectories
        browser.show_run(self.studio.browser.runs.current)
        model = browser.model
        entries = model.visible()
        self._empty.setVisible(len(model) == 0)
        self.list.setVisible(len(model) > 0)
        text = (
            "Choose a run of a UI agent on the page Runs."
            if not model.run_id
            else "This run has no episodes on screens."
        )
        self._empty.text.setText(text)
        shown = [self.list.item(i).data(_FILE) for i in range(self.list.count())]
        if shown == [entry.file for entry in entries]:
            return
        self.list.blockSignals(True)
        self.list.clear()
        for entry in entries:
            item = QListWidgetItem(f"{entry.task} · seed {entry.seed}\n{entry.outcome} · reward {entry.reward:.3g}")
            item.setData(_FILE, entry.file)
            item.setForeground(QColor(getattr(self.theme, _TONES.get(str(entry.outcome), "text"))))
            self.list.addItem(item)
            if entry.file == model.file:
                self.list.setCurrentItem(item)
        self.list.blockSignals(False)

    def _open(self, item: QListWidgetItem | None) -> None:
        if item is not None:
            self.studio.trajectories.open(item.data(_FILE))


class TrajectoryViewer(View):
    """One episode: the screen of a turn, what the model wrote, and the other episodes of its group."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.trajectories.model])
        model = studio.trajectories.model
        self.screenshot = ScreenView(theme)
        self._instruction, self._turn = Elided("", "heading"), label("", "muted")
        self._outcome = Badge(theme)
        self._reply = QPlainTextEdit()
        self._reply.setReadOnly(True)
        self._reply.setFont(monospace_font())
        self._reply.setMaximumHeight(150)
        self._reply.setAccessibleName("Reply of the model")
        self._group = FlowLayout(spacing=6)
        self._group_title = label("GROUP", "caption")
        self._group_shown: object = None
        previous = push_button("‹", lambda: model.seek(model.turn - 1), name="Previous turn")
        following = push_button("›", lambda: model.seek(model.turn + 1), name="Next turn")
        self._empty = EmptyState(theme, "screen", "Choose an episode", "Its screens, replies and actions appear here.")
        self._body = QWidget()
        self._body.setLayout(
            column(
                frame(row(self._instruction, self._outcome, margins=(14, 8, 12, 8)), "bar"),
                self.screenshot,
                frame(
                    column(
                        row(previous, following, self._turn, None),
                        self._reply,
                        self._group_title,
                        self._group,
                        spacing=6,
                        margins=(12, 8, 12, 10),
                    ),
                    "bar",
                ),
                spacing=0,
            )
        )
        self.setLayout(column(self._empty, self._body))

    def refresh(self) -> None:
        """Show the turn."""
        model = self.studio.trajectories.model
        document = model.document
        self._empty.setVisible(document is None)
        self._body.setVisible(document is not None)
        if document is None:
            return
        self.studio.trajectories.load_pictures()
        entry = model.entry
        if entry is not None:
            self._instruction.set_text(entry.instruction or entry.task)
            self._outcome.set(str(entry.outcome), _TONES.get(str(entry.outcome), "muted"), entry.reason)
        turns = model.turns
        if not turns:
            self.screenshot.show_screen(None, [])
            return
        turn = turns[model.turn]
        self.screenshot.show_screen(model.picture(screen_of(turn)), action_points(turn.action))
        self._turn.setText(f"turn {model.turn + 1} of {len(turns)} · reward {turn.reward:.3g}")
        self._reply.setPlainText(describe_turn(turn))
        self._show_group()

    def _show_group(self) -> None:
        model = self.studio.trajectories.model
        members = model.group()
        wanted = (tuple(one.file for one in members), model.file)
        self._group_title.setVisible(len(members) > 1)
        if wanted == self._group_shown:
            return
        self._group_shown = wanted
        clear_layout(self._group)
        for one in members if len(members) > 1 else ():
            mark = "● " if one.file == model.file else ""
            button = push_button(
                f"{mark}{one.outcome} {one.reward:.2g}", partial(self.studio.trajectories.open, one.file)
            )
            self._group.addWidget(button)


def action_points(action: JsonObject | None) -> list[tuple[float, float]]:
    """The points of an action on the screen, in its pixels."""
    if action is None:
        return []
    if isinstance(action.get("path"), list):
        return [(float(x), float(y)) for x, y in action["path"]]
    at = action.get("at")
    return [(float(at[0]), float(at[1]))] if isinstance(at, list) and len(at) == 2 else []


def describe_turn(turn: TrajectoryTurn) -> str:
    """What the model wrote and did in a turn."""
    parts = [turn.text]
    if turn.unreadable:
        parts.append(f"unreadable: {turn.unreadable}")
    if turn.action is not None:
        parts.append("action: " + " ".join(f"{key}={value}" for key, value in turn.action.items()))
    if turn.log_probs:
        version = f", policy version {turn.versions[0]}" if turn.versions else ""
        parts.append(f"{len(turn.log_probs)} tokens, log-probability {sum(turn.log_probs):.3f}{version}")
    return "\n".join(part for part in parts if part)
