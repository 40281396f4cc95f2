"""Starts the studio: finds or starts the service, opens the window, or draws one page into a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication, QImage
from PySide6.QtWidgets import QApplication

from palaestra.runs.client.client import TrainerService
from palaestra.studio.model.settings import Settings, settings_file
from palaestra.studio.qt.bridge import Bridge
from palaestra.studio.qt.theme import apply_theme, check_fonts, choose_theme
from palaestra.studio.qt.window import StudioWindow
from palaestra.studio.studio import Studio


def create_application() -> QApplication:
    """The Qt application, once per process."""
    existing = QApplication.instance()
    if isinstance(existing, QApplication):
        return existing
    QGuiApplication.setHighDpiScaleFactorRoundingPolicy(Qt.HighDpiScaleFactorRoundingPolicy.PassThrough)
    application = QApplication(sys.argv[:1])
    application.setApplicationName("Palaestra")
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


def run_studio(service: TrainerService) -> int:
    """Show the window until it is closed; returns the exit code."""
    application = create_application()
    window = create_window(service, Settings(settings_file()))
    window.show()
    return application.exec()


def has_display() -> bool:
    """Whether a window can be shown."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("QT_QPA_PLATFORM"))


def save_picture(window: StudioWindow, path: Path) -> None:
    """Save what the window shows."""
    window.grab().save(str(path))
