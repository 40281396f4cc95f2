"""The environment variables and the interpreter of a trainer."""

import sys
import venv
from pathlib import Path

import pytest

from palaestra.errors import ConfigError
from palaestra.runs.process import interpreter as module
from palaestra.runs.process.interpreter import (
    Interpreter,
    ProbedParameter,
    choose_python,
    environment_findings,
    probe,
    python_findings,
    trainer_environment,
)
from palaestra.runs.runner import Machine
from palaestra.runs.spec import RunSpec

HERE = Interpreter(sys.executable, "this one")


def test_the_environment_is_built_from_names_and_not_inherited(paths):
    shell = {
        "PATH": "/bin", "LC_ALL": "C", "https_proxy": "http://p", "WANDB_API_KEY": "k", "CUDA_HOME": "/c", "LANG": "C",
        "OMP_NUM_THREADS": "4", "AWS_SECRET_ACCESS_KEY": "s", "PYTHONPATH": "/mine", "PALAESTRA_TOKEN": "t",
        "CUDA_VISIBLE_DEVICES": "0,1", "HTTP_COOKIE": "c", "EDITOR": "vi",
    }  # fmt: skip

    found = trainer_environment(RunSpec(gpus=1), paths, Machine(shell, 0, gpus=("3", "4")))

    assert {key: value for key, value in found.items() if key in shell} == {
        "PATH": "/bin", "LC_ALL": "C", "https_proxy": "http://p", "WANDB_API_KEY": "k", "CUDA_HOME": "/c", "LANG": "C",
        "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "3",
    }  # fmt: skip
    assert found["PALAESTRA_HOME"] == str(paths.run_dir.parents[3])
    assert found["TMPDIR"] == str(paths.attempt_dir / "tmp")
    assert (found["PYTHONUNBUFFERED"], found["SDL_NO_SIGNAL_HANDLERS"], found["PYTHONHASHSEED"]) == ("1", "1", "0")


def test_without_gpus_none_is_visible_and_one_thread_is_the_default(paths):
    found = trainer_environment(RunSpec(), paths, Machine({}, 0, gpus=("0",)))

    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == ("", "1")


def test_a_wish_changes_a_default_but_not_what_the_runner_needs(paths):
    spec = RunSpec(environment={"OMP_NUM_THREADS": "3", "PYTHONPATH": "/envs", "WANDB_MODE": "online"})

    found = trainer_environment(spec, paths, Machine({}, 0), {"PYTHONPATH": "/shim:/checkout", "WANDB_MODE": "offline"})

    assert found["OMP_NUM_THREADS"] == "3"
    assert found["PYTHONPATH"] == "/shim:/checkout:/envs"
    assert found["WANDB_MODE"] == "offline"


def test_the_interpreter_is_the_given_one_the_checkouts_own_or_ours(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    venv.create(checkout / ".venv", with_pip=False, symlinks=True)
    venv.create(checkout / "elsewhere", with_pip=False, symlinks=True)
    own = str(checkout / ".venv" / "bin" / "python")

    assert choose_python(RunSpec()).path == sys.executable
    assert choose_python(RunSpec(), checkout).path == own
    assert choose_python(RunSpec(python=str(checkout / ".venv"))).path == own
    assert choose_python(RunSpec(python="checkout/.venv/bin/python", invoked_from=tmp_path)).path == own
    assert Path(choose_python(RunSpec(python="python3")).path).name == "python3"
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", "elsewhere")
    assert choose_python(RunSpec(), checkout).path == str(checkout / "elsewhere" / "bin" / "python")


@pytest.mark.parametrize("given", ["", " ", "no-such-python", "/nowhere/bin/python", "/etc", "/etc/passwd"])
def test_an_interpreter_that_is_not_there_is_refused(given):
    with pytest.raises(ConfigError) as refused:
        choose_python(RunSpec(python=given))
    assert (refused.value.place, refused.value.value) == ("python", given)


def test_a_probe_tells_versions_environment_and_arguments(machine):
    found = probe(
        HERE, machine, packages=("gymnasium", "no-such-package"), env_id="Pendulum-v1", signature_of="json:JSONEncoder"
    )

    assert found.version == tuple(sys.version_info[:3])
    assert (found.at_least("gymnasium", 1), found.at_least("gymnasium", 99)) == (True, False)
    assert found.packages["no-such-package"] is None
    assert found.at_least("no-such-package", 0) is False
    assert found.env_signature["action_space"] == {
        "type": "Box", "shape": [1], "dtype": "float32", "low": -2.0, "high": 2.0,
    }  # fmt: skip
    assert found.env_signature["observation_space"]["low"] == [-1.0, -1.0, -8.0]
    assert found.arguments["allow_nan"] == ProbedParameter(default=True, required=False, kind="bool")
    assert [finding.level for finding in environment_findings(found, "Pendulum-v1")] == ["ok"]


def test_an_answer_is_remembered_until_the_packages_change(machine, tmp_path, monkeypatch):
    venv.create(tmp_path / "one", with_pip=False, symlinks=True)
    there = choose_python(RunSpec(python=str(tmp_path / "one")))
    asked = []
    real = module._run_probe
    monkeypatch.setattr(module, "_run_probe", lambda *words: asked.append(words) or real(*words))

    probe(there, machine, packages=("torch",))
    probe(there, machine, packages=("torch",))
    assert len(asked) == 1
    (packages,) = (tmp_path / "one").glob("lib/python3*/site-packages")
    (packages / "new.pth").write_text("")
    probe(there, machine, packages=("torch",))
    assert len(asked) == 2


def test_an_old_or_broken_interpreter_is_refused_with_its_version(machine, tmp_path):
    found = probe(HERE, machine)
    (old,) = python_findings(HERE, found, {}, oldest=(9, 9))
    liar = tmp_path / "python"
    liar.write_text("#!/bin/sh\necho hello\nexit 3\n")
    liar.chmod(0o755)
    wrong = Interpreter(str(liar), "as given")
    (broken,) = python_findings(wrong, probe(wrong, machine), {}, oldest=(3, 8))

    assert (old.level, f"{sys.version_info[0]}.{sys.version_info[1]}" in old.text) == ("refused", True)
    assert "older than 9.9" in old.text
    assert (broken.level, "exit code 3" in broken.text) == ("refused", True)


def test_looking_writes_nothing(machine, tmp_path):
    venv.create(tmp_path / "one", with_pip=False, symlinks=True)
    before = sorted(tmp_path.rglob("*"))

    probe(choose_python(RunSpec(python=str(tmp_path / "one"))), machine, packages=("torch",), env_id="CartPole-v1")

    assert sorted(tmp_path.rglob("*")) == before
