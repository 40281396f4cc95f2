"""The play in the window: its state, its steps, and the person's keys and clicks as controls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from palaestra.runs.play.protocol import Act
from palaestra.runs.play.state import Controls, PlayEnded, PlayNotice, PlayState, Report, StepReport
from palaestra.studio.model.revision import Revised

_MAX_STEPS = 2000
_MAX_EPISODES = 200
_NAMED_KEYS = frozenset(
    "Enter Tab Escape Backspace Delete ArrowLeft ArrowRight ArrowUp ArrowDown Home End PageUp PageDown".split()
)
_MODIFIERS = ("Control", "Alt", "Meta")
_MODIFIER_KEYS = frozenset((*_MODIFIERS, "Shift"))


@dataclass(frozen=True)
class FinishedEpisode:
    """An episode of this play."""

    number: int
    steps: int
    episode_return: float
    terminated: bool
    success: bool | None


class PlayModel(Revised):
    """What is known of the play that the window shows."""

    def __init__(self) -> None:
        super().__init__()
        self.input = PersonInput(lambda: self.state)
        self._clear()

    def _clear(self) -> None:
        self.play_id = ""
        self.is_starting = False
        self.state: PlayState | None = None
        self.ended: PlayEnded | None = None
        self.problem = ""
        """Why the play could not be started; empty otherwise."""
        self.remedy = ""
        self.steps: deque[StepReport] = deque(maxlen=_MAX_STEPS)
        self.episodes: deque[FinishedEpisode] = deque(maxlen=_MAX_EPISODES)
        self.notices: list[PlayNotice] = []
        """Notices that have not been shown yet."""
        self.input.clear()

    @property
    def is_open(self) -> bool:
        """Whether there is a play that has not ended."""
        return bool(self.play_id) and self.ended is None

    @property
    def last_step(self) -> StepReport | None:
        """The newest step."""
        return self.steps[-1] if self.steps else None

    def begin_start(self) -> None:
        """A play was requested."""
        self._clear()
        self.is_starting = True
        self.touch()

    def begin(self, play_id: str) -> None:
        """A play has been started."""
        self.play_id, self.is_starting = play_id, False
        self.touch()

    def fail(self, problem: str, remedy: str = "") -> None:
        """The play could not be started."""
        self.is_starting, self.problem, self.remedy = False, problem, remedy
        self.touch()

    def receive(self, play_id: str, report: Report) -> None:
        """Take a message of the play."""
        if play_id != self.play_id:
            return
        if isinstance(report, StepReport):
            last = self.last_step
            if last is not None and (last.episode, last.step) == (report.episode, report.step):
                return  # a new connection begins with the newest step
            self.steps.append(report)
            if report.is_last:
                self.episodes.append(
                    FinishedEpisode(
                        report.episode, report.step, report.episode_return, report.terminated, report.success
                    )
                )
        elif isinstance(report, PlayState):
            self.state = report
        elif isinstance(report, PlayNotice):
            self.notices.append(report)
        else:
            self.ended = report
            self.input.clear()
        self.touch()

    def take_notices(self) -> list[PlayNotice]:
        """The notices that have not been shown yet."""
        notices, self.notices = self.notices, []
        return notices


class PersonInput:
    """Keys, sliders and clicks of the person as actions of the play.

    The case of a letter does not matter: Shift may be pressed or released while the letter is held.
    """

    def __init__(self, state: Callable[[], PlayState | None]) -> None:
        self._state = state
        self._pressed: list[str] = []
        self._axis_values: dict[int, float] = {}
        self._count = 0

    @property
    def pressed_keys(self) -> tuple[str, ...]:
        """The keys that are held, in the order in which they were pressed."""
        return tuple(self._pressed)

    def clear(self) -> None:
        """Forget the keys and sliders that are held."""
        self._pressed.clear()
        self._axis_values.clear()

    def press(self, key: str) -> Act | None:
        """A key was pressed; None if it means nothing here."""
        controls, key = self._controls, _ignore_case(key)
        if controls is None or key in self._pressed or not _is_bound(key, controls):
            return None
        self._pressed.append(key)
        return self._current_action(controls)

    def release(self, key: str) -> Act | None:
        """A key was released; the keys that are still held apply, except where each press is a move."""
        controls, key = self._controls, _ignore_case(key)
        if key not in self._pressed:
            return None
        self._pressed.remove(key)
        return None if controls is None or self._is_turn_based else self._current_action(controls)

    def release_all(self) -> Act | None:
        """All keys and sliders were released, for example because the window has lost the focus."""
        is_held = bool(self._pressed or self._axis_values)
        self.clear()
        is_heard = self._controls is not None and not self._is_turn_based
        return self._act(None) if is_held and is_heard else None

    def choose(self, index: int, *, held: bool) -> Act | None:
        """A button of a choice was pressed; when not `held`, it was released and the keys apply again."""
        controls = self._controls
        if controls is None or not 0 <= index < len(controls.choices):
            return None
        if held:
            return self._act(controls.choices[index].action)
        return None if self._is_turn_based else self._current_action(controls)

    def set_axis(self, index: int, value: float | None) -> Act | None:
        """A slider was moved; None: it was released. Where each action is a move, the release makes it."""
        controls = self._controls
        if controls is None or not 0 <= index < len(controls.axes):
            return None
        if value is not None:
            self._axis_values[index] = value
            return None if self._is_turn_based else self._current_action(controls)
        if self._is_turn_based:
            move = self._current_action(controls) if index in self._axis_values else None
            self._axis_values.pop(index, None)
            return move
        self._axis_values.pop(index, None)
        return self._current_action(controls)

    def click(self, x: int, y: int, *, button: str = "left", times: int = 1) -> Act | None:
        """A click on the screen of a task."""
        return self._act_on_screen({"kind": "click", "at": [x, y], "button": button, "times": times})

    def drag(self, start: tuple[int, int], end: tuple[int, int]) -> Act | None:
        """A drag on the screen of a task."""
        return self._act_on_screen({"kind": "drag", "path": [list(start), list(end)]})

    def scroll(self, x: int, y: int, dx: int, dy: int) -> Act | None:
        """A turn of the wheel over the screen of a task."""
        return self._act_on_screen({"kind": "scroll", "at": [x, y], "dx": dx, "dy": dy}) if dx or dy else None

    def type_key(self, key: str, modifiers: tuple[str, ...] = ()) -> Act | None:
        """A key for the screen of a task: characters are typed, named keys and chords are pressed."""
        chord = [name for name in _MODIFIERS if name in modifiers]
        if key in _MODIFIER_KEYS:
            return None  # the chord comes with its last key
        if not chord and len(key) == 1 and key.isprintable():
            return self._act_on_screen({"kind": "type", "text": key})
        if chord or key in _NAMED_KEYS:
            return self._act_on_screen({"kind": "press", "keys": [*chord, key]})
        return None

    @property
    def _controls(self) -> Controls | None:
        state = self._state()
        return None if state is None or state.mode == "agent" else state.environment.controls

    @property
    def _is_turn_based(self) -> bool:
        state = self._state()
        return state is not None and state.environment.turn_based

    def _current_action(self, controls: Controls) -> Act:
        if controls.kind == "choices":
            return self._act(_find_choice(controls, self._pressed[-1]) if self._pressed else None)
        if not self._pressed and not self._axis_values:
            return self._act(None)
        values = []
        for index, axis in enumerate(controls.axes):
            value = self._axis_values.get(index, axis.idle)
            positive = any(key in axis.positive_keys for key in self._pressed)
            negative = any(key in axis.negative_keys for key in self._pressed)
            if positive != negative:
                value = axis.high if positive else axis.low
            values.append(value)
        shape = np.shape(controls.idle)
        return self._act(np.array(values).reshape(shape).tolist() if shape else values)

    def _act_on_screen(self, action: dict[str, Any]) -> Act | None:
        controls = self._controls
        return None if controls is None or controls.kind != "screen" else self._act(action)

    def _act(self, action: Any) -> Act:
        self._count += 1
        return Act(action, self._count)


def _ignore_case(key: str) -> str:
    return key.lower() if len(key) == 1 else key


def _is_bound(key: str, controls: Controls) -> bool:
    keys = [choice.keys for choice in controls.choices]
    keys += [(*axis.negative_keys, *axis.positive_keys) for axis in controls.axes]
    return any(key in some for some in keys)


def _find_choice(controls: Controls, key: str) -> Any:
    return next((choice.action for choice in controls.choices if key in choice.keys), None)
