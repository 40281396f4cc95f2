"""Overlays of the window: notices that fade, the command palette, the list of shortcuts."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QSize, Qt
from PySide6.QtGui import QColor, QKeyEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QFrame,
    QGraphicsDropShadowEffect,
    QLabel,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QWidget,
)

from palaestra.studio.model.commands import Command, Commands
from palaestra.studio.model.notices import Notice
from palaestra.studio.qt.icons import icon
from palaestra.studio.qt.parts import clear_layout, column, frame, icon_button, label, push_button, row
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import View
from palaestra.studio.studio import Studio

_ICONS = {"info": "info", "success": "check", "warning": "alert", "error": "alert"}
_TONES = {"info": "info", "success": "success", "warning": "warning", "error": "danger"}
_NOTICE_WIDTH = 400
_PALETTE_WIDTH = 560


def _add_shadow(widget: QWidget) -> None:
    shadow = QGraphicsDropShadowEffect(widget)
    shadow.setBlurRadius(24)
    shadow.setOffset(0, 4)
    shadow.setColor(QColor(0, 0, 0, 110))
    widget.setGraphicsEffect(shadow)


class NoticeList(View):
    """The notices, in the lower right corner of the window."""

    def __init__(self, studio: Studio, theme: Theme, window: QWidget) -> None:
        super().__init__(studio, theme, [studio.notices])
        self.setParent(window)
        self._cards = column(spacing=8)
        self.setLayout(self._cards)
        self._shown: list[int] = []
        self.setFixedWidth(_NOTICE_WIDTH)
        self.hide()

    def refresh_if_changed(self) -> bool:
        """Let old notices fade, also while none is shown."""
        notices = self.studio.notices.visible()
        self._drawn = (self.studio.notices.revision,)
        numbers = [notice.number for notice in notices]
        if numbers == self._shown:
            return False
        self._shown = numbers
        clear_layout(self._cards)
        for notice in notices:
            self._cards.addWidget(self._card(notice))
        self.setVisible(bool(notices))
        self.place()
        return True

    def refresh(self) -> None:
        """Done by `refresh_if_changed`."""

    def place(self) -> None:
        """Stay in the corner of the window."""
        parent = self.parentWidget()
        if parent is not None and self._shown:
            self.adjustSize()
            self.move(parent.width() - self.width() - 16, parent.height() - self.height() - 40)
            self.raise_()

    def _card(self, notice: Notice) -> QFrame:
        picture = QLabel()
        picture.setPixmap(icon(_ICONS[notice.level], getattr(self.theme, _TONES[notice.level])).pixmap(18, 18))
        text = label(notice.text, wrap=True, selectable=True)
        texts = column(text, spacing=2)
        if notice.detail:
            texts.addWidget(label(notice.detail, "muted", wrap=True, selectable=True))
        if notice.action and notice.perform is not None:
            perform = notice.perform

            def act() -> None:
                self.studio.notices.dismiss(number=notice.number)
                perform()

            texts.addLayout(row(push_button(notice.action, act), None))
        close = icon_button(
            self.theme, "close", lambda: self.studio.notices.dismiss(number=notice.number), tip="Dismiss"
        )
        close.setIconSize(QSize(12, 12))
        left = column(picture, None)
        right = column(close, None)
        layout = row(left, texts, right, spacing=10, margins=(12, 10, 8, 10))
        layout.setStretch(1, 1)
        card = frame(layout, "card")
        card.setAccessibleName(f"{notice.level}: {notice.text}")
        _add_shadow(card)
        return card


class Overlay(QWidget):
    """Covers the window with darkness and a card; a click beside the card closes it."""

    def __init__(self, window: QWidget) -> None:
        super().__init__(window)
        window.installEventFilter(self)
        self.hide()

    def open(self) -> None:
        """Show the overlay."""
        parent = self.parentWidget()
        assert parent is not None
        self.setGeometry(parent.rect())
        self.show()
        self.raise_()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Cover the window when its size changes."""
        if event.type() == QEvent.Type.Resize and self.isVisible():
            parent = self.parentWidget()
            assert parent is not None
            self.setGeometry(parent.rect())
        return False

    def mousePressEvent(self, event: object) -> None:
        """Close."""
        self.close_overlay()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Escape closes."""
        if event.key() == Qt.Key.Key_Escape:
            self.close_overlay()
        else:
            super().keyPressEvent(event)

    def close_overlay(self) -> None:
        """Hide the overlay and return the focus."""
        self.hide()
        parent = self.parentWidget()
        if parent is not None:
            parent.setFocus()

    def paintEvent(self, event: QPaintEvent) -> None:
        """Darken the window."""
        QPainter(self).fillRect(self.rect(), QColor(0, 0, 0, 120))


class CommandPalette(Overlay):
    """Finds a command by a few letters."""

    def __init__(self, commands: Commands, theme: Theme, window: QWidget) -> None:
        super().__init__(window)
        self._commands = commands
        self._field = QLineEdit()
        self._field.setPlaceholderText("What do you want to do?")
        self._field.setAccessibleName("Search commands")
        self._field.textChanged.connect(self._search)
        self._field.installEventFilter(self)
        self._list = QListWidget()
        self._list.setAccessibleName("Commands")
        self._list.itemClicked.connect(self._perform)
        self._list.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        card = frame(column(self._field, self._list, margins=(10, 10, 10, 10)), "card")
        card.setFixedWidth(_PALETTE_WIDTH)
        card.setFixedHeight(380)
        card.mousePressEvent = lambda event: None  # type: ignore[method-assign]  # a click inside does not close
        _add_shadow(card)
        self.setLayout(column(60, row(None, card, None), None))
        self._found: list[Command] = []

    def open(self) -> None:
        """Show all commands."""
        super().open()
        self._field.clear()
        self._search("")
        self._field.setFocus()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Arrow keys move in the list while the text keeps the focus."""
        if watched is self._field and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            if event.key() in (Qt.Key.Key_Down, Qt.Key.Key_Up):
                step = 1 if event.key() == Qt.Key.Key_Down else -1
                count = max(1, self._list.count())
                self._list.setCurrentRow((self._list.currentRow() + step) % count)
                return True
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self._perform(self._list.currentItem())
                return True
            if event.key() == Qt.Key.Key_Escape:
                self.close_overlay()
                return True
        return super().eventFilter(watched, event)

    def _search(self, text: str) -> None:
        self._found = self._commands.search(text)
        self._list.clear()
        for command in self._found:
            shortcut = f"    {command.shortcut}" if command.shortcut else ""
            self._list.addItem(QListWidgetItem(f"{command.group}: {command.title}{shortcut}"))
        self._list.setCurrentRow(0)

    def _perform(self, item: QListWidgetItem | None) -> None:
        if item is None:
            return
        command = self._found[self._list.row(item)]
        self.close_overlay()
        command.perform()


