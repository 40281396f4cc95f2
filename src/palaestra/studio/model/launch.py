"""Training a new policy: which runner and script, its form, the preflight, consent, and the launch.

Each pair of runner and script keeps a draft of its own, so that looking at another one loses nothing.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.runs.catalogue import Readiness, ScriptInfo
from palaestra.runs.runner import Finding, LaunchPreview, RunnerCapabilities
from palaestra.runs.spec import RunSpec
from palaestra.studio.model.form import Form, fields_of
from palaestra.studio.model.revision import Revised

if TYPE_CHECKING:
    from palaestra.runs.presets import Preset

Stage: TypeAlias = Literal["editing", "checking", "checked", "launching"]
_POLITE_NICE = 10
"""CPU niceness of runs that share the machine with the window."""
# Keys that the environment chooser and the options of the run set, by runner.
_KEYS_SET_ELSEWHERE = {
    "palaestra": (
        "name",
        "experiment_name",
        "env.id",
        "tasks",
        "trainer.seed",
        "telemetry.progress",
        "telemetry.wandb",
    ),
    "cleanrl": ("env_id", "seed", "track"),
    "corl": ("checkout", "checkpoints_path", "device"),
}
_PARAMETER_KEYS = ("env.kwargs", "env_kwargs")
"""Where a runner may take the parameters of the environment."""
_MODEL_KEY, _SMALL_MODEL = "model.name", "tiny"
"""The model of screen tasks that is entered first: it needs no download, and trains on a CPU."""


@dataclass(frozen=True)
class RunOptions:
    """What a run has beside the configuration of its trainer."""

    name: str = ""
    tags: tuple[str, ...] = ()
    seed: int | None = None
    gpus: int = 0
    nice: int = _POLITE_NICE
    video: bool = False
    track: str = "off"
    warm_start: str = ""
    """Id of a checkpoint; empty for new weights."""


@dataclass
class Draft:
    """What the user has entered for one runner and script."""

    form: Form = field(default_factory=Form)
    options: RunOptions = field(default_factory=RunOptions)
    has_schema: bool = False
    parameters_key: str = ""
    """Key of the parameters of the environment; empty when the runner takes none."""


class LaunchModel(Revised):
    """The state of `Train new`."""

    def __init__(self) -> None:
        super().__init__()
        self.runners: dict[str, RunnerCapabilities] = {}
        self.readiness: dict[str, Readiness] = {}
        self.scripts: dict[str, tuple[ScriptInfo, ...]] = {}
        self.runner = ""
        self.script = ""
        self.is_screen = False
        """Whether the chosen environment is a screen task, for which a runner has other scripts and settings."""
        self.stage: Stage = "editing"
        self.preview: LaunchPreview | None = None
        self.has_consent = False
        self.problem = ""
        """Why the preflight or the launch could not be made; empty otherwise."""
        self.launched = ""
        """Id of the run that was launched last."""
        self._drafts: dict[tuple[str, str, bool], Draft] = {}
        self._last_scripts: dict[str, str] = {}

    # ------------------------------------------------------------------ choices

    @property
    def capabilities(self) -> RunnerCapabilities | None:
        """The capabilities of the chosen runner."""
        return self.runners.get(self.runner)

    @property
    def draft(self) -> Draft:
        """What was entered for the chosen runner and script."""
        return self._drafts.setdefault((self.runner, self.script, self.is_screen), Draft())

    @property
    def form(self) -> Form:
        """The form of the chosen runner and script."""
        return self.draft.form

    def set_runners(self, runners: Mapping[str, RunnerCapabilities]) -> None:
        """The catalogue of runners has arrived."""
        # Our own trainer first, the one for trials last.
        order = {"palaestra": 0, "echo": 2}
        self.runners = dict(sorted(runners.items(), key=lambda entry: (order.get(entry[0], 1), entry[0])))
        if self.runner not in self.runners:
            self.runner = "palaestra" if "palaestra" in self.runners else next(iter(self.runners), "")
            self.script = ""
            self._invalidate()
        self.touch()

    def set_readiness(self, runner: str, readiness: Readiness) -> None:
        """Whether a runner could start here."""
        self.readiness[runner] = readiness
        self.touch()

    def set_scripts(self, runner: str, scripts: Sequence[ScriptInfo]) -> None:
        """The scripts of a runner have arrived."""
        self.scripts[runner] = tuple(scripts)
        self._keep_script()
        self.touch()

    def set_screen(self, is_screen: bool) -> None:
        """Another kind of environment was chosen."""
        if is_screen != self.is_screen:
            self.is_screen = is_screen
            self._keep_script()
            self._invalidate()

    def available_scripts(self) -> tuple[ScriptInfo, ...]:
        """The scripts of the chosen runner that can learn in the chosen kind of environment."""
        scripts = self.scripts.get(self.runner, ())
        if self.is_screen:
            return tuple(one for one in scripts if not one.actions or "screen" in one.actions)
        return tuple(one for one in scripts if one.actions != ("screen",))

    def _keep_script(self) -> None:
        """Choose another script if the chosen one is not available."""
        names = [one.name for one in self.available_scripts()]
        if self.runner in self.scripts and self.script not in names:
            self.script = names[0] if names else ""
            self._invalidate()

    def choose_runner(self, runner: str) -> None:
        """Choose a runner, with the script that was chosen for it last."""
        if runner in self.runners and runner != self.runner:
            self.runner = runner
            first = next((one.name for one in self.available_scripts()), "")
            self.script = self._last_scripts.get(runner, first)
            self._keep_script()
            self._invalidate()

    def choose_script(self, script: str) -> None:
        """Choose a script or an algorithm."""
        if script != self.script:
            self.script = self._last_scripts[self.runner] = script
            self._invalidate()

    def set_schema(self, runner: str, script: str, schema: Mapping[str, Any], *, is_screen: bool = False) -> None:
        """The form of a runner and script has arrived."""
        draft = self._drafts.setdefault((runner, script, is_screen), Draft())
        paths = {one.path for one in fields_of(schema)}
        draft.parameters_key = next((key for key in _PARAMETER_KEYS if key in paths), "")
        draft.form.set_schema(schema, hidden=(*_KEYS_SET_ELSEWHERE.get(runner, ()), draft.parameters_key))
        draft.has_schema = True
        _enter_model(draft.form)
        self.touch()

    def change_options(self, **changes: Any) -> None:
        """Change what a run has beside its configuration."""
        self.draft.options = replace(self.draft.options, **changes)
        self._invalidate()

    def edit(self, path: str, text: str) -> None:
        """Enter a text into the form."""
        self.form.set_text(path, text)
        self._invalidate()

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Enter the values of a preset or of another run."""
        self.form.load(values)
        _enter_model(self.form)
        self._invalidate()

    def start_from(self, env_id: str) -> bool:
        """Enter the recommended settings for an environment; whether there are some."""
        values = starting_point(self.runner, env_id, self.script)
        if not values or not self.draft.has_schema:
            return False
        self.load_values(values)
        return True

    # ------------------------------------------------------------------ preflight and launch

    def build_spec(
        self, env_id: str, parameters: Mapping[str, Any], *, seed: int, invoked_from: Path | None = None
    ) -> RunSpec:
        """The request for the run. `ValueError` names the first value that cannot be used.

        `invoked_from` is a directory on the machine of the service.
        """
        options = self.draft.options
        config = self.form.changes()
        if self.is_screen:
            config["tasks"] = [{"task": env_id, **({"params": dict(parameters)} if parameters else {})}]
        elif parameters:
            self._place_parameters(config, env_id, parameters)
        fields = {
            "runner": self.runner,
            "script": self.script or None,
            "name": options.name,
            "config": config,
            "env_id": None if self.is_screen else env_id,
            "seed": options.seed if options.seed is not None else seed,
            "gpus": options.gpus,
            "nice": options.nice,
            "video": options.video,
            "track": options.track,
            "warm_start": options.warm_start or None,
            "tags": options.tags,
            "invoked_from": invoked_from or Path.cwd(),
        }
        try:
            return parse_section(RunSpec, fields)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    def _place_parameters(self, config: dict[str, Any], env_id: str, parameters: Mapping[str, Any]) -> None:
        *parents, last = self.draft.parameters_key.split(".")
        if not last:
            raise ValueError(
                f"{', '.join(parameters)} of {env_id}: {self.runner} takes no parameters of environments. "
                "Clear them, or choose another trainer."
            )
        for parent in parents:
            config = config.setdefault(parent, {})
        config[last] = dict(parameters)

    def begin_check(self) -> None:
        """A preflight was requested."""
        self.stage, self.problem, self.preview, self.has_consent = "checking", "", None, False
        self.form.clear_remarks()
        self.touch()

    def finish_check(self, preview: LaunchPreview) -> None:
        """The preflight has answered; its findings about fields are shown beside them.

        An answer about values that the user has changed meanwhile is out of date.
        """
        if self.stage != "checking":
            return
        self.stage, self.preview = "checked", preview
        for finding in preview.findings:
            if finding.level == "refused":
                self._place_finding(finding)
        self.touch()

    def fail(self, text: str) -> None:
        """The preflight or the launch could not be made."""
        self.stage, self.problem = "editing", text
        self.touch()

    def set_consent(self, given: bool) -> None:
        """The user agrees, or no longer agrees, to the command."""
        self.has_consent = given
        self.touch()

    def begin_launch(self) -> None:
        """A launch was requested."""
        self.stage = "launching"
        self.touch()

    def finish_launch(self, run_id: str) -> None:
        """The run is queued."""
        self.launched, self.stage, self.preview, self.has_consent = run_id, "editing", None, False
        self.touch()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the last preflight."""
        return self.preview.findings if self.preview is not None else ()

    @property
    def refusal(self) -> str:
        """Why Launch is disabled; empty when it is not."""
        if not self.runner:
            return "Choose a trainer"
        problems = self.form.problems()
        if problems:
            path, reason = next(iter(problems.items()))
            return f"{path} {reason}"
        if self.stage == "checking":
            return "Checking …"
        if self.stage == "launching":
            return "Launching …"
        if self.preview is None:
            return "Check it first"
        if self.preview.command is None:
            return "The check found something to fix"
        if self.preview.needs_consent and not self.has_consent:
            return "Agree to the command first"
        return ""

    def _place_finding(self, finding: Finding) -> None:
        # Findings about a key begin with it: `trainer.seed = -1: must be …`.
        place, _, rest = finding.text.partition(" = ")
        one = self.form.find_field(place)
        if one is not None and rest:
            key = "" if one.path == place else f"{place.removeprefix(f'{one.path}.')}: "
            reason = f"{key}{_skip_value(rest)}"
            self.form.add_remark(one.path, f"{reason}. {finding.remedy}".rstrip(". ") if finding.remedy else reason)

    def _invalidate(self) -> None:
        """What was checked is no longer what would be launched."""
        if self.stage != "launching":
            self.stage = "editing"
        self.preview, self.has_consent, self.problem = None, False, ""
        self.touch()


class PresetsModel(Revised):
    """Named sets of values of forms, by the kind of the form."""

    def __init__(self) -> None:
        super().__init__()
        self._presets: dict[str, tuple[Preset, ...]] = {}

    def set_all(self, kind: str, presets: Sequence[Preset]) -> None:
        """The presets of a kind have arrived."""
        self._presets[kind] = tuple(presets)
        self.touch()

    def names(self, kind: str) -> list[str]:
        """The names of the presets of a kind."""
        return [preset.name for preset in self._presets.get(kind, ())]

    def get(self, kind: str, name: str) -> Preset | None:
        """A preset by its name."""
        return next((preset for preset in self._presets.get(kind, ()) if preset.name == name), None)


def _enter_model(form: Form) -> None:
    if _MODEL_KEY in form.fields and not form.text(_MODEL_KEY):
        form.set_text(_MODEL_KEY, _SMALL_MODEL)


def _skip_value(text: str) -> str:
    """The reason of `value: reason`; the value is a Python literal, which may hold a colon itself."""
    end = text.find(": ")
    while end >= 0:
        try:
            ast.literal_eval(text[:end])
        except (ValueError, SyntaxError):
            end = text.find(": ", end + 1)
        else:
            return text[end + 2 :]
    return text


@cache
def _starting_points() -> dict[str, dict[str, dict[str, Any]]]:
    text = (files("palaestra.studio") / "starting_points.json").read_text(encoding="utf-8")
    points: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return points


def starting_point(runner: str, env_id: str, script: str = "") -> dict[str, Any]:
    """Recommended settings of a runner and script for an environment; empty when there are none."""
    points = _starting_points()
    known = points.get(f"{runner}/{script}") or points.get(runner, {})
    values = known.get(env_id, {})
    if script and values.get("algorithm", {}).get("name", script) != script:
        values = {}  # those of another algorithm
    return values or known.get("*", {})
