"""The first steps of a new user: play CartPole, train an agent in it, watch the agent."""

from __future__ import annotations

from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.runs.spec import RunSpec
from palaestra.studio.model.launch import starting_point
from palaestra.studio.model.revision import Revised
from palaestra.studio.model.settings import Settings
from palaestra.studio.play_session import PlaySession
from palaestra.studio.policy_library import PolicyLibrary
from palaestra.studio.request import Requests
from palaestra.studio.run_browser import RunBrowser

ENVIRONMENT = "CartPole-v1"
_DONE = "first_steps_done"


class FirstSteps(Revised):
    """Which steps are done, and what each of them does."""

    def __init__(
        self,
        requests: Requests,
        settings: Settings,
        session: PlaySession,
        browser: RunBrowser,
        library: PolicyLibrary,
    ) -> None:
        super().__init__()
        self._requests, self._settings = requests, settings
        self._session, self._browser, self._library = session, browser, library
        self.has_played = self.has_watched = False
        self.run_id = ""
        browser.on_run_changed.append(self._follow)

    @property
    def is_needed(self) -> bool:
        """Whether the user has not taken or skipped them before."""
        return not self._settings.get(_DONE, False)

    @property
    def run(self) -> RunRecord | None:
        """The run that was started here."""
        return self._browser.runs.get(self.run_id) if self.run_id else None

    @property
    def can_watch(self) -> bool:
        """Whether there is a trained policy."""
        run = self.run
        return run is not None and run.phase is Phase.SUCCEEDED

    def play(self) -> None:
        """Play CartPole."""
        self._session.choose_environment(ENVIRONMENT)
        self._session.set_mode("human")
        self._session.start()
        self.has_played = True
        self.touch()

    def train(self) -> None:
        """Train PPO in CartPole, with the recommended settings."""
        spec = RunSpec(
            env_id=ENVIRONMENT,
            name="first-cartpole",
            config=starting_point("palaestra", ENVIRONMENT),
            nice=10,
            invoked_from=self._requests.service_directory,
        )

        def receive(record: RunRecord) -> None:
            self.run_id = record.run_id
            self._browser.runs.update(record)
            self._browser.show(record.run_id)
            self.touch()

        self._requests.ask("The run was not launched", lambda service: service.submit(spec), receive, key="first-run")

    def watch(self) -> None:
        """Let the trained policy act."""
        run_id = self.run_id
        self._session.choose_environment(ENVIRONMENT)

        def receive(checkpoints: list) -> None:  # type: ignore[type-arg]
            if checkpoints:
                self._library.activate(checkpoints[0].checkpoint_id)
                self.has_watched = True
                self.dismiss()
            else:
                self._requests.notices.add("warning", f"{run_id} has no checkpoint.")

        self._requests.ask("The trained policy was not found", lambda service: service.checkpoints(run=run_id), receive)

    def dismiss(self) -> None:
        """Do not show the first steps again."""
        self._settings.set(_DONE, True)
        self.touch()

    def _follow(self, record: RunRecord) -> None:
        if record.run_id == self.run_id:
            self.touch()
