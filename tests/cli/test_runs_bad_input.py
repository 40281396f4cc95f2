"""Invalid runs are refused on one line with a remedy, before anything is launched or written."""

import json
import os
import subprocess
import sys

import pytest
from tests.runs.serving import service_thread

from palaestra.files.home import Home
from palaestra.runs import TrainerService


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One service for all tests, because none of them leaves state behind."""
    home = Home(tmp_path_factory.mktemp("refused").resolve() / "var" / "training")
    with service_thread(home):
        yield home
        assert os.listdir(home.runs) == []


@pytest.fixture
def start(palaestra, home, monkeypatch):
    def call(*words):
        monkeypatch.setenv("PALAESTRA_HOME", str(home.base))
        return palaestra("runs", "start", *words)

    return call


# Not pydantic: typer itself loads it.
FORBIDDEN = [
    "numpy", "torch", "http.client", "rich", "yaml", "fastapi", "uvicorn", "gymnasium", "asyncio", "palaestra.config",
    "palaestra.runs.supervisor.supervisor", "palaestra.runs.client.client", "palaestra.train",
]  # fmt: skip

REFUSED = {
    "an unknown runner": (["--runner", "ecko"], "Did you mean 'echo'?"),
    "an unknown key": (["--runner", "echo", "stepps=3"], "steps"),
    "a value of the wrong kind": (["--runner", "echo", "steps=many"], "steps"),
    "a script that is not there": (["--runner", "cleanrl", "--script", "dqn", "checkout=/nowhere"], "git clone"),
    "no configuration": ([], "Try: palaestra runs start cartpole"),
    "a file that is not there": (["cartpol.yaml"], "cannot be read"),
    "an environment that does not exist": (["env.id=CartPol-v1"], "CartPole-v1"),
    "an interpreter that is not there": (["env.id=CartPole-v1", "--python", "/no/python"], "/no/python"),
    "more GPUs than there are": (["--runner", "echo", "--gpus", 64], "fewer with --gpus"),
    "a GPU that is no number": (["--runner", "echo", "--gpus", 65], "--gpus"),
    "video that the runner cannot": (["--runner", "echo", "--video"], "Leave --video out"),
    "tracking that the runner cannot": (["--runner", "echo", "--track", "online"], "Leave --track out"),
    "tracking of an unknown kind": (["--runner", "echo", "--track", "sometimes"], "--track"),
    "a name that leaves the directory": (["--runner", "echo", "--name", "../../x"], "--name"),
    "a name with a slash": (["--runner", "echo", "--name", "a/b"], "--name"),
    "a priority beyond": (["--runner", "echo", "--priority", 1000], "--priority"),
    "a token in the configuration": (
        ["--runner", "echo", "wait_for=hf_abcdefghijklmnopqrstuvwxyz"],
        "looks like a token",
    ),
    "a number that JSON cannot hold": (["--runner", "echo", "steps=.nan"], "at steps: is not a finite number"),
    "weights without a name": (["--runner", "echo", "--warm-start", ""], "checkpoint = '': is empty"),
    "an address that is none": (["--runner", "echo", "--on", "ftp://x"], "is not the address of a Ray cluster"),
    "an option as an address": (["--runner", "echo", "--on=-oProxyCommand=x"], "is not the address of a machine"),
    "a machine that is none": (
        ["--runner", "echo", "--on", "x@host.invalid"],
        "x@host.invalid: cannot be reached (ssh: ",
    ),
    "a word that is no override": (["--runner", "echo", "steps=1", "fast"], "is not key=value"),
    "a checkpoint that is none": (["env.id=CartPole-v1", "--warm-start", "nothing"], "is not a palaestra checkpoint"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(start, home, case):
    words, reason = REFUSED[case]
    result = start(*words)
    assert result.code == 2, result
    assert result.err.startswith("error: ")
    assert reason in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert os.listdir(home.runs) == []


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["show", "missing"], 2, "no such run"),
        (["show", "../../etc/passwd"], 2, "is not the id of a run"),
        (["logs", "missing"], 2, "no such run"),
        (["stop", "missing"], 2, "no such run"),
        (["resume", "missing"], 2, "no such run"),
        (["compare", "missing", "neither"], 2, "no such run"),
        (["archive", "missing"], 2, "no such run"),
        (["restore", "missing"], 2, "missing"),
        (["restore", "../x"], 2, "is not the id of a run"),
        (["delete", "missing", "--yes"], 2, "no such run"),
        (["export-tensorboard", "missing"], 2, "no such run"),
        (["list", "--phase", "runing"], 2, "Known: queued"),
    ],
)
def test_a_run_that_is_none_is_named_in_one_line(palaestra, home, monkeypatch, words, code, reason):
    monkeypatch.setenv("PALAESTRA_HOME", str(home.base))
    result = palaestra("runs", *words)
    assert (result.code, reason in result.err) == (code, True), result
    assert len(result.err.strip().splitlines()) == 1


def test_a_disk_that_is_too_small_is_refused_with_what_helps(palaestra, tmp_path):
    home = Home(tmp_path / "var" / "training")
    with service_thread(home, min_free_disk_mb=10**9):
        result = palaestra("runs", "start", "--runner", "echo")
        assert (result.code, "palaestra runs gc" in result.err) == (2, True), result
        assert os.listdir(home.runs) == []


def test_a_bad_setting_of_the_service_is_refused_with_the_nearest(palaestra):
    result = palaestra("serve", "max_runing=3")
    assert (result.code, "Did you mean 'max_running'?" in result.err) == (2, True), result
    result = palaestra("serve", "port=70000")
    assert (result.code, "service.port = 70000" in result.err) == (2, True), result


def test_who_serves_others_is_warned_on_the_terminal(palaestra, monkeypatch):
    facts = {"url": "http://127.0.0.1:1", "pid": 1, "warning": "the service listens without encryption"}
    monkeypatch.setattr("palaestra.runs.service.server.run_service", lambda config, home, announce: announce(facts))
    for words in ((), ("--json",)):
        result = palaestra("serve", "host=0.0.0.0", *words)
        assert result.err.startswith("warning: the service listens without encryption.\n")
    assert json.loads(result.out)["warning"] == facts["warning"]


def test_listing_imports_no_web_server_no_numbers_and_no_models(tmp_path):
    """`runs list` is fast because it imports little."""
    home = Home(tmp_path / "var" / "training")
    code = (
        "import sys\nsys.argv = ['palaestra', 'runs', 'list']\nfrom palaestra.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print(*(name for name in {FORBIDDEN} if name in sys.modules))"
    )
    with service_thread(home):
        trainer = TrainerService(home)
        trainer.wait(trainer.start_run({"steps": 1}, runner="echo", name="quick"), timeout_s=30)
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[1].startswith("quick-")
    assert lines[-1] == ""


def test_a_foreign_script_needs_consent_which_cannot_be_asked_for_without_a_terminal(start, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / "cleanrl").mkdir(parents=True)
    canary = tmp_path / "ran"
    (checkout / "cleanrl" / "mine.py").write_text(
        "from dataclasses import dataclass\nimport tyro\n\n@dataclass\nclass Args:\n"
        '    env_id: str = "CartPole-v1"\n    """the environment"""\n    seed: int = 1\n    """seed"""\n\n'
        f'if __name__ == "__main__":\n    args = tyro.cli(Args)\n    open({str(canary)!r}, "w").close()\n'
    )
    words = ["--runner", "cleanrl", "--script", "mine", "--env", "CartPole-v1", f"checkout={checkout}"]
    result = start(*words)
    assert result.code == 2, result
    assert "Add --yes to confirm" in result.err
    assert "mine.py" in result.err  # the command is shown before the question
    assert not canary.exists()
    assert start(*words, "--dry-run").code == 0
    assert not canary.exists()
