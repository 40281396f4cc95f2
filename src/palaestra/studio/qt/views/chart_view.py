"""Curves: a board of charts with common options, each chart one metric of the chosen runs."""

from __future__ import annotations

import csv
import io
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PySide6.QtCore import QBuffer, QByteArray, QIODevice, QPointF, Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QFileDialog,
    QGridLayout,
    QLabel,
    QScrollArea,
    QSizePolicy,
    QSlider,
    QWidget,
)

from palaestra.studio.model.chart import ChartLine, Floats, short_number, thin_line
from palaestra.studio.qt.parts import (
    Elided,
    EmptyState,
    FlowLayout,
    clear_layout,
    column,
    frame,
    icon_button,
    label,
    row,
)
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import Rotation, View
from palaestra.studio.studio import Studio

if TYPE_CHECKING:
    import pyqtgraph

_MIN_INTERVAL_S, _MIN_INTERVAL_PLAYING_S = 0.1, 0.25
"""To paint a chart takes as long as a frame of a play may be late, so that charts are painted less often beside one."""
_DETAIL_AFTER_S = 0.25
"""After zooming, the part that is shown is read in more detail once the range has stayed the same for this long."""
_RAW_ALPHA, _BAND_ALPHA = 60, 45
_MAX_LEGEND = 12
_MIN_STRETCHES = 200
_AXES = (("step", "step"), ("time", "time"), ("episode", "episode"))


def load_pyqtgraph() -> Any:
    """The library that draws the charts. To import it takes a quarter of a second, which a window without needs not."""
    import pyqtgraph
    import pyqtgraph.exporters

    pyqtgraph.setConfigOptions(antialias=True)
    return pyqtgraph


def shorten_numbers(axis: pyqtgraph.AxisItem) -> None:
    """Let an axis write 200000 as 200k."""
    write = axis.tickStrings

    def write_short(values: list[float], scale: float, spacing: float) -> list[str]:
        if axis.logMode or not values or max(map(abs, values)) < 10_000:
            return write(values, scale, spacing)  # type: ignore[no-any-return]
        return [short_number(value) for value in values]

    axis.tickStrings = write_short


