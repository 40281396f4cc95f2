"""The table of runs: search, sort, choose runs to compare, and act on one."""

from __future__ import annotations

import time
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, QPoint, Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QHeaderView, QMenu, QTableView

from palaestra.runs.record import RunRecord
from palaestra.studio.model.runs import COLUMNS, TONES, RunsModel
from palaestra.studio.qt.parts import EmptyState, SearchField, column, frame, label, push_button, row
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import View
from palaestra.studio.studio import Studio

_CHOSEN = 0
_WIDTHS = {"phase": 92, "name": 230, "agent": 130, "env": 130, "return": 80, "steps": 74, "seed": 50, "time": 84}
_Index = QModelIndex | QPersistentModelIndex


class RunRows(QAbstractTableModel):
    """The visible runs as Qt wants them; the first column chooses runs for the charts."""

    def __init__(self, runs: RunsModel, theme: Theme) -> None:
        super().__init__()
        self._runs, self._theme = runs, theme
        self._records: list[RunRecord] = []

    def follow(self) -> None:
        """Show what the model holds; selections stay where the rows stay."""
        records = self._runs.visible()
        same_rows = [one.run_id for one in records] == [one.run_id for one in self._records]
        if same_rows:
            self._records = records
            if records:
                self.dataChanged.emit(self.index(0, 0), self.index(len(records) - 1, len(COLUMNS)))
            return
        self.beginResetModel()
        self._records = records
        self.endResetModel()

    def record(self, row_number: int) -> RunRecord | None:
        """The run in a row."""
        return self._records[row_number] if 0 <= row_number < len(self._records) else None

    def row_of(self, run_id: str) -> int:
        """The row of a run; -1 when it is not visible."""
        return next((i for i, record in enumerate(self._records) if record.run_id == run_id), -1)

    def rowCount(self, parent: _Index | None = None) -> int:
        """Number of runs."""
        return 0 if parent is not None and parent.isValid() else len(self._records)

    def columnCount(self, parent: _Index | None = None) -> int:
        """Number of columns."""
        return 1 + len(COLUMNS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = 0) -> Any:
        """Titles of the columns, with the order."""
        if orientation is not Qt.Orientation.Horizontal or role != Qt.ItemDataRole.DisplayRole:
            return None
        if section == _CHOSEN:
            return ""
        one = COLUMNS[section - 1]
        mark = (" ▾" if self._runs.is_descending else " ▴") if one.name == self._runs.sort_column else ""
        return one.title + mark

    def flags(self, index: _Index) -> Qt.ItemFlag:
        """The first column can be checked."""
        flags = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        return flags | Qt.ItemFlag.ItemIsUserCheckable if index.column() == _CHOSEN else flags

    def data(self, index: _Index, role: int = 0) -> Any:
        """Text, colour and check mark of a cell."""
        record = self.record(index.row())
        if record is None:
            return None
        if index.column() == _CHOSEN:
            if role == Qt.ItemDataRole.CheckStateRole:
                is_chosen = record.run_id in self._runs.chosen
                return Qt.CheckState.Checked if is_chosen else Qt.CheckState.Unchecked
            return None
        one = COLUMNS[index.column() - 1]
        if role == Qt.ItemDataRole.DisplayRole:
            return one.text(record, time.time())
        if role == Qt.ItemDataRole.ForegroundRole and one.name == "phase":
            return QColor(getattr(self._theme, TONES[record.phase]))
        if role == Qt.ItemDataRole.TextAlignmentRole and one.is_number:
            return Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        if role == Qt.ItemDataRole.ToolTipRole:
            return record.reason if one.name == "phase" else record.run_id if one.name == "name" else None
        return None

    def setData(self, index: _Index, value: Any, role: int = 0) -> bool:
        """Choose a run for the charts, or no longer."""
        record = self.record(index.row())
        if record is None or index.column() != _CHOSEN or role != Qt.ItemDataRole.CheckStateRole:
            return False
        others = [run_id for run_id in self._runs.chosen if run_id != record.run_id]
        self._runs.choose([*others, record.run_id] if len(others) == len(self._runs.chosen) else others)
        return True


