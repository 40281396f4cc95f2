"""The right dock: status, curves, details, output, videos and beliefs of the current run."""

from __future__ import annotations

import json
import time

from PySide6.QtCore import QSignalBlocker, Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices, QFocusEvent, QTextCursor
from PySide6.QtWidgets import (
    QCheckBox,
    QFormLayout,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QProgressBar,
    QTabWidget,
    QTreeWidget,
    QTreeWidgetItem,
    QWidget,
)

from palaestra.runs.record import RunRecord
from palaestra.studio.model.runs import TONES, progress, status_text
from palaestra.studio.qt.parts import (
    Badge,
    ConfirmButton,
    Elided,
    EmptyState,
    SearchField,
    column,
    frame,
    label,
    push_button,
    row,
    scroll,
)
from palaestra.studio.qt.theme import Theme, monospace_font
from palaestra.studio.qt.view import Rotation, View
from palaestra.studio.qt.views.beliefs_view import BeliefsView
from palaestra.studio.qt.views.chart_view import ChartBoard
from palaestra.studio.studio import Studio

_MAX_BLOCKS = 5000
_PROGRESS_STEPS = 1000
_NO_REASON = "done"
"""What a run says that has reached its last step, which the phase says already."""


def open_url(url: str) -> None:
    """Open a page in the user's browser."""
    QDesktopServices.openUrl(QUrl(url))


