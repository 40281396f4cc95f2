"""The window of the studio: bars, docks and pages, one timer, and the commands of the user."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable

from PySide6.QtCore import QByteArray, QSize, Qt, QTimer
from PySide6.QtGui import QCloseEvent, QKeySequence, QResizeEvent, QShortcut
from PySide6.QtWidgets import (
    QApplication,
    QButtonGroup,
    QDockWidget,
    QMainWindow,
    QSizePolicy,
    QStackedWidget,
    QToolBar,
    QToolButton,
    QWidget,
)

from palaestra.errors import ConfigError
from palaestra.studio.feed import PlayFrame
from palaestra.studio.model.commands import Command, Commands
from palaestra.studio.qt.bridge import Bridge
from palaestra.studio.qt.docks.session_dock import SessionDock
from palaestra.studio.qt.docks.telemetry_dock import TelemetryDock
from palaestra.studio.qt.docks.train_panel import TrainPanel
from palaestra.studio.qt.docks.trained_panel import TrainedPanel
from palaestra.studio.qt.icons import icon
from palaestra.studio.qt.overlays import CommandPalette, NoticeHistory, NoticeList, ShortcutOverlay
from palaestra.studio.qt.pages.episodes_page import EpisodesPage
from palaestra.studio.qt.pages.play_page import PlayPage
from palaestra.studio.qt.pages.runs_page import RunsPage
from palaestra.studio.qt.pages.trajectories_page import TrajectoriesPage
from palaestra.studio.qt.pages.welcome_page import WelcomePage
from palaestra.studio.qt.parts import Badge, icon_button, label
from palaestra.studio.qt.theme import DARK, LIGHT, Theme, apply_theme
from palaestra.studio.qt.view import Rotation, View
from palaestra.studio.qt.views.form_view import FormView
from palaestra.studio.qt.views.gauges import MachineGauges
from palaestra.studio.qt.views.video_view import VideoView
from palaestra.studio.studio import Studio

_SETTLED_S, _SETTLED_STEPS = 0.8, 30
TICK_MS = 25
"""One view is refreshed per tick, so that a window with four plots draws each ten times a second."""
_SIZE = QSize(1440, 900)
_PAGES = (
    ("play", "Play", "gamepad"),
    ("runs", "Runs", "chart"),
    ("episodes", "Episodes", "film"),
    ("trajectories", "Trajectories", "screen"),
)


class StudioWindow(QMainWindow):
    """One window on one service. Closing it stops nothing."""

    def __init__(self, studio: Studio, theme: Theme, bridge: Bridge) -> None:
        super().__init__()
        self.studio, self.theme = studio, theme
        self.setWindowTitle("Palaestra")
        self.setMinimumSize(960, 600)
        self.resize(_SIZE)
        self.commands = Commands()
        self._rotation = Rotation()
        self._opener: Callable[[], None] | None = None
        self._frame: PlayFrame | None = None
        self._busy_at = time.monotonic()
        self._add_commands()
        self._build()
        self._restore_layout()
        bridge.woken.connect(self._react)
        self._timer = QTimer(self)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._tick)
        self._timer.start(TICK_MS)

    # ------------------------------------------------------------------ content

    def _build(self) -> None:
        """Build everything in the current theme."""
        studio, theme, rotation = self.studio, self.theme, self._rotation
        rotation.clear()
        self.play_page = PlayPage(studio, theme)
        self.pages: dict[str, View] = {
            "welcome": WelcomePage(studio, theme),
            "play": self.play_page,
            "runs": RunsPage(studio, theme, rotation),
            "episodes": EpisodesPage(studio, theme, rotation),
            "trajectories": TrajectoriesPage(studio, theme, rotation),
        }
        self._stack = QStackedWidget()
        for page in self.pages.values():
            self._stack.addWidget(page)
        self.setCentralWidget(self._stack)
        self._build_docks()
        self.notice_list = NoticeList(studio, theme, self)
        rotation.add(self.notice_list, *self.pages.values())
        rotation.add(self.play_page.bar, self.play_page.controls, self.play_page.steps)
        self._build_bar()
        self.palette_overlay = CommandPalette(self.commands, theme, self)
        self.shortcut_overlay = ShortcutOverlay(self.commands, theme, self)
        self.notice_history = NoticeHistory(studio, theme, self)
        first = "welcome" if studio.first_steps.is_needed else "play"
        self.show_page(studio.settings.get("page", first))

    def _build_docks(self) -> None:
        studio, theme, rotation = self.studio, self.theme, self._rotation
        self.train_panel = TrainPanel(studio, theme, rotation)
        self.trained_panel = TrainedPanel(studio, theme)
        self.parameters = FormView(
            studio,
            theme,
            [studio.session.environments],
            lambda: studio.session.environments.form,
            studio.session.environments.edit,
        )
        self.session_dock = SessionDock(studio, theme, self.parameters, self.train_panel, self.trained_panel)
        self.telemetry_dock = TelemetryDock(studio, theme, rotation, {"Clips": VideoView(studio, theme)})
        self._left = self._add_dock("session", "Session", self.session_dock, Qt.DockWidgetArea.LeftDockWidgetArea)
        self._right = self._add_dock("run", "Run", self.telemetry_dock, Qt.DockWidgetArea.RightDockWidgetArea)
        rotation.add(self.session_dock, self.train_panel, self.trained_panel, self.parameters)

    def _build_bar(self) -> None:
        bar = QToolBar("Pages")
        bar.setObjectName("bar")
        bar.setMovable(False)
        bar.setIconSize(QSize(18, 18))
        brand = label("Palaestra", "title")
        brand.setContentsMargins(10, 0, 14, 0)
        bar.addWidget(brand)
        self._page_buttons = QButtonGroup(bar)
        for name, title, icon_name in _PAGES:
            button = QToolButton()
            button.setText(title)
            button.setIcon(icon(icon_name, self.theme.muted))
            button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
            button.setCheckable(True)
            button.setProperty("role", "page")
            button.setProperty("page", name)
            button.setAccessibleName(f"Page {title}")
            button.clicked.connect(lambda _=False, name=name: self.show_page(name))
            self._page_buttons.addButton(button)
            bar.addWidget(button)
        gap = QWidget()
        gap.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        bar.addWidget(gap)
        self.gauges = MachineGauges(self.studio, self.theme)
        self._rotation.add(self.gauges)
        bar.addWidget(self.gauges)
        self._connection = Badge(self.theme)
        bar.addWidget(self._connection)
        for icon_name, name in (
            ("panel-left", "view.left"),
            ("panel-right", "view.right"),
            ("search", "view.palette"),
            ("sun" if self.theme is DARK else "moon", "view.theme"),
            ("keyboard", "view.shortcuts"),
        ):
            command = self.commands.get(name)
            tip = f"{command.title} ({command.shortcut})" if command.shortcut else command.title
            bar.addWidget(icon_button(self.theme, icon_name, command.perform, tip=tip))
        self.addToolBar(bar)
        self._bar = bar

    def _add_dock(self, name: str, title: str, content: QWidget, area: Qt.DockWidgetArea) -> QDockWidget:
        dock = QDockWidget(title)
        dock.setObjectName(name)
        dock.setWidget(content)
        dock.setTitleBarWidget(QWidget())
        dock.setFeatures(QDockWidget.DockWidgetFeature.DockWidgetClosable)
        self.addDockWidget(area, dock)
        return dock

    def show_page(self, name: str) -> None:
        """Show a page."""
        page = self.pages.get(name) or self.play_page
        self._keep_docks()
        self._stack.setCurrentWidget(page)
        self._show_docks()
        self.studio.settings.set("page", name)
        for button in self._page_buttons.buttons():
            button.setChecked(button.property("page") == name)

    def _keep_docks(self) -> None:
        """Remember which docks are open beside the play; the other pages use the whole width."""
        if self._stack.currentWidget() is self.play_page and self.isVisible():
            self.studio.settings.set("left_dock", not self._left.isHidden())
            self.studio.settings.set("right_dock", not self._right.isHidden())

    def _show_docks(self) -> None:
        is_play = self._stack.currentWidget() is self.play_page
        self._left.setVisible(is_play and self.studio.settings.get("left_dock", True))
        self._right.setVisible(is_play and self.studio.settings.get("right_dock", False))

    def open_page(self, name: str) -> None:
        """Show a page as a user would after a few clicks: a play that runs, a run that is selected."""
        openers: dict[str, Callable[[], None]] = {
            "welcome": lambda: None,
            "play": self.studio.session.start,
            "runs": self._show_newest_runs,
            "compare": lambda: self._show_newest_runs(compare=True),
            "episodes": self._show_newest_episode,
            "trajectories": self._show_newest_runs,
            "train": lambda: self._show_agent("train"),
            "trained": lambda: self._show_agent("trained"),
            "shortcuts": lambda: self.shortcut_overlay.open(),
            "commands": lambda: self.palette_overlay.open(),
        }
        if name not in openers:
            raise ConfigError("page", name, "unknown page", f"There are {', '.join(openers)}")
        self.show_page(name if name in self.pages else "runs" if name == "compare" else "play")
        self._opener = openers[name]

    def is_settled(self) -> bool:
        """Whether everything that a page shows has arrived and is drawn."""
        now = time.monotonic()
        studio = self.studio
        if studio.connection.is_connected is None or not studio.browser.runs.is_loaded:
            return False
        if self._opener is not None:
            opener, self._opener = self._opener, None
            opener()
            self._busy_at = now
        play = studio.session.play
        is_waiting = play.is_starting or (play.is_open and len(play.steps) < _SETTLED_STEPS)
        if is_waiting and not (play.state is not None and play.state.waiting):
            self._busy_at = now
        if not studio.feed.is_idle or not (play.is_open or self._rotation.is_idle):
            self._busy_at = now
        return now - self._busy_at > _SETTLED_S

    def _show_newest_runs(self, *, compare: bool = False) -> None:
        runs = self.studio.browser.runs.visible()
        if runs:
            self.studio.browser.show(runs[0].run_id)
            self._right.setVisible(self._stack.currentWidget() is self.play_page)
        if compare:
            self.studio.browser.choose([record.run_id for record in runs[:4]])

    def _show_newest_episode(self) -> None:
        records = self.studio.episodes.episodes.visible()
        if records:
            self.studio.episodes.open(records[0])

    def _show_agent(self, purpose: str) -> None:
        self.studio.session.set_mode("agent")
        self.session_dock.show_purpose(purpose)
        self._show_newest_runs()

    def change_theme(self) -> None:
        """Change between dark and light."""
        self.theme = LIGHT if self.theme is DARK else DARK
        self.studio.settings.set("theme", self.theme.name)
        application = QApplication.instance()
        assert isinstance(application, QApplication)
        apply_theme(application, self.theme)
        overlays = (self.notice_list, self.palette_overlay, self.shortcut_overlay, self.notice_history)
        for part in (self._bar, self._left, self._right, *overlays):
            part.setParent(None)
            part.deleteLater()
        self._build()
        if self._frame is not None and self._frame.play_id == self.studio.session.play.play_id:
            self.play_page.show_frame(self._frame.picture, self._frame.report)
        self._busy_at = time.monotonic()

    # ------------------------------------------------------------------ commands

    def _add_commands(self) -> None:
        studio = self.studio

        def is_playing() -> bool:
            return studio.session.play.is_open

        self.commands.add(
            Command("play.start", "Start a play", "Play", self._start_play, "F5"),
            Command("play.pause", "Pause or continue", "Play", studio.session.toggle_pause, "Ctrl+Space", is_playing),
            Command("play.step", "Single step", "Play", studio.session.step_once, "Ctrl+.", is_playing),
            Command("play.reset", "New episode", "Play", studio.session.reset, "Ctrl+R", is_playing),
            Command(
                "play.again",
                "Same episode again",
                "Play",
                lambda: studio.session.reset(same_seed=True),
                "Ctrl+Shift+R",
                is_playing,
            ),
            Command("play.faster", "Faster", "Play", lambda: studio.session.change_speed(1), "Ctrl+Up", is_playing),
            Command("play.slower", "Slower", "Play", lambda: studio.session.change_speed(-1), "Ctrl+Down", is_playing),
            Command(
                "play.hand_over", "Take over, or give back", "Play", studio.session.hand_over, "Ctrl+H", is_playing
            ),
            Command("play.end", "End the play", "Play", studio.session.end, "", is_playing),
            Command("mode.human", "Human", "Mode", lambda: studio.session.set_mode("human"), "Ctrl+Alt+1"),
            Command("mode.hybrid", "Hybrid", "Mode", lambda: studio.session.set_mode("hybrid"), "Ctrl+Alt+2"),
            Command("mode.agent", "Agent", "Mode", lambda: studio.session.set_mode("agent"), "Ctrl+Alt+3"),
            Command("view.palette", "Find a command", "View", lambda: self.palette_overlay.open(), "Ctrl+K"),
            Command("view.shortcuts", "Shortcuts", "View", lambda: self.shortcut_overlay.open(), "?"),
            Command("view.notices", "Past notices", "View", lambda: self.notice_history.open(), "Ctrl+Shift+N"),
            Command("view.left", "Session panel", "View", lambda: self._toggle(self._left), "Ctrl+B"),
            Command("view.right", "Run panel", "View", lambda: self._toggle(self._right), "Ctrl+J"),
            Command("page.play", "Play", "Page", lambda: self.show_page("play"), "Ctrl+1"),
            Command("page.runs", "Runs", "Page", lambda: self.show_page("runs"), "Ctrl+2"),
            Command("page.episodes", "Episodes", "Page", lambda: self.show_page("episodes"), "Ctrl+3"),
            Command("page.trajectories", "Trajectories", "Page", lambda: self.show_page("trajectories"), "Ctrl+4"),
            Command("page.welcome", "First steps", "Page", lambda: self.show_page("welcome")),
            Command("view.steps", "Table of steps", "View", lambda: self.play_page.toggle_steps(), "Ctrl+T"),
            Command("view.grid", "Cells or picture", "View", lambda: self.play_page.toggle_grid(), "Ctrl+G"),
            Command(
                "view.values", "Values on the cells", "View", lambda: self.play_page.toggle_values(), "Ctrl+Shift+V"
            ),
            Command("view.theme", "Dark or light", "View", self.change_theme, ""),
        )
        for command in self.commands:
            if command.shortcut:
                self._bind(command)

    def _start_play(self) -> None:
        """Start a play in the environment that the field shows, even while the user is typing there."""
        self.session_dock.environment.choose_typed()
        self.studio.session.start()

    def _bind(self, command: Command) -> None:
        shortcut = QShortcut(QKeySequence(command.shortcut), self)

        def perform() -> None:
            if command.is_enabled():
                command.perform()

        shortcut.activated.connect(perform)

    def _toggle(self, dock: QDockWidget) -> None:
        dock.setVisible(not dock.isVisible())

    # ------------------------------------------------------------------ timer and layout

    def _react(self) -> None:
        """Something arrived that is to be seen at once."""
        self.studio.feed.drain()
        frame = self.studio.feed.take_frame()
        if frame is not None and frame.play_id == self.studio.session.play.play_id:
            self._frame = frame
            self.play_page.show_frame(frame.picture, frame.report)

    def _tick(self) -> None:
        self.studio.feed.drain()
        self.studio.poll()
        self._rotation.tick(lambda text: self.studio.notices.add("error", "A part of the window failed.", text))
        connection = {True: ("connected", "success"), False: ("not connected", "danger"), None: ("connecting", "muted")}
        self._connection.set(*connection[self.studio.connection.is_connected], tip=self.studio.service_name)

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Keep the notices in their corner."""
        super().resizeEvent(event)
        self.notice_list.place()

    def closeEvent(self, event: QCloseEvent) -> None:
        """Save the layout and end the studio."""
        settings = self.studio.settings
        settings.set("geometry", _to_text(self.saveGeometry()))
        settings.set("layout", _to_text(self.saveState()))
        self._timer.stop()
        self.studio.close()
        super().closeEvent(event)

    def _restore_layout(self) -> None:
        settings = self.studio.settings
        self.restoreGeometry(_from_text(settings.get("geometry", "")))
        self.restoreState(_from_text(settings.get("layout", "")))


def _to_text(data: QByteArray) -> str:
    return base64.b64encode(bytes(data.data())).decode()


def _from_text(text: str) -> QByteArray:
    try:
        return QByteArray(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return QByteArray()
