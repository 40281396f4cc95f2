"""Requests about what can be trained and played: runners, their scripts and settings, environments, tasks, datasets."""

from __future__ import annotations

import os

from palaestra.runs.catalogue import DatasetInfo, EnvironmentInfo, Readiness, ScriptInfo, TaskInfo
from palaestra.runs.client.requests import ServiceRequests, quote, quote_path
from palaestra.runs.runner import RunnerCapabilities
from palaestra.runs.spec import RunSpec, resolve_environment
from palaestra.runs.wire import JsonObject, from_json


class CatalogueRequests(ServiceRequests):
    """What the client can ask about runners and environments.

    `python` is an interpreter or a virtual environment on the service's machine, as in a `RunSpec`.
    """

    def runners(self) -> dict[str, RunnerCapabilities]:
        """The runners by name."""
        runners = self.request("GET", "/runners")
        return {name: from_json(RunnerCapabilities, capabilities) for name, capabilities in runners.items()}

    def runner_schema(
        self, name: str, script: str | None = None, env: str | None = None, *, python: str | None = None
    ) -> JsonObject:
        """JSON Schema of a runner's own keys; for some runners it depends on the script and the environment."""
        path = f"/runners/{quote(name)}/schema"
        return dict(self.request("GET", path, None, script=script, env=env, **_places(name, python)))

    def runner_scripts(self, name: str, *, python: str | None = None) -> list[ScriptInfo]:
        """The scripts or algorithms of a runner."""
        rows = self.request("GET", f"/runners/{quote(name)}/scripts", None, **_places(name, python))
        return [from_json(ScriptInfo, row) for row in rows]

    def runner_readiness(self, name: str, *, python: str | None = None) -> Readiness:
        """Whether a runner could start a run, and what is missing. Starts no training."""
        path = f"/runners/{quote(name)}/readiness"
        return from_json(Readiness, self.request("GET", path, None, **_places(name, python)))

    def environments(
        self, runner: str | None = None, *, python: str | None = None, refresh: bool = False
    ) -> list[EnvironmentInfo]:
        """The environments and tasks that a runner can train in; by default those that can be played."""
        query = {"runner": runner, "refresh": refresh or None, **_places(runner, python)}
        return [from_json(EnvironmentInfo, row) for row in self.request("GET", "/environments", None, **query)]

    def environment_parameters(
        self, env_id: str, runner: str | None = None, *, python: str | None = None
    ) -> JsonObject:
        """JSON Schema of the parameters of an environment or task."""
        path = f"/environments/{quote_path(env_id)}/parameters"
        return dict(self.request("GET", path, None, runner=runner, **_places(runner, python)))

    def tasks(self) -> list[TaskInfo]:
        """The screen tasks."""
        return [from_json(TaskInfo, row) for row in self.request("GET", "/tasks")]

    def datasets(self, *, env: str | None = None) -> list[DatasetInfo]:
        """The datasets to learn from, with the state of their files."""
        return [from_json(DatasetInfo, row) for row in self.request("GET", "/datasets", None, env=env)]

    def verify_dataset(self, dataset_id: str) -> DatasetInfo:
        """Compare every byte of a dataset with its manifest; its `state` and `problem` hold the result."""
        path = f"/datasets/{quote_path(dataset_id)}/verify"
        return from_json(DatasetInfo, self.request("POST", path))


def _places(runner: str | None, python: str | None) -> dict[str, str | None]:
    """The checkout and the interpreter that this process would send with a run of the runner."""
    spec = resolve_environment(RunSpec(runner=runner or "palaestra", python=python), os.environ)
    return {"checkout": spec.checkout, "python": spec.python}
