"""Small parts that several views are made of: labels, badges, segments, cards, an inline confirmation, a sparkline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from PySide6.QtCore import QPointF, QRect, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QColor,
    QFontMetrics,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QPen,
    QPolygonF,
    QResizeEvent,
    QShortcut,
)
from PySide6.QtWidgets import (
    QButtonGroup,
    QFrame,
    QHBoxLayout,
    QLabel,
    QLayout,
    QLayoutItem,
    QLineEdit,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QSpinBox,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from palaestra.studio.qt.icons import icon
from palaestra.studio.qt.theme import Theme

_CONFIRM_S = 4.0


def label(text: str = "", role: str = "", *, wrap: bool = False, selectable: bool = False) -> QLabel:
    """A label in one of the roles of the style sheet. The text is never read as markup."""
    result = QLabel(text)
    result.setTextFormat(Qt.TextFormat.PlainText)
    result.setProperty("role", role)
    result.setWordWrap(wrap)
    if wrap:
        result.setMinimumWidth(40)
    if selectable:
        result.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return result


def restyle(widget: QWidget) -> None:
    """Apply the style sheet again after a property has changed."""
    widget.style().unpolish(widget)
    widget.style().polish(widget)


def push_button(
    text: str, perform: Callable[[], None], *, role: str = "", tip: str = "", name: str = ""
) -> QPushButton:
    """A button with a text."""
    # An ampersand would mark the letter after it.
    button = QPushButton(text.replace("&", "&&"))
    button.setProperty("role", role)
    button.setToolTip(tip)
    button.setAccessibleName(name or text)
    button.setCursor(Qt.CursorShape.PointingHandCursor)
    button.clicked.connect(lambda _=False: perform())
    return button


def icon_button(theme: Theme, icon_name: str, perform: Callable[[], None], *, tip: str) -> QToolButton:
    """A button with an icon; the tip is also its accessible name."""
    button = QToolButton()
    button.setIcon(icon(icon_name, theme.text))
    button.setIconSize(QSize(18, 18))
    button.setToolTip(tip)
    button.setAccessibleName(tip)
    button.clicked.connect(lambda _=False: perform())
    return button


def number_box(minimum: int, maximum: int, *, accessible: str) -> QSpinBox:
    """A field for a whole number."""
    box = QSpinBox()
    box.setRange(minimum, maximum)
    box.setAccessibleName(accessible)
    # The padding of the style sheet does not reach the text.
    box.lineEdit().setTextMargins(7, 0, 0, 0)
    return box


def row(*items: QWidget | QLayout | int | None, spacing: int = 8, margins: Sequence[int] = (0, 0, 0, 0)) -> QHBoxLayout:
    """Widgets beside each other; None is a stretch, a number a gap."""
    layout = QHBoxLayout()
    _fill(layout, items, spacing, margins)
    return layout


def column(
    *items: QWidget | QLayout | int | None, spacing: int = 8, margins: Sequence[int] = (0, 0, 0, 0)
) -> QVBoxLayout:
    """Widgets below each other; None is a stretch, a number a gap."""
    layout = QVBoxLayout()
    _fill(layout, items, spacing, margins)
    return layout


def _fill(layout: Any, items: Sequence[QWidget | QLayout | int | None], spacing: int, margins: Sequence[int]) -> None:
    layout.setSpacing(spacing)
    layout.setContentsMargins(*margins)
    for item in items:
        if item is None:
            layout.addStretch(1)
        elif isinstance(item, int):
            layout.addSpacing(item)
        elif isinstance(item, QWidget):
            layout.addWidget(item)
        else:
            layout.addLayout(item)


def frame(layout: QLayout, role: str = "panel") -> QFrame:
    """A frame around a layout."""
    result = QFrame()
    result.setProperty("role", role)
    result.setLayout(layout)
    return result


def line() -> QFrame:
    """A horizontal line."""
    result = QFrame()
    result.setProperty("role", "line")
    return result


def scroll(widget: QWidget) -> QScrollArea:
    """A widget that scrolls vertically."""
    area = QScrollArea()
    area.setWidgetResizable(True)
    area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    area.setFrameShape(QFrame.Shape.NoFrame)
    area.setWidget(widget)
    return area


def clear_layout(layout: QLayout) -> None:
    """Delete everything in a layout."""
    while (item := layout.takeAt(0)) is not None:
        widget = item.widget()
        if widget is not None:
            widget.setParent(None)
            widget.deleteLater()
        elif (inner := item.layout()) is not None:
            clear_layout(inner)


def add_step_keys(widget: QWidget, move: Callable[[int], None]) -> None:
    """Let the arrow keys to the left and right move by one while the focus is in a widget; fields keep theirs."""
    for key, by in ((Qt.Key.Key_Left, -1), (Qt.Key.Key_Right, 1)):
        shortcut = QShortcut(QKeySequence(key), widget)
        shortcut.setContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
        shortcut.activated.connect(partial(move, by))


class Elided(QLabel):
    """One line that ends with dots when it does not fit; the tip shows all of it."""

    def __init__(self, text: str = "", role: str = "", mode: Qt.TextElideMode = Qt.TextElideMode.ElideRight) -> None:
        super().__init__()
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setProperty("role", role)
        self._whole, self._mode = "", mode
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.setMinimumWidth(30)
        self.set_text(text)

    def set_text(self, text: str) -> None:
        """Show a text."""
        if text != self._whole:
            self._whole = text
            self.setToolTip(text)
            self.setAccessibleName(text)
            self._elide()

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Shorten the text to the new width."""
        super().resizeEvent(event)
        self._elide()

    def sizeHint(self) -> QSize:
        """The width of the whole text."""
        metrics = QFontMetrics(self.font())
        return QSize(metrics.horizontalAdvance(self._whole) + 4, metrics.height() + 2)

    def _elide(self) -> None:
        self.setText(QFontMetrics(self.font()).elidedText(self._whole, self._mode, max(self.width(), 30)))


