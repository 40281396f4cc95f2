"""Starts the studio: finds or starts the service, opens the window, or draws one page into a file."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QEventLoop, QObject, Qt, QTimer
from PySide6.QtGui import QGuiApplication, QImage
from PySide6.QtWidgets import QApplication

from palaestra.errors import ConfigError
from palaestra.runs.client.client import TrainerService
from palaestra.studio.model.settings import Settings, settings_file
from palaestra.studio.qt.bridge import Bridge
from palaestra.studio.qt.theme import apply_theme, check_fonts, choose_theme
from palaestra.studio.qt.views.chart_view import load_pyqtgraph
from palaestra.studio.qt.window import StudioWindow
from palaestra.studio.studio import Studio

_SETTLE_TIMEOUT_S = 30.0
_PRELOAD_AFTER_MS = 500
_SWITCH_INTERVAL_S = 0.001
"""How long the threads of the feed keep the interpreter when the window needs it; Python's default is 5 ms."""
_COLLECT_EVERY_MS = 500
_FREEZE_AFTER_MS = 3000
_THRESHOLDS = (1000, 10, 20)
"""Number of new objects, and of collections of the generation before, that lead to a collection of a generation."""


class GarbageCollector(QObject):
    """Takes the place of Python's automatic collections, from its creation until `close`.

    These run in any thread that makes objects, and stop all threads: a full one keeps the window from drawing for a
    tenth of a second, and one in the thread of a stream deletes widgets outside the thread of the window. What exists
    some seconds after the start, mostly modules, is never looked at again.
    """

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        gc.disable()
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.collect)
        self._timer.start(_COLLECT_EVERY_MS)
        QTimer.singleShot(_FREEZE_AFTER_MS, self, gc.freeze)

    def collect(self) -> int:
        """Collect the oldest generation that is due; returns its number, or -1 if none is."""
        counts = gc.get_count()
        due = [number for number, limit in enumerate(_THRESHOLDS) if counts[number] >= limit]
        if not due:
            return -1
        gc.collect(due[-1])
        return due[-1]

    def close(self) -> None:
        """Collect automatically again."""
        self._timer.stop()
        gc.unfreeze()
        gc.enable()


def create_application() -> QApplication:
    """The Qt application, once per process."""
    existing = QApplication.instance()
    if isinstance(existing, QApplication):
        return existing
    QGuiApplication.setHighDpiScaleFactorRoundingPolicy(Qt.HighDpiScaleFactorRoundingPolicy.PassThrough)
    application = QApplication(sys.argv[:1])
    application.setApplicationName("Palaestra")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    check_fonts()
    return application


def create_window(service: TrainerService, settings: Settings, theme_name: str | None = None) -> StudioWindow:
    """A window on a service, connected and not yet shown."""
    application = create_application()
    theme = choose_theme(theme_name or settings.get("theme", "system"), application)
    apply_theme(application, theme)
    bridge = Bridge()
    studio = Studio(service, settings, wake=bridge.wake, decode=QImage.fromData)
    window = StudioWindow(studio, theme, bridge)
    bridge.setParent(window)
    studio.connect()
    return window


def run_studio(service: TrainerService, page: str = "", theme_name: str = "") -> int:
    """Show the window until it is closed; returns the exit code."""
    application = create_application()
    collector = GarbageCollector(application)
    settings = Settings(settings_file())
    window = create_window(service, settings, theme_name or None)
    if page and page not in window.pages:
        window.close()
        raise ConfigError("--page", page, "unknown page", f"There are {', '.join(window.pages)}")
    if page:
        window.show_page(page)
    window.show()
    # After the first paint, and in another thread: the first chart does not have to wait for it.
    QTimer.singleShot(_PRELOAD_AFTER_MS, lambda: threading.Thread(target=load_pyqtgraph, daemon=True).start())
    try:
        return application.exec()
    finally:
        collector.close()


def take_screenshot(service: TrainerService, path: Path, page: str, theme_name: str) -> None:
    """Draw a page once it has settled, and save it. `ConfigError` if there is no such page or it cannot be saved."""
    window = create_window(service, Settings(None), theme_name)
    try:
        window.open_page(page)
        window.show()
        wait_until(window.is_settled, _SETTLE_TIMEOUT_S)
        if not window.grab().save(str(path)):
            raise ConfigError("--screenshot", str(path), "cannot be written", "Is the directory there?")
    finally:
        window.close()


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Let the window live until something is done; whether it was done in time."""
    loop = QEventLoop()
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            return False
        loop.processEvents(QEventLoop.ProcessEventsFlag.AllEvents, 20)
        time.sleep(0.005)
    return True
