"""Runs a program in a virtual environment that it creates on first use. A program of the standard library.

    python environment_program.py DIRECTORY REQUIREMENTS [--stderr] -- PROGRAM ARGUMENT…

The environment is complete or absent: it is built under a temporary name and renamed, and a lock lets one process
build it while others wait. SIGTERM removes what is not complete. Progress goes to standard output as marked lines, or
with `--stderr` to standard error.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

MARKER = "palaestra.json"
"""Written last, with the requirements that are installed."""
FAILED, STOPPED = 1, 130


def main(argv: list[str]) -> int:
    """Create the environment if it is missing, and become the program."""
    split = argv.index("--")
    directory, requirements, *options = argv[:split]
    prints_to_stderr = "--stderr" in options
    reason = "" if is_ready(directory) else create(directory, requirements, prints_to_stderr)
    if reason:
        remedy = "Connect the machine to a package index (PIP_INDEX_URL), or give an interpreter with --python"
        write(f"the Python environment {directory} cannot be created: {reason}. {remedy}", prints_to_stderr)
        return FAILED
    python = os.path.join(directory, "bin", "python")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return os.execve(python, [python, *argv[split + 1 :]], environment)


def is_ready(directory: str) -> bool:
    """Whether the environment is complete and its interpreter still exists."""
    python = os.path.join(directory, "bin", "python")
    return os.path.exists(os.path.join(directory, MARKER)) and os.access(python, os.X_OK)


def create(directory: str, requirements: str, prints_to_stderr: bool) -> str:
    """Create the environment, or wait until another process has; returns why that failed, or an empty string."""
    signal.signal(signal.SIGTERM, stop)  # until the program takes the place of this one
    parent, name = os.path.split(directory)
    os.makedirs(parent, exist_ok=True)
    with open(os.path.join(parent, f".{name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another run that creates {directory}", prints_to_stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready(directory):
            return ""
        # Left by a creation that was killed; the lock says that none is under way.
        for old in os.listdir(parent):
            if old.startswith(f".{name}.") and old.endswith(".new"):
                shutil.rmtree(os.path.join(parent, old), ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)
        temporary = os.path.join(parent, f".{name}.{os.getpid()}.new")
        try:
            return build(temporary, directory, requirements, prints_to_stderr)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def build(temporary: str, directory: str, requirements: str, prints_to_stderr: bool) -> str:
    """Install the requirements below a temporary name and rename it; returns why that failed."""
    began = time.monotonic()
    with open(requirements, encoding="utf-8") as file:
        pins = file.read().split()
    report(f"creating {directory} with {len(pins)} packages; later runs reuse it", prints_to_stderr)
    reason = run([sys.executable, "-m", "venv", temporary], prints_to_stderr)
    if reason:
        return f"{sys.executable} -m venv failed: {reason}"
    python = os.path.join(temporary, "bin", "python")
    install = [python, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--progress-bar=off"]
    reason = run([*install, "--no-warn-script-location", "-r", requirements], prints_to_stderr)
    if reason:
        return reason
    with open(os.path.join(temporary, MARKER), "w", encoding="utf-8") as file:
        json.dump({"schema": 1, "python": sys.version.split()[0], "requirements": pins}, file, indent=1)
    os.rename(temporary, directory)
    report(f"created {directory} in {time.monotonic() - began:.0f} s", prints_to_stderr)
    return ""


def run(command: list[str], prints_to_stderr: bool) -> str:
    """Run a command and pass its output on; returns its last error, or an empty string."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                line = line.rstrip()
                write(line, prints_to_stderr)
                # pip explains a failure in lines that begin with ERROR.
                last = line if line and ("ERROR" in line or not last.startswith("ERROR")) else last
        except BaseException:
            process.terminate()  # else it would continue to write below the temporary name
            raise
    return "" if process.returncode == 0 else last.removeprefix("ERROR: ") or f"exit code {process.returncode}"


def stop(number: int, frame: FrameType | None) -> None:
    """End the program in a way that removes the temporary directory. A second signal does not interrupt that."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(STOPPED)


def report(text: str, prints_to_stderr: bool) -> None:
    """Report progress."""
    event = json.dumps({"kind": "LogLine", "level": "info", "text": text})
    write(text if prints_to_stderr else f"@palaestra {event}", prints_to_stderr)


def write(text: str, prints_to_stderr: bool) -> None:
    """Write a line."""
    stream = sys.stderr if prints_to_stderr else sys.stdout
    stream.write(text + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