class NoticeHistory(Overlay):
    """The notices of this window, newest first, also those that have faded."""

    def __init__(self, studio: Studio, theme: Theme, window: QWidget) -> None:
        super().__init__(window)
        self._notices, self._theme = studio.notices, theme
        self.list = QListWidget()
        self.list.setAccessibleName("Notices")
        self.list.setWordWrap(True)
        self.list.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self._empty = label("Nothing was reported so far.", "muted")
        content = column(label("Notices", "title"), self._empty, self.list, spacing=10, margins=(16, 14, 16, 14))
        card = frame(content, "card")
        card.setFixedSize(_PALETTE_WIDTH + 120, 460)
        card.mousePressEvent = lambda event: None  # type: ignore[method-assign]  # a click inside does not close
        _add_shadow(card)
        self.setLayout(column(None, row(None, card, None), None))

    def open(self) -> None:
        """Show the notices and receive Escape."""
        super().open()
        history = self._notices.history[::-1]
        self.list.clear()
        for notice in history:
            picture = icon(_ICONS[notice.level], getattr(self._theme, _TONES[notice.level]))
            age = format_age(self._notices.age_of(notice))
            self.list.addItem(
                QListWidgetItem(picture, "\n".join(filter(None, (f"{age}  {notice.text}", notice.detail))))
            )
        self.list.setVisible(bool(history))
        self._empty.setVisible(not history)
        self.setFocus()


def format_age(seconds: float) -> str:
    """How long ago something was, in the largest unit."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{int(seconds / length)} {unit} ago"
    return f"{int(seconds)} s ago"


class ShortcutOverlay(Overlay):
    """All shortcuts on one page."""

    def __init__(self, commands: Commands, theme: Theme, window: QWidget) -> None:
        super().__init__(window)
        columns = row(spacing=28)
        for group, members in commands.groups().items():
            lines = column(label(group, "heading"), spacing=4)
            for command in members:
                keys = label(command.shortcut, "caption")
                keys.setMinimumWidth(96)
                lines.addLayout(row(keys, label(command.title), None, spacing=8))
            lines.addStretch(1)
            columns.addLayout(lines)
        hint = label("In a play, the keys beside the buttons below the picture act. Escape closes this page.", "muted")
        card = frame(column(label("Shortcuts", "title"), columns, hint, spacing=14, margins=(24, 20, 24, 20)), "card")
        _add_shadow(card)
        self.setLayout(column(None, row(None, card, None), None))

    def open(self) -> None:
        """Show the overlay and receive Escape."""
        super().open()
        self.setFocus()
