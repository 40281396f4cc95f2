"""The environment that the user has chosen (which one, its parameters, its seed), and the datasets to learn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from palaestra.runs.catalogue import DatasetInfo, EnvironmentInfo
from palaestra.studio.model.commands import match_score
from palaestra.studio.model.form import Form
from palaestra.studio.model.revision import Revised

DEFAULT = "CartPole-v1"
_FAVOURITES = ("CartPole-v1", "LunarLander-v3", "FrozenLake-v1", "Pendulum-v1", "MountainCar-v0", "Taxi-v4")
"""Shown first: they need little and show what a play is."""


class EnvironmentsModel(Revised):
    """The catalogue of environments and tasks, and the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.all: tuple[EnvironmentInfo, ...] = ()
        self.chosen = DEFAULT
        self.seed = 0
        self.form = Form()
        """The parameters of the chosen environment; without fields until they are known."""
        self.problem = ""
        self._wanted: dict[str, Any] = {}

    @property
    def info(self) -> EnvironmentInfo | None:
        """The chosen environment; None if it is not in the catalogue, as an address of the user is not."""
        return next((one for one in self.all if one.env_id == self.chosen), None)

    @property
    def is_screen(self) -> bool:
        """Whether a screen task is chosen."""
        return self.info is not None and self.info.kind == "screen"

    def set_catalogue(self, environments: Sequence[EnvironmentInfo]) -> None:
        """The catalogue has arrived."""
        order = {name: index for index, name in enumerate(_FAVOURITES)}
        self.all = tuple(
            sorted(
                environments,
                key=lambda one: (order.get(one.env_id, len(order)), not one.installed, one.group, one.env_id),
            )
        )
        self.touch()

    def choose(self, env_id: str, parameters: Mapping[str, Any] | None = None) -> bool:
        """Choose an environment; whether it is another one."""
        env_id = env_id.strip()
        if not env_id or (env_id == self.chosen and parameters is None):
            return False
        is_other = env_id != self.chosen
        self.chosen, self.problem = env_id, ""
        self._wanted = dict(parameters or {})
        if is_other:
            self.form = Form()
        else:
            self.form.load(self._wanted)
        self.touch()
        return is_other

    def set_schema(self, env_id: str, schema: Mapping[str, Any]) -> None:
        """The parameters of an environment have arrived."""
        if env_id == self.chosen:
            self.form.set_schema(schema)
            if self._wanted:
                self.form.load(self._wanted)
                self._wanted = {}  # the same schema may arrive again, and must not undo what the user enters
            self.problem = ""
            self.touch()

    def fail(self, env_id: str, problem: str) -> None:
        """The parameters of an environment could not be read."""
        if env_id == self.chosen:
            self.problem = problem
            self.touch()

    def edit(self, name: str, text: str) -> None:
        """Enter a parameter."""
        self.form.set_text(name, text)
        self.touch()

    def set_seed(self, seed: int) -> None:
        """Change the seed of the next play."""
        self.seed = max(0, min(seed, 2**31 - 1))
        self.touch()

    def search(self, text: str, limit: int = 200) -> list[EnvironmentInfo]:
        """The environments that match what was typed, best first."""
        if not text.strip():
            return list(self.all[:limit])
        scored = []
        for order, one in enumerate(self.all):
            score = match_score(text, f"{one.env_id} {one.group}")
            if score is not None:
                scored.append((-score - (5.0 if one.installed else 0.0), order, one))
        return [one for _, _, one in sorted(scored, key=lambda entry: entry[:2])[:limit]]


class DatasetsModel(Revised):
    """The datasets of the service."""

    STATES: ClassVar[dict[str, tuple[str, str]]] = {
        "verified": ("verified", "success"),
        "unchecked": ("not verified", "warning"),
        "damaged": ("damaged", "danger"),
        "unverified": ("no manifest", "danger"),
    }
    """Word and tone of the badge of each state."""

    def __init__(self) -> None:
        super().__init__()
        self.all: tuple[DatasetInfo, ...] = ()
        self.verifying_id = ""
        """Id of the dataset that is being verified; empty if there is none."""

    def set_all(self, datasets: Sequence[DatasetInfo]) -> None:
        """The list of datasets has arrived."""
        if tuple(datasets) != self.all:
            self.all = tuple(datasets)
            self.touch()

    def set_verifying(self, dataset_id: str) -> None:
        """Set the dataset whose bytes are being compared with its manifest; an empty id: none."""
        self.verifying_id = dataset_id
        self.touch()

    def update(self, info: DatasetInfo) -> None:
        """A dataset was verified."""
        self.verifying_id = ""
        self.all = tuple(info if one.dataset_id == info.dataset_id else one for one in self.all)
        self.touch()

    def get(self, dataset_id: str) -> DatasetInfo | None:
        """A dataset by its id."""
        return next((one for one in self.all if one.dataset_id == dataset_id), None)

    def for_environment(self, env_id: str) -> tuple[list[DatasetInfo], list[DatasetInfo]]:
        """The datasets of an environment and those of unknown origin, and all others."""
        name = env_id.removeprefix("compiled/")
        fitting = [one for one in self.all if one.env_id in ("", name)]
        return fitting, [one for one in self.all if one.env_id not in ("", name)]

    @staticmethod
    def problem(info: DatasetInfo) -> str:
        """Why a dataset cannot be learned from; empty if it can."""
        return info.problem or "It cannot be read" if info.state in ("damaged", "unverified") else ""
