"""Draws the cells of small worlds (FrozenLake, CliffWalking, Taxi, MiniGrid) and the values of a tabular policy."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QFont, QPainter, QPen, QPolygonF

from palaestra.runs.play.state import CellGrid
from palaestra.studio.qt.theme import Theme

# Background and letter of each kind of cell.
_FILL = {
    "ice": "#a8cfe0",
    "hole": "#25445a",
    "goal": "#5cb585",
    "start": "#e0c080",
    "cliff": "#5a3a34",
    "wall": "#5b6470",
    "lava": "#e0602f",
    "floor": "",
    "stop": "",
}
_COLOURS = {
    "red": "#d9534f",
    "green": "#4ca86b",
    "blue": "#4a86d0",
    "yellow": "#d9b13b",
    "purple": "#9a6bc4",
    "grey": "#8a929c",
}
_GLYPHS = {"goal": "★", "start": "S", "key": "⚷", "ball": "●", "box": "■", "door": "▯"}
_HEADINGS = {0: 0.0, 1: 90.0, 2: 180.0, 3: 270.0}
_ANGLES = {"right": 0.0, "down": 90.0, "left": 180.0, "up": 270.0}
_VALUE_COLOUR, _MAX_TINT = "#2f9e6e", 0.8
"""Tint of the cell with the highest value; the one with the lowest has none."""
_DARK_INK, _LIGHT_INK = "#1f2328", "#e8ebef"
_MIN_SIDE_FOR_NUMBERS = 34.0


def paint_cells(painter: QPainter, area: QRectF, grid: CellGrid, theme: Theme, *, with_values: bool = True) -> None:
    """Draw a grid inside an area, as large as it fits with square cells.

    Cells with values are tinted by that of the best action, which is drawn as an arrow.
    """
    columns = max(1, grid.columns)
    rows = max(1, -(-len(grid.cells) // columns))
    side = min(area.width() / columns, area.height() / rows)
    left = area.x() + (area.width() - side * columns) / 2
    top = area.y() + (area.height() - side * rows) / 2

    def cell_area(index: int) -> QRectF:
        return QRectF(left + side * (index % columns), top + side * (index // columns), side, side)

    tints = _tints(grid) if with_values else {}
    for index, kind in enumerate(grid.cells):
        _paint_cell(painter, cell_area(index), kind, theme, tints.get(index))
    for name, index in grid.marks.items():
        _paint_mark(painter, cell_area(index), name, theme)
    _paint_agent(painter, cell_area(grid.agent), grid.heading, theme)
    for index, tint in tints.items():
        ink = _ink(_background(grid.cells[index], theme, tint))
        move_ink = theme.on_accent if index == grid.agent else ink
        _paint_best_actions(painter, cell_area(index), grid.values[index], grid.moves, move_ink)
        if side >= _MIN_SIDE_FOR_NUMBERS:
            lower = cell_area(index).adjusted(2, side * 0.8, -2, -1)
            _paint_text(painter, lower, f"{max(grid.values[index]):.3g}", ink, 0.8)


def best_actions(values: Sequence[float]) -> list[int]:
    """The actions with the highest value; none where all are equal, because nothing is preferred there."""
    highest = max(values)
    best = [action for action, value in enumerate(values) if value == highest]
    return best if len(best) < len(values) else []


def _tints(grid: CellGrid) -> dict[int, float]:
    """The share of the tint of each cell in which an action is preferred."""
    highest = {cell: max(values) for cell, values in enumerate(grid.values) if values and best_actions(values)}
    if not highest:
        return {}
    low, high = min(highest.values()), max(highest.values())
    return {cell: _MAX_TINT * (value - low) / (high - low) if high > low else 0.0 for cell, value in highest.items()}


def _background(kind: str, theme: Theme, tint: float | None = None) -> QColor:
    name, _, rest = kind.partition(" ")
    fill = QColor(_FILL.get(name) or theme.raised)
    colour = _COLOURS.get(rest.split(" ")[0] if rest else "", "")
    if name == "stop" and colour:
        fill = _mix(fill, QColor(colour), 0.43)
    return fill if tint is None else _mix(fill, QColor(_VALUE_COLOUR), tint)


def _mix(one: QColor, other: QColor, share: float) -> QColor:
    parts = zip(one.getRgb()[:3], other.getRgb()[:3], strict=True)  # type: ignore[index]
    return QColor(*(round(a + (b - a) * share) for a, b in parts))


def _ink(background: QColor) -> str:
    """A colour that can be read on a background."""
    return _DARK_INK if background.lightnessF() > 0.45 else _LIGHT_INK


def _paint_cell(painter: QPainter, area: QRectF, kind: str, theme: Theme, tint: float | None) -> None:
    name, _, rest = kind.partition(" ")
    colour = _COLOURS.get(rest.split(" ")[0] if rest else "", "")
    painter.setPen(QPen(QColor(theme.window), 1.5))
    painter.setBrush(_background(kind, theme, tint))
    painter.drawRect(area)
    if "wall-right" in rest:
        painter.setPen(QPen(QColor(theme.text), 3))
        painter.drawLine(area.topRight(), area.bottomRight())
    glyph = _GLYPHS.get(name, "")
    if name == "door":
        painter.setBrush(Qt.BrushStyle.NoBrush if rest.endswith("open") else QColor(colour or theme.muted))
        painter.setPen(QPen(QColor(colour or theme.muted), max(1.5, area.width() / 14)))
        inset = area.width() * 0.14
        painter.drawRect(area.adjusted(inset, inset, -inset, -inset))
        if rest.endswith("locked"):
            _paint_text(painter, area, "✕", theme.window, 0.4)
    elif glyph and tint is None:
        _paint_text(painter, area, glyph, colour or _DARK_INK, 0.42)
    elif glyph:
        corner = area.adjusted(0, 0, -area.width() * 0.7, -area.height() * 0.7)
        _paint_text(painter, corner, glyph, colour or _DARK_INK, 0.8)


def _paint_mark(painter: QPainter, area: QRectF, name: str, theme: Theme) -> None:
    if name == "destination":
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.setPen(QPen(QColor(theme.accent), max(2.0, area.width() / 16)))
        inset = area.width() * 0.1
        painter.drawRect(area.adjusted(inset, inset, -inset, -inset))
    elif name == "passenger":
        _paint_text(painter, area.adjusted(0, 0, -area.width() * 0.5, -area.height() * 0.5), "☺", theme.text, 0.8)
    elif name.startswith("carries "):
        kind, _, colour = name.removeprefix("carries ").partition(" ")
        corner = area.adjusted(area.width() * 0.55, area.height() * 0.55, 0, 0)
        _paint_text(painter, corner, _GLYPHS.get(kind, "●"), _COLOURS.get(colour, theme.text), 0.9)


def _paint_agent(painter: QPainter, area: QRectF, heading: int | None, theme: Theme) -> None:
    painter.setPen(QPen(QColor(theme.window), 1.5))
    painter.setBrush(QColor(theme.accent))
    centre, radius = area.center(), area.width() * 0.3
    if heading is None:
        painter.drawEllipse(centre, radius, radius)
        return
    painter.save()
    painter.translate(centre)
    painter.rotate(_HEADINGS.get(heading, 0.0))
    triangle = [QPointF(radius, 0), QPointF(-radius * 0.8, -radius * 0.8), QPointF(-radius * 0.8, radius * 0.8)]
    painter.drawPolygon(QPolygonF(triangle))
    painter.restore()


def _paint_best_actions(
    painter: QPainter, area: QRectF, values: Sequence[float], moves: Sequence[str], ink: str
) -> None:
    """An arrow for each of the best actions, or its name."""
    for action in best_actions(values):
        move = moves[action] if action < len(moves) else str(action)
        if move in _ANGLES:
            _paint_arrow(painter, area.center(), area.width() * 0.25, _ANGLES[move], ink)
        else:
            _paint_text(painter, area.adjusted(0, area.height() * 0.36, 0, -area.height() * 0.36), move, ink, 0.7)


def _paint_arrow(painter: QPainter, centre: QPointF, length: float, angle: float, ink: str) -> None:
    painter.save()
    painter.translate(centre)
    painter.rotate(angle)
    painter.setPen(QPen(QColor(ink), max(1.5, length / 6)))
    painter.drawLine(QPointF(-length * 0.15, 0), QPointF(length * 0.7, 0))
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(QColor(ink))
    head = [QPointF(length, 0), QPointF(length * 0.4, -length * 0.38), QPointF(length * 0.4, length * 0.38)]
    painter.drawPolygon(QPolygonF(head))
    painter.restore()


def _paint_text(painter: QPainter, area: QRectF, text: str, colour: str, share: float) -> None:
    font = QFont(painter.font())
    font.setPixelSize(max(6, int(area.height() * share)))
    painter.setFont(font)
    painter.setPen(QColor(colour))
    painter.drawText(area, Qt.AlignmentFlag.AlignCenter, text)
