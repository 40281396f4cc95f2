"""Output of trainers cannot control the terminal, and JSON output is valid JSON."""

import io
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.runs.serving import service_thread

from palaestra.cli.runs.table import format_reason, format_runs
from palaestra.cli.terminal import Column, dump_json, format_table, sanitize_line, sanitize_output, shorten
from palaestra.files.home import Home
from palaestra.runs import TrainerService
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.telemetry import Journal
from palaestra.telemetry.event import TrainingStep

TITLE, CLEAR, BACKWARDS = "\x1b]0;owned\x07", "\x1b[2J", "\u202e"


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path.resolve() / "var" / "training")


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (f"a{TITLE}b{CLEAR}c", "abc"),
        (f"a{BACKWARDS}b", "a\\u202eb"),
        ("a\x00b\x85c\td", "a\\x00b\\x85c d"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x9b2Ja\x1bPq#0\x1b\\b\x1b", "ab"),
        ("grün … 漢字", "grün … 漢字"),
    ],
)
def test_a_line_is_only_drawn(result, shown):
    assert sanitize_line(result) == shown


def test_output_keeps_its_lines_tabs_and_colours():
    output = f"\x1b[1;31ma\x1b[0m\t{TITLE}{CLEAR}b\r\n{BACKWARDS}\x08"
    assert sanitize_output(output) == "\x1b[1;31ma\x1b[0m\tb\r\n\\u202e\\x08"


def test_a_long_name_keeps_both_ends():
    assert shorten("a" * 100 + "b" * 100, 11) == "aaaaa…bbbbb"
    assert shorten("short", 5) == "short"


def test_json_has_no_number_that_json_lacks():
    assert json.loads(dump_json({"a": [float("inf"), float("nan"), 1.5]})) == {"a": ["Infinity", "NaN", 1.5]}


def test_an_event_and_its_reason_are_not_printed_twice():
    assert format_reason("killed", "killed (SIGABRT)") == "SIGABRT"
    assert format_reason("stop_asked", "asked to stop") == ""
    assert format_reason("stop_asked", "asked to stop (shutdown)") == "shutdown"
    assert format_reason("stopped", "stopped by the operator") == "by the operator"
    assert format_reason("failed", "exit code 3") == "exit code 3"


def _odd_run(home):
    """A run whose output contains control sequences."""
    with service_thread(home):
        trainer = TrainerService(home)
        run_id = trainer.start_run({"steps": 2, "then": "exit:3"}, runner="echo")
        trainer.wait(run_id, timeout_s=30)
    with open(home.run(run_id).attempt(1).stdout, "a") as file:
        file.write(f"last {TITLE}{CLEAR}{BACKWARDS}words\n")
    return run_id


def test_no_command_for_the_terminal_gets_out_of_a_run(palaestra, home):
    run_id = _odd_run(home)

    shown = palaestra("runs", "show", run_id).out
    assert "last \\u202ewords" in shown
    assert palaestra("runs", "logs", run_id).out.endswith(f"last {TITLE}{CLEAR}{BACKWARDS}words\n")
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "palaestra", "runs", "logs", run_id, "--tail", "1"]
    subprocess.run(command, stdout=terminal, check=True, env={**os.environ, "PALAESTRA_HOME": str(home.base)})
    assert os.read(main, 4096) == b"last \\u202ewords\r\n"
    os.close(main)
    os.close(terminal)


def test_numbers_that_are_none_and_names_that_are_too_long_spoil_neither_json_nor_tables(palaestra, home):
    for run_id in ("solo-1", "solo-2"):
        attempt = home.run(run_id).attempt(1)
        attempt.path.mkdir(parents=True)
        (home.run(run_id).path / "resolved.json").write_text("{}")
        with Journal(attempt.journal) as journal:
            metrics = {"m" * 120 + "end": 2.0, f"{CLEAR}loss": float("inf")}
            journal.emit(TrainingStep(env_step=1, update=1, metrics=metrics))

    def refuse(word):
        raise AssertionError(word)

    document = json.loads(palaestra("runs", "show", "solo-1", "--json").out, parse_constant=refuse)
    assert "Infinity" in document["metrics"].values()
    for words in (["show", "solo-1"], ["compare", "solo-1", "solo-2"]):
        result = palaestra("runs", *words).out
        assert "\x1b" not in result
        assert f"{'m' * 29}…{'m' * 27}end " in result


