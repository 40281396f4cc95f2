"""The page of a play: the picture, the controls of the person, the pace, and the last steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QHeaderView, QSizePolicy, QSlider, QSplitter, QTableWidget, QTableWidgetItem, QWidget

from palaestra.runs.play.state import Axis, Choice, PlayState, StepReport
from palaestra.studio.qt.icons import icon
from palaestra.studio.qt.parts import (
    Badge,
    Elided,
    EmptyState,
    FlowLayout,
    clear_layout,
    column,
    frame,
    icon_button,
    label,
    push_button,
    row,
)
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import View
from palaestra.studio.qt.views.render_view import RenderView
from palaestra.studio.studio import Studio

_COLUMNS = ("step", "actor", "action", "reward", "return", "policy")
_MAX_ROWS = 200
_MIN_HEIGHT = 30
"""A table of steps below this height is collapsed."""
_SLIDER_STEPS = 200
_WAITING = {
    "move": "Your move",
    "policy": "Choose a policy on the left, or let it act at random",
    "reset": "The episode is over",
}


class PlayPage(View):
    """Shows the play, and turns what the person does into controls."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.session.play])
        self.picture = RenderView(theme)
        self.bar = PlayBar(studio, theme, self.toggle_values)
        self.controls = ControlsPanel(studio, theme)
        self.steps = StepTable(studio, theme)
        self._empty = EmptyState(
            theme, "gamepad", "No play yet", "Choose an environment on the left and press Play (F5)."
        )
        self._empty.add_action(push_button("Play", studio.session.start, role="primary"))
        self._grid_shown: bool | None = None
        upper = QWidget()
        upper.setLayout(column(self._header(), self.picture, self._empty, self.controls, self.bar, spacing=0))
        splitter = QSplitter(Qt.Orientation.Vertical)
        splitter.addWidget(upper)
        splitter.addWidget(self.steps)
        splitter.setStretchFactor(0, 1)
        splitter.setSizes([700, 0])
        splitter.setCollapsible(0, False)
        self.splitter = splitter
        self.setLayout(column(splitter))
        self._connect_input()
        self.refresh()

    def show_frame(self, image: QImage, report: StepReport) -> None:
        """Show a picture that has just arrived."""
        self._show_cells(report)
        self.picture.show_frame(image)

    def _show_cells(self, report: StepReport) -> None:
        self.picture.show_cells(report.grid if self.shows_grid else None, with_values=self.shows_values)

    @property
    def shows_grid(self) -> bool:
        """Whether small worlds are drawn as cells."""
        return self.studio.settings.get("show_grid", True)

    def toggle_grid(self) -> None:
        """Change between cells and the picture of the environment."""
        self.studio.settings.set("show_grid", not self.shows_grid)
        self.studio.session.play.touch()
        last = self.studio.session.play.last_step
        if last is not None:
            self._show_cells(last)

    @property
    def shows_values(self) -> bool:
        """Whether the values of a tabular policy are drawn on the cells."""
        return self.studio.settings.get("show_values", True)

    def toggle_values(self) -> None:
        """Show or hide the values of a tabular policy."""
        self.studio.settings.set("show_values", not self.shows_values)
        self.studio.session.play.touch()
        last = self.studio.session.play.last_step
        if last is not None:
            self._show_cells(last)

    def toggle_steps(self) -> None:
        """Show or hide the table of steps."""
        sizes = self.splitter.sizes()
        self.splitter.setSizes([sum(sizes), 0] if sizes[1] else [sum(sizes) - 220, 220])

    def refresh(self) -> None:
        """Show the state of the play."""
        play = self.studio.session.play
        state = play.state
        has_play = play.is_open or bool(play.steps)
        self.picture.setVisible(has_play or play.is_starting)
        self._empty.setVisible(not has_play and not play.is_starting)
        if play.problem:
            self._empty.title.setText("The play could not be started")
            self._empty.text.setText(f"{play.problem[:1].upper()}{play.problem[1:].rstrip('.')}. {play.remedy}".strip())
        else:
            self._empty.title.setText("No play yet")
            self._empty.text.setText("Choose an environment on the left and press Play (F5).")
        self.picture.show_message(self._message(state))
        self._name.set_text(state.environment.env_id if state is not None else self.studio.session.environments.chosen)
        instruction = state.environment.instruction if state is not None else ""
        self._instruction.set_text(instruction)
        self._instruction.setVisible(bool(instruction))
        self._show_badges(state)

    def _message(self, state: PlayState | None) -> str:
        play = self.studio.session.play
        if play.is_starting:
            return f"Starting {self.studio.session.environments.chosen} …"
        if play.ended is not None:
            return f"The play has ended: {play.ended.reason}" if play.ended.failed else "The play has ended"
        if state is None:
            return ""
        if state.waiting == "policy" and state.loading is not None and state.loading.state == "loading":
            return f"Loading {state.loading.name} …"
        if state.waiting == "move" and state.environment.turn_based and play.last_step is not None:
            return ""
        if state.waiting == "move" and state.environment.controls.kind == "choices":
            keys = [_key_text(choice.keys[0]) for choice in state.environment.controls.choices if choice.keys]
            return f"Press {' or '.join(keys[:4])} to move"
        return _WAITING.get(state.waiting, "") if state.waiting != "reset" else ""

    def _header(self) -> QWidget:
        self._name = Elided("", "heading")
        self._instruction = Elided("", "muted")
        self._actor, self._policy = Badge(self.theme), Badge(self.theme)
        self._numbers = label("", "muted")
        parts = (self._name, self._instruction, self._policy, self._actor, self._numbers)
        head = row(*parts, spacing=10, margins=(14, 8, 14, 8))
        head.setStretch(0, 1)
        head.setStretch(1, 2)
        return frame(head, "bar")

    def _show_badges(self, state: PlayState | None) -> None:
        last = self.studio.session.play.last_step
        self._actor.setVisible(state is not None)
        self._policy.setVisible(state is not None and state.policy is not None)
        if state is not None:
            actor = last.actor if last is not None and last.actor is not None else state.control
            self._actor.set("you act" if actor == "human" else "agent acts", "accent" if actor == "human" else "info")
            if state.policy is not None:
                self._policy.set(state.policy.name, "muted", "\n".join(state.policy.notes))
        if last is not None:
            end = " · done" if last.is_last else ""
            self._numbers.setText(f"episode {last.episode} · step {last.step} · return {last.episode_return:,.4g}{end}")
        else:
            self._numbers.setText("")

    def _connect_input(self) -> None:
        person, send = self.studio.session.play.input, self.studio.session.send

        def press(key: str, text: str, modifiers: list[str]) -> None:
            if self._is_screen():
                is_character = len(text) == 1 and text.isprintable() and not modifiers
                send(person.type_key(text if is_character else key, tuple(modifiers)))
            else:
                send(person.press(key))

        self.picture.key_pressed.connect(press)
        self.picture.key_released.connect(lambda key: send(person.release(key)))
        self.picture.focus_lost.connect(lambda: send(person.release_all()))
        self.picture.clicked.connect(lambda x, y, button, times: send(person.click(x, y, button=button, times=times)))
        self.picture.dragged.connect(lambda *points: send(person.drag(points[:2], points[2:])))
        self.picture.scrolled.connect(lambda x, y, dx, dy: send(person.scroll(x, y, dx, dy)))

    def _is_screen(self) -> bool:
        state = self.studio.session.play.state
        return state is not None and state.environment.controls.kind == "screen"


