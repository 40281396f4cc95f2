"""`palaestra runs diff` and `runs show`: what differs between two runs of one program."""

import json
import sys
import time

import pytest
from tests.runs.reproducibility.repositories import commit, make_repository

from palaestra.runs import TrainerService
from palaestra.runs.wire import to_json

PROGRAM = "import sys\nprint('step 1: loss 0.5')\n"


@pytest.fixture
def start(runs, home, tmp_path):
    """Starts a program and waits until its code is recorded; returns its id."""

    def call(*words):
        result = runs("start", "--json", *words)
        assert result.code == 0, result
        run_id = json.loads(result.out)["run_id"]
        service = TrainerService(home)
        service.wait(run_id, timeout_s=60)
        deadline = time.monotonic() + 30
        while not service.run(run_id).code_version:
            assert time.monotonic() < deadline, "its code was not recorded"
        return run_id

    return call


def test_configuration_code_packages_and_variables_are_compared(runs, start, tmp_path, monkeypatch):
    make_repository(tmp_path, train__py=PROGRAM, __gitignore="var/\n", same__py="x = 1\n")
    monkeypatch.setenv("MY_SETTING", "1")
    first = start("--", sys.executable, "train.py", "--lr", "0.5", "--seed", "1")
    (tmp_path / "train.py").write_text(PROGRAM.replace("0.5", "0.25"))
    (tmp_path / "new.py").write_text("y = 1\n")
    monkeypatch.setenv("MY_SETTING", "2")
    second = start("--", sys.executable, "train.py", "--lr", "0.75", "--seed", "1")
    packages = tmp_path / "var/training/runs" / second / "attempt_1/source/packages.txt"
    packages.write_text(packages.read_text() + "invented==1.0\n")

    document = json.loads(runs("diff", first, second, "--json").out)
    assert document["runs"] == [first, second]
    assert document["configuration"] == {"lr": [0.5, 0.75]}
    assert document["command"][1][-4:] == ["--lr", "0.75", "--seed", "1"]
    assert document["packages"] == {"invented": [None, "1.0"]}
    assert document["variables"] == {"MY_SETTING": ["1", "2"]}
    assert document["machine"] == {}
    assert set(document["code"]) == {"version"}
    assert [(file["name"], file["change"]) for file in document["files"]] == [
        ("new.py", "added"),
        ("train.py", "changed"),
    ]
    text = runs("diff", first, second).out
    for line in ("lr", "-print('step 1: loss 0.5')", "+print('step 1: loss 0.25')", "+y = 1", "invented", "MY_SETTING"):
        assert line in text
    assert "same.py" not in text
    assert "No differences." in runs("diff", first, first).out


def test_two_commits_are_compared_by_the_contents_that_git_has(runs, start, home, tmp_path):
    make_repository(tmp_path, train__py=PROGRAM, __gitignore="var/\n")
    first = start("--", sys.executable, "train.py")
    secret = "hf_" + "plantedplanted"
    (tmp_path / "train.py").write_text(PROGRAM + f"print('done')\nlogin('{secret}')\n")
    commit(tmp_path, "Second")
    second = start("--", sys.executable, "train.py")

    document = json.loads(runs("diff", first, second, "--json").out)
    assert to_json(TrainerService(home).diff_runs(first, second)) == document
    assert "+login('***')" in document["files"][0]["text"]
    assert secret not in runs("diff", first, second).out
    assert set(document["code"]) == {"commit", "version"}
    assert "+print('done')" in document["files"][0]["text"]
    shown = runs("show", second).out
    assert f"code       {document['code']['commit'][1][:12]} (main)" in shown
    assert "system     Python 3." in shown
    source = json.loads(runs("show", second, "--json").out)["source"]
    assert source["code"]["commit"] == document["code"]["commit"][1]


def test_runs_without_a_record_are_compared_as_far_as_possible(runs, start, home, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    first = start("--", sys.executable, "train.py", "--lr", "1")
    second = start("--", sys.executable, "train.py", "--lr", "2")
    (home.run(first).attempt(1).source / "code.json").unlink()

    document = json.loads(runs("diff", first, second, "--json").out)
    assert document["configuration"] == {"lr": [1, 2]}
    assert document["missing"] == [f"{first}: its code was not recorded"]
    assert runs("diff", first, "nothing").code == 2
