"""Virtual environments that runners create on first use, below the state directory.

Creating takes up to a minute and happens in the first seconds of a run (`runners/programs/environment_program.py`), so
that its progress is in the log of the run. A preflight only looks whether the environment exists, or could be created.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from palaestra.files.home import Home
from palaestra.runs.process.interpreter import CACHE_S, inherited_variables
from palaestra.runs.runner import Finding, Machine

PROGRAM = Path(__file__).parents[1] / "runners" / "programs" / "environment_program.py"
MARKER = "palaestra.json"
LOCATION_VARIABLE = "PALAESTRA_ENVIRONMENTS"
"""Directory of the environments; without it, `environments` in the state directory."""
_INDEX_TIMEOUT_S = 20.0
_answers: dict[tuple[str, ...], tuple[str, float]] = {}
"""Why the index of some pip variables cannot be used, and when the answer expires."""


@dataclass(frozen=True)
class RunnerEnvironment:
    """A virtual environment with pinned packages."""

    name: str
    requirements: Path
    """File with one pinned requirement per line, dependencies included."""
    size_mb: int
    """What it takes on the disk, about."""

    def directory(self, machine: Machine, state: Path | None = None) -> Path:
        """Where it is or will be; another Python or other pins are another environment."""
        pins = self.requirements.read_bytes() + sys.version.encode()
        chosen = machine.environment.get(LOCATION_VARIABLE)
        home = Home.default() if state is None else Home(state)
        base = Path(chosen).expanduser() if chosen else home.environments
        return base.absolute() / f"{self.name}-{hashlib.sha256(pins).hexdigest()[:12]}"

    def is_ready(self, machine: Machine, state: Path | None = None) -> bool:
        """Whether it exists."""
        return (self.directory(machine, state) / MARKER).is_file()

    def python(self, machine: Machine, state: Path | None = None) -> str:
        """Its interpreter, which may not exist yet."""
        return str(self.directory(machine, state) / "bin" / "python")

    def command(self, machine: Machine, state: Path | None, *, prints_to_stderr: bool = False) -> list[str]:
        """The beginning of a command that creates it if necessary and runs a program in it."""
        options = ["--stderr"] if prints_to_stderr else []
        directory = str(self.directory(machine, state))
        return [sys.executable, "-I", str(PROGRAM), directory, str(self.requirements), *options, "--"]

    def findings(self, machine: Machine) -> list[Finding]:
        """Whether it exists, or could be created."""
        directory = self.directory(machine)
        if self.is_ready(machine):
            return [Finding("python", "ok", f"the environment {directory}")]
        if find_spec("ensurepip") is None:
            text = f"{sys.executable} cannot create virtual environments: it has no ensurepip"
            return [
                Finding("python", "refused", text, "Install it (Debian: apt install python3-venv), or use --python")
            ]
        existing = next(path for path in directory.parents if path.exists())
        free_mb = shutil.disk_usage(existing).free // 10**6
        if free_mb < self.size_mb:
            text = f"the environment {directory} needs about {self.size_mb} MB, and {free_mb} MB are free at {existing}"
            return [Finding("disk", "refused", text, f"Free space there, or set {LOCATION_VARIABLE} to a larger disk")]
        reason = _find_index_fault(self.requirements, machine)
        if reason:
            text = f"the environment {directory} does not exist and cannot be created: {reason}"
            remedy = (
                "Connect to a package index (PIP_INDEX_URL), or name an interpreter that has the packages with --python"
            )
            return [Finding("python", "refused", text, remedy)]
        text = (
            f"the environment {directory} will be created when the run starts (about half a minute, {self.size_mb} MB)"
        )
        return [Finding("python", "ok", text)]


def pip_variables(machine: Machine) -> dict[str, str]:
    """The variables that configure pip; a trainer gets them only while its environment is created."""
    return {name: value for name, value in machine.environment.items() if name.startswith("PIP_")}


def _find_index_fault(requirements: Path, machine: Machine) -> str:
    """Why the first requirement cannot be fetched; empty if it can. The answer is cached for a minute."""
    variables = pip_variables(machine)
    key = (str(requirements), *(f"{name}={value}" for name, value in sorted(variables.items())))
    now = time.monotonic()
    if key in _answers and now < _answers[key][1]:
        return _answers[key][0]
    reason = _try_index(requirements, {**inherited_variables(machine), **variables})
    _answers[key] = (reason, now + CACHE_S)
    return reason


def _try_index(requirements: Path, environment: Mapping[str, str]) -> str:
    if find_spec("pip") is None:
        return ""  # the environment brings its own pip; whether there is an index is found when the run starts
    pin = requirements.read_text().split()[0]
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--disable-pip-version-check", "--retries=0"]
    command = [sys.executable, "-m", "pip", "install", *options, "--timeout=5", "--quiet", pin]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            cwd=os.sep,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INDEX_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the package index did not answer within {_INDEX_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return errors[-1].removeprefix("ERROR: ")[:300] if errors else f"pip failed with exit code {done.returncode}"