class PlayBar(View):
    """Play, pause, single step, reset, speed, recording."""

    def __init__(self, studio: Studio, theme: Theme, toggle_values: Callable[[], None]) -> None:
        super().__init__(studio, theme, [studio.session.play])
        tip = "Values and best actions of the policy (Ctrl+Shift+V)"
        self.values = push_button("Values", toggle_values, role="toggle", tip=tip)
        self.values.setCheckable(True)
        self._play = icon_button(theme, "play", self._start_or_pause, tip="Play or pause (Ctrl+Space)")
        self._step = icon_button(theme, "step", studio.session.step_once, tip="Single step (Ctrl+.)")
        self._reset = icon_button(theme, "reset", studio.session.reset, tip="New episode (Ctrl+R)")
        self._stop = icon_button(theme, "stop", studio.session.end, tip="End the play")
        self._slower = push_button(
            "−", lambda: studio.session.change_speed(-1), role="small", tip="Slower", name="Slower"
        )
        self._faster = push_button(
            "+", lambda: studio.session.change_speed(1), role="small", tip="Faster", name="Faster"
        )
        for button in (self._slower, self._faster):
            button.setFixedWidth(30)
        self._speed = label("1×")
        self._speed.setMinimumWidth(44)
        self._speed.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._hand_over = push_button("Take over", studio.session.hand_over, tip="Hand control over (Ctrl+H)")
        self._recording = icon_button(theme, "record", studio.session.toggle_recording, tip="Record episodes")
        self._recording.setCheckable(True)
        self._seed = label("", "muted")
        layout = row(
            self._play,
            self._step,
            self._reset,
            self._stop,
            12,
            self._slower,
            self._speed,
            self._faster,
            12,
            self._hand_over,
            None,
            self.values,
            8,
            self._seed,
            8,
            self._recording,
            spacing=4,
            margins=(10, 6, 10, 6),
        )
        bar = frame(layout, "bar")
        self.setLayout(column(bar))
        self.refresh()

    def refresh(self) -> None:
        """Show the state of the play."""
        play = self.studio.session.play
        state = play.state
        is_running = play.is_open and state is not None and not state.paused
        self._play.setIcon(icon("pause" if is_running else "play", self.theme.text))
        for button in (self._step, self._reset, self._stop, self._slower, self._faster, self._recording):
            button.setEnabled(play.is_open)
        self._hand_over.setVisible(state is not None and state.mode == "hybrid" and play.is_open)
        last = play.last_step
        settings = self.studio.settings
        has_values = last is not None and last.grid is not None and bool(last.grid.values)
        self.values.setVisible(has_values and settings.get("show_grid", True))
        self.values.setChecked(settings.get("show_values", True))
        if state is not None:
            self._speed.setText(f"{state.speed:g}×")
            self._hand_over.setText("Give back" if state.control == "human" else "Take over")
            self._seed.setText(f"seed {state.seed}")
            self._recording.setChecked(state.recording)
            tip = "Episodes are recorded" if state.recording else "Episodes are not recorded"
            self._recording.setToolTip(tip)
            self._recording.setIcon(icon("record", self.theme.danger if state.recording else self.theme.muted))

    def _start_or_pause(self) -> None:
        if self.studio.session.play.is_open:
            self.studio.session.toggle_pause()
        else:
            self.studio.session.start()


