"""Windows for tests: a real service, a real window without a display, and nothing left behind."""

import gc
import os
import threading
import time

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import pytest
from PySide6.QtCore import QEvent, Qt, QTimer
from PySide6.QtWidgets import QApplication
from tests.runs.serving import service

from palaestra.files.home import Home
from palaestra.runs.client.client import TrainerService
from palaestra.studio.model.settings import Settings
from palaestra.studio.qt.application import create_window

WAIT_MS = 60_000


@pytest.fixture(scope="module")
def module_home(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("studio") / "var" / "training")


@pytest.fixture(scope="module")
def client(module_home):
    """A client of a service process that the tests of a module share."""
    with service(module_home, play_idle_s=30.0):
        yield TrainerService(module_home)


class WindowDriver:
    """A window, and a way to wait for what it shows."""

    def __init__(self, qtbot, window):
        self.qtbot, self.window, self.studio = qtbot, window, window.studio

    def wait(self, condition, timeout_ms=WAIT_MS):
        self.qtbot.waitUntil(lambda: bool(condition()), timeout=timeout_ms)

    def settle(self):
        """Wait until every request is answered and every visible view has drawn it."""
        self.wait(lambda: self.studio.feed.is_idle and self.window._rotation.is_idle)

    def click(self, button):
        self.qtbot.mouseClick(button, Qt.MouseButton.LeftButton)

    def notices(self):
        return [notice.text for notice in self.studio.notices.history]


@pytest.fixture
def open_window(qtbot, client, monkeypatch, module_home):
    """Open windows that are closed after the test, and fail if one leaves something behind."""
    monkeypatch.setenv("PALAESTRA_HOME", str(module_home.base))
    threads_before = set(threading.enumerate())
    windows = []

    def open_one(settings=None, *, theme="dark", service_client=None, connected=True):
        window = create_window(service_client or client, settings or Settings(None), theme)
        windows.append(window)
        window.show()
        driver = WindowDriver(qtbot, window)
        if connected:
            driver.wait(lambda: window.studio.connection.is_connected and window.studio.browser.runs.is_loaded)
            driver.settle()
        return driver

    yield open_one
    for window in windows:
        window.close()
        window.deleteLater()
    windows.clear()
    _check_nothing_left(threads_before)


def _check_nothing_left(threads_before):
    application = QApplication.instance()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        application.sendPostedEvents(None, QEvent.Type.DeferredDelete)
        application.processEvents()
        gc.collect()
        left = _find_left(threads_before)
        if not left:
            return
        time.sleep(0.02)
    raise AssertionError(f"left behind: {left}")


def _find_left(threads_before):
    """What a window left: threads by name, windows by class, timers by their parents."""
    threads = [
        thread.name for thread in threading.enumerate() if thread not in threads_before and "studio" in thread.name
    ]
    windows = [type(widget).__name__ for widget in QApplication.topLevelWidgets() if widget.isVisible()]
    timers = [
        f"a timer of {type(timer.parent()).__name__}"
        for timer in gc.get_objects()
        if issubclass(type(timer), QTimer) and _is_active(timer)  # isinstance would ask foreign objects for a class
    ]
    return [*threads, *windows, *timers]


def _is_active(timer):
    try:
        return timer.isActive()
    except RuntimeError:  # its C++ object is gone
        return False
