"""The preflight of a machine: what works here, what would fail, and the command that mends it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from palaestra.errors import PalaestraError
from palaestra.files.home import Home
from palaestra.http.hosts import exposure_warning
from palaestra.redaction import is_secret_name
from palaestra.runs.client.connect import find_service, holder_of
from palaestra.runs.process.interpreter import Interpreter, cuda_findings, probe
from palaestra.runs.process.resource_usage import detect_gpus
from palaestra.runs.runner import Finding, Machine
from palaestra.runs.runners.registry import broken_runners, registered_runners
from palaestra.runs.service.config import SETTINGS_FILE, service_config, settings_changed
from palaestra.runs.spec import RunSpec
from palaestra.runs.store.database import RegistryCorrupt, open_for_reading

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
_RESTART = "palaestra serve --stop; the next command starts another, and runs go on meanwhile"
_SENT = "Nothing to do: runs that are started here take what is set here"
# Variables of which a trainer gets the service's, and what to do when this shell has another.
_MATTERING = {
    "PALAESTRA_CLEANRL": _SENT,
    "UV_PROJECT_ENVIRONMENT": _SENT,
    "WANDB_API_KEY": _RESTART,
    "WANDB_BASE_URL": _RESTART,
    "CUDA_VISIBLE_DEVICES": _RESTART,
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
    gpus = detect_gpus()
    shown = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.memory_mb:,} MB)" for gpu in gpus)
    yield Finding("gpu", "ok", shown or "none: runs train on the processor")
    if gpus and importlib.util.find_spec("torch") is not None:
        mine = Interpreter(sys.executable, "this one")
        lacks = cuda_findings(mine, probe(mine, _here(tuple(gpu.index for gpu in gpus)), cuda=True))
        yield from (replace(one, check="cuda", level="warning") if one.level == "refused" else one for one in lacks)
    uv = shutil.which("uv")
    yield Finding("uv", "ok", uv or "not found: needed only to set up checkouts that bring a uv.lock")


def _here(gpus: tuple[str, ...] = ()) -> Machine:
    return Machine(environment=dict(os.environ), free_disk_bytes=1 << 40, gpus=gpus)


def _state(home: Home) -> Iterator[Finding]:
    yield from _registry(home)
    yield from _settings(home)
    yield from _service(home)
    if home.token.exists() and home.token.stat().st_mode & 0o077:
        yield Finding("token", "refused", f"{home.token} can be read by others", f"chmod 600 {home.token}")


def _registry(home: Home) -> Iterator[Finding]:
    if home.registry.exists() and not home.registry.is_file():
        remedy = f"Move it away; the next service makes one from the run directories: mv {home.registry} elsewhere"
        yield Finding("registry", "refused", f"{home.registry} is not a file", remedy)
        return
    if home.registry.exists() and not os.access(home.registry, os.R_OK | os.W_OK):
        yield Finding(
            "registry", "refused", f"{home.registry} cannot be read and written", f"chmod 644 {home.registry}"
        )
        return
    try:
        connection = open_for_reading(home.registry)
        if connection is None:
            yield Finding("registry", "ok", "none yet; the first run makes it")
        else:
            count = connection.execute("SELECT count(*) FROM runs").fetchone()[0]
            connection.close()
            yield Finding("registry", "ok", f"{count:,} run{'' if count == 1 else 's'} in {home.registry}")
    except RegistryCorrupt as error:
        remedy = "Nothing to do: the service rebuilds it from the run directories when it starts"
        yield Finding("registry", "warning", str(error), remedy)
    except PalaestraError as error:
        yield Finding("registry", "refused", str(error))


def _settings(home: Home) -> Iterator[Finding]:
    path = home.path / SETTINGS_FILE
    if not path.exists():
        return
    try:
        config = service_config(home, {})
    except PalaestraError as error:
        yield Finding("settings", "refused", f"no service starts with {path}: {error}", "Mend it, or move it away")
        return
    warning = exposure_warning(config.host, config.port)
    if warning:
        yield Finding("network", "warning", warning, f"Take host out of {path}")
    changed = settings_changed(home)
    if changed:
        yield Finding("settings", "warning", changed, _RESTART)
    else:
        yield Finding("settings", "ok", str(path))


def _service(home: Home) -> Iterator[Finding]:
    holder = holder_of(home)
    if holder is None:
        killed = " (the last one was killed)" if home.endpoint.exists() else ""
        yield Finding("service", "ok", f"not running{killed}; it starts by itself when a run is started")
        return
    pid = holder.identity.pid
    if not holder.url:
        text = f"process {pid} holds {home.path} and serves nobody: an orchestrator, or a service that has just begun"
        yield Finding("service", "ok", text)
        return
    if pid != os.getpid() and find_service(home) is None:
        yield Finding("service", "warning", f"process {pid} at {holder.url} does not answer us", _RESTART)
        return
    yield Finding("service", "ok", f"{holder.url} (process {pid})")
    theirs = _environment_of(pid)
    for name in _MATTERING if theirs is not None and pid != os.getpid() else ():
        one, other = (theirs or {}).get(name), os.environ.get(name)
        if one != other and not (one and other and is_secret_name(name)):
            text = f"{_told(name, one)} for the service and {_told(name, other)} here"
            yield Finding("environment", "warning", f"{name} is {text}", _MATTERING[name])


def _environment_of(pid: int) -> dict[str, str] | None:
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:
        return None
    return dict(word.split("=", 1) for word in words if "=" in word)


def _told(name: str, value: str | None) -> str:
    if value is None:
        return "not set"
    return "set" if is_secret_name(name) else repr(value)


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
    machine = _here()
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
