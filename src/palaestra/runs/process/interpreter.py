"""Which Python a foreign trainer runs in, and what is in there.

Choosing looks at files only; `probe` starts the interpreter once for `programs/probe.py` and remembers the answer for a
minute, because a preview, a consent and a launch ask the same within seconds. Nothing is created or installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palaestra.config import closest_names
from palaestra.errors import ConfigError
from palaestra.runs.process.environment import passed_on
from palaestra.runs.runner import Finding, Machine
from palaestra.runs.spec import RunSpec

__all__ = [
    "Interpreter", "Probe", "choose_python", "cuda_findings", "environment_findings", "probe", "python_findings",
]  # fmt: skip

PROGRAM = Path(__file__).with_name("probe.py")
LIMIT_S = 60.0
REMEMBERED_S = 60.0


@dataclass(frozen=True)
class Interpreter:
    """One Python."""

    path: str
    how: str
    """Why this one: for people."""


@dataclass(frozen=True)
class Probe:
    """What was found in an interpreter."""

    error: str = ""
    """Why nothing is known; empty when something is."""
    version: tuple[int, ...] = ()
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Versions of what was asked for; None for what is not installed."""
    cuda: bool = False
    env: Mapping[str, Any] = field(default_factory=dict)
    missing_wrappers: tuple[str, ...] = ()
    """Of the names that were asked for, those that `gymnasium.wrappers` does not have."""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown_version(self) -> str:
        """As people write it."""
        return ".".join(str(part) for part in self.version)

    def at_least(self, package: str, *wanted: int) -> bool:
        """Whether a package is installed in this version or a later one."""
        found = self.packages.get(package)
        parts = [int(part) for part in (found or "").split(".")[: len(wanted)] if part.isdecimal()]
        return bool(parts) and tuple(parts) >= wanted


def choose_python(spec: RunSpec, checkout: Path | None = None) -> Interpreter:
    """What the spec names, else the checkout's own environment, else ours; `ConfigError` when it is not there."""
    if spec.python is not None:
        return Interpreter(_named(spec.python, spec.invoked_from), "as given")
    if checkout is not None:
        place = os.environ.get("UV_PROJECT_ENVIRONMENT") or ".venv"
        own = checkout / place / "bin" / "python"
        if own.is_file():
            return Interpreter(str(own), f"the checkout's {place}")
    return Interpreter(sys.executable, "the run service's own")


def _named(given: str, invoked_from: Path) -> str:
    if not given.strip():
        raise ConfigError(
            "python", given, "names no interpreter", "Leave it out, or give an interpreter or a virtualenv"
        )
    path = Path(given).expanduser()
    if path.parent == Path(".") and not (invoked_from / path).exists():
        found = shutil.which(given)
        if found is None:
            raise ConfigError("python", given, "no such program", "Give the path of an interpreter or a virtualenv")
        return found
    # Not resolved: a virtual environment is told by where its link lies, not by what it points to.
    path = Path(os.path.normpath(invoked_from / path))
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError("python", given, f"{path} is not a program", "Give an interpreter or a virtualenv directory")
    return str(path)


def probe(
    interpreter: Interpreter,
    machine: Machine,
    *,
    packages: tuple[str, ...] = (),
    env_id: str | None = None,
    cuda: bool = False,
    signature_of: str | None = None,
    pythonpath: tuple[str, ...] = (),
    register: tuple[str, ...] = (),
    render: bool = False,
    wrappers: tuple[str, ...] = (),
) -> Probe:
    """Ask an interpreter; an answer is remembered until its packages change, at most a minute."""
    wanted = {
        "packages": packages, "env_id": env_id, "cuda": cuda, "signature_of": signature_of,
        "register": register, "render": render, "wrappers": wrappers,
    }  # fmt: skip
    environment = {**passed_on(machine), "PYTHONDONTWRITEBYTECODE": "1", "SDL_VIDEODRIVER": "dummy"}
    if pythonpath:
        environment["PYTHONPATH"] = ":".join(pythonpath)
    key = (interpreter.path, _changed(interpreter.path), json.dumps([wanted, environment], sort_keys=True))
    now = time.monotonic()
    for stale in [known for known, (_, since) in _remembered.items() if now - since > REMEMBERED_S]:
        del _remembered[stale]
    if key not in _remembered:
        _remembered[key] = (_asked(interpreter.path, wanted, environment), now)
    return _remembered[key][0]


