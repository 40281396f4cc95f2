"""The echo program as a plain process, without a service around it."""

import subprocess
import sys
from pathlib import Path

from palaestra.runs.runner import EventFiles, JournalFile, StdoutLines
from palaestra.runs.runners import programs

PROGRAM = Path(programs.__file__).with_name("echo_program.py")
SOURCES = {
    "journal": (JournalFile(),),
    "stdout": (StdoutLines("events"),),
    "tensorboard": (EventFiles("runs/**/events.out.tfevents.*", "cleanrl"),),
}


def start_echo(attempt, *options, speak="journal"):
    attempt.work.mkdir(parents=True)
    with attempt.stdout.open("wb") as stdout:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", PROGRAM, "--journal", attempt.journal, "--speak", speak, *map(str, options)],
            cwd=attempt.work,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stdout,
        )


def metric_name(number, speak="journal"):
    return f"losses/m{number}" if speak == "tensorboard" else f"m{number}"
