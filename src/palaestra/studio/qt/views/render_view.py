"""The picture of a play: the newest frame, scaled to the view, or the cells of a small world."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter

from PySide6.QtCore import QPoint, QRectF, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFocusEvent,
    QFont,
    QImage,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QWheelEvent,
)
from PySide6.QtWidgets import QSizePolicy, QWidget

from palaestra.runs.play.state import CellGrid
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.views.cell_painter import paint_cells

# Qt's codes for keys and the names that the DOM and our controls use.
_KEY_NAMES = {
    Qt.Key.Key_Left: "ArrowLeft",
    Qt.Key.Key_Right: "ArrowRight",
    Qt.Key.Key_Up: "ArrowUp",
    Qt.Key.Key_Down: "ArrowDown",
    Qt.Key.Key_Return: "Enter",
    Qt.Key.Key_Enter: "Enter",
    Qt.Key.Key_Space: " ",
    Qt.Key.Key_Tab: "Tab",
    Qt.Key.Key_Shift: "Shift",
    Qt.Key.Key_Backspace: "Backspace",
    Qt.Key.Key_Delete: "Delete",
    Qt.Key.Key_Home: "Home",
    Qt.Key.Key_End: "End",
    Qt.Key.Key_PageUp: "PageUp",
    Qt.Key.Key_PageDown: "PageDown",
}
_MODIFIERS = {
    Qt.KeyboardModifier.ControlModifier: "Control",
    Qt.KeyboardModifier.AltModifier: "Alt",
    Qt.KeyboardModifier.MetaModifier: "Meta",
}
_DRAG_PIXELS = 6
_SHARP_BELOW = 200
"""Pictures with fewer pixels on a side keep their edges when they are enlarged."""


class RenderView(QWidget):
    """Draws the newest frame, and reports keys and clicks of the person in pixels of the picture."""

    key_pressed = Signal(str, str, list)
    """Name of the key, the character that it types, and the modifiers."""
    key_released = Signal(str)
    focus_lost = Signal()
    clicked = Signal(int, int, str, int)
    dragged = Signal(int, int, int, int)
    scrolled = Signal(int, int, int, int)

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._image: QImage | None = None
        self._cells: CellGrid | None = None
        self._with_values = True
        self._message = ""
        self._pressed_at: QPoint | None = None
        self._is_double = False
        self.paints: deque[float] = deque(maxlen=1000)
        """Times of the last paints that showed a new frame, for measuring the frame rate."""
        self.on_painted: Callable[[], None] | None = None
        self._has_new_frame = False
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setMinimumSize(240, 180)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setAccessibleName("Picture of the environment")

    def show_frame(self, image: QImage) -> None:
        """Show a picture."""
        self._image, self._has_new_frame = image, True
        self.update()

    def show_cells(self, cells: CellGrid | None, *, with_values: bool = True) -> None:
        """Show cells instead of the picture, with or without the values of the policy; None: the picture."""
        if cells != self._cells or with_values != self._with_values:
            self._cells, self._with_values = cells, with_values
            self.update()

    def show_message(self, text: str) -> None:
        """Show a text over the picture; empty for none."""
        if text != self._message:
            self._message = text
            self.update()

    def clear(self) -> None:
        """Show nothing."""
        self._image, self._cells, self._message = None, None, ""
        self.update()

    @property
    def image(self) -> QImage | None:
        """The picture that is shown."""
        return self._image

    def paintEvent(self, event: QPaintEvent) -> None:
        """Draw."""
        painter = QPainter(self)
        painter.fillRect(self.rect(), QColor(self._theme.window))
        if self._cells is not None:
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            area = QRectF(self.rect()).adjusted(12, 12, -12, -12)
            paint_cells(painter, area, self._cells, self._theme, with_values=self._with_values)
        elif self._image is not None:
            is_small = max(self._image.width(), self._image.height()) < _SHARP_BELOW
            painter.setRenderHint(QPainter.RenderHint.SmoothPixmapTransform, not is_small)
            painter.drawImage(self._picture_area(), self._image)
        if self._message:
            self._paint_message(painter)
        painter.end()
        if self._has_new_frame:
            self._has_new_frame = False
            self.paints.append(perf_counter())
            if self.on_painted is not None:
                self.on_painted()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Report a key, unless it repeats or belongs to the window."""
        name = key_name(event)
        if event.key() == Qt.Key.Key_Escape:
            self.clearFocus()
        elif name and not event.isAutoRepeat():
            self.key_pressed.emit(name, event.text(), modifier_names(event))
        else:
            super().keyPressEvent(event)

    def keyReleaseEvent(self, event: QKeyEvent) -> None:
        """Report a key that was released."""
        name = key_name(event)
        if name and not event.isAutoRepeat():
            self.key_released.emit(name)
        else:
            super().keyReleaseEvent(event)

    def focusNextPrevChild(self, next: bool) -> bool:
        """Tab is a key of some environments; Escape leaves the picture."""
        return False

    def focusOutEvent(self, event: QFocusEvent) -> None:
        """Keys that are held when the focus is lost would never be released."""
        self.focus_lost.emit()
        super().focusOutEvent(event)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        """Remember where a click or a drag begins."""
        self.setFocus()
        self._pressed_at, self._is_double = event.position().toPoint(), False

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        """The second press of a double click."""
        self._pressed_at, self._is_double = event.position().toPoint(), True

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        """Report a click or a drag in pixels of the picture."""
        start, self._pressed_at = self._pressed_at, None
        if start is None:
            return
        end = event.position().toPoint()
        first, last = self._to_picture(start), self._to_picture(end)
        if first is None or last is None:
            return
        if (end - start).manhattanLength() > _DRAG_PIXELS:
            self.dragged.emit(*first, *last)
            return
        button = {Qt.MouseButton.RightButton: "right", Qt.MouseButton.MiddleButton: "middle"}.get(
            event.button(), "left"
        )
        self.clicked.emit(*last, button, 2 if self._is_double else 1)

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Report a turn of the wheel."""
        at = self._to_picture(event.position().toPoint())
        if at is not None:
            delta = event.angleDelta()
            self.scrolled.emit(*at, -delta.x(), -delta.y())

    def _picture_area(self) -> QRectF:
        assert self._image is not None
        width, height = max(1, self._image.width()), max(1, self._image.height())
        scale = min(self.width() / width, self.height() / height)
        if max(width, height) < _SHARP_BELOW and scale > 1:
            scale = float(int(scale))  # whole factors keep pixels square
        w, h = width * scale, height * scale
        return QRectF((self.width() - w) / 2, (self.height() - h) / 2, w, h)

    def _to_picture(self, point: QPoint) -> tuple[int, int] | None:
        if self._image is None:
            return None
        area = self._picture_area()
        x = (point.x() - area.x()) * self._image.width() / area.width()
        y = (point.y() - area.y()) * self._image.height() / area.height()
        return (int(x), int(y)) if 0 <= x < self._image.width() and 0 <= y < self._image.height() else None

    def _paint_message(self, painter: QPainter) -> None:
        font = QFont(self.font())
        font.setPointSizeF(font.pointSizeF() + 2)
        painter.setFont(font)
        box = painter.fontMetrics().boundingRect(
            self.rect().adjusted(40, 0, -40, 0), Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap, self._message
        )
        # In the lower part, where it hides the least.
        box.moveCenter(QPoint(self.width() // 2, int(self.height() * 0.84)))
        background = QColor(self._theme.raised)
        background.setAlpha(235)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setBrush(background)
        painter.setPen(QPen(QColor(self._theme.border)))
        painter.drawRoundedRect(box.adjusted(-18, -12, 18, 12), 8, 8)
        painter.setPen(QColor(self._theme.text))
        painter.drawText(box, Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap, self._message)


def key_name(event: QKeyEvent) -> str:
    """The name of a key as in the DOM; empty for keys that are not passed on."""
    named = _KEY_NAMES.get(Qt.Key(event.key()))
    if named is not None:
        return named
    # By the key and not by its character, which is another one when Shift is released before the key.
    key = event.key()
    if 0x20 < key <= sys.maxunicode and chr(key).isprintable():
        return chr(key).lower()
    text = event.text()  # a character that has no key of its own
    return text.lower() if len(text) == 1 and text.isprintable() else ""


def modifier_names(event: QKeyEvent) -> list[str]:
    """The modifiers that are held."""
    return [name for modifier, name in _MODIFIERS.items() if event.modifiers() & modifier]