class ChartView(View):
    """One metric of the chosen runs."""

    def __init__(self, studio: Studio, theme: Theme, metric: str) -> None:
        super().__init__(studio, theme, [studio.browser.charts])
        self.name = metric
        self._title = Elided(metric, "heading")
        self._value = label("", "muted")
        self._library = load_pyqtgraph()
        self.plot = self._library.PlotWidget(background=theme.surface)
        self._curves: dict[str, pyqtgraph.PlotDataItem] = {}
        self._raw_curves: dict[str, pyqtgraph.PlotDataItem] = {}
        self._bands: dict[str, tuple[pyqtgraph.PlotDataItem, pyqtgraph.PlotDataItem, pyqtgraph.FillBetweenItem]] = {}
        self._lines: list[ChartLine] = []
        self._range_changed_at = 0.0
        self._set_up_plot()
        header = row(
            self._title,
            self._value,
            icon_button(theme, "download", self.export_csv, tip=f"Save {metric} as CSV"),
            icon_button(theme, "screen", self.export_png, tip=f"Save {metric} as a picture"),
            icon_button(theme, "close", lambda: studio.browser.details.remove_chart(metric), tip=f"Hide {metric}"),
            spacing=6,
            margins=(10, 4, 4, 0),
        )
        card = frame(column(header, self.plot, spacing=0, margins=(0, 0, 6, 6)), "card")
        self.setLayout(column(card))
        self.setMinimumHeight(190)
        self.setAccessibleName(f"Chart of {metric}")

    def _set_up_plot(self) -> None:
        item = self.plot.getPlotItem()
        item.showGrid(x=True, y=True, alpha=0.15)
        item.setMenuEnabled(False)
        item.hideButtons()
        for name in ("left", "bottom"):
            axis = item.getAxis(name)
            axis.setPen(self.theme.border)
            axis.setTextPen(self.theme.muted)
            shorten_numbers(axis)
            # Smaller ticks would take a third of the time of a paint.
            axis.setStyle(maxTickLevel=0)
        item.getAxis("left").setWidth(52)
        self.plot.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self._hover_line = self._library.InfiniteLine(
            angle=90, pen=self._library.mkPen(self.theme.strong_border, width=1)
        )
        self._hover_line.hide()
        self._hover_text = QLabel(self.plot)
        self._hover_text.setTextFormat(Qt.TextFormat.PlainText)
        self._hover_text.setStyleSheet(
            f"background: {self.theme.raised}; color: {self.theme.text}; border: 1px solid {self.theme.border};"
            "border-radius: 4px; padding: 3px 6px; font-size: 11px;"
        )
        self._hover_text.hide()
        self.plot.addItem(self._hover_line, ignoreBounds=True)
        self._hover = self._library.SignalProxy(
            self.plot.scene().sigMouseMoved, rateLimit=30, slot=lambda event: self._show_values(event[0])
        )
        item.getViewBox().sigRangeChangedManually.connect(lambda *_: self._note_range())
        self.plot.scene().sigMouseClicked.connect(self._reset_on_double_click)

    def refresh_if_changed(self) -> bool:
        """Also read more detail after zooming."""
        is_playing = self.studio.session.play.is_open
        self.min_interval_s = _MIN_INTERVAL_PLAYING_S if is_playing else _MIN_INTERVAL_S
        if self._range_changed_at and time.monotonic() - self._range_changed_at > _DETAIL_AFTER_S:
            self._range_changed_at = 0.0
            (first, last), _ = self.plot.getPlotItem().getViewBox().viewRange()
            if math.isfinite(first) and math.isfinite(last) and last - first >= 1:
                self.studio.browser.load_detail(self.name, first, last)
        return super().refresh_if_changed()

    def refresh(self) -> None:
        """Draw the lines."""
        charts = self.studio.browser.charts
        self._lines = charts.lines(self.name)
        self.plot.getPlotItem().setLogMode(y=charts.options.log_scale)
        keys = {line.key for line in self._lines}
        for items in (self._curves, self._raw_curves):
            for key in items.keys() - keys:
                self.plot.removeItem(items.pop(key))
        for key in self._bands.keys() - {line.key for line in self._lines if line.low is not None}:
            for item in self._bands.pop(key):
                self.plot.removeItem(item)
        for index, line in enumerate(self._lines):
            self._draw(line, self.theme.series[index % len(self.theme.series)])
        last = [line.y[-1] for line in self._lines if len(line.y)]
        self._value.setText(f"{last[0]:.5g}" if len(last) == 1 else "")

    def _draw(self, line: ChartLine, colour: str) -> None:
        if line.low is not None and line.high is not None:
            self._draw_band(line, colour)
        if line.raw is not None:
            faint = QColor(colour)
            faint.setAlpha(_RAW_ALPHA)
            self._item(self._raw_curves, line.key, faint).setData(*self._cut(line.x, line.raw))
        elif line.key in self._raw_curves:
            self.plot.removeItem(self._raw_curves.pop(line.key))
        self._item(self._curves, line.key, QColor(colour)).setData(*self._cut(line.x, line.y), connect="finite")

    def _cut(self, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        """The part of a line that can be seen, in about two points per pixel.

        The plot could do this itself, but the ends of its lines move with the range, and the automatic range with the
        ends: some curves were drawn again and again for ever.
        """
        box = self.plot.getPlotItem().getViewBox()
        if not box.autoRangeEnabled()[0]:
            (first, last), _ = box.viewRange()
            margin = last - first  # the user can move on before the next refresh
            start, end = np.searchsorted(x, [first - margin, last + margin])
            x, y = x[max(0, start - 1) : end + 1], y[max(0, start - 1) : end + 1]
        return thin_line(x, y, max(_MIN_STRETCHES, self.plot.width()))

    def _item(self, items: dict[str, pyqtgraph.PlotDataItem], key: str, colour: QColor) -> pyqtgraph.PlotDataItem:
        # A pen of width 1 is drawn several times faster than a wider one.
        pen = self._library.mkPen(colour, width=1)
        if key not in items:
            items[key] = self.plot.plot(pen=pen)
        else:
            items[key].setPen(pen)
        return items[key]

    def _draw_band(self, line: ChartLine, colour: str) -> None:
        assert line.low is not None
        assert line.high is not None
        if line.key not in self._bands:
            fill = QColor(colour)
            fill.setAlpha(_BAND_ALPHA)
            # A pen that draws nothing: without any pen an item keeps no path, and nothing would be filled.
            invisible = self._library.mkPen(None)
            low, high = self.plot.plot(pen=invisible), self.plot.plot(pen=invisible)
            band = self._library.FillBetweenItem(low, high, brush=fill)
            self.plot.addItem(band)
            self._bands[line.key] = (low, high, band)
        low, high, _ = self._bands[line.key]
        low.setData(line.x, line.low)
        high.setData(line.x, line.high)

    def _note_range(self) -> None:
        self._range_changed_at = time.monotonic()
        self._drawn = ()  # other points of the lines can be seen

    def _reset_on_double_click(self, event: object) -> None:
        if getattr(event, "double", lambda: False)():
            self.plot.getPlotItem().enableAutoRange()
            self._drawn = ()

    def _show_values(self, position: QPointF) -> None:
        """Show the values of all lines at the pointer."""
        item = self.plot.getPlotItem()
        if not self._lines or not item.sceneBoundingRect().contains(position):
            self._hover_line.hide()
            self._hover_text.hide()
            return
        x = item.getViewBox().mapSceneToView(position).x()
        texts = [f"{self.studio.browser.charts.options.x_axis} {x:,.6g}"]
        for line in self._lines[:_MAX_LEGEND]:
            if len(line.x):
                index = min(int(np.searchsorted(line.x, x)), len(line.x) - 1)
                texts.append(f"{line.label[:32]}  {line.y[index]:.5g}")
        self._hover_line.setPos(x)
        self._hover_line.show()
        self._hover_text.setText("\n".join(texts))
        self._hover_text.adjustSize()
        left = position.x() + 14
        if left + self._hover_text.width() > self.plot.width():
            left = position.x() - self._hover_text.width() - 14
        self._hover_text.move(int(max(0, left)), int(min(position.y(), self.plot.height() - self._hover_text.height())))
        self._hover_text.show()

    def leaveEvent(self, event: object) -> None:
        """Hide the values."""
        self._hover_line.hide()
        self._hover_text.hide()

    def export_csv(self) -> None:
        """Ask for a file, and save the points that are drawn."""
        self._ask_for_file("CSV (*.csv)", "csv", self.save_csv)

    def export_png(self) -> None:
        """Ask for a file, and save the picture of the chart."""
        self._ask_for_file("PNG (*.png)", "png", self.save_png)

    def save_csv(self, path: Path) -> None:
        """Save the points that are drawn."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(("run", self.studio.browser.charts.options.x_axis, self.name))
        writer.writerows(self.studio.browser.charts.table(self.name))
        self._write(path, text.getvalue().encode(), "points are")

    def save_png(self, path: Path) -> None:
        """Save the picture of the chart."""
        exporter = self._library.exporters.ImageExporter(self.plot.getPlotItem())
        exporter.parameters()["width"] = 1200
        data = QByteArray()
        buffer = QBuffer(data)
        buffer.open(QIODevice.OpenModeFlag.WriteOnly)
        exporter.export(toBytes=True).save(buffer, "PNG")
        self._write(path, bytes(data.data()), "chart is")

    def _write(self, path: Path, data: bytes, what: str) -> None:
        try:
            path.write_bytes(data)
        except OSError as error:
            self.studio.notices.add("error", f"{path} cannot be written ({error.strerror}).")
        else:
            self.studio.notices.add("success", f"The {what} in {path}.")

    def _ask_for_file(self, kind: str, suffix: str, save: object) -> None:
        dialog = QFileDialog(self, f"Save {self.name}", f"{self.name.replace('/', '_')}.{suffix}", kind)
        dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
        dialog.setDefaultSuffix(suffix)
        dialog.fileSelected.connect(lambda name: save(Path(name)))  # type: ignore[operator]
        dialog.open()


class ChartBoard(View):
    """The charts of the chosen runs, with their options and a legend."""

    def __init__(self, studio: Studio, theme: Theme, rotation: Rotation, *, columns: int) -> None:
        super().__init__(studio, theme, [studio.browser.details, studio.browser.runs, studio.browser.charts])
        self._rotation, self._columns = rotation, columns
        self._views: dict[str, ChartView] = {}
        self._grid = QGridLayout()
        self._grid.setSpacing(8)
        self._grid.setContentsMargins(10, 6, 10, 10)
        holder = QWidget()
        holder.setLayout(self._grid)
        self._area = QScrollArea()
        self._area.setWidgetResizable(True)
        self._area.setWidget(holder)
        self._legend = row(spacing=12, margins=(12, 0, 12, 0))
        self._legend_keys: tuple[str, ...] = ()
        self._empty = EmptyState(theme, "chart", "No curves", "Choose a run, or wait for its first metrics.")
        self.setLayout(column(self._options(), self._legend, self._empty, self._area, spacing=4))
        self.refresh()

    def _options(self) -> QWidget:
        options = self.studio.browser.charts.options
        self._metric = QComboBox()
        self._metric.setEditable(True)
        self._metric.setInsertPolicy(QComboBox.InsertPolicy.NoInsert)
        self._metric.setAccessibleName("Add a metric")
        self._metric.setMinimumWidth(110)
        line = self._metric.lineEdit()
        if line is not None:
            line.setPlaceholderText("Add a metric …")
        self._metric.activated.connect(self._add_metric)
        self._axis = QComboBox()
        self._axis.setAccessibleName("X axis")
        for value, text in _AXES:
            self._axis.addItem(f"by {text}", value)
        self._axis.setCurrentIndex(max(0, self._axis.findData(options.x_axis)))
        self._axis.activated.connect(lambda _: self._set(x_axis=self._axis.currentData()))
        self._smoothing = QSlider(Qt.Orientation.Horizontal)
        self._smoothing.setRange(0, 99)
        self._smoothing.setValue(round(100 * options.smoothing))
        self._smoothing.setFixedWidth(80)
        self._smoothing.setAccessibleName("Smoothing")
        self._smoothing.setToolTip("Smoothing")
        self._smoothing.valueChanged.connect(lambda value: self._set(smoothing=value / 100))
        self._log, self._group = QCheckBox("log"), QCheckBox("group seeds")
        self._log.setChecked(options.log_scale)
        self._group.setChecked(options.grouped)
        self._log.toggled.connect(lambda on: self._set(log_scale=on))
        self._group.toggled.connect(lambda on: self._set(grouped=on))
        self._group.setToolTip("Runs that differ in their seed only: mean and standard deviation")
        smoothing = QWidget()
        smoothing.setLayout(row(label("smooth", "muted"), self._smoothing, spacing=6))
        flow = FlowLayout(spacing=8)
        for widget in (self._metric, self._axis, smoothing, self._log, self._group):
            flow.addWidget(widget)
        flow.setContentsMargins(12, 6, 12, 2)
        bar = frame(flow, "panel")
        bar.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Maximum)
        return bar

    def _set(self, **changes: object) -> None:
        self.studio.browser.charts.set_options(**changes)

    def _add_metric(self, index: int) -> None:
        self.studio.browser.add_chart(self._metric.itemText(index))
        self._metric.setCurrentIndex(-1)
        self._metric.clearEditText()

    def refresh(self) -> None:
        """Follow the chosen metrics and runs."""
        details, chosen = self.studio.browser.details, self.studio.browser.runs.chosen
        names = details.all_metrics(chosen)
        if [self._metric.itemText(i) for i in range(self._metric.count())] != names and not self._metric.hasFocus():
            self._metric.clear()
            self._metric.addItems(names)
            self._metric.setCurrentIndex(-1)
        metrics = [metric for metric in details.charts if metric in names] if chosen else []
        if metrics != list(self._views):
            self._arrange(metrics)
        self._empty.setVisible(not metrics)
        self._area.setVisible(bool(metrics))
        self._show_legend()

    def _arrange(self, metrics: list[str]) -> None:
        for metric in self._views.keys() - set(metrics):
            view = self._views.pop(metric)
            self._rotation.remove(view)
            view.setParent(None)
            view.deleteLater()
        ordered = {}
        for index, metric in enumerate(metrics):
            if metric not in self._views:
                self._views[metric] = ChartView(self.studio, self.theme, metric)
                self._rotation.add(self._views[metric])
            ordered[metric] = self._views[metric]
            self._grid.addWidget(ordered[metric], index // self._columns, index % self._columns)
        self._views = ordered

    def chart(self, metric: str) -> ChartView:
        """The chart of a metric."""
        return self._views[metric]

    def _show_legend(self) -> None:
        metric = next(iter(self._views), "")
        lines = self.studio.browser.charts.lines(metric) if metric else []
        keys = tuple(f"{line.key} {line.label}" for line in lines[:_MAX_LEGEND])
        if keys == self._legend_keys:
            return
        self._legend_keys = keys
        clear_layout(self._legend)
        if len(lines) < 2:
            return
        for index, line in enumerate(lines[:_MAX_LEGEND]):
            mark = QLabel("━")
            mark.setStyleSheet(f"color: {self.theme.series[index % len(self.theme.series)]};")
            text = label(line.label[:48], "muted")
            self._legend.addLayout(row(mark, text, spacing=4))
        self._legend.addStretch(1)