class Badge(QLabel):
    """A short word in a coloured frame: a phase, an integrity, a readiness."""

    def __init__(self, theme: Theme, text: str = "", tone: str = "muted") -> None:
        super().__init__()
        self._theme = theme
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self._shown = ("", "")
        self.set(text, tone)

    def set(self, text: str, tone: str, tip: str = "") -> None:
        """Show a word in a tone: `muted`, `accent`, `success`, `warning`, `danger`, `info`."""
        self.setToolTip(tip)
        if (text, tone) != self._shown:
            self._shown = (text, tone)
            colour = getattr(self._theme, tone)
            self.setText(text)
            self.setAccessibleName(text)
            self.setStyleSheet(
                f"color: {colour}; border: 1px solid {colour}; border-radius: 8px; padding: 1px 7px; font-size: 11px;"
            )


class Segments(QWidget):
    """A choice among a few words, all visible."""

    chosen = Signal(str)

    def __init__(self, names: Sequence[tuple[str, str]], *, accessible: str) -> None:
        """`names` are pairs of value and text."""
        super().__init__()
        self.setAccessibleName(accessible)
        self._group = QButtonGroup(self)
        self._group.setExclusive(True)
        self._buttons: dict[str, QPushButton] = {}
        layout = row(spacing=0)
        for index, (value, text) in enumerate(names):
            button = QPushButton(text)
            button.setCheckable(True)
            button.setProperty("role", "segment")
            place = "first" if index == 0 else "last" if index == len(names) - 1 else "middle"
            button.setProperty("place", place)
            button.setAccessibleName(f"{accessible}: {text}")
            button.setCursor(Qt.CursorShape.PointingHandCursor)
            button.clicked.connect(lambda _=False, value=value: self.chosen.emit(value))
            self._group.addButton(button)
            self._buttons[value] = button
            layout.addWidget(button, 1)
        self.setLayout(layout)

    def choose(self, value: str) -> None:
        """Show a value as chosen, without a signal."""
        button = self._buttons.get(value)
        if button is not None:
            button.setChecked(True)

    def value(self) -> str:
        """The chosen value."""
        return next((value for value, button in self._buttons.items() if button.isChecked()), "")

    def button(self, value: str) -> QPushButton:
        """The button of a value."""
        return self._buttons[value]


class ConfirmButton(QPushButton):
    """A button that asks once more in its own place: the second click within some seconds confirms."""

    confirmed = Signal()

    def __init__(self, text: str, question: str, *, role: str = "danger") -> None:
        super().__init__(text)
        self._text, self._question = text, question
        self.setProperty("role", role)
        self.setAccessibleName(text)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._restore)
        self.clicked.connect(self._ask)
        self._subject = ""

    def set_subject(self, subject: str) -> None:
        """Name what a click is about. The first click on one thing must not confirm for another."""
        if subject != self._subject:
            self._subject = subject
            self._restore()

    def _ask(self) -> None:
        if self._timer.isActive():
            self._restore()
            self.confirmed.emit()
        else:
            self.setText(self._question)
            self._timer.start(int(1000 * _CONFIRM_S))

    def _restore(self) -> None:
        self._timer.stop()
        self.setText(self._text)


class SearchField(QLineEdit):
    """A field whose text filters something."""

    def __init__(self, theme: Theme, placeholder: str) -> None:
        super().__init__()
        self.setPlaceholderText(placeholder)
        self.setAccessibleName(placeholder)
        self.setClearButtonEnabled(True)
        self.addAction(icon("search", theme.muted, 16), QLineEdit.ActionPosition.LeadingPosition)