class ControlsPanel(View):
    """Buttons for choices and sliders for numbers, with their keys; hidden while only the agent acts."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.session.play])
        self._flow = FlowLayout(spacing=6)
        self._shown: object = None
        inner = frame(self._flow, "bar")
        self._flow.setContentsMargins(12, 6, 12, 6)
        self.setLayout(column(inner))
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Maximum)
        self.setVisible(False)

    def refresh_if_changed(self) -> bool:
        """Follow the mode also while hidden."""
        state = self.studio.session.play.state
        wanted = state is not None and state.mode != "agent" and self.studio.session.play.is_open
        wanted = wanted and state is not None and state.environment.controls.kind in ("choices", "axes")
        if self.isHidden() == wanted:
            self.setVisible(wanted)
        return super().refresh_if_changed()

    def refresh(self) -> None:
        """Build the buttons once for each environment."""
        state = self.studio.session.play.state
        if state is None or state.environment.controls == self._shown:
            return
        self._shown = state.environment.controls
        clear_layout(self._flow)
        for index, choice in enumerate(state.environment.controls.choices):
            self._flow.addWidget(self._choice_button(index, choice))
        for index, axis in enumerate(state.environment.controls.axes):
            self._flow.addWidget(self._axis_slider(index, axis))

    def _choice_button(self, index: int, choice: Choice) -> QWidget:
        keys = " ".join(_key_text(key) for key in choice.keys[:2])
        button = push_button(f"{choice.label}   {keys}".rstrip(), lambda: None, name=choice.label)
        button.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        person = self.studio.session.play.input
        button.pressed.connect(lambda: self.studio.session.send(person.choose(index, held=True)))
        button.released.connect(lambda: self.studio.session.send(person.choose(index, held=False)))
        return button

    def _axis_slider(self, index: int, axis: Axis) -> QWidget:
        slider = QSlider(Qt.Orientation.Horizontal)
        slider.setRange(0, _SLIDER_STEPS)
        slider.setFixedWidth(110)
        slider.setAccessibleName(axis.label)
        span = (axis.high - axis.low) or 1.0
        idle = round(_SLIDER_STEPS * (axis.idle - axis.low) / span)
        slider.setValue(idle)
        person = self.studio.session.play.input

        def move(position: int) -> None:
            if slider.isSliderDown():
                self.studio.session.send(person.set_axis(index, axis.low + span * position / _SLIDER_STEPS))

        def release() -> None:
            slider.setValue(idle)
            self.studio.session.send(person.set_axis(index, None))

        slider.valueChanged.connect(move)
        slider.sliderReleased.connect(release)
        keys = " ".join(_key_text(key) for key in (*axis.negative_keys[:1], *axis.positive_keys[:1]))
        holder = QWidget()
        holder.setLayout(row(label(axis.label, "muted"), slider, label(keys, "caption"), spacing=6))
        return holder


class StepTable(View):
    """The last steps, newest first."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        super().__init__(studio, theme, [studio.session.play])
        self._table = QTableWidget(0, len(_COLUMNS))
        self._table.setHorizontalHeaderLabels(list(_COLUMNS))
        self._table.setAccessibleName("Steps")
        self._table.verticalHeader().hide()
        self._table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self._table.setShowGrid(False)
        self._table.setAlternatingRowColors(True)
        self._table.verticalHeader().setDefaultSectionSize(24)
        header = self._table.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        header.setStretchLastSection(True)
        header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        self._table.setColumnWidth(4, 150)
        self._first_shown: StepReport | None = None
        self.setMinimumHeight(0)
        self.setLayout(column(self._table))

    def minimumSizeHint(self) -> QSize:
        """The table can be collapsed."""
        return QSize(0, 0)

    @property
    def can_be_seen(self) -> bool:
        """Whether the table is not collapsed."""
        return self.isVisible() and self.height() >= _MIN_HEIGHT

    def refresh(self) -> None:
        """Add the new steps on top."""
        steps = self.studio.session.play.steps
        new: list[StepReport] = []
        for report in reversed(steps):
            if report is self._first_shown or len(new) >= _MAX_ROWS:
                break
            new.append(report)
        if not steps:
            self._table.setRowCount(0)
        self._first_shown = steps[-1] if steps else None
        if len(new) >= _MAX_ROWS:
            self._table.setRowCount(0)
        for report in reversed(new):
            self._table.insertRow(0)
            for index, text in enumerate(self._cells(report)):
                self._table.setItem(0, index, QTableWidgetItem(text))
        if self._table.rowCount() > _MAX_ROWS:
            self._table.setRowCount(_MAX_ROWS)

    def _cells(self, report: StepReport) -> tuple[str, ...]:
        state = self.studio.session.play.state
        choices = () if state is None else state.environment.controls.choices
        actor = {"human": "you", "agent": "agent", None: "–"}[report.actor]
        end = " (terminated)" if report.terminated else " (truncated)" if report.truncated else ""
        return (
            f"{report.episode}.{report.step}",
            actor,
            format_action(report.action, choices),
            f"{report.reward:.4g}",
            f"{report.episode_return:.5g}{end}",
            format_outputs(report.outputs),
        )


