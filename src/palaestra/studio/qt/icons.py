"""The icons of the studio, drawn from short paths in any colour."""

from __future__ import annotations

from functools import cache

from PySide6.QtCore import QByteArray, QSize, Qt
from PySide6.QtGui import QIcon, QPainter, QPixmap
from PySide6.QtSvg import QSvgRenderer


def _circle(x: float, y: float, r: float) -> str:
    return f"M{x - r} {y}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0"


_FRAME = "M4.5 5.5h15v13h-15z"
# The lines of each icon in a square of 24.
_LINES = {
    "reset": "M12 5a7 7 0 1 1-6.6 4.7M4 4v6h6",
    "search": _circle(10.5, 10.5, 6) + "M15 15l5 5",
    "close": "M6 6l12 12M18 6L6 18",
    "check": "M4.5 12.5l5 5 10-11",
    "alert": "M12 3.5l9.5 16.5h-19zM12 10v5M12 17.4v.2",
    "info": _circle(12, 12, 8.5) + "M12 11v6M12 7.4v.2",
    "chart": "M4 4v16h16M7 15l4-5 3 3 5-7",
    "table": _FRAME + "M4.5 10h15M10 10v8.5",
    "film": _FRAME + "M8.5 5.5v13M15.5 5.5v13M4.5 12h15",
    "screen": "M3.5 4.5h17v12h-17zM9 20h6M12 16.5V20",
    "gamepad": "M8 8h8a5 5 0 0 1 4.5 6.5l-.8 2a2 2 0 0 1-3.5.5L14.5 15h-5l-1.7 2a2 2 0 0 1-3.5-.5l-.8-2A5 5 0 0 1 8 8z"
    "M8 10v3M6.5 11.5h3",
    "keyboard": "M3 7h18v10H3zM7 10.5h.1M10.3 10.5h.1M13.7 10.5h.1M17 10.5h.1M8 14h8",
    "moon": "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
    "sun": _circle(12, 12, 4) + "M12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6L7 7M17 17l1.4 1.4M5.6 18.4L7 17M17 7l1.4-1.4",
    "external": "M13 5h6v6M19 5l-8 8M16 14v5H5V8h5",
    "download": "M12 4v11M7.5 11l4.5 4.5 4.5-4.5M5 20h14",
    "upload": "M12 16V5M7.5 9.5L12 5l4.5 4.5M5 20h14",
    "tag": "M4 12V4h8l8 8-8 8z" + _circle(8, 8, 0.8),
    "star": "M12 4l2.5 5.2 5.7.7-4.2 4 1.1 5.6-5.1-2.8-5.1 2.8 1.1-5.6-4.2-4 5.7-.7z",
    "plus": "M12 5v14M5 12h14",
    "panel-left": _FRAME + "M10 5.5v13",
    "panel-right": _FRAME + "M14 5.5v13",
    "robot": "M5 8.5h14v10.5H5zM12 8.5V5M9 19v1.5M15 19v1.5",
    "person": _circle(12, 8, 3.5) + "M5 20c.6-4 3.4-6 7-6s6.4 2 7 6",
    "both": _circle(8.5, 9, 3) + "M3 19c.5-3.3 2.7-5 5.5-5s5 1.7 5.5 5M15.5 8.5h5.5v5.5h-5.5zM18.2 8.5V6",
    "disk": "M5 4h11l3 3v13H5zM8 4v5h7V4M8 20v-6h8v6",
    "refresh": "M19 8A8 8 0 0 0 5 9.5M5 16a8 8 0 0 0 14-1.5M19.5 4v4.5H15M4.5 20v-4.5H9",
    "shield": "M12 3.5l7 2.5v5.5c0 4.5-3 7.5-7 9-4-1.5-7-4.5-7-9V6zM8.5 12l2.5 2.5 4.5-5",
}
_FILLS = {
    "play": "M7 4.5v15l12-7.5z",
    "pause": "M6.5 5h4v14h-4zM13.5 5h4v14h-4z",
    "step": "M5 5v14l10-7zM16.5 5H19v14h-2.5z",
    "record": _circle(12, 12, 6),
    "stop": "M6 6h12v12H6z",
    "more": _circle(6, 12, 1.6) + _circle(12, 12, 1.6) + _circle(18, 12, 1.6),
    "robot": _circle(9.5, 13, 1.3) + _circle(14.5, 13, 1.3),
    "gamepad": _circle(16, 11.5, 1),
}


@cache
def icon(name: str, colour: str, size: int = 18) -> QIcon:
    """An icon in a colour, sharp on every scale."""
    body = ""
    if name in _FILLS:
        body += f'<path d="{_FILLS[name]}" fill="{colour}"/>'
    if name in _LINES:
        style = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-linecap="round" stroke-linejoin="round"'
        body += f'<path d="{_LINES[name]}" {style}/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24">{body}</svg>'
    renderer = QSvgRenderer(QByteArray(svg.encode()))
    result = QIcon()
    for scale in (1, 2, 3):
        pixmap = QPixmap(QSize(size, size) * scale)
        pixmap.fill(Qt.GlobalColor.transparent)
        painter = QPainter(pixmap)
        renderer.render(painter)
        painter.end()
        pixmap.setDevicePixelRatio(scale)
        result.addPixmap(pixmap)
    return result
