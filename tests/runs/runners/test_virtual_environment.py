"""Environments that runners create on first use: complete or absent, once, and refused where there is no index."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from palaestra.runs.process.virtual_environment import LOCATION_VARIABLE, MARKER, RunnerEnvironment
from palaestra.runs.runner import Machine
from palaestra.runs.runners.spade_bdi import SpadeBdiRunner
from palaestra.runs.spec import RunSpec

CLOSED = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_RETRIES": "0",
}
"""An index at a port of this machine where nothing listens."""


def _environment(tmp_path, *pins):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("".join(f"{pin}\n" for pin in pins))
    return RunnerEnvironment("trial", requirements, size_mb=1)


def _machine(tmp_path, **variables):
    return Machine({**os.environ, LOCATION_VARIABLE: str(tmp_path / "environments"), **variables}, 10**12)


def test_two_processes_create_it_once_and_both_run_in_it(tmp_path):
    # Without packages it needs no index.
    environment, machine = _environment(tmp_path), _machine(tmp_path)
    assert not environment.is_ready(machine)
    command = [*environment.command(machine, None), "-c", "import sys; print(sys.prefix)"]

    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]

    directory = str(environment.directory(machine))
    assert [process.returncode for process in processes] == [0, 0]
    assert [output.splitlines()[-1] for output in outputs] == [directory, directory]
    assert sum("created" in output for output in outputs) == 1
    assert environment.is_ready(machine)
    assert json.loads((environment.directory(machine) / MARKER).read_text())["requirements"] == []
    left = sorted(path.name for path in (tmp_path / "environments").iterdir())
    assert left == [f".{environment.directory(machine).name}.lock", environment.directory(machine).name]
    (finding,) = environment.findings(machine)
    assert finding.level == "ok"


def test_without_an_index_nothing_is_left_and_the_last_line_is_the_reason(tmp_path):
    environment, machine = _environment(tmp_path, "greenlet==3.5.6"), _machine(tmp_path)
    command = [*environment.command(machine, None), "-c", "pass"]

    done = subprocess.run(command, env={**os.environ, **CLOSED}, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert "cannot be created: No matching distribution found for greenlet==3.5.6" in last
    assert "PIP_INDEX_URL" in last
    assert [path.name for path in (tmp_path / "environments").iterdir() if not path.name.endswith(".lock")] == []


def test_nothing_is_left_of_a_creation_that_is_stopped(tmp_path):
    environment, machine = _environment(tmp_path, "greenlet==3.5.6"), _machine(tmp_path)
    command = [*environment.command(machine, None), "-c", "pass"]
    # An index that accepts a connection and answers nothing: pip waits for it.
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(120)
        url = {"PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple", "no_proxy": "127.0.0.1"}
        creator = subprocess.Popen(
            command, env={**os.environ, **CLOSED, **url}, stdout=subprocess.DEVNULL, start_new_session=True
        )
        with index.accept()[0]:
            during = [path.name for path in (tmp_path / "environments").iterdir() if path.suffix == ".new"]
            os.killpg(creator.pid, signal.SIGTERM)
            code = creator.wait(60)

    assert len(during) == 1
    assert code == 130
    assert [path.suffix for path in (tmp_path / "environments").iterdir()] == [".lock"]


def test_other_pins_are_another_environment(tmp_path):
    machine = _machine(tmp_path)
    first = _environment(tmp_path, "a==1").directory(machine)

    assert _environment(tmp_path, "a==2").directory(machine) != first


def test_a_machine_without_an_index_is_told_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    spec = RunSpec(runner="spade-bdi", env_id="FrozenLake-v1")

    findings = SpadeBdiRunner().preflight(spec, _machine(tmp_path, **CLOSED))

    (refused,) = [one for one in findings if one.level == "refused"]
    assert refused.check == "python"
    assert "does not exist and cannot be created: No matching distribution found" in refused.text
    assert "PIP_INDEX_URL" in refused.remedy
    assert "--python" in refused.remedy
    (missing,) = [one for one in SpadeBdiRunner().readiness(spec, _machine(tmp_path, **CLOSED)) if one.level != "ok"]
    assert missing.check == "python"
    assert not (tmp_path / "environments").exists(), "a preflight creates nothing"


def test_too_little_space_for_the_environment_is_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    measured = []

    def measure(path):
        measured.append(Path(path))
        return SimpleNamespace(free=229 * 10**6)

    monkeypatch.setattr("shutil.disk_usage", measure)
    spec = RunSpec(runner="spade-bdi", env_id="FrozenLake-v1")

    # Much is free where runs are stored; the environment lies elsewhere.
    findings = SpadeBdiRunner().preflight(spec, _machine(tmp_path))

    (refused,) = [one for one in findings if one.level == "refused"]
    assert refused.check == "disk"
    assert f"needs about 230 MB, and 229 MB are free at {tmp_path}" in refused.text
    assert LOCATION_VARIABLE in refused.remedy
    assert measured == [tmp_path]


def test_plans_that_nothing_could_check_yet_are_a_warning_with_the_command_that_prepares_the_check(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    monkeypatch.setattr("palaestra.runs.process.virtual_environment._find_index_fault", lambda *_: "")
    spec = RunSpec(runner="spade-bdi", env_id="FrozenLake-v1")

    findings = SpadeBdiRunner().preflight(spec, _machine(tmp_path))

    (warning,) = [one for one in findings if one.level != "ok"]
    assert (warning.level, warning.check) == ("warning", "asl")
    assert "only when the run starts" in warning.text
    assert warning.remedy == "palaestra runners --prepare spade-bdi"


def test_an_error_in_plans_is_refused_with_its_line_before_the_environment_exists(tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    (tmp_path / "plans.asl").write_text("!live.\n+!live <- .begin_episode; .do(1\n")
    spec = RunSpec(runner="spade-bdi", env_id="FrozenLake-v1", config={"asl": "plans.asl"}, invoked_from=tmp_path)

    findings = SpadeBdiRunner().preflight(spec, _machine(tmp_path))

    (refused,) = [one for one in findings if one.level == "refused"]
    assert refused.check == "asl"
    assert refused.text == f"{tmp_path}/plans.asl:2: ( is not closed before the end of the file"


def test_an_interpreter_without_the_packages_is_refused_with_the_command_that_installs_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    spec = RunSpec(runner="spade-bdi", env_id="FrozenLake-v1", python=sys.executable)

    findings = SpadeBdiRunner().preflight(spec, _machine(tmp_path))

    (refused,) = [one for one in findings if one.level == "refused"]
    assert "No module named 'agentspeak'" in refused.text
    assert "requirements.txt" in refused.remedy


@pytest.mark.parametrize("name", ["PIP_INDEX_URL", "PIP_TRUSTED_HOST"])
def test_the_program_does_not_inherit_the_variables_of_pip(tmp_path, name):
    environment, machine = _environment(tmp_path), _machine(tmp_path)
    directory = environment.directory(machine)
    (directory / "bin").mkdir(parents=True)
    (directory / MARKER).write_text("{}")
    (directory / "bin" / "python").symlink_to(sys.executable)
    command = [*environment.command(machine, None), "-c", "import os; print(sorted(os.environ))"]

    done = subprocess.run(command, env={**os.environ, name: "x"}, capture_output=True, text=True, check=True)

    assert name not in done.stdout
    assert "PATH" in done.stdout