class RunHeader(View):
    """Name, status, progress and the most important actions of the current run."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.browser.runs])
        self._name = Elided("", "heading", Qt.TextElideMode.ElideMiddle)
        self._badge = Badge(theme)
        self._status = Elided("", "muted")
        self._reason = label("", "muted", wrap=True, selectable=True)
        self._alarms = label("", "warning", wrap=True, selectable=True)
        self._progress = QProgressBar()
        self._progress.setRange(0, _PROGRESS_STEPS)
        self._progress.setTextVisible(False)
        self._progress.setAccessibleName("Progress")
        self._stop = ConfirmButton("Stop", "Really stop?")
        self._stop.confirmed.connect(lambda: studio.browser.stop(studio.browser.runs.current))
        self._resume = push_button("Resume", lambda: studio.browser.resume(studio.browser.runs.current))
        self._tensorboard = push_button("TensorBoard", lambda: studio.browser.open_tensorboard(open_url), role="link")
        self._tracking = push_button("W&B", lambda: studio.browser.open_tracking(open_url), role="link")
        content = column(
            row(self._name, self._badge),
            self._status,
            self._progress,
            self._reason,
            self._alarms,
            row(self._stop, self._resume, None, self._tensorboard, self._tracking, spacing=6),
            spacing=6,
            margins=(12, 10, 12, 8),
        )
        self.setLayout(column(frame(content, "bar")))
        self.refresh()

    def refresh(self) -> None:
        """Show the run."""
        record = self.studio.browser.runs.current_record
        self.setVisible(record is not None)
        self._stop.set_subject("" if record is None else record.run_id)
        if record is None:
            return
        self._name.set_text(record.name or record.run_id)
        self._badge.set(record.phase.value, TONES[record.phase], record.reason)
        self._status.set_text(f"{record.agent_id} · {record.env_id} · {status_text(record, time.time())}")
        share = progress(record)
        self._progress.setVisible(share is not None and not record.phase.has_ended)
        self._progress.setValue(round(_PROGRESS_STEPS * (share or 0.0)))
        self._reason.setText(record.reason)
        self._reason.setVisible(record.reason not in ("", _NO_REASON))
        self._alarms.setText("\n".join(alarm.text for alarm in record.alarms))
        self._alarms.setVisible(bool(record.alarms))
        self._stop.setVisible(not record.phase.has_ended and record.supervised)
        self._resume.setVisible(record.phase.has_ended and record.supervised)

    def refresh_if_changed(self) -> bool:
        """Follow the choice also while hidden, and count the time of a live run."""
        record = self.studio.browser.runs.current_record
        if self.isHidden() == (record is not None):
            self.setVisible(record is not None)
        if record is not None and not record.phase.has_ended and self.isVisible():
            self._status.set_text(f"{record.agent_id} · {record.env_id} · {status_text(record, time.time())}")
        return super().refresh_if_changed()


class NotesField(QPlainTextEdit):
    """A field of several lines that reports, as fields of one line do, when the user has left it."""

    editing_finished = Signal()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        """Report the end of the editing; a context menu does not end it."""
        super().focusOutEvent(event)
        if event.reason() != Qt.FocusReason.PopupFocusReason:
            self.editing_finished.emit()


class RunFacts(View):
    """What a run is: its record, tags, notes, command, settings and events."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.browser.runs, studio.browser.details])
        self._title, self._tags = QLineEdit(), QLineEdit()
        self._title.setPlaceholderText("A name of your own")
        self._title.setAccessibleName("Name of the run")
        self._tags.setPlaceholderText("Tags, separated by commas")
        self._tags.setAccessibleName("Tags of the run")
        self._notes = NotesField()
        self._notes.setPlaceholderText("Notes")
        self._notes.setAccessibleName("Notes on the run")
        self._notes.setMaximumHeight(64)
        self._title.editingFinished.connect(lambda: self._edit(name=self._title.text().strip()))
        self._tags.editingFinished.connect(lambda: self._edit(tags=_split(self._tags.text())))
        self._notes.textChanged.connect(self._keep_draft)
        self._notes.editing_finished.connect(self._save_draft)
        self._save_notes = push_button("Save notes", self._save_draft)
        self._drafts: dict[str, str] = {}
        """Notes that were typed and are not saved, by run."""
        self._facts = QFormLayout()
        self._facts.setHorizontalSpacing(14)
        self._facts.setVerticalSpacing(4)
        self._values: list[tuple[QLabel, QLabel]] = []
        self._search = SearchField(theme, "Search settings")
        self._search.textChanged.connect(lambda _: self._fill_tree())
        self._tree = QTreeWidget()
        self._tree.setColumnCount(2)
        self._tree.setHeaderLabels(["setting", "value"])
        self._tree.setAccessibleName("Settings, command and events")
        self._tree.setRootIsDecorated(True)
        self._tree.setColumnWidth(0, 190)
        self._tree.setMinimumHeight(240)
        self._shown_run = ""
        self._tree_content: object = None
        facts = QWidget()
        facts.setLayout(self._facts)
        content = column(
            self._title,
            self._tags,
            self._notes,
            row(None, self._save_notes),
            facts,
            self._search,
            self._tree,
            spacing=8,
            margins=(12, 10, 12, 10),
        )
        self.setLayout(column(scroll(frame(content))))

    def refresh(self) -> None:
        """Show the run."""
        record = self.studio.browser.runs.current_record
        if record is None:
            return
        is_other = record.run_id != self._shown_run
        self._shown_run = record.run_id
        if is_other or not self._title.hasFocus():
            self._title.setText(record.name)
        if is_other or not self._tags.hasFocus():
            self._tags.setText(", ".join(record.tags))
        self._show_notes(record)
        self._fill_facts(record)
        self._fill_tree()

    def _show_notes(self, record: RunRecord) -> None:
        """Show what was typed, or what is saved. A draft ends when the service has it."""
        runs = self.studio.browser.runs
        for run_id, draft in list(self._drafts.items()):
            known = runs.get(run_id)
            if known is not None and known.notes == draft:
                del self._drafts[run_id]
        text = self._drafts.get(record.run_id, record.notes)
        if self._notes.toPlainText() != text:
            with QSignalBlocker(self._notes):
                self._notes.setPlainText(text)

    def _keep_draft(self) -> None:
        if self._shown_run:
            self._drafts[self._shown_run] = self._notes.toPlainText()

    def _save_draft(self) -> None:
        if self._shown_run in self._drafts:
            self._edit(notes=self._drafts[self._shown_run])

    def _fill_facts(self, record: RunRecord) -> None:
        facts = {
            "run id": record.run_id,
            "trainer": record.runner,
            "seed": "" if record.seed is None else str(record.seed),
            "attempt": str(record.attempt),
            "steps": f"{record.env_step:,}" + (f" of {record.total_steps:,}" if record.total_steps else ""),
            "episodes": f"{record.episodes:,}",
            "size": f"{record.bytes_on_disk / 1e6:,.1f} MB",
        }
        while len(self._values) < len(facts):
            name, value = label("", "muted"), label("", selectable=True)
            self._facts.addRow(name, value)
            self._values.append((name, value))
        for (name_label, value_label), (name_text, value_text) in zip(self._values, facts.items(), strict=True):
            name_label.setText(name_text)
            value_label.setText(value_text)

    def _fill_tree(self) -> None:
        details = self.studio.browser.details
        words = self._search.text().lower().split()
        argv = details.command.get("argv") or ()
        command = {"command": " ".join(str(word) for word in argv), "directory": details.command.get("cwd", "")}
        events = [
            (time.strftime("%H:%M:%S", time.localtime(event.time)), f"{event.kind} {event.reason}".strip())
            for event in details.events
        ]
        groups = {
            title: [
                (str(name), text)
                for name, value in values
                for text in (value if isinstance(value, str) else json.dumps(value),)
                if all(word in f"{name} {text}".lower() for word in words)
            ]
            for title, values in (
                ("settings", details.config.items()),
                ("command", command.items()),
                ("events", events),
            )
        }
        # A tree that is built again loses its position and the groups that the user has opened.
        content = (details.run_id, words, groups)
        if content != self._tree_content:
            self._tree_content = content
            self._build_tree(groups, is_searched=bool(words))

    def _build_tree(self, groups: dict[str, list[tuple[str, str]]], *, is_searched: bool) -> None:
        self._tree.clear()
        for title, entries in groups.items():
            top = QTreeWidgetItem([title, ""])
            for name, text in entries:
                item = QTreeWidgetItem([name, text])
                item.setToolTip(1, text)
                top.addChild(item)
            if entries:
                self._tree.addTopLevelItem(top)
                top.setExpanded(title == "settings" or is_searched)

    def _edit(self, **changes: object) -> None:
        record = self.studio.browser.runs.get(self._shown_run)
        if record is None:
            return
        changed = {name: value for name, value in changes.items() if getattr(record, name) != value}
        if changed:
            self.studio.browser.edit(record.run_id, **changed)


