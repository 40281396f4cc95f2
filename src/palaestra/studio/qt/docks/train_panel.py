"""`Train new`: catalogue of trainers, form, preflight, command, consent and launch."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QCheckBox, QComboBox, QInputDialog, QLineEdit, QMenu, QPlainTextEdit, QWidget

from palaestra.runs.runner import Finding, RunnerCapabilities
from palaestra.studio.qt.icons import icon
from palaestra.studio.qt.parts import (
    Badge,
    Elided,
    clear_layout,
    column,
    frame,
    label,
    line,
    number_box,
    push_button,
    row,
)
from palaestra.studio.qt.theme import Theme, monospace_font
from palaestra.studio.qt.view import Rotation, View
from palaestra.studio.qt.views.form_view import FormView
from palaestra.studio.studio import Studio

_TONES = {"ready": "success", "warning": "warning", "missing": "danger"}
_FINDING_TONES = {"ok": "success", "warning": "warning", "refused": "danger"}
_FINDING_ICONS = {"ok": "check", "warning": "alert", "refused": "close"}


class TrainPanel(View):
    """Everything needed to launch a run."""

    def __init__(self, studio: Studio, theme: Theme, rotation: Rotation) -> None:
        training = studio.training
        super().__init__(studio, theme, [training.launch, training.presets, studio.library.checkpoints])
        self.catalogue = RunnerCatalogue(studio, theme)
        self.script = QComboBox()
        self.script.setAccessibleName("Algorithm or script")
        self.script.activated.connect(lambda _: training.choose_script(str(self.script.currentData())))
        self.presets = push_button("Presets", self._open_presets, tip="Recommended settings and your presets")
        models = [training.launch, training.datasets, studio.session.environments]
        self.form = FormView(studio, theme, models, lambda: training.launch.form, training.launch.edit)
        self.options = RunOptionsForm(studio, theme)
        self.preflight = PreflightList(studio, theme)
        self.check = push_button("Check", training.check, tip="Run the preflight and show the command")
        self.launch = push_button("Launch", training.start, role="primary")
        self._problem = label("", "danger", wrap=True, selectable=True)
        self._hint = label("", "muted", wrap=True)
        self.setLayout(
            column(
                label("TRAINER", "caption"),
                self.catalogue,
                row(self.script, self.presets),
                self.form,
                line(),
                self.options,
                line(),
                self.preflight,
                self._problem,
                row(self.check, self.launch),
                self._hint,
                spacing=10,
            )
        )
        rotation.add(self.catalogue, self.form, self.options, self.preflight)

    def refresh(self) -> None:
        """Show the choices and whether Launch is possible."""
        self.studio.training.read_details()
        launch = self.studio.training.launch
        scripts = launch.available_scripts()
        if [self.script.itemData(i) for i in range(self.script.count())] != [one.name for one in scripts]:
            self.script.clear()
            for one in scripts:
                self.script.addItem(one.title or one.name, one.name)
                self.script.setItemData(self.script.count() - 1, one.description, Qt.ItemDataRole.ToolTipRole)
        self.script.setCurrentIndex(self.script.findData(launch.script))
        self.script.setVisible(bool(scripts))
        refusal = launch.refusal
        self.launch.setEnabled(not refusal)
        self.launch.setToolTip(refusal or "Queue the run")
        self.check.setEnabled(launch.stage in ("editing", "checked"))
        self._hint.setText(refusal if refusal and refusal != "Check it first" else "")
        self._hint.setVisible(bool(self._hint.text()))
        self._problem.setText(launch.problem)
        self._problem.setVisible(bool(launch.problem))

    def _open_presets(self) -> None:
        training, menu = self.studio.training, QMenu(self)
        menu.addAction("Recommended for this environment", training.use_recommended)
        menu.addAction("Defaults of the trainer", lambda: training.launch.load_values({}))
        names = training.presets.names(training.preset_kind)
        menu.addSeparator()
        for name in names:
            menu.addAction(name, partial(training.load_preset, name))
        remove = menu.addMenu("Delete")
        remove.setEnabled(bool(names))
        for name in names:
            remove.addAction(name, partial(training.delete_preset, name))
        menu.addAction("Save as …", self._ask_for_name)
        menu.popup(self.presets.mapToGlobal(self.presets.rect().bottomLeft()))

    def _ask_for_name(self) -> None:
        dialog = QInputDialog(self)
        dialog.setLabelText("Name of the preset")
        dialog.textValueSelected.connect(lambda name: self.studio.training.save_preset(name.strip()))
        dialog.open()


class RunnerCatalogue(View):
    """The trainers, with a badge that says whether each could start here."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.training.launch])
        self._cards = column(spacing=6)
        self._built: tuple[object, ...] = ()
        self.setLayout(self._cards)

    def refresh(self) -> None:
        """Show the trainers."""
        launch = self.studio.training.launch
        wanted = (tuple(launch.runners), tuple(launch.readiness.items()), launch.runner)
        if wanted == self._built:
            return
        self._built = wanted
        clear_layout(self._cards)
        for name, capabilities in launch.runners.items():
            self._cards.addWidget(self._card(name, capabilities))

    def _card(self, name: str, capabilities: RunnerCapabilities) -> QWidget:
        launch = self.studio.training.launch
        readiness = launch.readiness.get(name)
        badge = Badge(self.theme, "checking …" if readiness is None else readiness.level, "muted")
        text = ""
        if readiness is not None:
            badge.set(readiness.level, _TONES[readiness.level], readiness.text)
            text = "" if readiness.level == "ready" else f"{readiness.text} {readiness.remedy}".strip()
        title = Elided(capabilities.title, "heading")  # a long one must not widen the dock
        head = row(title, badge)
        head.setStretch(0, 1)
        layout = column(head, spacing=3, margins=(10, 7, 10, 7))
        if text and name == launch.runner:
            layout.addWidget(label(text, "muted", wrap=True, selectable=True))
        card = frame(layout, "card")
        card.setProperty("chosen", name == launch.runner)
        card.setAccessibleName(f"Trainer {name}")
        card.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        card.setCursor(Qt.CursorShape.PointingHandCursor)
        choose = self.studio.training.choose_runner
        card.mousePressEvent = lambda event: choose(name)  # type: ignore[method-assign]
        card.keyPressEvent = lambda event: (  # type: ignore[method-assign]
            choose(name) if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Space) else None
        )
        return card


