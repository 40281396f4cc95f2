"""Run the fast tests on two cores, then once more, alone, those that failed; say at the very end which needed that.

A busy machine may break a test that starts hundreds of processes, so a first failure is not final. A test that keeps
needing a second try is broken, though: list it in `second_tries.txt` when that happens, and CI gives it no other.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEDGER = "tests/second_tries.txt"
TESTS_FAILED = 1  # pytest's exit code; every other one above 0 means that the run itself went wrong
# pytest-timeout raises an exception in the test, which code that waits in C or handles every exception never sees. Such
# a test would hold its worker until CI ends the whole run, so a worker that is this late prints its stack and exits.
LATE_WORKER = ("-o", "faulthandler_timeout=420", "-o", "faulthandler_exit_on_timeout=true")


def known_tests(ledger: str) -> set[str]:
    """The tests that needed a second try before, one id per line; `#` begins a comment."""
    lines = (line.partition("#")[0].strip() for line in ledger.splitlines())
    return {line for line in lines if line}


def refused_tests(failed: Sequence[str], known: set[str], *, in_ci: bool) -> list[str]:
    """Those that may not be tried again: in CI, each test that needed a second try before."""
    return [test for test in failed if in_ci and test in known]


def run_suite(root: Path, *, in_ci: bool) -> int:
    """Run the tests below `root`; the exit code is pytest's."""
    last_failed = root / ".pytest_cache" / "v" / "cache" / "lastfailed"
    last_failed.unlink(missing_ok=True)
    exit_code = _run_pytest(root, "-n", "2", "--dist", "worksteal")
    if exit_code != TESTS_FAILED:
        return exit_code
    failed = _read_tests(last_failed)
    refused = refused_tests(failed, known_tests((root / LEDGER).read_text()), in_ci=in_ci)
    if refused:
        _report(f"failed and may not be tried again, being listed in {LEDGER}", refused)
        return exit_code
    _report("failed beside the others; running again, alone", failed)
    exit_code = _run_pytest(root, "--last-failed", "--last-failed-no-failures", "none")
    failed_twice = _read_tests(last_failed) if exit_code == TESTS_FAILED else []
    if failed_twice:
        _report("failed twice", failed_twice)
    if exit_code in (0, TESTS_FAILED) and (passed_alone := [test for test in failed if test not in failed_twice]):
        _report(f"needed a second try; mend the cause, or list it in {LEDGER} so that CI gives no other", passed_alone)
    return exit_code


def _run_pytest(root: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", *LATE_WORKER, *arguments]
    return subprocess.run(command, cwd=root, check=False).returncode


def _read_tests(last_failed: Path) -> list[str]:
    """The tests that failed; pytest removes the file when none did, and a failure to collect names no test."""
    return sorted(json.loads(last_failed.read_text())) if last_failed.exists() else []


def _report(what: str, tests: Sequence[str]) -> None:
    print(f"\n{len(tests)} {'test' if len(tests) == 1 else 'tests'} {what}:", *tests, sep="\n  ", flush=True)


if __name__ == "__main__":
    sys.exit(run_suite(ROOT, in_ci=bool(os.environ.get("CI"))))
