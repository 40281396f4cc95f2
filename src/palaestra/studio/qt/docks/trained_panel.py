"""`Use trained`: cards of checkpoints, and letting one act."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFileDialog, QFrame, QInputDialog

from palaestra.processes.memory import format_bytes
from palaestra.runs.play.state import PolicyStatus
from palaestra.studio.model.checkpoints import CheckpointCard, CheckpointGroup
from palaestra.studio.model.runs import format_time
from palaestra.studio.qt.parts import (
    Badge,
    Elided,
    EmptyState,
    FlowLayout,
    SearchField,
    Sparkline,
    clear_layout,
    column,
    frame,
    label,
    push_button,
    row,
)
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import View
from palaestra.studio.studio import Studio

_TONES = {"verified": "success", "unchecked": "muted", "damaged": "danger"}
_MAX_GROUPS, _MAX_CARDS = 6, 8
"""Cards of one group; a search finds the others."""


class TrainedPanel(View):
    """The checkpoints, grouped by environment and algorithm."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        library = studio.library
        super().__init__(
            studio,
            theme,
            [library.checkpoints, studio.session.environments, studio.training.launch, studio.browser.runs],
        )
        self.min_interval_s = 0.3
        self._search = SearchField(theme, "Search checkpoints")
        self._search.textChanged.connect(library.checkpoints.set_search)
        self._import = push_button("Import …", self._ask_for_file, tip="Copy a checkpoint from a file")
        self._status = StatusCard(studio, theme)
        self._empty = EmptyState(
            theme, "disk", "No checkpoints yet", "Train something first, or import a file from elsewhere."
        )
        self._empty.add_action(push_button("Import …", self._ask_for_file))
        self._groups = column(spacing=10)
        self._built: object = None
        random_policy = push_button(
            "Act at random", lambda: library.activate("random"), tip="Let random actions act in the play"
        )
        self.setLayout(
            column(
                row(self._search, self._import),
                self._status,
                self._empty,
                self._groups,
                row(random_policy, None),
                spacing=10,
            )
        )

    def refresh(self) -> None:
        """Show the cards."""
        library = self.studio.library
        model = library.checkpoints
        runs = {record.run_id: record for record in self.studio.browser.runs.all()}
        groups = model.groups(self.studio.session.environments.chosen, self.studio.training.launch.runners, runs)
        self._empty.setVisible(model.is_loaded and len(model) == 0)
        self._status.show_status(model.activating, model.acting, has_stopped=model.has_stopped)
        wanted = (tuple(groups), model.chosen, {key: tuple(value) for key, value in model.curves.items()})
        if wanted == self._built:
            return
        self._built = wanted
        clear_layout(self._groups)
        for index, group in enumerate(groups):
            if index == _MAX_GROUPS:
                hidden = sum(len(one.cards) for one in groups[index:])
                self._groups.addWidget(label(f"{hidden} of other environments: search for them", "muted"))
                break
            self._groups.addWidget(Elided(f"{group.env_id or 'unknown environment'} · {group.agent_id}", "caption"))
            self._add_cards(group)

    def _add_cards(self, group: CheckpointGroup) -> None:
        for card in group.cards[:_MAX_CARDS]:
            self.studio.library.read_curve(card.record.run_id)
            self._groups.addWidget(self._card(card))
        hidden = len(group.cards) - _MAX_CARDS
        if hidden > 0:
            self._groups.addWidget(label(f"{hidden} older ones: search for their id", "muted"))

    def _card(self, card: CheckpointCard) -> QFrame:
        record, library = card.record, self.studio.library
        is_chosen = library.checkpoints.chosen == record.checkpoint_id
        badges = FlowLayout(spacing=5)
        if card.is_newest_success:
            badges.addWidget(Badge(self.theme, "newest", "accent"))
        if record.best:
            badges.addWidget(Badge(self.theme, "best", "info"))
        if card.is_deployed:
            badges.addWidget(Badge(self.theme, "deployed", "success"))
        badges.addWidget(Badge(self.theme, card.integrity, _TONES[card.integrity]))
        when = format_time(record.created)
        score = "" if record.metric is None else f" · score {record.metric:.4g}"
        facts = f"{when} · {format_bytes(record.size_bytes)} · {record.profile}{score}"
        layout = column(
            Elided(card.title, "heading"), Elided(facts, "muted"), badges, spacing=4, margins=(10, 8, 10, 8)
        )
        curve = library.checkpoints.curves.get(record.run_id)
        if curve:
            spark = Sparkline(self.theme)
            spark.set_values(curve)
            layout.addWidget(spark)
        if is_chosen:
            self._add_actions(layout, card)
        result = frame(layout, "card")
        result.setProperty("chosen", is_chosen)
        result.setAccessibleName(f"Checkpoint {card.title}")
        result.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        result.setCursor(Qt.CursorShape.PointingHandCursor)
        result.mousePressEvent = lambda event: library.choose(record.checkpoint_id)  # type: ignore[method-assign]
        result.keyPressEvent = lambda event: (  # type: ignore[method-assign]
            library.choose(record.checkpoint_id) if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Space) else None
        )
        return result

    def _add_actions(self, layout: object, card: CheckpointCard) -> None:
        record, library = card.record, self.studio.library
        digest = record.metrics_digest
        if digest:
            text = " · ".join(f"{name} {value:.4g}" for name, value in list(digest.items())[:4])
            layout.addWidget(label(text, "muted", wrap=True))  # type: ignore[attr-defined]
        use = push_button("Use", lambda: library.activate(record.checkpoint_id), role="primary", tip="Let it act")
        use.setEnabled(not card.mismatch and card.can_play and card.integrity != "damaged")
        buttons = FlowLayout(spacing=6)
        buttons.addWidget(use)
        if card.mismatch:
            layout.addWidget(label(card.mismatch, "warning", wrap=True))  # type: ignore[attr-defined]
            switch = push_button("Switch environment", lambda: library.switch_environment(record.checkpoint_id))
            switch.setEnabled(card.can_play)
            buttons.addWidget(switch)
        if not card.can_play:
            text = "Policies of this trainer cannot act here."
            layout.addWidget(label(text, "warning", wrap=True))  # type: ignore[attr-defined]
        buttons.addWidget(push_button("Verify", lambda: library.verify(record.checkpoint_id), tip="Check every byte"))
        buttons.addWidget(
            push_button(
                "Deploy", lambda: library.deploy(record.checkpoint_id), tip="Make it the one for its environment"
            )
        )
        layout.addLayout(buttons)  # type: ignore[attr-defined]

    def _ask_for_file(self) -> None:
        if self.studio.is_remote:
            # The service reads the file; a file dialog would show this machine.
            question = QInputDialog(self)
            question.setWindowTitle("Import a checkpoint")
            question.setLabelText("Path of the file on the machine of the service:")
            question.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
            question.textValueSelected.connect(self._import_file)
            question.open()
            return
        dialog = QFileDialog(self, "Import a checkpoint", str(Path.cwd()))
        dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
        dialog.fileSelected.connect(self._import_file)
        dialog.open()

    def _import_file(self, path: str) -> None:
        if path.strip():
            self.studio.library.import_file(path.strip(), env_id=self.studio.session.environments.chosen)