class LogView(View):
    """The output of the current run, following its end."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.browser.details])
        self._text = QPlainTextEdit()
        self._text.setReadOnly(True)
        self._text.setMaximumBlockCount(_MAX_BLOCKS)
        self._text.setFont(monospace_font())
        self._text.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self._text.setAccessibleName("Output of the run")
        self._follow = QCheckBox("follow")
        self._follow.setChecked(True)
        self._search = SearchField(theme, "Find in the output")
        self._search.returnPressed.connect(self._find)
        self._empty = EmptyState(theme, "info", "No output", "The run has written nothing so far.")
        bar = frame(row(self._search, self._follow, margins=(12, 6, 12, 6)), "panel")
        self.setLayout(column(bar, self._empty, self._text, spacing=0))
        self._shown = ("", 0, 0)

    def refresh(self) -> None:
        """Append what is new."""
        details = self.studio.browser.details
        run_id, start, length = self._shown
        end = details.log_start + len(details.log)
        self._empty.setVisible(not details.log)
        self._text.setVisible(bool(details.log))
        if details.run_id == run_id and start <= end and details.log_start <= start + length:
            new = details.log[start + length - details.log_start :]
            if new:
                cursor = QTextCursor(self._text.document())
                cursor.movePosition(QTextCursor.MoveOperation.End)
                cursor.insertText(new)
        else:
            self._text.setPlainText(details.log)
        self._shown = (details.run_id, details.log_start, len(details.log))
        if self._follow.isChecked():
            bar = self._text.verticalScrollBar()
            bar.setValue(bar.maximum())

    def _find(self) -> None:
        if not self._text.find(self._search.text()):
            self._text.moveCursor(QTextCursor.MoveOperation.Start)
            self._text.find(self._search.text())


class TelemetryDock(QWidget):
    """The tabs of the current run."""

    def __init__(self, studio: Studio, theme: Theme, rotation: Rotation, extra: dict[str, View]) -> None:
        super().__init__()
        self.header = RunHeader(studio, theme)
        self.charts = ChartBoard(studio, theme, rotation, columns=1)
        self.facts = RunFacts(studio, theme)
        self.log = LogView(studio, theme)
        self.tabs = QTabWidget()
        self.tabs.setDocumentMode(True)
        self.tabs.addTab(self.charts, "Curves")
        self.tabs.addTab(self.facts, "Run")
        self.tabs.addTab(self.log, "Output")
        for title, view in extra.items():
            self.tabs.addTab(view, title)
        self.beliefs = BeliefsView(studio, theme)
        self.beliefs.add_to(self.tabs)
        rotation.add(self.header, self.charts, self.facts, self.log, self.beliefs, *extra.values())
        self.setLayout(column(self.header, self.tabs, spacing=0))
        self.setMinimumWidth(340)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
