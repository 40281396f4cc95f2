"""The first steps of a new user: play CartPole, train an agent in it, watch the agent; see what a table has learned."""

from __future__ import annotations

from collections.abc import Callable

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
LAKE, LAKE_ALGORITHM = "FrozenLake8x8-v1", "q_learning"
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
        self.run_id = self.lake_run_id = ""
        self.has_seen_lake = False
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

    @property
    def lake_run(self) -> RunRecord | None:
        """The run in the frozen lake."""
        return self._browser.runs.get(self.lake_run_id) if self.lake_run_id else None

    def play(self) -> None:
        """Play CartPole."""
        self._session.choose_environment(ENVIRONMENT)
        self._session.set_mode("human")
        self._session.start()
        self.has_played = True
        self.touch()

    def train(self) -> None:
        """Train PPO in CartPole, with the recommended settings."""

        def receive(record: RunRecord) -> None:
            self.run_id = record.run_id

        self._launch(ENVIRONMENT, "ppo", "first-cartpole", receive)

    def train_lake(self) -> None:
        """Train Q-learning in the frozen lake; its policy acts as soon as it is trained."""

        def receive(record: RunRecord) -> None:
            self.lake_run_id = record.run_id

        self._launch(LAKE, LAKE_ALGORITHM, "first-lake", receive)

    def _launch(self, env_id: str, script: str, name: str, launched: Callable[[RunRecord], None]) -> None:
        spec = RunSpec(
            env_id=env_id,
            script=script,
            name=name,
            config=starting_point("palaestra", env_id, script),
            nice=10,
            invoked_from=self._requests.service_directory,
        )

        def receive(record: RunRecord) -> None:
            launched(record)
            self._browser.runs.update(record)
            self._browser.show(record.run_id)
            self.touch()

        self._requests.ask("The run was not launched", lambda service: service.submit(spec), receive, key="first-run")

    def watch(self) -> None:
        """Let the trained policy act."""
        self._watch(self.run_id, ENVIRONMENT)

    def _watch(self, run_id: str, env_id: str) -> None:
        self._session.choose_environment(env_id)

        def receive(checkpoints: list) -> None:  # type: ignore[type-arg]
            if checkpoints:
                self._library.activate(checkpoints[0].checkpoint_id)
                self.has_watched |= run_id == self.run_id
                self.dismiss()
            else:
                self._requests.notices.add("warning", f"{run_id} has no checkpoint.")

        self._requests.ask("The trained policy was not found", lambda service: service.checkpoints(run=run_id), receive)

    def dismiss(self) -> None:
        """Do not show the first steps again."""
        self._settings.set(_DONE, True)
        self.touch()

    def _follow(self, record: RunRecord) -> None:
        if record.run_id in (self.run_id, self.lake_run_id):
            self.touch()
        if record.run_id == self.lake_run_id and record.phase is Phase.SUCCEEDED and not self.has_seen_lake:
            self.has_seen_lake = True
            self._watch(record.run_id, LAKE)
