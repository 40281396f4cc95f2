"""A second try is given once, named at the end, and refused in CI to tests that needed one before."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.run_suite import LATE_WORKER, LEDGER, ROOT, known_tests, refused_tests, run_suite

FLAKY = """
from pathlib import Path

def test_steady():
    pass

def test_flaky():
    tried = Path(__file__).with_name("tried")
    was_tried = tried.exists()
    tried.touch()
    assert was_tried
"""
FLAKY_ID = "tests/test_both.py::test_flaky"


@pytest.fixture
def project(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / LEDGER).write_text("# none yet\n")
    (tmp_path / "tests" / "test_both.py").write_text(FLAKY)
    return tmp_path


def test_a_ledger_holds_one_test_per_line_and_comments():
    assert known_tests("# why\na.py::test_b  # busy\n\n c.py::test_d[1] \n") == {"a.py::test_b", "c.py::test_d[1]"}


def test_a_known_test_is_refused_its_second_try_in_ci_alone():
    assert refused_tests(["a", "b"], {"b", "c"}, in_ci=True) == ["b"]
    assert refused_tests(["a", "b"], {"b", "c"}, in_ci=False) == []


def test_a_test_that_passes_alone_is_named_in_the_last_line(project, capfd):
    assert run_suite(project, in_ci=True) == 0
    lines = capfd.readouterr().out.rstrip().splitlines()
    assert lines[-1] == f"  {FLAKY_ID}"
    assert lines[-2].startswith("1 test needed a second try")


def test_a_test_that_needed_a_second_try_before_fails_ci(project, capfd):
    (project / LEDGER).write_text(f"{FLAKY_ID}\n")
    assert run_suite(project, in_ci=True) == 1
    assert "1 test failed and may not be tried again" in capfd.readouterr().out
    (project / "tests" / "tried").unlink()
    assert run_suite(project, in_ci=False) == 0


def test_a_test_that_fails_twice_fails_the_suite(project, capfd):
    (project / "tests" / "test_both.py").write_text("def test_never():\n    assert 1 == 2\n")
    assert run_suite(project, in_ci=False) == 1
    assert capfd.readouterr().out.endswith("1 test failed twice:\n  tests/test_both.py::test_never\n")


def test_a_test_that_no_time_limit_reaches_fails_and_the_others_run(project, capfd, monkeypatch):
    (project / "tests" / "test_both.py").write_text(
        "import signal, time\n"
        "def test_steady():\n"
        "    pass\n"
        "def test_stuck():\n"
        "    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "    while True:\n"
        "        time.sleep(1)\n"
    )
    monkeypatch.setattr("tests.run_suite.LATE_WORKER", ("-o", "faulthandler_timeout=1", *LATE_WORKER[2:]))
    assert run_suite(project, in_ci=False) != 0
    output = capfd.readouterr().out
    assert "1 failed, 1 passed" in output
    assert "1 test failed beside the others; running again, alone:\n  tests/test_both.py::test_stuck" in output


def test_a_test_may_interrupt_a_process_although_the_suite_ignores_sigint(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_child.py").write_text(
        "import signal, subprocess, sys\n"
        "def test_interrupted():\n"
        "    code = 'import time; print(1, flush=True); time.sleep(60)'\n"
        "    with subprocess.Popen([sys.executable, '-c', code], stdout=-1, stderr=-3) as child:\n"
        "        child.stdout.readline()\n"
        "        child.send_signal(signal.SIGINT)\n"
        "        assert child.wait(30) == -signal.SIGINT\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", tmp_path],
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout


def test_the_ledger_names_tests_that_exist():
    for test in known_tests((ROOT / LEDGER).read_text()):
        assert (Path(ROOT) / test.partition("::")[0]).exists(), test
