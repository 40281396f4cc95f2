"""Small gauges of the machine and of the queue, in the upper bar."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from palaestra.processes.memory import format_bytes
from palaestra.studio.qt.parts import label, row
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import View
from palaestra.studio.studio import Studio

_HIGH = 0.9


class Gauge(QWidget):
    """A share as a bar, with the last values behind it."""

    def __init__(self, theme: Theme, title: str) -> None:
        super().__init__()
        self._theme, self._title = theme, title
        self._values: list[float] = []
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(title)

    def sizeHint(self) -> QSize:
        """Fits into the bar."""
        return QSize(84, 24)

    def set_values(self, values: list[float], tip: str) -> None:
        """Show the newest values, from 0 to 1."""
        self.setToolTip(tip)
        if values != self._values:
            self._values = values
            self.setAccessibleDescription(tip)
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        """Draw the values as columns, and the newest one as a number."""
        painter = QPainter(self)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(self._theme.raised))
        painter.drawRoundedRect(self.rect(), 4, 4)
        if not self._values:
            return
        newest = self._values[-1]
        colour = QColor(self._theme.danger if newest > _HIGH else self._theme.info)
        colour.setAlpha(110)
        painter.setBrush(colour)
        shown = self._values[-42:]
        width = self.width() / 42
        for index, value in enumerate(shown):
            height = self.height() * min(1.0, value)
            left = self.width() - width * (len(shown) - index)
            painter.drawRect(QRectF(left, self.height() - height, width, height))
        painter.setPen(QColor(self._theme.text))
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignCenter, f"{self._title} {100 * newest:.0f} %")


class MachineGauges(View):
    """CPU, memory, GPUs and the queue."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.machine, studio.browser.runs])
        self._cpu, self._memory = Gauge(theme, "CPU"), Gauge(theme, "RAM")
        self._gpus, self._queue = label("", "muted"), label("", "muted")
        self.setLayout(row(self._queue, self._gpus, self._cpu, self._memory, spacing=10))

    def refresh(self) -> None:
        """Show the newest sample."""
        model = self.studio.machine
        usage = model.usage
        if usage is None:
            return
        self._cpu.set_values(list(model.cpu), f"CPU of the service's machine: {usage.cpu_percent:.0f} %")
        used, total = format_bytes(usage.memory_used_bytes), format_bytes(usage.memory_total_bytes)
        disk = format_bytes(usage.disk_free_bytes)
        self._memory.set_values(list(model.memory), f"{used} of {total} memory used; {disk} free on disk")
        self._gpus.setText("  ".join(f"GPU {gpu.index} {gpu.busy_percent or 0:.0f} %" for gpu in usage.gpus))
        self._gpus.setVisible(bool(usage.gpus))
        live = self.studio.browser.runs.live()
        running = sum(record.phase.has_process for record in live)
        queued = len(live) - running
        parts = [f"{running} running"] if running else []
        parts += [f"{queued} queued"] if queued else []
        self._queue.setText(" · ".join(parts))
        waiting = [f"{record.run_id}: {record.reason}" for record in live if not record.phase.has_process]
        self._queue.setToolTip("\n".join(waiting))