class RunOptionsForm(View):
    """Name, tags, seed, GPUs, niceness, video, tracking, warm start: what the runner can do, and nothing else."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.training.launch, studio.library.checkpoints])
        change = studio.training.launch.change_options
        self._name, self._tags = QLineEdit(), QLineEdit()
        self._name.setPlaceholderText("from the environment")
        self._tags.setPlaceholderText("separated by commas")
        self._name.textEdited.connect(lambda text: change(name=text.strip()))
        self._tags.textEdited.connect(
            lambda text: change(tags=tuple(part.strip() for part in text.split(",") if part.strip()))
        )
        self._gpus, self._nice = number_box(0, 64, accessible="GPUs"), number_box(0, 19, accessible="Niceness")
        self._nice.setToolTip("CPU niceness (0–19; higher yields more, so that the window stays smooth)")
        self._gpus.valueChanged.connect(lambda value: change(gpus=value))
        self._nice.valueChanged.connect(lambda value: change(nice=value))
        self._video = QCheckBox("Record clips while training (slower)")
        self._video.toggled.connect(lambda on: change(video=on))
        self._track = QComboBox()
        self._track.addItems(["off", "offline", "online"])
        self._track.activated.connect(lambda _: change(track=self._track.currentText()))
        self._warm_start = QComboBox()
        self._warm_start.activated.connect(lambda _: change(warm_start=str(self._warm_start.currentData())))
        self._rows: dict[str, QWidget] = {}
        items = {
            "name": ("Name", self._name),
            "tags": ("Tags", self._tags),
            "warm_start": ("Start from", self._warm_start),
            "gpus": ("GPUs", self._gpus),
            "nice": ("Niceness", self._nice),
            "track": ("W&B", self._track),
            "video": ("", self._video),
        }
        body = column(label("RUN", "caption"), spacing=6)
        for name, (title, widget) in items.items():
            widget.setAccessibleName(title or name)
            holder = QWidget()
            if title:
                widget.setFixedWidth(170)
                holder.setLayout(row(label(title), None, widget))
            else:
                holder.setLayout(row(widget, None))
            self._rows[name] = holder
            body.addWidget(holder)
        self._cpu_hint = label("", "warning", wrap=True)
        body.addWidget(self._cpu_hint)
        self.setLayout(body)

    def refresh(self) -> None:
        """Show what the runner can do."""
        launch = self.studio.training.launch
        capabilities, options = launch.capabilities, launch.draft.options
        usage = self.studio.machine.usage
        num_gpus = len(usage.gpus) if usage is not None else 0
        self._rows["gpus"].setVisible(num_gpus > 0)
        self._rows["video"].setVisible(capabilities is not None and capabilities.video)
        self._rows["track"].setVisible(capabilities is not None and capabilities.tracking)
        self._rows["warm_start"].setVisible(capabilities is not None and capabilities.warm_start)
        needs_gpu = capabilities is not None and capabilities.needs_gpu
        slow = num_gpus == 0 and (needs_gpu or self.studio.session.environments.is_screen)
        text = "There is no GPU here: training runs on the CPU, with lower priority so that the window stays smooth."
        self._cpu_hint.setText(text if slow else "")
        self._cpu_hint.setVisible(slow)
        for field, value in ((self._name, options.name), (self._tags, ", ".join(options.tags))):
            if not field.hasFocus() and field.text() != value:
                field.setText(value)
        for box, number in ((self._gpus, options.gpus), (self._nice, options.nice)):
            box.blockSignals(True)
            box.setValue(number)
            box.blockSignals(False)
        self._video.blockSignals(True)
        self._video.setChecked(options.video)
        self._video.blockSignals(False)
        self._track.setCurrentText(options.track)
        self._fill_warm_starts(options.warm_start)

    def _fill_warm_starts(self, chosen: str) -> None:
        launch = self.studio.training.launch
        records = self.studio.library.checkpoints.for_warm_start(launch.runner, self.studio.session.environments.chosen)
        ids = ["", *(record.checkpoint_id for record in records)]
        if [self._warm_start.itemData(i) for i in range(self._warm_start.count())] != ids:
            self._warm_start.clear()
            self._warm_start.addItem("new weights", "")
            for record in records:
                self._warm_start.addItem(f"{record.step_text} steps · {record.checkpoint_id[:8]}", record.checkpoint_id)
        self._warm_start.setCurrentIndex(max(0, self._warm_start.findData(chosen)))


class PreflightList(View):
    """The findings of the preflight, the command, and the consent to it."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.training.launch])
        self._list = column(spacing=4)
        self._command = QPlainTextEdit()
        self._command.setReadOnly(True)
        self._command.setFont(monospace_font(9.0))
        self._command.setMaximumHeight(110)
        self._command.setAccessibleName("Command")
        self._consent = QCheckBox("I agree that this command runs code that is not part of Palaestra")
        self._consent.toggled.connect(studio.training.launch.set_consent)
        self._title = label("CHECK", "caption")
        self._shown: object = None
        self.setLayout(column(self._title, self._list, self._command, self._consent, spacing=6))

    def refresh(self) -> None:
        """Show the findings."""
        launch = self.studio.training.launch
        preview = launch.preview
        self._title.setVisible(preview is not None or launch.stage == "checking")
        self._title.setText("CHECKING …" if launch.stage == "checking" else "CHECK")
        if preview is not self._shown:
            self._shown = preview
            clear_layout(self._list)
            for finding in launch.findings:
                self._list.addWidget(self._finding(finding))
            command = None if preview is None else preview.command
            argv = [] if command is None else [str(word) for word in command.get("argv", ())]
            self._command.setPlainText(" ".join(argv))
        has_command = preview is not None and preview.command is not None
        self._command.setVisible(has_command)
        self._consent.setVisible(has_command and preview is not None and preview.needs_consent)
        self._consent.blockSignals(True)
        self._consent.setChecked(launch.has_consent)
        self._consent.blockSignals(False)

    def _finding(self, finding: Finding) -> QWidget:
        mark = label()
        colour = getattr(self.theme, _FINDING_TONES[finding.level])
        mark.setPixmap(icon(_FINDING_ICONS[finding.level], colour, 14).pixmap(14, 14))
        texts = column(label(f"{finding.check}: {finding.text}", wrap=True, selectable=True), spacing=1)
        if finding.remedy and finding.level != "ok":
            texts.addWidget(label(finding.remedy, "muted", wrap=True, selectable=True))
        layout = row(column(mark, None), texts, spacing=8)
        layout.setStretch(1, 1)
        holder = QWidget()
        holder.setLayout(layout)
        return holder
