"""The environment of the SPADE-BDI worker for tests: created once beside the packages of this interpreter."""

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.translator import Translator
from palaestra.runs.process.virtual_environment import LOCATION_VARIABLE
from palaestra.runs.runner import Machine
from palaestra.runs.runners.spade_bdi import ENVIRONMENT
from palaestra.runs.spec import RunSpec
from palaestra.telemetry import JournalReader

SHORT = {"episodes": 60, "env_kwargs": {"is_slippery": False}}


@lru_cache(maxsize=1)
def bdi_python() -> str:
    """Its interpreter. Workers of xdist share it; without a package index the test is skipped."""
    location = str(Path(sys.prefix) / "environments")
    machine = Machine({**os.environ, LOCATION_VARIABLE: location}, free_disk_bytes=10**12)
    refused = [finding.text for finding in ENVIRONMENT.findings(machine) if finding.level == "refused"]
    if refused:
        pytest.skip(refused[0])
    command = ENVIRONMENT.command(machine, None)
    done = subprocess.run([*command, "-c", "pass"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return ENVIRONMENT.python(machine)


def bdi_spec(**options) -> RunSpec:
    return RunSpec(**{"runner": "spade-bdi", "env_id": "FrozenLake-v1", "python": bdi_python(), **options})


def read_events(plan):
    attempt = Attempt(plan.paths.attempt_dir)
    translator = Translator(attempt, plan.sources, 1)
    while translator.pump(10_000, final=True):
        pass
    translator.close()
    with JournalReader(attempt.journal) as reader:
        return [record.event for record in reader.read()]
