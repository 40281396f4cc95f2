"""The left dock: which environment, who acts, and what an agent does: train a new policy or use a trained one."""

from __future__ import annotations

from PySide6.QtCore import QStringListModel, Qt
from PySide6.QtWidgets import QCompleter, QLineEdit, QWidget

from palaestra.studio.qt.parts import Segments, column, frame, label, line, number_box, push_button, row, scroll
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import View
from palaestra.studio.studio import Studio


class SessionDock(View):
    """Environment, mode, and the panels of the mode."""

    def __init__(self, studio: Studio, theme: Theme, parameters: QWidget, train: QWidget, trained: QWidget) -> None:
        super().__init__(studio, theme, [studio.session.environments, studio.session.play])
        self.environment = EnvironmentField(studio, theme)
        self._seed = number_box(0, 2**31 - 1, accessible="Seed")
        self._seed.setToolTip("Seed of the first episode; each further episode adds one.")
        self._seed.editingFinished.connect(lambda: studio.session.set_seed(self._seed.value()))
        self._play = push_button("Play", studio.session.start, role="primary", tip="Start a play (F5)")
        self._problem = label("", "danger", wrap=True)
        self.mode = Segments([("human", "Human"), ("hybrid", "Hybrid"), ("agent", "Agent")], accessible="Who acts")
        self.mode.chosen.connect(lambda mode: studio.session.set_mode(mode))
        self._hint = label("", "muted", wrap=True)
        self.purpose = Segments([("train", "Train new"), ("trained", "Use trained")], accessible="What the agent does")
        self.purpose.chosen.connect(self.show_purpose)
        self._train, self._trained = train, trained
        self._agent_parts = (self.purpose, train, trained)
        content = column(
            label("ENVIRONMENT", "caption"),
            self.environment,
            self._problem,
            parameters,
            row(label("Seed"), self._seed, None, self._play),
            4,
            line(),
            4,
            label("WHO ACTS", "caption"),
            self.mode,
            self._hint,
            self.purpose,
            train,
            trained,
            None,
            spacing=8,
            margins=(14, 12, 14, 14),
        )
        panel = frame(content)
        self.setLayout(column(scroll(panel)))
        self.setMinimumWidth(370)
        self.mode.choose(studio.session.mode)
        self.purpose.choose(studio.settings.get("purpose", "train"))
        self.refresh()

    def refresh(self) -> None:
        """Show the choice and the mode."""
        chosen = self.studio.session.environments
        self.environment.show_choice(chosen.chosen)
        if not self._seed.hasFocus():
            self._seed.setValue(chosen.seed)
        info = chosen.info
        problem = chosen.problem or (f"Not installed. {info.remedy}" if info is not None and not info.installed else "")
        self._problem.setText(problem)
        self._problem.setVisible(bool(problem))
        self._play.setEnabled(not self.studio.session.play.is_starting)
        self.mode.choose(self.studio.session.mode)
        hints = {
            "human": "You act, with the keyboard and the mouse.",
            "hybrid": "The agent acts; hold a key to override it, or take over.",
            "agent": "A policy acts.",
        }
        self._hint.setText(hints[self.studio.session.mode])
        self.show_purpose(self.purpose.value())

    def show_purpose(self, purpose: str) -> None:
        """Show what an agent does: `train` or `trained`."""
        self.purpose.choose(purpose)
        has_agent = self.studio.session.mode != "human"
        self.studio.settings.set("purpose", purpose)
        self.purpose.setVisible(has_agent)
        self._train.setVisible(has_agent and purpose == "train")
        self._trained.setVisible(has_agent and purpose == "trained")


class EnvironmentField(QLineEdit):
    """A field that completes the names of environments and tasks."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__()
        self._studio = studio
        self._names = QStringListModel()
        completer = QCompleter(self._names)
        completer.setCompletionMode(QCompleter.CompletionMode.UnfilteredPopupCompletion)
        completer.setCaseSensitivity(Qt.CaseSensitivity.CaseInsensitive)
        completer.setMaxVisibleItems(14)
        completer.activated.connect(self._choose)
        self.setCompleter(completer)
        self.setPlaceholderText("CartPole-v1, miniwob/click-button, module:factory …")
        self.setAccessibleName("Environment")
        self.textEdited.connect(self._search)
        self.returnPressed.connect(lambda: self._choose(self.text()))
        self.editingFinished.connect(self.choose_typed)

    def show_choice(self, env_id: str) -> None:
        """Show the chosen environment, unless the user is typing."""
        if not self.hasFocus() and self.text() != env_id:
            self.setText(env_id)

    def mousePressEvent(self, event: object) -> None:
        """Offer everything."""
        super().mousePressEvent(event)  # type: ignore[arg-type]
        self.selectAll()
        self._search("")
        completer = self.completer()
        if completer is not None:
            completer.complete()

    def _search(self, text: str) -> None:
        self._names.setStringList([one.env_id for one in self._studio.session.environments.search(text)])

    def choose_typed(self) -> None:
        """Choose what was typed, for example before a play is started."""
        if self.isModified():
            self.setModified(False)
            chosen = self._studio.session.environments.chosen
            if not self.text().strip():
                self.setText(chosen)
            elif self.text().strip() != chosen:
                self._studio.session.choose_environment(self.text())

    def _choose(self, env_id: str) -> None:
        self.setModified(False)
        self._studio.session.choose_environment(env_id)
        self.clearFocus()