class RunTable(View):
    """The table with its search field."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.browser.runs])
        self.rows = RunRows(studio.browser.runs, theme)
        self.search = SearchField(theme, "Search: words, env:…, phase:…, tag:…, -word")
        self.search.textChanged.connect(studio.browser.runs.set_search)
        self._counts = label("", "muted")
        self._more = push_button("Actions", self._open_menu, tip="Actions of the selected run", name="Actions")
        self.table = self._build_table()
        self._empty = EmptyState(theme, "table", "No runs yet", "Start one with Train new, or: palaestra runs start")
        bar = frame(row(self.search, self._counts, self._more, spacing=10, margins=(12, 8, 12, 8)), "bar")
        self.setLayout(column(bar, self._empty, self.table, spacing=0))
        self._chosen_before: tuple[str, ...] = ()
        self.refresh()

    def _build_table(self) -> QTableView:
        table = QTableView()
        table.setModel(self.rows)
        table.setAccessibleName("Runs")
        table.setSelectionBehavior(QTableView.SelectionBehavior.SelectRows)
        table.setSelectionMode(QTableView.SelectionMode.SingleSelection)
        table.setShowGrid(False)
        table.setAlternatingRowColors(True)
        table.setWordWrap(False)
        table.verticalHeader().hide()
        table.verticalHeader().setDefaultSectionSize(28)
        header = table.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        header.setStretchLastSection(True)
        header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        header.sectionClicked.connect(self._sort)
        table.setColumnWidth(_CHOSEN, 28)
        for index, one in enumerate(COLUMNS, start=1):
            table.setColumnWidth(index, _WIDTHS.get(one.name, 100))
        table.selectionModel().currentRowChanged.connect(lambda current, _: self._show(current))
        table.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        table.customContextMenuRequested.connect(lambda point: self._open_menu(table.viewport().mapToGlobal(point)))
        return table

    def refresh(self) -> None:
        """Show the runs."""
        runs = self.studio.browser.runs
        self.rows.follow()
        self._empty.setVisible(len(runs) == 0)
        self.table.setVisible(len(runs) > 0)
        visible = self.rows.rowCount()
        self._counts.setText(f"{visible} of {len(runs)}" if visible != len(runs) else f"{visible}")
        at = self.rows.row_of(runs.current)
        if at >= 0 and self.table.currentIndex().row() != at:
            self.table.selectionModel().blockSignals(True)
            self.table.selectRow(at)
            self.table.selectionModel().blockSignals(False)
        self._more.setEnabled(bool(runs.current))
        if runs.chosen != self._chosen_before:
            self._chosen_before = runs.chosen
            self.studio.browser.choose(runs.chosen)

    def _sort(self, section: int) -> None:
        if section != _CHOSEN:
            self.studio.browser.runs.sort_by(COLUMNS[section - 1].name)

    def _show(self, index: _Index) -> None:
        record = self.rows.record(index.row())
        if record is not None:
            self.studio.browser.show(record.run_id)

    def _open_menu(self, at: QPoint | None = None) -> None:
        record = self.studio.browser.runs.current_record
        if record is None:
            return
        browser, menu = self.studio.browser, QMenu(self)
        run_id, has_ended = record.run_id, record.phase.has_ended
        menu.addAction("Stop", lambda: browser.stop(run_id)).setEnabled(not has_ended and record.supervised)
        menu.addAction("Resume", lambda: browser.resume(run_id)).setEnabled(has_ended and record.supervised)
        menu.addAction("Record a clip", lambda: browser.record_video(run_id))
        title = "Remove from favorites" if record.favorite else "Mark as favorite"
        menu.addAction(title, lambda: browser.edit(run_id, favorite=not record.favorite))
        menu.addSeparator()
        menu.addAction("Archive", lambda: browser.archive(run_id)).setEnabled(has_ended and not record.archived)
        menu.addAction("Delete", lambda: browser.delete(run_id)).setEnabled(has_ended)
        menu.popup(at or self._more.mapToGlobal(QPoint(0, self._more.height())))
