"""The play of the window: choosing an environment, starting, controlling and ending a play."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from palaestra.errors import PalaestraError
from palaestra.runs.play.protocol import (
    Control,
    Mode,
    Pause,
    Reset,
    SetMode,
    SetRecording,
    SetSpeed,
    SingleStep,
    TakeControl,
)
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import PlayEnded, PlayRecord, PlayState, Report
from palaestra.studio.model.environments import EnvironmentsModel
from palaestra.studio.model.play import PlayModel
from palaestra.studio.model.settings import Settings
from palaestra.studio.request import Requests, split_error

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 10.0)


class PlaySession:
    """The environment, the mode and the play."""

    def __init__(self, requests: Requests, settings: Settings) -> None:
        self._requests, self._settings = requests, settings
        self.environments = EnvironmentsModel()
        self.play = PlayModel()
        self.on_stopped: list[Callable[[], None]] = []
        """Called when a play that was stopped has finished its recording, which is after its `PlayEnded`."""
        self._start_number = 0
        """Number of the newest start: a play that is ready after another was started is ended."""
        self.mode: Mode = "human"
        stored = settings.get("mode", "human")
        if stored in ("human", "hybrid", "agent"):
            self.mode = stored  # type: ignore[assignment]
        self.environments.choose(settings.get("environment", self.environments.chosen))
        self.environments.set_seed(settings.get("seed", 0))

    # ------------------------------------------------------------------ environments

    def refresh_environments(self) -> None:
        """Read the catalogue of environments."""
        self._requests.ask(
            "The environments cannot be listed",
            lambda service: service.environments(),
            self.environments.set_catalogue,
            key="environments",
        )
        self._read_parameters()

    def choose_environment(self, env_id: str, parameters: dict[str, Any] | None = None) -> None:
        """Choose the environment of the next play and of the next run."""
        if self.environments.choose(env_id, parameters):
            self._settings.set("environment", self.environments.chosen)
            self._read_parameters()

    def set_seed(self, seed: int) -> None:
        """Choose the seed of the next play."""
        self.environments.set_seed(seed)
        self._settings.set("seed", self.environments.seed)

    def _read_parameters(self) -> None:
        env_id = self.environments.chosen

        def fail(error: PalaestraError) -> None:
            self.environments.fail(env_id, " ".join(split_error(error)).strip())

        self._requests.ask(
            "The parameters cannot be read",
            lambda service: service.environment_parameters(env_id),
            lambda schema: self.environments.set_schema(env_id, schema),
            key="parameters",
            failed=fail,
        )

    # ------------------------------------------------------------------ the play

    def start(self, *, checkpoint: str | None = None, consent: str = "", paused: bool = False) -> None:
        """Play in the chosen environment; the current play ends."""
        self.end()
        chosen = self.environments
        place = {"task": chosen.chosen} if chosen.is_screen else {"env_id": chosen.chosen}
        try:
            spec = PlaySpec.model_validate(
                {
                    **place,
                    "parameters": chosen.form.changes(),
                    "seed": chosen.seed,
                    "mode": self.mode,
                    "checkpoint": checkpoint,
                    "consent": consent,
                    "paused": paused,
                    "invoked_from": self._requests.service_directory,
                }
            )
        except ValueError as error:
            self.play.fail(f"The parameters cannot be used: {error}")
            return
        self.play.begin_start()
        self._start_number += 1
        number = self._start_number

        def begin(record: PlayRecord) -> None:
            if number == self._start_number:
                self.play.begin(record.play_id)
                self._requests.feed.watch_play(record.play_id)
            else:
                self._stop(record.play_id)

        def fail(error: PalaestraError) -> None:
            if number == self._start_number:
                self.play.fail(*split_error(error))

        self._requests.ask(
            "The play could not be started", lambda service: service.start_play(spec), begin, failed=fail
        )

    def end(self) -> None:
        """End the play."""
        self._start_number += 1
        if self.play.is_open:
            self._stop(self.play.play_id)
        else:
            self._requests.feed.watch_play("")

    def _stop(self, play_id: str) -> None:
        def finish(_: object) -> None:
            for notify in self.on_stopped:
                notify()

        self._requests.ask("The play could not be ended", lambda service: service.stop_play(play_id), finish)

    def send(self, control: Control | None) -> None:
        """Send a control to the play."""
        if control is not None and self.play.is_open and not self._requests.feed.send(control):
            self._requests.notices.add("warning", "The play cannot be reached.", key="play")

    def set_mode(self, mode: Mode) -> None:
        """Choose who acts, in this play and the next ones."""
        self.mode = mode
        self._settings.set("mode", mode)
        self.play.input.clear()
        self.play.touch()
        self.send(SetMode(mode))

    def toggle_pause(self) -> None:
        """Pause or continue the play; without one, start it."""
        if not self.play.is_open:
            self.start()
        elif self.play.state is not None:
            self.send(Pause(not self.play.state.paused))

    def step_once(self) -> None:
        """Make a single step; pauses the play first."""
        if self.play.state is not None and not self.play.state.paused:
            self.send(Pause(True))
        self.send(SingleStep())

    def reset(self, *, same_seed: bool = False) -> None:
        """Begin a new episode."""
        state = self.play.state
        self.send(Reset(state.seed if same_seed and state is not None else None))

    def change_speed(self, direction: int) -> None:
        """Go to the next faster or slower speed."""
        if self.play.state is not None:
            current = self.play.state.speed
            others = [one for one in SPEEDS if (one > current if direction > 0 else one < current)]
            if others:
                self.send(SetSpeed(min(others) if direction > 0 else max(others)))

    def hand_over(self) -> None:
        """In hybrid mode, give control to the other side."""
        state = self.play.state
        if state is not None and state.mode == "hybrid":
            self.send(TakeControl("human" if state.control == "agent" else "agent"))

    def toggle_recording(self) -> None:
        """Record the next episodes, or not."""
        if self.play.state is not None:
            self.send(SetRecording(not self.play.state.recording))

    def receive(self, play_id: str, report: Report) -> None:
        """Take a message of the play."""
        self.play.receive(play_id, report)
        for notice in self.play.take_notices():
            self._requests.notices.add(notice.level, notice.text, notice.remedy)
        if play_id != self.play.play_id:
            return
        if isinstance(report, PlayState) and report.mode != self.mode:
            self.mode = report.mode
        if isinstance(report, PlayEnded) and report.failed:
            self._requests.notices.add(
                "error",
                f"The play ended: {report.reason}",
                report.remedy,
                action="Start again",
                perform=self.start,
                key="play-ended",
            )
