"""Colours, fonts and the style sheet of the studio, for a dark and a light window."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QFont, QFontDatabase, QFontInfo, QPalette
from PySide6.QtWidgets import QApplication

from palaestra.errors import ConfigError


@dataclass(frozen=True)
class Theme:
    """The colours of a window."""

    name: str
    window: str
    surface: str
    raised: str
    border: str
    strong_border: str
    text: str
    muted: str
    accent: str
    on_accent: str
    selection: str
    success: str
    warning: str
    danger: str
    info: str
    series: tuple[str, ...]
    """Colours of curves, distinguishable with colour-blind eyes."""


DARK = Theme(
    name="dark",
    window="#101317",
    surface="#171b21",
    raised="#1f252d",
    border="#2b333d",
    strong_border="#4a5563",
    text="#e8ebef",
    muted="#9aa5b4",
    accent="#e8836b",
    on_accent="#1a0f0b",
    selection="#3a2b2a",
    success="#4fbf8b",
    warning="#e0b04c",
    danger="#f0686c",
    info="#6ba6e8",
    series=("#6ba6e8", "#f0a04b", "#5cc9a0", "#e8836b", "#b894e6", "#e6d35a", "#7cc4d8", "#e08fb8"),
)
LIGHT = Theme(
    name="light",
    window="#f6f5f2",
    surface="#ffffff",
    raised="#f0eeea",
    border="#dcd8d0",
    strong_border="#a29c92",
    text="#1f2328",
    muted="#5d6673",
    accent="#b5452c",
    on_accent="#ffffff",
    selection="#f6ddd5",
    success="#1d7f50",
    warning="#8f6200",
    danger="#b9282d",
    info="#1f66ad",
    series=("#1f66ad", "#c2670b", "#15805a", "#b5452c", "#7446ad", "#8a7a00", "#1c7f99", "#b0417c"),
)
THEMES = {theme.name: theme for theme in (DARK, LIGHT)}


def choose_theme(wanted: str, application: QApplication) -> Theme:
    """The theme that a setting names; `system` follows the desktop."""
    if wanted in THEMES:
        return THEMES[wanted]
    return DARK if application.styleHints().colorScheme() == Qt.ColorScheme.Dark else LIGHT


def apply_theme(application: QApplication, theme: Theme) -> None:
    """Use a theme for all windows."""
    application.setStyle("Fusion")
    application.setPalette(_palette(theme))
    application.setStyleSheet(_style_sheet(theme))


def check_fonts() -> None:
    """Refuse a machine without fonts, where every letter would be a box."""
    if not QFontInfo(QFont()).family():
        raise ConfigError(
            "fonts", "", "no font is installed", "Install one, for example: apt-get install fonts-dejavu-core"
        )


def monospace_font(size: float = 9.5) -> QFont:
    """The font of logs and commands."""
    font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
    font.setPointSizeF(size)
    return font


def _palette(theme: Theme) -> QPalette:
    palette = QPalette()
    role = QPalette.ColorRole
    colours = {
        role.Window: theme.window,
        role.WindowText: theme.text,
        role.Base: theme.surface,
        role.AlternateBase: theme.raised,
        role.Text: theme.text,
        role.Button: theme.raised,
        role.ButtonText: theme.text,
        role.BrightText: theme.danger,
        role.ToolTipBase: theme.raised,
        role.ToolTipText: theme.text,
        role.PlaceholderText: theme.muted,
        role.Highlight: theme.accent,
        role.HighlightedText: theme.on_accent,
        role.Link: theme.info,
        role.Mid: theme.border,
        role.Dark: theme.border,
        role.Light: theme.raised,
    }
    for which, colour in colours.items():
        palette.setColor(which, QColor(colour))
    for which in (role.Text, role.WindowText, role.ButtonText, role.HighlightedText):
        palette.setColor(QPalette.ColorGroup.Disabled, which, QColor(theme.strong_border))
    return palette


def _style_sheet(theme: Theme) -> str:
    folder = Path(__file__).parent
    template = (folder / "style.qss").read_text(encoding="utf-8")
    return Template(template).substitute(asdict(theme), folder=folder.as_posix())
