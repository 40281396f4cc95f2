"""Training a new policy from the window: catalogue, form, preflight and launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from palaestra.errors import PalaestraError
from palaestra.runs.catalogue import ScriptInfo
from palaestra.runs.record import RunRecord
from palaestra.runs.runner import RunnerCapabilities
from palaestra.runs.spec import RunSpec
from palaestra.studio.model.environments import DatasetsModel
from palaestra.studio.model.launch import LaunchModel, PresetsModel
from palaestra.studio.play_session import PlaySession
from palaestra.studio.request import Requests, split_error


class Training:
    """`Train new`."""

    def __init__(self, requests: Requests, session: PlaySession, on_launched: Callable[[RunRecord], None]) -> None:
        self._requests, self._session, self._on_launched = requests, session, on_launched
        self.launch = LaunchModel()
        self.presets = PresetsModel()
        self.datasets = DatasetsModel()
        self._has_asked = False

    # ------------------------------------------------------------------ catalogue

    def refresh(self) -> None:
        """Read the catalogue of runners."""

        def receive(runners: Mapping[str, RunnerCapabilities]) -> None:
            self._has_asked = False
            self.launch.set_runners(runners)

        self._requests.ask("The trainers cannot be listed", lambda service: service.runners(), receive, key="runners")

    def read_details(self) -> None:
        """Read which runners are ready, and the form of the chosen one; called while they can be seen.

        The service starts an interpreter for each runner; a user who only plays or looks at runs does not wait for it.
        """
        if self.launch.runners and not self._has_asked:
            self._has_asked = True
            for name in self.launch.runners:
                self._read_readiness(name)
            self._read_runner()

    def choose_runner(self, name: str) -> None:
        """Choose a runner."""
        self.launch.choose_runner(name)
        self._read_runner()

    def choose_script(self, name: str) -> None:
        """Choose a script or an algorithm."""
        self.launch.choose_script(name)
        self._read_schema()

    def _read_readiness(self, name: str) -> None:
        self._requests.ask(
            f"The state of {name} is unknown",
            lambda service: service.runner_readiness(name),
            lambda readiness: self.launch.set_readiness(name, readiness),
            key=f"readiness {name}",
        )

    def _read_runner(self) -> None:
        name = self.launch.runner
        if not name:
            return
        if name in self.launch.scripts:
            self._read_schema()
            return

        def receive(scripts: Sequence[ScriptInfo]) -> None:
            self.launch.set_scripts(name, scripts)
            self._read_schema()

        self._requests.ask(
            f"The algorithms of {name} cannot be listed",
            lambda service: service.runner_scripts(name),
            receive,
            key=f"scripts {name}",
        )

    def follow_environment(self) -> None:
        """Another environment was chosen: offer what can learn in it."""
        if self.launch.is_screen != self._session.environments.is_screen:
            self.launch.set_screen(self._session.environments.is_screen)
            if self._has_asked:
                self._read_schema()

    def _read_schema(self) -> None:
        launch, env_id = self.launch, self._session.environments.chosen
        chosen = (launch.runner, launch.script, launch.is_screen)
        name, script, is_screen = chosen
        if launch.draft.has_schema:
            self.read_presets()
            self.read_datasets()
            return

        def receive(schema: Mapping[str, object]) -> None:
            launch.set_schema(name, script, schema, is_screen=is_screen)
            if chosen == (launch.runner, launch.script, launch.is_screen):
                launch.start_from(self._session.environments.chosen)
            self.read_presets()
            self.read_datasets()

        self._requests.ask(
            f"The settings of {name} cannot be read",
            lambda service: service.runner_schema(name, script or None, env_id if is_screen else None),
            receive,
            key=f"schema {chosen}",
        )

    def use_recommended(self) -> None:
        """Enter the recommended settings for the chosen environment."""
        if not self.launch.start_from(self._session.environments.chosen):
            self._requests.notices.add("info", "There are no recommended settings for this environment.")

    # ------------------------------------------------------------------ datasets

    def read_datasets(self) -> None:
        """Read the list of datasets, if the form asks for one."""
        if self.launch.form.has_kind("dataset"):
            self._requests.ask(
                "The datasets cannot be listed",
                lambda service: service.datasets(),
                self.datasets.set_all,
                key="datasets",
            )

    def verify_dataset(self, dataset_id: str) -> None:
        """Compare every byte of a dataset with its manifest."""
        self.datasets.set_verifying(dataset_id)

        def fail(error: PalaestraError) -> None:
            self.datasets.set_verifying("")
            self._requests.notices.add("error", f"{dataset_id} was not verified.", str(error))

        self._requests.ask(
            f"{dataset_id} was not verified",
            lambda service: service.verify_dataset(dataset_id),
            self.datasets.update,
            key="verify dataset",
            failed=fail,
        )

    # ------------------------------------------------------------------ presets

    @property
    def preset_kind(self) -> str:
        """The kind of presets that fit the form."""
        screens = "-screens" if self.launch.is_screen else ""
        return f"train/{self.launch.runner}/{self.launch.script or 'default'}{screens}"

    def read_presets(self) -> None:
        """Read the presets of this runner and script."""
        kind = self.preset_kind
        self._requests.ask(
            "The presets cannot be listed",
            lambda service: service.presets(kind),
            lambda presets: self.presets.set_all(kind, presets),
            key="presets",
        )

    def save_preset(self, name: str) -> None:
        """Save what was entered under a name."""
        kind = self.preset_kind
        try:
            values = self.launch.form.changes()
        except ValueError as error:
            self._requests.notices.add("warning", f"The preset was not saved: {error}.")
            return
        self._requests.ask(
            "The preset was not saved",
            lambda service: service.save_preset(kind, name, values),
            lambda _: self.read_presets(),
        )

    def load_preset(self, name: str) -> None:
        """Enter the values of a preset."""
        preset = self.presets.get(self.preset_kind, name)
        if preset is not None:
            self.launch.load_values(preset.values)

    def delete_preset(self, name: str) -> None:
        """Delete a preset."""
        kind = self.preset_kind
        self._requests.ask(
            "The preset was not deleted",
            lambda service: service.delete_preset(kind, name),
            lambda _: self.read_presets(),
        )

    # ------------------------------------------------------------------ preflight and launch

    def check(self) -> None:
        """Run the preflight, and show the command that a launch would execute."""
        spec = self._build_spec()
        if spec is None:
            return
        self.launch.begin_check()
        self._requests.ask(
            "The check failed",
            lambda service: service.prepare_training(spec),
            self.launch.finish_check,
            key="preflight",
            failed=self._fail,
        )

    def start(self) -> None:
        """Launch what was checked."""
        preview = self.launch.preview
        spec = self._build_spec()
        if self.launch.refusal or preview is None or spec is None:
            return
        consent = preview.digest if preview.needs_consent else None
        self.launch.begin_launch()

        def receive(record: RunRecord) -> None:
            self.launch.finish_launch(record.run_id)
            self._requests.notices.add("success", f"{record.run_id} is {record.phase.value}.")
            self._on_launched(record)

        self._requests.ask(
            "The run was not launched",
            lambda service: service.submit(spec, consent, preview.run_id),
            receive,
            key="launch",
            failed=self._fail,
        )

    def _build_spec(self) -> RunSpec | None:
        chosen = self._session.environments
        try:
            return self.launch.build_spec(
                chosen.chosen, chosen.form.changes(), seed=chosen.seed, invoked_from=self._requests.service_directory
            )
        except ValueError as error:
            self.launch.fail(str(error))
            return None

    def _fail(self, error: PalaestraError) -> None:
        self.launch.fail(" ".join(split_error(error)).strip())
