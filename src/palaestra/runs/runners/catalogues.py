"""What runners offer: their scripts, their environments, and whether they are ready; with defaults.

A runner that declares nothing has no scripts, trains in the environments that Gymnasium has registered in its
interpreter, and is ready if that interpreter works. `RunnerWithScripts`, `RunnerWithEnvironments` and
`RunnerWithReadiness` are the methods with which it can say more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from palaestra.errors import ConfigError, PalaestraError
from palaestra.runs.catalogue import (
    EnvironmentInfo,
    Readiness,
    RunnerWithEnvironments,
    RunnerWithReadiness,
    RunnerWithScripts,
    ScriptInfo,
    TaskInfo,
)
from palaestra.runs.process.environments import list_environments, read_parameters
from palaestra.runs.process.interpreter import choose_python, probe, python_findings
from palaestra.runs.process.parameter_schema import object_schema
from palaestra.runs.runner import Finding, Machine, Runner
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

_T = TypeVar("_T")


def scripts_of(runner: Runner, spec: RunSpec, machine: Machine) -> list[ScriptInfo]:
    """The scripts or algorithms of a runner."""
    if isinstance(runner, RunnerWithScripts):
        return list(_call(runner, lambda: runner.scripts(spec, machine)))
    return []


def environments_of(runner: Runner, spec: RunSpec, machine: Machine, *, refresh: bool = False) -> list[EnvironmentInfo]:
    """The environments that a runner can train in."""
    if isinstance(runner, RunnerWithEnvironments):
        return list(_call(runner, lambda: runner.environments(spec, machine, refresh=refresh)))
    return list_environments(choose_python(spec), machine, refresh=refresh)


def environment_parameters_of(runner: Runner, env_id: str, spec: RunSpec, machine: Machine) -> JsonObject:
    """JSON Schema of the parameters of an environment of a runner."""
    if isinstance(runner, RunnerWithEnvironments):
        return _call(runner, lambda: runner.environment_parameters(env_id, spec, machine))
    return read_parameters(env_id, choose_python(spec), machine)


def readiness_of(runner: Runner, spec: RunSpec, machine: Machine) -> Readiness:
    """Whether a runner could start a run. Starts no training."""
    try:
        if isinstance(runner, RunnerWithReadiness):
            findings = list(_call(runner, lambda: runner.readiness(spec, machine)))
        else:
            interpreter = choose_python(spec)
            findings = python_findings(interpreter, probe(interpreter, machine), {}, oldest=(3, 8))
    except ConfigError as error:
        value = f"{error.value}: " if error.value not in (None, "") else ""
        findings = [Finding(error.place, "refused", f"{value}{error.reason}", error.remedy)]
    return Readiness.from_findings(findings)


def list_tasks() -> list[TaskInfo]:
    """The screen tasks of the installed suites."""
    from palaestra.sessions.suite import DescribedSuite
    from palaestra.sessions.suites import suites  # loads every suite, which listing the runners must not

    tasks = []
    for name, suite in sorted(suites().items()):
        for task in suite.names():
            properties = suite.parameters(task) if isinstance(suite, DescribedSuite) else {}
            schema = object_schema(properties) if isinstance(suite, DescribedSuite) else {"type": "object"}
            tasks.append(TaskInfo(task=f"{name}/{task}", suite=name, parameters=schema))
    return tasks


def _call(runner: Runner, method: Callable[[], _T]) -> _T:
    """Call a method of a runner. A fault in it is an error that names the runner."""
    try:
        return method()
    except PalaestraError:
        raise
    except Exception as error:
        reason = f"failed ({type(error).__name__}: {error})"
        raise ConfigError("runner", runner.name, reason, "This is a fault of the runner; see the log") from error
