"""The interpreter, packages and machine of an attempt."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from palaestra.redaction import HIDDEN, Redactor
from palaestra.runs.process.resource_usage import detect_gpus
from palaestra.runs.reproducibility.bounded_process import run_bounded
from palaestra.runs.wire import JsonObject

_PROGRAM = Path(__file__).with_name("packages_program.py")
_TIMEOUT_S = 30.0
_MAX_BYTES = 4 << 20
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?")


@dataclass
class EnvironmentRecord:
    """The environment of an attempt, as environment.json holds it."""

    python: str = ""
    """Version of the interpreter; empty for a program without one."""
    executable: str = ""
    package_count: int = 0
    digest: str = ""
    """Hash of the version and the packages."""
    platform: str = ""
    host: str = ""
    cpu: str = ""
    cores: int = 0
    memory_mb: int = 0
    gpus: list[str] = field(default_factory=list)
    """Names of the GPUs that were leased."""
    problems: list[str] = field(default_factory=list)

    @property
    def description(self) -> str:
        """`Python 3.11.7, 182 packages (9f2c1d3e4b5a), 2 cores of AMD EPYC`."""
        python = f"Python {self.python}, {self.package_count} packages ({self.digest})" if self.python else ""
        machine = f"{self.cores} core{'s' if self.cores != 1 else ''} of {self.cpu}" if self.cpu else ""
        return ", ".join(text for text in (python, machine, *self.gpus) if text)


def collect_environment(
    command: JsonObject,
    directory: Path,
    gpus: tuple[str, ...],
    *,
    redact: Redactor,
    closing: threading.Event | None = None,
) -> EnvironmentRecord:
    """Record the environment of a command.json, and write packages.txt into `directory`."""
    record = describe_machine(gpus)
    argv = command.get("argv")
    variables = {str(name): str(value) for name, value in dict(command.get("environment") or {}).items()}
    python = find_python(str(argv[0])) if isinstance(argv, list) and argv else None
    if python is None:
        return record
    facts = _list_packages(python, variables, closing)
    if facts is None:
        record.problems.append(f"the packages of {python} could not be listed")
        return record
    packages = [redact(str(name)) for name in facts.get("packages", [])]
    record.python, record.executable = str(facts.get("python", "")), python
    record.package_count = len(packages)
    text = "\n".join([f"# Python {record.python}", *packages, ""])
    record.digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
    (directory / "packages.txt").write_text(text, encoding="utf-8")
    return record


def describe_machine(gpus: tuple[str, ...]) -> EnvironmentRecord:
    """The machine of the service, with the GPUs that an attempt leases."""
    names = {gpu.index: gpu.name for gpu in detect_gpus()} if gpus else {}
    return EnvironmentRecord(
        platform=platform.platform(),
        host=platform.node(),
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_mb=_memory_mb(),
        gpus=[names.get(index) or f"GPU {index}" for index in gpus],
    )


def find_python(program: str) -> str | None:
    """The Python interpreter of a program: itself, or the one beside it such as of `venv/bin/torchrun`."""
    path = Path(program)
    if _PYTHON.fullmatch(path.name):
        return program
    beside = path.parent / "python"
    is_script = os.access(beside, os.X_OK) and _is_text(path)
    return str(beside) if is_script else None


def environment_from_json(data: JsonObject) -> EnvironmentRecord:
    """The record of an environment.json; wrong or unknown fields are left out."""
    record = EnvironmentRecord()
    for name, default in vars(record).items():
        value = data.get(name, default)
        if isinstance(value, type(default)):
            setattr(record, name, value)
    return record


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


_cache: dict[tuple[str, float, str], JsonObject] = {}


def _list_packages(python: str, variables: Mapping[str, str], closing: threading.Event | None) -> JsonObject | None:
    key = (python, _packages_changed(python), variables.get("PYTHONPATH", ""))
    if key not in _cache:
        environment = {name: value for name, value in variables.items() if value != HIDDEN}
        environment = {"PATH": os.environ.get("PATH", ""), **environment, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PALAESTRA_RUN", None)
        # Its own directory is gone when the attempt has ended.
        environment.pop("TMPDIR", None)
        output = run_bounded(
            (python, str(_PROGRAM)),
            max_bytes=_MAX_BYTES,
            timeout_s=_TIMEOUT_S,
            environment=environment,
            closing=closing,
        )
        try:
            facts = json.loads(output.data.splitlines()[-1]) if output is not None and output.is_complete else None
        except (ValueError, IndexError):
            facts = None
        if not isinstance(facts, dict):
            return None
        while len(_cache) >= 32:
            _cache.pop(next(iter(_cache)))
        _cache[key] = facts
    return _cache[key]


def _packages_changed(python: str) -> float:
    path = Path(shutil.which(python) or python)
    try:
        directories = list(path.parent.parent.glob("lib/python3*/site-packages"))
        return max((directory.stat().st_mtime for directory in directories), default=0.0)
    except OSError:
        return 0.0


@lru_cache(maxsize=1)
def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("model name", "Model", "Hardware")):
                    return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def _memory_mb() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    except (OSError, ValueError):
        return 0
