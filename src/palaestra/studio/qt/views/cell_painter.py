"""Draws the cells of small worlds: FrozenLake, CliffWalking, Taxi, MiniGrid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
_ARROWS = {4: ("←", "↓", "→", "↑")}


def paint_cells(
    painter: QPainter, area: QRectF, grid: CellGrid, theme: Theme, values: Mapping[int, Sequence[float]] | None = None
) -> None:
    """Draw a grid inside an area, as large as it fits with square cells."""
    columns = max(1, grid.columns)
    rows = max(1, -(-len(grid.cells) // columns))
    side = min(area.width() / columns, area.height() / rows)
    left = area.x() + (area.width() - side * columns) / 2
    top = area.y() + (area.height() - side * rows) / 2

    def cell_area(index: int) -> QRectF:
        return QRectF(left + side * (index % columns), top + side * (index // columns), side, side)

    for index, kind in enumerate(grid.cells):
        _paint_cell(painter, cell_area(index), kind, theme)
        if values and index in values:
            _paint_values(painter, cell_area(index), values[index], theme)
    for name, index in grid.marks.items():
        _paint_mark(painter, cell_area(index), name, theme)
    _paint_agent(painter, cell_area(grid.agent), grid.heading, theme)


def _paint_cell(painter: QPainter, area: QRectF, kind: str, theme: Theme) -> None:
    name, _, rest = kind.partition(" ")
    fill = QColor(_FILL.get(name) or theme.raised)
    colour = _COLOURS.get(rest.split(" ")[0] if rest else "", "")
    if name == "stop" and colour:
        fill = QColor(colour)
        fill.setAlpha(110)
    painter.setPen(QPen(QColor(theme.window), 1.5))
    painter.setBrush(fill)
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
    elif glyph:
        _paint_text(painter, area, glyph, colour or "#1f2328", 0.42)


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


def _paint_values(painter: QPainter, area: QRectF, values: Sequence[float], theme: Theme) -> None:
    """The best action of a cell as an arrow, and the size of its value as a shade."""
    if not values:
        return
    best = max(range(len(values)), key=lambda index: values[index])
    arrows = _ARROWS.get(len(values))
    text = arrows[best] if arrows is not None else str(best)
    corner = area.adjusted(area.width() * 0.62, 2, -3, -area.height() * 0.62)
    _paint_text(painter, corner, text, theme.on_accent if theme.name == "light" else "#1f2328", 0.8)
    lower = area.adjusted(2, area.height() * 0.74, -2, -2)
    _paint_text(painter, lower, f"{values[best]:.2f}", "#1f2328", 0.75)


def _paint_text(painter: QPainter, area: QRectF, text: str, colour: str, share: float) -> None:
    font = QFont(painter.font())
    font.setPixelSize(max(6, int(area.height() * share)))
    painter.setFont(font)
    painter.setPen(QColor(colour))
    painter.drawText(area, Qt.AlignmentFlag.AlignCenter, text)
