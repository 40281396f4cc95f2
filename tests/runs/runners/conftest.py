"""Paths, a machine, and running a plan the way the service does: that argv, that environment, that directory."""

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from tests.runs.runners.corl_data import DATASET, make_short_spec, read_events, write_dataset

from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.runs.runner import AttemptPaths, LaunchPlan, Machine
from palaestra.runs.runners.corl import CorlRunner


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


@pytest.fixture(scope="session")
def stored_dataset(tmp_path_factory):
    return write_dataset(Home(tmp_path_factory.mktemp("offline") / "var" / "training").datasets)


@pytest.fixture
def corl_home(stored_dataset, monkeypatch):
    """A state directory with the dataset in it."""
    base = stored_dataset.parents[4]
    monkeypatch.setenv("PALAESTRA_HOME", str(base))
    return Home(base / "var" / "training")


@pytest.fixture
def own_corl_home(stored_dataset, monkeypatch, tmp_path):
    """A state directory with a copy of the dataset, which a test may damage."""
    home = Home(tmp_path / "own" / "var" / "training")
    shutil.copytree(stored_dataset, home.datasets / DATASET)
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path / "own"))
    return home


@pytest.fixture(scope="session")
def corl_run(stored_dataset, tmp_path_factory):
    """A finished run: its plan, its output and its events."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALAESTRA_HOME", str(stored_dataset.parents[4]))
        machine = Machine(environment=dict(os.environ), free_disk_bytes=10**12)
        spec = make_short_spec(seed=3, config={"metrics_every": 10, "learning_rate": 1e-5, "betas": [0.8, 0.9]})
        plan = CorlRunner().plan(spec, make_paths(tmp_path_factory.mktemp("trained")), machine)
        code, output = run(plan)
    assert code == 0, output
    return spec, plan, output, read_events(plan)
