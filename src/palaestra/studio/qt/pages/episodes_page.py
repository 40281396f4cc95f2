"""The page of recorded episodes: the list, and the player with a scrubber."""

from __future__ import annotations

import time
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QComboBox, QFileDialog, QListWidget, QListWidgetItem, QSlider, QSplitter, QWidget

from palaestra.runs.play.state import EpisodeRecord
from palaestra.studio.model.replay import SPEEDS
from palaestra.studio.model.runs import format_time
from palaestra.studio.qt.icons import icon
from palaestra.studio.qt.pages.play_page import format_action, format_outputs
from palaestra.studio.qt.parts import (
    ConfirmButton,
    Elided,
    EmptyState,
    SearchField,
    Sparkline,
    add_step_keys,
    column,
    frame,
    icon_button,
    label,
    push_button,
    row,
)
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import Rotation, View
from palaestra.studio.qt.views.render_view import RenderView
from palaestra.studio.studio import Studio

_ID = Qt.ItemDataRole.UserRole


class EpisodesPage(View):
    """The list on the left, the player on the right."""

    def __init__(self, studio: Studio, theme: Theme, rotation: Rotation) -> None:
        super().__init__(studio, theme, [studio.episodes.episodes])
        self._search = SearchField(theme, "Search episodes")
        self._search.textChanged.connect(studio.episodes.episodes.set_search)
        self.list = QListWidget()
        self.list.setAccessibleName("Recorded episodes")
        self.list.setProperty("role", "entries")
        self.list.currentItemChanged.connect(lambda item, _: self._open(item))
        self._empty = EmptyState(
            theme, "film", "No recorded episodes", "Play something: every episode is recorded unless you switch it off."
        )
        refresh = icon_button(theme, "refresh", studio.episodes.refresh, tip="Read the list again")
        left = QWidget()
        bar = frame(row(self._search, refresh, margins=(10, 8, 10, 8)), "bar")
        left.setLayout(column(bar, self._empty, self.list, spacing=0))
        self.player = ReplayPlayer(studio, theme)
        splitter = QSplitter(Qt.Orientation.Horizontal)
        splitter.addWidget(left)
        splitter.addWidget(self.player)
        splitter.setSizes([340, 900])
        splitter.setChildrenCollapsible(False)
        self.setLayout(column(splitter))
        rotation.add(self.player)
        replay = studio.episodes.replay
        add_step_keys(self, lambda by: replay.seek(replay.position + by))
        self.refresh()

    def refresh(self) -> None:
        """Show the list."""
        model = self.studio.episodes.episodes
        records = model.visible()
        self._empty.setVisible(model.is_loaded and len(model) == 0)
        self.list.setVisible(len(model) > 0)
        shown = [self.list.item(i).data(_ID) for i in range(self.list.count())]
        if shown == records:
            return
        current = self.studio.episodes.replay.record
        self.list.blockSignals(True)
        self.list.clear()
        for record in records:
            item = QListWidgetItem(_describe(record))
            item.setData(_ID, record)
            item.setToolTip(record.episode_id)
            self.list.addItem(item)
            if current is not None and record.episode_id == current.episode_id:
                self.list.setCurrentItem(item)
        self.list.blockSignals(False)

    def _open(self, item: QListWidgetItem | None) -> None:
        if item is not None:
            self.studio.episodes.open(item.data(_ID))


