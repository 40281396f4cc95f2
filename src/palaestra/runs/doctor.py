"""The preflight of a machine: what works here, what would fail, and the command that mends it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from palaestra.errors import PalaestraError
from palaestra.runs.durable import read_json
from palaestra.runs.gpu import detected_gpus
from palaestra.runs.layout import Home
from palaestra.runs.runner import Finding, Machine
from palaestra.runs.runners.table import broken_runners, registered_runners
from palaestra.runs.spec import RunSpec
from palaestra.runs.store.database import RegistryCorrupt, open_reading

__all__ = ["examine"]

_LEAST_MB = 512
_PACKAGES: dict[str, tuple[str, str, Literal["warning", "refused"]]] = {
    "fastapi": ("the run service", "serve", "refused"),
    "uvicorn": ("the run service", "serve", "refused"),
    "httptools": ("the run service", "serve", "refused"),
    "torch": ("training", "", "refused"),
    "tensorboard": ("TensorBoard files", "tensorboard", "warning"),
    "wandb": ("tracking with W&B", "wandb", "warning"),
    "imageio_ffmpeg": ("video clips", "video", "warning"),
    "Box2D": ("the environments LunarLander and BipedalWalker", "box2d", "warning"),
    "mujoco": ("the environments of MuJoCo", "mujoco", "warning"),
    "transformers": ("vision-language models", "vlm", "warning"),
    "miniwob": ("screen tasks", "ui", "warning"),
}
# What a runner would be asked to do here, to hear what it lacks.
_TRIALS = {
    "cleanrl": {"script": "ppo", "env_id": "CartPole-v1"},
    "sb3": {"script": "ppo", "env_id": "CartPole-v1"},
}


def examine(home: Home) -> list[Finding]:
    """Look at everything. Starts short probes of other interpreters, writes nothing."""
    return [*_machine(home), *_state(home), *_packages(), *_runners(home)]


def _machine(home: Home) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Finding("cores", "ok", f"{os.cpu_count()}")
    place = next(path for path in (home.path, *home.path.parents) if path.exists())
    free = shutil.disk_usage(place).free >> 20
    if free < _LEAST_MB:
        text = f"{free} MB are free at {place}, and {_LEAST_MB} are the least for a launch"
        yield Finding("disk", "refused", text, "palaestra runs gc, or set PALAESTRA_HOME to a larger disk")
    else:
        yield Finding("disk", "ok", f"{free:,} MB free at {place}")
    if not os.access(place, os.W_OK):
        yield Finding("state", "refused", f"{place} cannot be written", "Set PALAESTRA_HOME to a directory of yours")
    gpus = detected_gpus()
    shown = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.memory_mb:,} MB)" for gpu in gpus)
    yield Finding("gpu", "ok", shown or "none: runs train on the processor")


def _state(home: Home) -> Iterator[Finding]:
    try:
        connection = open_reading(home.registry)
        if connection is None:
            yield Finding("registry", "ok", "none yet; the first run makes it")
        else:
            count = connection.execute("SELECT count(*) FROM runs").fetchone()[0]
            connection.close()
            yield Finding("registry", "ok", f"{count:,} runs in {home.registry}")
    except RegistryCorrupt as error:
        remedy = "Nothing to do: the service rebuilds it from the run directories when it starts"
        yield Finding("registry", "warning", str(error), remedy)
    except PalaestraError as error:
        yield Finding("registry", "refused", str(error))
    told = read_json(home.endpoint)
    if told is not None:
        yield Finding("service", "ok", f"{told.get('url')} (process {told.get('pid')})")
    else:
        yield Finding("service", "ok", "not running; it starts by itself when a run is started")
    if home.token.exists() and home.token.stat().st_mode & 0o077:
        yield Finding("token", "refused", f"{home.token} can be read by others", f"chmod 600 {home.token}")


def _packages() -> Iterator[Finding]:
    for package, (what, extra, level) in _PACKAGES.items():
        if importlib.util.find_spec(package) is not None:
            yield Finding(f"dependency:{package}", "ok", f"{_version(package)} ({what})")
        else:
            remedy = f"pip install 'palaestra[{extra}]'" if extra else f"pip install {package}"
            yield Finding(f"dependency:{package}", level, f"is not installed: {what} will not work", remedy)


def _version(package: str) -> str:
    for name in (package, package.lower(), package.replace("_", "-")):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "installed"


def _runners(home: Home) -> Iterator[Finding]:
    machine = Machine(environment=dict(os.environ), free_disk_bytes=1 << 40)
    for name, runner in registered_runners().items():
        trial = _TRIALS.get(name)
        if trial is None:
            yield Finding(f"runner:{name}", "ok", runner.capabilities.title)
            continue
        spec = RunSpec.model_validate({"runner": name, "invoked_from": Path.cwd(), **trial})
        # A foreign trainer that cannot run here is no fault of the machine, so it is told and no more.
        lacks = [finding for finding in runner.preflight(spec, machine) if finding.level == "refused"]
        for finding in lacks[:1]:
            yield Finding(f"runner:{name}", "warning", f"{finding.text}", finding.remedy)
        if not lacks:
            yield Finding(f"runner:{name}", "ok", runner.capabilities.title)
    for name, reason in broken_runners().items():
        yield Finding(f"runner:{name}", "warning", f"cannot be loaded: {reason}", "Mend or uninstall its package")