_remembered: dict[tuple[str, float, str], tuple[Probe, float]] = {}


def _changed(python: str) -> float:
    """When the packages beside an interpreter last changed."""
    found = Path(python).parent.parent.glob("lib/python3*/site-packages")
    return max((directory.stat().st_mtime for directory in found), default=0.0)


def _asked(python: str, wanted: Mapping[str, Any], environment: Mapping[str, str]) -> Probe:
    try:
        done = subprocess.run(
            [python, str(PROGRAM), json.dumps(wanted)], env=dict(environment), cwd="/", stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except OSError as error:
        return Probe(error=f"cannot be started ({error.strerror})")
    except subprocess.TimeoutExpired:
        return Probe(error=f"did not answer within {LIMIT_S:.0f} s")
    try:
        # Compiled libraries print to stdout past Python; the answer is the last line.
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Probe(error=f"exit code {done.returncode}: {said[:300]}")
    return Probe(
        version=tuple(int(part) for part in found["python"].split(".")),
        packages=found["packages"],
        cuda=found.get("cuda", False),
        env=found.get("env", {}),
        missing_wrappers=tuple(found.get("missing_wrappers", ())),
        arguments=found.get("arguments", {}),
    )


def python_findings(
    interpreter: Interpreter, found: Probe, needed: Mapping[str, str], *, oldest: tuple[int, int], remedy: str = ""
) -> list[Finding]:
    """Whether the interpreter is one, is new enough, and has what is `needed` (package and the way to install it)."""
    if found.error:
        text = f"{interpreter.path} {found.error}"
        return [Finding("python", "refused", text, "Name a working interpreter with --python")]
    where = f"{found.shown_version} at {interpreter.path} ({interpreter.how})"
    if found.version[:2] < oldest:
        wanted = ".".join(str(part) for part in oldest)
        return [Finding("python", "refused", f"{where} is older than {wanted}", f"Use --python with {wanted} or newer")]
    findings = [Finding("python", "ok", where)]
    for package, install in needed.items():
        version = found.packages.get(package)
        if version is None:
            fix = remedy or f"{interpreter.path} -m pip install '{install}'"
            findings.append(Finding(f"dependency:{package}", "refused", f"is not installed in {interpreter.path}", fix))
        else:
            findings.append(Finding(f"dependency:{package}", "ok", version))
    return findings


def cuda_findings(interpreter: Interpreter, found: Probe) -> list[Finding]:
    """Whether torch there could use a GPU that is leased; only asked of runs that want one."""
    if found.cuda or found.error:
        return []
    text = f"torch in {interpreter.path} sees no GPU: the run would train on the CPU and hold the GPU"
    install = f"{interpreter.path} -m pip install torch --index-url https://download.pytorch.org/whl/cu128"
    return [Finding("gpu", "refused", text, f"{install}, or leave --gpus out")]


def environment_findings(found: Probe, env_id: str) -> list[Finding]:
    """Whether the environment can be made there."""
    if not found.env or found.env.get("made"):
        return [Finding("env", "ok", env_id)] if found.env else []
    known = found.env["known"]
    close = closest_names(env_id, known)
    hint = f"Nearest: {', '.join(close)}" if close else "Look at what gymnasium has registered there"
    if env_id in known:
        hint = "Install what it names, or choose another environment"
    return [Finding("env", "refused", f"{env_id} cannot be made: {found.env['reason'][:300]}", hint)]
