"""`palaestra runs start -- PROGRAM`, `--explain` and `--like`."""

import json
import sys

import pytest

from palaestra.runs import TrainerService

PROGRAM = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--quiet", action="store_true")
options = parser.parse_args()
print("seed:", options.seed, os.environ.get("GREETING"))
for step in range(4):
    if not options.quiet:
        print(f"step {step}: loss {step * options.lr}")
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    return (sys.executable, "train.py")


@pytest.fixture
def start(runs, home):
    """Starts a run with these words and waits for its end; returns its id."""

    def call(*words):
        result = runs("start", "--json", *words)
        assert result.code == 0, result
        run_id = json.loads(result.out)["run_id"]
        TrainerService(home).wait(run_id, timeout_s=60)
        return run_id

    return call


def test_a_program_runs_with_its_own_options_and_needs_no_confirmation(runs, start, program, monkeypatch):
    monkeypatch.setenv("GREETING", "hello")
    run_id = start("--tag", "a", "--", *program, "--lr", "0.5", "--seed", 3)
    document = json.loads(runs("show", run_id, "--json").out)

    assert run_id.startswith("train-")
    assert document["run"]["phase"] == "succeeded"
    assert (document["run"]["seed"], document["run"]["tags"]) == (3, ["a"])
    assert document["metrics"] == {"loss": 1.5}
    assert document["command"]["argv"] == [sys.executable, "train.py", "--lr", "0.5", "--seed", "3"]
    assert runs("logs", run_id).out.splitlines()[0] == "seed: 3 hello"


def test_words_before_the_dashes_change_options_of_the_program(start, runs, program):
    run_id = start("lr=2", "--seed", 9, "--", *program, "--lr", "0.5", "--seed", "3")
    assert json.loads(runs("show", run_id, "--json").out)["metrics"] == {"loss": 6.0}
    assert runs("logs", run_id).out.splitlines()[0].startswith("seed: 9")


def test_a_run_is_repeated_with_changes(start, runs, program, monkeypatch):
    monkeypatch.setenv("GREETING", "first")
    first = start("--tag", "a", "--", *program, "--lr", "0.5", "--seed", "3")
    monkeypatch.setenv("GREETING", "second")
    second = start("--like", first, "--yes", "lr=1", "--tag", "b")
    document = json.loads(runs("show", second, "--json").out)

    assert document["command"]["argv"][1:] == ["train.py", "--lr", "1", "--seed", "3"]
    assert document["run"]["tags"] == ["b"]
    assert document["metrics"] == {"loss": 3.0}
    assert runs("logs", second).out.splitlines()[0] == "seed: 3 first"
    refused = runs("start", "--like", first, "lr=1")
    assert (refused.code, "--yes" in refused.err) == (2, True)


def test_a_run_of_another_runner_is_repeated_with_changes(start, runs):
    first = start("--runner", "echo", "steps=3", "metrics=4")
    second = start("--like", first, "steps=5")
    document = json.loads(runs("show", second, "--json").out)

    assert document["run"]["env_step"] == 50
    assert set(document["metrics"]) >= {"m0", "m3"}
    result = runs("start", "--like", first, "stps=5")
    assert (result.code, "stps" in result.err) == (2, True)


def test_a_request_that_cannot_run_is_refused(runs):
    refused = {
        ("--",): "no program given",
        ("--", "no-such-program"): "no-such-program: no such program",
        ("--runner", "echo", "--", "true"): "does not run programs",
        ("config.yaml", "--", "true"): "is no part of the program",
        ("--like", "nothing"): "no such run",
        ("--", sys.executable, "nothing.py"): "no such file",
    }
    for words, text in refused.items():
        result = runs("start", *words)
        assert (result.code, text in result.err) == (2, True), (words, result)
    assert runs("list").out.startswith("No runs yet")


def test_a_program_without_metrics_says_what_was_looked_for(start, runs, program, tmp_path):
    run_id = start("--", *program, "--quiet")
    shown = runs("show", run_id).out

    assert "No metrics were found. Looked for:" in shown
    assert "none in 1 lines of output" in shown
    assert f"none with numbers below {tmp_path}" in shown
    assert "palaestra.log.step(step, loss=loss)" in shown


def test_the_rules_are_explained_with_and_without_a_program(palaestra):
    result = palaestra("runs", "start", "--explain")
    assert result.code == 0
    for text in ("$PALAESTRA_LOG", "iter 100: loss 2.31", "-> step 2,048: rollout/ep_rew_mean = 22.4"):
        assert text in result.out
    with_program = palaestra("runs", "start", "--explain", "--", "python", "train.py", "--lr", "1").out
    assert with_program.startswith(result.out.rstrip())
    assert "The command starts python train.py in " in with_program
    assert "  lr  1" in with_program
    rules = json.loads(palaestra("runs", "start", "--explain", "--json").out)
    assert rules["log"]["variable"] == "PALAESTRA_LOG"
    assert len(rules["printed"]) >= 9


def test_a_program_reports_with_palaestra_log(start, runs, tmp_path):
    (tmp_path / "quick.py").write_text(
        "import palaestra.log\n"
        "for step in range(100): palaestra.log.step(step, loss=step / 4)\n"
        "print('step 5: loss 9.5')\n"
    )
    run_id = start("--", sys.executable, "quick.py")
    document = json.loads(runs("show", run_id, "--json").out)

    assert document["metrics"] == {"loss": 99 / 4}
    assert document["run"]["env_step"] == 99


def test_a_sweep_of_a_typed_command_needs_no_confirmation_and_prints_no_findings(runs, program, tmp_path):
    words = ("--json", "--", *program, "--lr", "1", "--seed", "0")
    started = runs("start", "--name", "grid", "lr=1,2", "--seeds", "1..2", *words)
    assert (started.code, json.loads(started.out)["num_runs"]) == (0, 4), started
    assert started.err.splitlines() == [f"Show it with: palaestra sweeps show {json.loads(started.out)['sweep_id']}"]
    # A file may come from somebody else: its commands are confirmed.
    (tmp_path / "grid.yaml").write_text("parameters: {command: [[python, other.py], [python, train.py, --quiet]]}\n")
    (tmp_path / "other.py").write_text("print('step: 1 loss: 2')")
    refused = runs("start", "--sweep", "grid.yaml", "--", *program)
    assert (refused.code, "confirmation is required" in refused.err) == (2, True), refused


def test_a_sweep_of_a_stored_command_needs_confirmation(start, runs, program):
    first = start("--", *program, "--lr", "1", "--seed", "0")
    refused = runs("start", "--like", first, "lr=1,2")
    assert (refused.code, "confirmation is required" in refused.err) == (2, True), refused


def test_a_missing_script_is_named_with_its_command(runs, tmp_path):
    for words in ((), ("--seeds", "1,2")):
        refused = runs("start", *words, "--", sys.executable, "gone.py", "--seed", "1")
        command = f"{sys.executable} gone.py --seed 1"
        problem = f"command = '{command}': {tmp_path}/gone.py: no such file. Check the path of the script."
        assert (refused.code, refused.err) == (2, f"error: {problem}\n")