class EmptyState(QWidget):
    """What a view shows when it has nothing: why, and what to do."""

    def __init__(self, theme: Theme, icon_name: str, title: str, text: str = "") -> None:
        super().__init__()
        picture = QLabel()
        picture.setPixmap(icon(icon_name, theme.strong_border, 44).pixmap(44, 44))
        picture.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.title, self.text = label(title, "heading", wrap=True), label(text, "muted", wrap=True)
        for part in (self.title, self.text):
            part.setAlignment(Qt.AlignmentFlag.AlignCenter)
            part.setMaximumWidth(420)
        self._actions = row(spacing=8)
        self.setLayout(
            column(
                None,
                picture,
                6,
                _centre(self.title),
                _centre(self.text),
                8,
                row(None, self._actions, None),
                None,
                spacing=6,
                margins=(24, 24, 24, 24),
            )
        )

    def add_action(self, button: QPushButton) -> None:
        """Add a button."""
        self._actions.addWidget(button)


def _centre(widget: QWidget) -> QHBoxLayout:
    """A text in the middle that may use most of the width."""
    layout = QHBoxLayout()
    layout.addStretch(1)
    layout.addWidget(widget, 12)
    layout.addStretch(1)
    return layout


class Sparkline(QWidget):
    """A small curve without axes."""

    def __init__(self, theme: Theme, colour: str = "") -> None:
        super().__init__()
        self._colour = QColor(colour or theme.accent)
        self._values: list[float] = []
        self.setMinimumSize(60, 22)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName("curve")

    def set_values(self, values: Sequence[float]) -> None:
        """Show values from left to right; those that are not finite are left out."""
        finite = [value for value in values if value == value and abs(value) != float("inf")]
        if finite != self._values:
            self._values = finite
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        """Draw the curve."""
        if len(self._values) < 2:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        low, high = min(self._values), max(self._values)
        span, width, height = (high - low) or 1.0, self.width() - 4, self.height() - 4
        count = len(self._values) - 1
        points = [
            QPointF(2 + width * index / count, 2 + height * (1 - (value - low) / span))
            for index, value in enumerate(self._values)
        ]
        painter.setPen(QPen(self._colour, 1.4))
        painter.drawPolyline(QPolygonF(points))


class FlowLayout(QLayout):
    """Widgets beside each other, continued in the next line where the width ends."""

    def __init__(self, spacing: int = 8) -> None:
        super().__init__()
        self._items: list[QLayoutItem] = []
        self.setSpacing(spacing)
        self.setContentsMargins(0, 0, 0, 0)

    def addItem(self, item: QLayoutItem) -> None:
        """Add an item."""
        self._items.append(item)

    def count(self) -> int:
        """Number of items."""
        return len(self._items)

    def itemAt(self, index: int) -> QLayoutItem | None:
        """An item."""
        return self._items[index] if 0 <= index < len(self._items) else None

    def takeAt(self, index: int) -> QLayoutItem | None:
        """Remove an item."""
        return self._items.pop(index) if 0 <= index < len(self._items) else None

    def hasHeightForWidth(self) -> bool:
        """The height depends on the width."""
        return True

    def heightForWidth(self, width: int) -> int:
        """The height of all lines."""
        margins = self.contentsMargins()
        inner = width - margins.left() - margins.right()
        return self._arrange(QRect(0, 0, inner, 0), move=False) + margins.top() + margins.bottom()

    def setGeometry(self, rectangle: QRect) -> None:
        """Place the items."""
        super().setGeometry(rectangle)
        self._arrange(rectangle.marginsRemoved(self.contentsMargins()), move=True)

    def sizeHint(self) -> QSize:
        """The smallest useful size."""
        return self.minimumSize()

    def minimumSize(self) -> QSize:
        """The size of the largest item."""
        size = QSize()
        for item in self._items:
            size = size.expandedTo(item.minimumSize())
        margins = self.contentsMargins()
        return size + QSize(margins.left() + margins.right(), margins.top() + margins.bottom())

    def _arrange(self, area: QRect, *, move: bool) -> int:
        """Place the items, each in the middle of its line; returns the height of all lines."""
        y = area.y() - self.spacing()
        for line_items in self._lines(area.width()):
            y += self.spacing()
            x, height = area.x(), max(item.sizeHint().height() for item in line_items)
            for item in line_items if move else ():
                hint = item.sizeHint()
                top = y + (height - hint.height()) // 2
                item.setGeometry(QRect(x, top, min(hint.width(), area.width()), hint.height()))
                x += hint.width() + self.spacing()
            y += height
        return max(0, y - area.y())

    def _lines(self, width: int) -> list[list[QLayoutItem]]:
        lines: list[list[QLayoutItem]] = []
        used = 0
        for item in self._items:
            widget = item.widget()
            if widget is not None and widget.isHidden():
                continue
            if not lines or used + item.sizeHint().width() > width:
                lines.append([])
                used = 0
            lines[-1].append(item)
            used += item.sizeHint().width() + self.spacing()
        return lines