class ReplayPlayer(View):
    """One episode, step by step."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.episodes.replay])
        replay = studio.episodes.replay
        self.picture = RenderView(theme)
        self.picture.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self._empty = EmptyState(
            theme, "film", "Choose an episode", "It can be replayed step by step and saved as a video."
        )
        self._title, self._facts = Elided("", "heading"), Elided("", "muted")
        self._step_text = label("", "muted")
        self._action = Elided("")
        self._rewards = Sparkline(theme)
        self.scrubber = QSlider(Qt.Orientation.Horizontal)
        self.scrubber.setAccessibleName("Position in the episode")
        self.scrubber.valueChanged.connect(replay.seek)
        self._play = icon_button(theme, "play", replay.toggle, tip="Play or pause the replay")
        self._back = icon_button(theme, "reset", lambda: replay.seek(0), tip="To the beginning")
        self._next = icon_button(theme, "step", lambda: replay.seek(replay.position + 1), tip="Next step (→)")
        self._speed = QComboBox()
        self._speed.setAccessibleName("Speed of the replay")
        for speed in SPEEDS:
            self._speed.addItem(f"{speed:g}×", speed)
        self._speed.setCurrentIndex(SPEEDS.index(1.0))
        self._speed.activated.connect(lambda _: replay.set_speed(float(self._speed.currentData())))
        self._export = push_button("Save video …", self._ask_for_file)
        self._delete = ConfirmButton("Delete", "Really delete?")
        self._delete.confirmed.connect(self._delete_episode)
        self._last_tick = time.monotonic()
        head = row(self._title, self._facts, self._export, self._delete, margins=(14, 8, 12, 8))
        head.setStretch(0, 1)
        head.setStretch(1, 2)
        self._player = QWidget()
        self._player.setLayout(
            column(
                frame(head, "bar"),
                self.picture,
                frame(
                    column(
                        row(self._back, self._play, self._next, self.scrubber, self._speed, spacing=6),
                        row(self._step_text, self._action, self._rewards, spacing=14),
                        spacing=4,
                        margins=(12, 6, 12, 10),
                    ),
                    "bar",
                ),
                spacing=0,
            )
        )
        self.setLayout(column(self._empty, self._player))
        self.refresh()

    def refresh_if_changed(self) -> bool:
        """Let the replay go on, and load the next pictures."""
        now = time.monotonic()
        seconds, self._last_tick = now - self._last_tick, now
        if not self.isVisible():
            return False
        self.studio.episodes.replay.advance(seconds)
        if self.studio.episodes.replay.steps:
            self.studio.episodes.load_pictures()
        return super().refresh_if_changed()

    def refresh(self) -> None:
        """Show the step."""
        replay = self.studio.episodes.replay
        record = replay.record
        self._empty.setVisible(record is None)
        self._player.setVisible(record is not None)
        self._delete.set_subject("" if record is None else record.episode_id)
        if record is None:
            return
        self._title.set_text(record.env_id or record.episode_id)
        self._facts.set_text(_describe(record).replace("\n", " · "))
        self.picture.show_message(replay.problem)
        self._play.setIcon(icon("pause" if replay.is_playing else "play", self.theme.text))
        self.scrubber.blockSignals(True)
        self.scrubber.setRange(0, max(0, len(replay.steps) - 1))
        self.scrubber.setValue(replay.position)
        self.scrubber.blockSignals(False)
        step = replay.step
        if step is None:
            return
        report = step.report
        actor = {"human": "you", "agent": "agent", None: "begin"}[report.actor]
        self._step_text.setText(f"step {report.step} of {record.steps} · {actor} · return {report.episode_return:.5g}")
        outputs = format_outputs(report.outputs)
        self._action.set_text(f"{format_action(report.action)}   {outputs}".strip())
        self._rewards.set_values([one.report.episode_return for one in replay.steps[: replay.position + 1]][-400:])
        picture = replay.picture()
        if picture is not None:
            self.picture.show_frame(picture)
        settings = self.studio.settings
        cells = report.grid if settings.get("show_grid", True) else None
        self.picture.show_cells(cells, with_values=settings.get("show_values", True))

    def _ask_for_file(self) -> None:
        record = self.studio.episodes.replay.record
        if record is None:
            return
        dialog = QFileDialog(self, "Save the episode as a video", f"{record.episode_id}.webm", "Video (*.webm)")
        dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
        dialog.fileSelected.connect(lambda path: self.studio.episodes.export(record.episode_id, Path(path)))
        dialog.open()

    def _delete_episode(self) -> None:
        record = self.studio.episodes.replay.record
        if record is not None:
            self.studio.episodes.delete(record.episode_id)


def _describe(record: EpisodeRecord) -> str:
    if record.problem:
        return f"{record.episode_id}\n{record.problem}"
    when = format_time(record.started)
    by = {"human": "you", "hybrid": "you and agent", "agent": record.policy or "agent"}[record.mode]
    return (
        f"{record.env_id} · {by}\n{when} · {record.steps} steps · return {record.episode_return:.4g} · {record.outcome}"
    )
