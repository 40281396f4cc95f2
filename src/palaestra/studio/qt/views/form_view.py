"""A form drawn from a schema: groups that open, a search, and the message of a field below it."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QComboBox, QLineEdit, QToolButton, QWidget

from palaestra.studio.model.form import GENERAL, Form, FormField
from palaestra.studio.qt.parts import (
    Badge,
    Elided,
    SearchField,
    clear_layout,
    column,
    label,
    push_button,
    restyle,
    row,
)
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import View
from palaestra.studio.studio import Studio

_DEFAULT = "(default)"
_DATASET_NONE, _DATASET_REQUIRED = "no dataset", "choose a dataset"


class FieldEditor(QWidget):
    """The title, the input and the message of one field."""

    def __init__(self, field: FormField, text: str, edit: Callable[[str, str], None]) -> None:
        super().__init__()
        self.field, self._edit = field, edit
        title = Elided(field.title)
        tip = "\n".join(part for part in (field.path, field.description, field.range_text) if part)
        title.setToolTip(tip)
        unit = label(field.unit, "muted")
        unit.setVisible(bool(field.unit))
        self._problem = label("", "danger", wrap=True)
        self.input: QComboBox | QLineEdit
        if field.kind in ("flag", "choice"):
            self.input = self._choice_input(text)
        else:
            self.input = self._text_input(text)
        self.input.setAccessibleName(field.path)
        self.input.setToolTip(tip)
        self.input.setFixedWidth(152)
        head = row(title, self.input, unit, spacing=6)
        head.setStretch(0, 1)
        self.setLayout(column(head, self._problem, spacing=2))
        self._problem.hide()

    def _choice_input(self, text: str) -> QComboBox:
        box = QComboBox()
        default = self.field.format(self.field.default)
        box.addItem(f"{default} {_DEFAULT}".strip() if default else _DEFAULT, "")
        for choice in self.field.choices:
            box.addItem(self.field.format(choice), self.field.format(choice))
        box.setCurrentIndex(max(0, box.findData(text)))
        box.activated.connect(lambda _: self._edit(self.field.path, str(box.currentData())))
        # The wheel scrolls the form; it must not change a value on the way.
        box.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        box.wheelEvent = lambda event: event.ignore()  # type: ignore[method-assign]
        return box

    def _text_input(self, text: str) -> QLineEdit:
        line = QLineEdit(text)
        default = self.field.format(self.field.default)
        line.setPlaceholderText("required" if self.field.is_required else default or "none")
        line.textEdited.connect(lambda new: self._edit(self.field.path, new))
        return line

    def show_state(self, text: str, problem: str) -> None:
        """Show a text that was not typed here, and the message of the field."""
        if isinstance(self.input, QLineEdit):
            if not self.input.hasFocus() and self.input.text() != text:
                self.input.setText(text)
            if self.input.property("invalid") != bool(problem):
                self.input.setProperty("invalid", bool(problem))
                restyle(self.input)
        else:
            index = max(0, self.input.findData(text))
            if self.input.currentIndex() != index:
                self.input.setCurrentIndex(index)
        self._problem.setText(problem)
        self._problem.setVisible(bool(problem))


class DatasetEditor(QWidget):
    """The choice of a dataset: those of the chosen environment, with a badge of their integrity."""

    def __init__(self, field: FormField, edit: Callable[[str, str], None], studio: Studio, theme: Theme) -> None:
        super().__init__()
        self.field, self._edit, self._studio = field, edit, studio
        self.input = QComboBox()
        self.input.setAccessibleName(field.path)
        self.input.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.input.setToolTip("\n".join(part for part in (field.path, field.description) if part))
        self.input.activated.connect(lambda _: edit(field.path, str(self.input.currentData())))
        self.input.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.input.wheelEvent = lambda event: event.ignore()  # type: ignore[method-assign]
        self.badge = Badge(theme)
        self.verify = push_button("Verify", self._verify, role="link", tip="Compare every byte with its manifest")
        self._facts, self._problem = label("", "muted", wrap=True), label("", "danger", wrap=True)
        self._text = ""
        head = row(Elided(field.title if field.title != "id" else field.group), self.badge, self.verify, spacing=6)
        head.setStretch(0, 1)
        self.setLayout(column(head, self.input, self._facts, self._problem, spacing=3))

    def show_state(self, text: str, problem: str) -> None:
        """Show the choices, the chosen dataset and the message of the field."""
        model, env_id = self._studio.training.datasets, self._studio.session.environments.chosen
        fitting, others = model.for_environment(env_id)
        entries = [(_DATASET_NONE if not self.field.is_required else _DATASET_REQUIRED, "", "")]
        entries += [(one.dataset_id, one.dataset_id, model.problem(one)) for one in fitting]
        entries += [
            (f"{one.dataset_id} ({one.env_id})", one.dataset_id, f"Collected in {one.env_id}") for one in others
        ]
        if text and all(text != value for _, value, _ in entries):
            entries.append((f"{text} (unknown)", text, ""))
        if entries != [self._entry(index) for index in range(self.input.count())]:
            self.input.clear()
            for title, value, reason in entries:
                self.input.addItem(title, value)
                index = self.input.count() - 1
                self.input.setItemData(index, reason, Qt.ItemDataRole.ToolTipRole)
                item = self.input.model().item(index)  # type: ignore[attr-defined]
                item.setEnabled(not reason)
        self.input.setCurrentIndex(max(0, self.input.findData(text)))
        self._text = text
        info = model.get(text)
        self.badge.setVisible(info is not None)
        self.verify.setVisible(info is not None and info.state != "unverified")
        self.verify.setEnabled(not model.verifying_id)
        self._facts.setVisible(info is not None)
        if info is not None:
            word, tone = model.STATES[info.state]
            is_verifying = model.verifying_id == info.dataset_id
            self.badge.set("verifying …" if is_verifying else word, "info" if is_verifying else tone, info.problem)
            size = f"{info.total_steps:,} steps · {info.total_episodes:,} episodes · {info.size_bytes / 1e6:,.1f} MB"
            self._facts.setText(f"{info.env_id} · {size}" if info.env_id else size)
        problem = problem or (model.problem(info) if info is not None else "")
        self._problem.setText(problem)
        self._problem.setVisible(bool(problem))

    def _entry(self, index: int) -> tuple[str, str, str]:
        reason = self.input.itemData(index, Qt.ItemDataRole.ToolTipRole)
        return self.input.itemText(index), str(self.input.itemData(index)), str(reason or "")

    def _verify(self) -> None:
        self._studio.training.verify_dataset(self._text)


class FormView(View):
    """A form. `get_form` may return another form later, as for another runner."""

    def __init__(
        self,
        studio: Studio,
        theme: Theme,
        models: list,  # type: ignore[type-arg]
        get_form: Callable[[], Form],
        edit: Callable[[str, str], None],
        *,
        searchable: bool = True,
    ) -> None:
        super().__init__(studio, theme, models)
        self._get_form, self._edit = get_form, edit
        self._search = SearchField(theme, "Search settings")
        self._search.textChanged.connect(lambda _: self._rebuild())
        self._search.setVisible(searchable)
        self._body = column(spacing=6)
        self._editors: dict[str, FieldEditor | DatasetEditor] = {}
        self._unfilled: dict[str, Callable[[], None]] = {}
        """What makes the editors of a group that was never open, by field: all of a long form take 70 ms."""
        self._built: tuple[object, ...] = ()
        self._open_groups: set[str] = {GENERAL, "algorithm", "dataset"}
        self.setLayout(column(self._search, self._body, spacing=8))

    def refresh(self) -> None:
        """Show the form."""
        form = self._get_form()
        fields = tuple(form.fields)
        if self._built != (id(form), fields):
            self._built = (id(form), fields)
            self._rebuild()
        for path, editor in self._editors.items():
            editor.show_state(form.text(path), form.problem(path))

    def editor(self, path: str) -> FieldEditor | DatasetEditor:
        """The editor of a field."""
        if path in self._unfilled:
            self._unfilled[path]()
        return self._editors[path]

    def _rebuild(self) -> None:
        form = self._get_form()
        clear_layout(self._body)
        self._editors, self._unfilled = {}, {}
        search = self._search.text()
        groups = form.groups(search)
        self._search.setVisible(len(form.fields) > 8)
        for name, fields in groups.items():
            self._add_group(form, name, fields, is_open=bool(search) or name in self._open_groups or len(groups) == 1)

    def _make_editor(self, form: Form, field: FormField) -> FieldEditor | DatasetEditor:
        if field.kind == "dataset":
            return DatasetEditor(field, self._edit, self.studio, self.theme)
        return FieldEditor(field, form.text(field.path), self._edit)

    def _add_group(self, form: Form, name: str, fields: list[FormField], *, is_open: bool) -> None:
        holder = QWidget()
        body = column(spacing=6, margins=(4, 0, 0, 6))

        def fill() -> None:
            for field in fields:
                self._unfilled.pop(field.path, None)
                editor = self._make_editor(form, field)
                editor.show_state(form.text(field.path), form.problem(field.path))
                self._editors[field.path] = editor
                body.addWidget(editor)

        if is_open:
            fill()
        else:
            self._unfilled.update(dict.fromkeys((field.path for field in fields), fill))
        holder.setLayout(body)
        changed = sum(bool(form.text(field.path)) for field in fields)
        head = QToolButton()
        head.setText(f"{name} · {changed} changed" if changed else name)
        head.setCheckable(True)
        head.setProperty("role", "group")
        head.setChecked(is_open)
        head.setArrowType(Qt.ArrowType.DownArrow if is_open else Qt.ArrowType.RightArrow)
        head.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        head.setAccessibleName(f"Group {name}")
        holder.setVisible(is_open)

        def toggle(on: bool) -> None:
            if on and any(field.path in self._unfilled for field in fields):
                fill()
            holder.setVisible(on)
            head.setArrowType(Qt.ArrowType.DownArrow if on else Qt.ArrowType.RightArrow)
            (self._open_groups.add if on else self._open_groups.discard)(name)

        head.toggled.connect(toggle)
        if name != GENERAL or len(form.groups()) > 1:
            self._body.addWidget(head)
        self._body.addWidget(holder)