def format_action(action: object, choices: Sequence[Choice] = ()) -> str:
    """An action in a few characters, by its name if it has one."""
    if action is None:
        return "–"
    named = next((choice.label for choice in choices if choice.action == action), "")
    if named:
        return named
    if isinstance(action, dict):
        kind = str(action.get("kind", ""))
        details = [f"{value}" for key, value in action.items() if key != "kind" and value not in (None, 1, "left", [])]
        return f"{kind} {' '.join(details)}"[:80]
    if isinstance(action, list):
        return "[" + ", ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in action) + "]"
    return str(action)


def format_outputs(outputs: dict[str, object]) -> str:
    """What a policy reported, in one line."""
    parts = []
    for name, value in outputs.items():
        if isinstance(value, float):
            parts.append(f"{name} {value:.3g}")
        elif isinstance(value, list):
            parts.append(f"{name} [" + ", ".join(_format_entry(entry) for entry in value[:6]) + "]")
        else:
            parts.append(f"{name} {value}")
    return " · ".join(parts)[:200]


def _format_entry(entry: object) -> str:
    is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
    return f"{entry:.2f}" if is_number else str(entry)


def _key_text(key: str) -> str:
    arrows = {"ArrowLeft": "←", "ArrowRight": "→", "ArrowUp": "↑", "ArrowDown": "↓", " ": "␣"}
    return arrows.get(key, key.upper() if len(key) == 1 else key)