class StatusCard(QFrame):
    """What happens to the policy that is being loaded: progress, a question, or why it failed."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__()
        self._studio = studio
        self.setProperty("role", "card")
        self._title, self._text = label("", "heading", wrap=True), label("", "muted", wrap=True, selectable=True)
        self._agree = push_button("Agree and load", self._give_consent)
        self._status: PolicyStatus | None = None
        self.setLayout(column(self._title, self._text, row(self._agree, None), spacing=4, margins=(10, 8, 10, 8)))
        self.hide()

    def show_status(
        self, status: PolicyStatus | None, acting: PolicyStatus | None = None, *, has_stopped: bool = False
    ) -> None:
        """Show a status beside the policy that acts; None hides the card. `has_stopped`: it acted before it failed."""
        self._status = status
        self.setVisible(status is not None)
        if status is None:
            return
        titles = {
            "loading": f"Loading {status.name} …",
            "failed": f"{status.name} {'has stopped' if has_stopped else 'could not be loaded'}",
            "needs_consent": f"{status.name} needs your consent",
            "ready": status.name,
        }
        self._title.setText(titles[status.state])
        hint = "The previous policy goes on acting. " if status.state == "failed" and acting is not None else ""
        self._text.setText(f"{hint}{status.text} {status.remedy}".strip())
        self._text.setVisible(bool(self._text.text()))
        self._agree.setVisible(status.state == "needs_consent")

    def _give_consent(self) -> None:
        if self._status is not None:
            self._studio.library.activate(self._status.checkpoint, consent=self._status.digest)
