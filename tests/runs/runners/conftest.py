"""Paths, a machine, and running a plan the way the service does: that argv, that environment, that directory."""

import os
import subprocess
import venv
from pathlib import Path

import pytest

from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.runs.runner import AttemptPaths, LaunchPlan, Machine


@pytest.fixture
def paths(tmp_path) -> AttemptPaths:
    return make_paths(tmp_path)


def make_paths(directory: Path) -> AttemptPaths:
    run = Home(directory / "home" / "var" / "training").run("a-run")
    attempt = run.attempt(1)
    return AttemptPaths("a-run", 1, run.path, attempt.path, attempt.work)


@pytest.fixture
def machine() -> Machine:
    return Machine(environment=dict(os.environ), free_disk_bytes=10**12)


def prepare(plan: LaunchPlan) -> Attempt:
    """What the service does before it starts the command."""
    attempt = Attempt(plan.paths.attempt_dir)
    attempt.work.mkdir(parents=True)
    attempt.scratch.mkdir()
    for name, text in plan.files.items():
        path = attempt.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return attempt


def start(plan: LaunchPlan) -> subprocess.Popen[bytes]:
    attempt = prepare(plan)
    with open(attempt.stdout, "wb") as log:
        return subprocess.Popen(
            plan.argv, env=dict(plan.environment), cwd=plan.cwd, stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def run(plan: LaunchPlan, timeout_s: float = 120) -> tuple[int, str]:
    """Exit code and output of the whole command."""
    with start(plan) as process:
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
    return code, Path(Attempt(plan.paths.attempt_dir).stdout).read_text(errors="replace")


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory) -> str:
    """An interpreter without packages."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False)
    return str(directory / "bin" / "python")