def test_a_removed_working_directory_is_named(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"rmdir {gone}; exec {sys.executable} -m palaestra runs start --runner echo steps=1"
    environment = {**os.environ, "PALAESTRA_HOME": str(tmp_path / "home")}
    process = subprocess.run(["sh", "-c", script], cwd=gone, env=environment, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.startswith("error: working directory = ")
    assert process.stderr.endswith("was removed. Change to an existing directory, for example with: cd ~.\n")


def test_a_closed_standard_output_is_no_fault(home, palaestra):
    run_id = _odd_run(home)
    script = f"exec {sys.executable} -m palaestra runs logs {run_id} >&-"
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    process = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def test_a_column_names_other_machines_when_a_run_is_on_one():
    here = RunRecord(run_id="a", runner="echo", agent_id="echo", env_id="E", phase=Phase.RUNNING)
    there = replace(here, run_id="b", host="gpu-box")
    assert format_runs([here])[0].split() == ["RUN", "RUNNER", "ENV", "PHASE", "STEPS", "RETURN", "ELAPSED", "NOTE"]
    titles, first, second = (line.split() for line in format_runs([here, there]))
    assert titles[:4] == ["RUN", "RUNNER", "HOST", "ENV"]
    assert (first[:3], second[:4]) == (["a", "echo", "E"], ["b", "echo", "gpu-box", "E"])


COLUMNS = (Column("RUN", min_width=8), Column("PHASE"), Column("STEPS", align_right=True), Column("TIME", drop_order=1))
ROWS = [("cartpole-20261118", "running", "20", "0:01:00"), ("b", "failed", "1,000", "0:00:01")]


def test_a_table_is_as_wide_as_its_cells_without_a_terminal():
    assert format_table(COLUMNS, ROWS) == [
        "RUN                PHASE    STEPS  TIME",
        "cartpole-20261118  running     20  0:01:00",
        "b                  failed   1,000  0:00:01",
    ]


def test_a_narrow_table_shortens_cells_then_leaves_out_columns_and_names_them():
    assert format_table(COLUMNS, ROWS, 36) == [
        "RUN          PHASE    STEPS  TIME",
        "cartp…61118  running     20  0:01:00",
        "b            failed   1,000  0:00:01",
    ]
    narrow = format_table(COLUMNS, ROWS, 24)
    assert narrow[1:] == [
        "car…1118  running     20",
        "b         failed   1,000",
        "Left out for the width of the terminal: TIME",
    ]
    # What cannot be shortened or left out is shown whole.
    assert format_table(COLUMNS, ROWS, 5)[1] == "cartpole-20261118  running     20"


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_with_colors_has_states_in_color_unless_no_color_is_set(monkeypatch):
    monkeypatch.setattr("sys.stdout", _Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    titles, first, second = format_table(COLUMNS, ROWS, 80)
    assert titles == "\x1b[1mRUN                PHASE    STEPS  TIME\x1b[0m"
    assert first == "cartpole-20261118  \x1b[36mrunning\x1b[0m     20  0:01:00"
    assert second == "b                  \x1b[31mfailed \x1b[0m  1,000  0:00:01"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert "\x1b" not in "".join(format_table(COLUMNS, ROWS, 80))
    # The width is that of the terminal.
    monkeypatch.setenv("COLUMNS", "24")
    assert format_table(COLUMNS, ROWS)[-1] == "Left out for the width of the terminal: TIME"
