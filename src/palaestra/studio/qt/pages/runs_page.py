"""The page of runs: the table on the left, curves and differences of the chosen runs on the right."""

from __future__ import annotations

import json

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHeaderView, QSplitter, QTableWidget, QTableWidgetItem, QTabWidget, QWidget

from palaestra.runs.comparison import Comparison
from palaestra.studio.qt.docks.telemetry_dock import LogView, RunFacts, RunHeader
from palaestra.studio.qt.parts import EmptyState, column
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import Rotation, View
from palaestra.studio.qt.views.beliefs_view import BeliefsView
from palaestra.studio.qt.views.chart_view import ChartBoard
from palaestra.studio.qt.views.run_table import RunTable
from palaestra.studio.qt.views.video_view import VideoView
from palaestra.studio.studio import Studio

_MIN_WIDTH, _MAX_WIDTH = 130, 280
"""Width of a column of differences: the ids of runs, which begin alike, and the names of evaluations fit into it."""


class RunsPage(View):
    """Look at runs, alone and beside each other."""

    def __init__(self, studio: Studio, theme: Theme, rotation: Rotation) -> None:
        super().__init__(studio, theme, [studio.browser.runs])
        self.table = RunTable(studio, theme)
        self.charts = ChartBoard(studio, theme, rotation, columns=2)
        self.comparison = ComparisonTable(studio, theme)
        self.tabs = QTabWidget()
        self.tabs.setDocumentMode(True)
        self.tabs.addTab(self.charts, "Curves")
        self.tabs.addTab(self.comparison, "Differences")
        self.header, self.facts, self.log = RunHeader(studio, theme), RunFacts(studio, theme), LogView(studio, theme)
        self.clips = VideoView(studio, theme)
        self.tabs.addTab(self.facts, "Run")
        self.tabs.addTab(self.log, "Output")
        self.tabs.addTab(self.clips, "Clips")
        self.beliefs = BeliefsView(studio, theme)
        self.beliefs.add_to(self.tabs)
        right = QWidget()
        right.setLayout(column(self.header, self.tabs, spacing=0))
        splitter = QSplitter(Qt.Orientation.Horizontal)
        splitter.addWidget(self.table)
        splitter.addWidget(right)
        splitter.setSizes([640, 760])
        splitter.setChildrenCollapsible(False)
        self.setLayout(column(splitter))
        rotation.add(self.table, self.charts, self.comparison, self.header, self.facts, self.log, self.clips)
        rotation.add(self.beliefs)

    def refresh(self) -> None:
        """Say how many runs are compared."""
        count = len(self.studio.browser.runs.chosen)
        self.tabs.setTabText(1, f"Differences ({count})" if count > 1 else "Differences")


class ComparisonTable(View):
    """The settings that differ, the evaluations and the final metrics of the chosen runs, one column for each run."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.browser.details, studio.browser.runs])
        self._table = QTableWidget()
        self._table.setAccessibleName("Differences of the chosen runs")
        self._table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self._table.setAlternatingRowColors(True)
        self._table.verticalHeader().hide()
        self._table.verticalHeader().setDefaultSectionSize(26)
        self._table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        self._table.horizontalHeader().setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        self._empty = EmptyState(
            theme, "table", "Nothing to compare", "Tick two runs or more in the first column of the table."
        )
        self._shown: Comparison | None = None
        self.setLayout(column(self._empty, self._table))

    def refresh(self) -> None:
        """Show the comparison."""
        comparison = self.studio.browser.details.comparison
        has_several = len(self.studio.browser.runs.chosen) > 1 and comparison is not None
        self._empty.setVisible(not has_several)
        self._table.setVisible(has_several)
        if not has_several or comparison is None or comparison is self._shown:
            return
        self._shown = comparison
        names = [one.run.name or one.run.run_id for one in comparison.runs]
        rows: list[tuple[str, list[str]]] = [("status", [one.run.phase.value for one in comparison.runs])]
        rows += [(key, [_text(value) for value in values]) for key, values in comparison.configuration.items()]
        rows += [
            (key, [_signed_text(value) if key.endswith("/gain") else _text(value) for value in values])
            for key, values in comparison.evaluations.items()
        ]
        rows += [(key, [_text(value) for value in values]) for key, values in comparison.metrics.items()]
        self._table.setColumnCount(1 + len(names))
        self._table.setRowCount(len(rows))
        self._table.setHorizontalHeaderLabels(["", *names])
        first_number = 1 + len(comparison.configuration)
        for index, (title, values) in enumerate(rows):
            head = QTableWidgetItem(title)
            font = head.font()
            font.setBold(index >= first_number)
            head.setFont(font)
            self._table.setItem(index, 0, head)
            for place, value in enumerate(values, start=1):
                item = QTableWidgetItem(value)
                item.setToolTip(value)
                self._table.setItem(index, place, item)
        self._table.resizeColumnsToContents()
        for place in range(1 + len(names)):
            width = min(max(self._table.columnWidth(place), _MIN_WIDTH), _MAX_WIDTH)
            self._table.setColumnWidth(place, width)


def _text(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) else json.dumps(value)


def _signed_text(value: float | None) -> str:
    return "–" if value is None else f"{value:+.5g}"
