"""The studio without a window: the parts that the views show and call, and what holds them together.

Every method returns at once; what a request finds appears in the models when the feed is drained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from palaestra.runs.client.client import TrainerService
from palaestra.runs.play.state import PlayEnded, PlayNotice, Report
from palaestra.runs.record import RunEvent, RunRecord
from palaestra.studio.episode_library import EpisodeLibrary, TrajectoryBrowser
from palaestra.studio.feed import ServiceFeed, Subscribers
from palaestra.studio.first_steps import FirstSteps
from palaestra.studio.model.notices import Notices
from palaestra.studio.model.revision import Revised
from palaestra.studio.model.runs import MachineModel
from palaestra.studio.model.settings import Settings
from palaestra.studio.play_session import PlaySession
from palaestra.studio.policy_library import PolicyLibrary
from palaestra.studio.request import Requests
from palaestra.studio.run_browser import RunBrowser
from palaestra.studio.training import Training

_LOST = "connection"
_POLL_S = 1.0
_SAVE_EVERY_S = 5.0


class ConnectionModel(Revised):
    """Whether the service answers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_connected: bool | None = None
        """None until the first answer."""
        self.reason = ""

    def set(self, is_connected: bool, reason: str = "") -> None:
        """The service has begun or ceased to answer."""
        self.is_connected, self.reason = is_connected, reason
        self.touch()


class Studio:
    """One service, and everything that the user can do with it."""

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
        self.connection = ConnectionModel()
        self.machine = MachineModel()
        self.feed = ServiceFeed(
            service,
            Subscribers(
                connected=self._handle_connected,
                disconnected=self._handle_disconnected,
                run_event=self._handle_run_event,
                points=lambda run_id, curves: self.browser.receive_points(run_id, curves),
                log=lambda run_id, text: self.browser.receive_log(run_id, text),
                play=self._receive_play,
                failed=lambda text: self.notices.add("error", "Something in the studio failed.", text),
            ),
            wake=wake,
            decode=decode,
        )
        requests = Requests(self.feed, self.notices)
        self._requests = requests
        self.session = PlaySession(requests, settings)
        self.browser = RunBrowser(requests)
        self.training = Training(requests, self.session, self._follow_launched)
        self.library = PolicyLibrary(requests, self.session)
        self.episodes = EpisodeLibrary(requests, decode)
        self.session.on_stopped.append(self.episodes.refresh)
        self.trajectories = TrajectoryBrowser(requests, decode)
        self.first_steps = FirstSteps(requests, settings, self.session, self.browser, self.library)
        self.ask = requests.ask
        self._last_poll = self._last_save = 0.0
        if settings.problem:
            self.notices.add("warning", settings.problem)

    @property
    def service_name(self) -> str:
        """Which service this is."""
        return self.feed.service.description

    @property
    def temporary_directory(self) -> Path:
        """A directory for this window alone, which is deleted when the studio ends."""
        return Path(self._temporary.name)

    @cached_property
    def _temporary(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix="palaestra-studio-", ignore_cleanup_errors=True)

    @property
    def is_remote(self) -> bool:
        """Whether the service may be on another machine, with other files."""
        return self.feed.service.is_remote

    def connect(self) -> None:
        """Connect to the service; what it holds is read as soon as it answers."""
        self.feed.connect()

    def poll(self) -> None:
        """Called often by the window: read what changes without an event, once a second."""
        now = time.monotonic()
        if now - self._last_save > _SAVE_EVERY_S:
            self._last_save = now
            self._save_settings()
            if self.connection.is_connected:
                # A run that began while the stream of events was being opened would be missed.
                self.browser.refresh()
                self.training.read_datasets()
        self.training.follow_environment()
        if now - self._last_poll > _POLL_S and self.connection.is_connected:
            self._last_poll = now
            self._requests.ask(
                "The machine cannot be read",
                lambda service: service.machine(),
                self.machine.receive,
                key="machine",
                failed=lambda error: None,
            )
            self.browser.refresh_live()
            if self.shows_beliefs:
                self.browser.read_beliefs()

    @property
    def shows_beliefs(self) -> bool:
        """Whether the runner of the current run reports beliefs; not while its capabilities are unknown."""
        record = self.browser.runs.current_record
        capabilities = None if record is None else self.training.launch.runners.get(record.runner)
        return capabilities is not None and capabilities.live_beliefs

    def _save_settings(self) -> None:
        before = self.settings.problem
        self.settings.save()
        if self.settings.problem and self.settings.problem != before:
            self.notices.add("warning", "The settings of the window are not saved.", self.settings.problem)

    def close(self) -> list[str]:
        """End the studio; runs and recordings stay. Returns the names of threads that did not end."""
        self.session.end()
        self.settings.save()
        threads = self.feed.close()
        if "_temporary" in vars(self):
            self._temporary.cleanup()
        return threads

    def _handle_connected(self) -> None:
        was_lost = self.connection.is_connected is False
        self.connection.set(True)
        self.notices.dismiss(key=_LOST)
        if was_lost:
            self.notices.add("success", "The run service answers again.")
        self.session.refresh_environments()
        self.training.refresh()
        self.browser.refresh()
        self.library.refresh()
        self.episodes.refresh()

    def _handle_disconnected(self, reason: str) -> None:
        self.connection.set(False, reason)
        text = "The run service does not answer. Runs are not affected; the studio reconnects by itself."
        self.notices.add("error", text, reason, key=_LOST, lasting=True)

    def _handle_run_event(self, run_id: str, event: RunEvent) -> None:
        self.browser.handle_event(run_id, event)
        if event.phase.has_ended:
            self.library.refresh()

    def _follow_launched(self, record: RunRecord) -> None:
        self.browser.runs.update(record)
        self.browser.show(record.run_id)

    def _receive_play(self, play_id: str, report: Report) -> None:
        if isinstance(report, PlayNotice) and self.connection.is_connected is False:
            return  # the notice about the service says it
        self.session.receive(play_id, report)
        self.library.receive(play_id, report)
        if isinstance(report, PlayEnded):
            self.episodes.refresh()
