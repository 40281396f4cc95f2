"""The studio without a window: its models, the feed, and everything that the user can do as a method.

Methods return at once; what a request finds appears in the models when the feed is drained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from palaestra.errors import ConfigError, PalaestraError
from palaestra.runs.client.client import TrainerService
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
from palaestra.runs.play.state import PlayEnded, PlayRecord, Report
from palaestra.studio.feed import ServiceFeed, Subscribers
from palaestra.studio.model.environments import EnvironmentsModel
from palaestra.studio.model.notices import Notices
from palaestra.studio.model.play import PlayModel
from palaestra.studio.model.settings import Settings

_LOST = "connection"
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 10.0)


class Studio:
    """Models and actions of one window."""

    def __init__(
        self,
        service: TrainerService,
        settings: Settings,
        *,
        wake: Callable[[], None] = lambda: None,
        decode: Callable[[bytes], Any] = lambda data: data,
    ) -> None:
        self.settings = settings
        self.notices = Notices()
        self.environments = EnvironmentsModel()
        self.play = PlayModel()
        self.mode: Mode = "human"
        self.is_connected: bool | None = None
        """None until the first answer."""
        self.feed = ServiceFeed(
            service,
            Subscribers(
                connected=self._handle_connected,
                disconnected=self._handle_disconnected,
                run_event=lambda run_id, event: None,
                points=lambda run_id, curves: None,
                log=lambda run_id, text: None,
                play=self._receive_play,
                failed=lambda text: self.notices.add("error", "Something in the studio failed.", text),
            ),
            wake=wake,
            decode=decode,
        )
        if settings.problem:
            self.notices.add("warning", settings.problem)

    @property
    def service_name(self) -> str:
        """What people call the service."""
        return self.feed.service.description

    def connect(self) -> None:
        """Connect to the service."""
        self.environments.choose(self.settings.get("environment", self.environments.chosen))
        self.feed.connect()

    def close(self) -> list[str]:
        """End the studio; runs and recordings stay. Returns the names of threads that did not end."""
        self.settings.set("environment", self.environments.chosen)
        self.settings.save()
        return self.feed.close()

    # ------------------------------------------------------------------ connection

    def _handle_connected(self) -> None:
        was_lost = self.is_connected is False
        self.is_connected = True
        self.notices.dismiss(key=_LOST)
        if was_lost:
            self.notices.add("success", "The run service answers again.")
        self.refresh_environments()

    def _handle_disconnected(self, reason: str) -> None:
        self.is_connected = False
        text = "The run service does not answer. Runs are not affected; the studio reconnects by itself."
        self.notices.add("error", text, reason, key=_LOST, lasting=True)

    def report_failure(self, what: str) -> Callable[[PalaestraError], None]:
        """A function that shows why a request failed."""

        def show(error: PalaestraError) -> None:
            if isinstance(error, ConfigError):
                self.notices.add("error", f"{what}: {error.reason}", error.remedy)
            else:
                self.notices.add("error", f"{what}.", str(error))

        return show

    # ------------------------------------------------------------------ environments

    def refresh_environments(self) -> None:
        """Read the catalogue of environments."""
        self.feed.request(
            lambda service: service.environments(),
            self.environments.set_catalogue,
            self.report_failure("The environments cannot be listed"),
            key="environments",
        )
        self._read_parameters()

    def choose_environment(self, env_id: str, parameters: dict[str, Any] | None = None) -> None:
        """Choose the environment of the next play and of the next run."""
        if self.environments.choose(env_id, parameters):
            self._read_parameters()

    def _read_parameters(self) -> None:
        env_id = self.environments.chosen
        if self.environments.is_screen:
            return

        def fail(error: PalaestraError) -> None:
            self.environments.problem = error.reason if isinstance(error, ConfigError) else str(error)
            self.environments.touch()

        self.feed.request(
            lambda service: service.environment_parameters(env_id),
            lambda schema: self.environments.set_schema(env_id, schema),
            fail,
            key="parameters",
        )

    # ------------------------------------------------------------------ play

    def start_play(self, *, checkpoint: str | None = None, consent: str = "", paused: bool = False) -> None:
        """Play in the chosen environment; the current play ends."""
        self.end_play()
        chosen = self.environments
        place = {"task": chosen.chosen} if chosen.is_screen else {"env_id": chosen.chosen}
        try:
            spec = PlaySpec(
                **place,  # type: ignore[arg-type]
                parameters=chosen.parameters,
                max_episode_steps=chosen.max_episode_steps,
                seed=chosen.seed,
                mode=self.mode,
                checkpoint=checkpoint,
                consent=consent,
                paused=paused,
            )
        except ValueError as error:
            self.play.fail(f"These parameters cannot be used: {error}")
            return
        self.play.begin_start()

        def begin(record: PlayRecord) -> None:
            self.play.begin(record.play_id)
            self.feed.watch_play(record.play_id)

        def fail(error: PalaestraError) -> None:
            is_refusal = isinstance(error, ConfigError)
            self.play.fail(error.reason if is_refusal else str(error), error.remedy if is_refusal else "")  # type: ignore[attr-defined]

        self.feed.request(lambda service: service.start_play(spec), begin, fail, key="play")

    def end_play(self) -> None:
        """End the play in the window."""
        play_id = self.play.play_id
        if self.play.is_open:
            self.feed.request(lambda service: service.stop_play(play_id), lambda _: None, lambda _: None)
        self.feed.watch_play("")

    def send(self, control: Control | None) -> None:
        """Send a control to the play."""
        if control is not None and self.play.is_open and not self.feed.send(control):
            self.notices.add("warning", "The play cannot be reached.", key="play")

    def set_mode(self, mode: Mode) -> None:
        """Choose who acts, in this play and the next ones."""
        self.mode = mode
        self.settings.set("mode", mode)
        self.play.input.clear()
        self.send(SetMode(mode))

    def toggle_pause(self) -> None:
        """Pause or continue the play."""
        if self.play.state is not None:
            self.send(Pause(not self.play.state.paused))

    def step_once(self) -> None:
        """Make a single step; pauses the play first."""
        if self.play.state is not None and not self.play.state.paused:
            self.send(Pause(True))
        self.send(SingleStep())

    def reset_play(self, *, same_seed: bool = False) -> None:
        """Begin a new episode."""
        state = self.play.state
        self.send(Reset(state.seed if same_seed and state is not None else None))

    def change_speed(self, direction: int) -> None:
        """Go to the next faster or slower speed."""
        if self.play.state is None:
            return
        current = self.play.state.speed
        others = [one for one in SPEEDS if (one > current if direction > 0 else one < current)]
        if others:
            self.send(SetSpeed(min(others) if direction > 0 else max(others)))

    def toggle_recording(self) -> None:
        """Record the next episodes, or not."""
        if self.play.state is not None:
            self.send(SetRecording(not self.play.state.recording))

    def cell_values(self) -> dict[int, list[float]]:
        """Numbers for each cell of a small world, one for each action, as far as the policy reported them."""
        return {}

    def hand_over(self) -> None:
        """In hybrid mode, give control to the other side."""
        state = self.play.state
        if state is not None and state.mode == "hybrid":
            self.send(TakeControl("human" if state.control == "agent" else "agent"))

    def _receive_play(self, play_id: str, report: Report) -> None:
        self.play.receive(play_id, report)
        for notice in self.play.take_notices():
            self.notices.add(notice.level, notice.text, notice.remedy)
        if isinstance(report, PlayEnded) and play_id == self.play.play_id and report.failed:
            self.notices.add(
                "error",
                f"The play ended: {report.reason}",
                report.remedy,
                action="Start again",
                perform=self.start_play,
                key="play-ended",
            )
