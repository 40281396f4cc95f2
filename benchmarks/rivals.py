"""The rivals' virtual environment: `.venv-rivals`, never ours.

Installs each rival on its own, so that one that does not install costs its row in the table and nothing else; the
reason is kept and printed. What was installed is remembered until the constraints change.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

__all__ = ["ABSENT", "PACKAGES", "prepare"]

PACKAGES = {
    "sb3": "stable-baselines3",
    "sbx": "sbx-rl",
    "skrl": "skrl",
    "tianshou": "tianshou",
    "torchrl": "torchrl",
}
ABSENT = {
    "pufferlib": "its source package downloads raylib and Box2D while building, and without them asks for CUDA; "
    "it has no wheels",
}
"""Tried and not measured, with the reason."""

_TIMEOUT_S = 600
_CONSTRAINTS = Path(__file__).with_name("rivals-constraints.txt")


def prepare(root: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, str]]:
    """The rivals' interpreter, and for each rival that is missing the reason."""
    home = root / ".venv-rivals"
    python = home / "bin" / "python"
    known = home / "installed.json"
    key = hashlib.sha256(_CONSTRAINTS.read_bytes()).hexdigest()
    if known.exists():
        before = json.loads(known.read_text())
        if before["key"] == key:
            return python, before["missing"]
    if not python.exists():
        say(f"creating {home.name} with {Path(sys.executable).name}")
        venv.create(home, with_pip=True)
    say("installing torch for the rivals")
    problem = _install(python, "torch") or _install(python, "gymnasium[classic-control,box2d,mujoco]")
    if problem:
        return python, dict.fromkeys(PACKAGES, problem)
    missing = {}
    for rival, package in PACKAGES.items():
        say(f"installing {package}")
        problem = _install(python, package)
        if problem:
            missing[rival] = problem
            say(f"skipped {rival}: {problem}")
    known.write_text(json.dumps({"key": key, "missing": missing}, indent=1))
    return python, missing


def _install(python: Path, package: str) -> str | None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", _CONSTRAINTS, package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"did not install within {_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    return f"did not install ({said[-1].strip()[:160] if said else 'no reason given'})"
