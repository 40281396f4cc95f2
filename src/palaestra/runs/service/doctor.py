"""Checks of this machine: what works, what would fail, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from palaestra.errors import PalaestraError
from palaestra.extras import EXTRAS, QT_LIBRARIES, install_command, is_installed, missing_modules
from palaestra.files.home import Home
from palaestra.http.hosts import exposure_warning
from palaestra.redaction import is_secret_name
from palaestra.runs.catalogue import RunnerWithReadiness
from palaestra.runs.client.connect import find_service
from palaestra.runs.config import SETTINGS_FILE, service_config
from palaestra.runs.process.interpreter import Interpreter, cuda_findings, probe
from palaestra.runs.process.resource_usage import Gpu, detect_gpus
from palaestra.runs.runner import Finding, Machine
from palaestra.runs.runners.catalogues import readiness_of
from palaestra.runs.runners.registry import broken_runners, registered_runners
from palaestra.runs.spec import RunSpec
from palaestra.runs.store.database import RegistryCorrupt, open_for_reading
from palaestra.runs.store.lock import find_lock_holder
from palaestra.sessions.browser.chromium import find_chromium

_MIN_FREE_MB = 512
_CHECK_TIMEOUT_S = 20.0
_RESTART = "palaestra serve --stop; the next command starts a new service, and runs are not affected"
_SENT_BY_CLIENT = "Nothing to do: runs started in this shell use its value"
# Variables that a trainer inherits from the service, with the remedy when this shell has another value.
_INHERITED_VARIABLES = {
    "PALAESTRA_CLEANRL": _SENT_BY_CLIENT,
    "PALAESTRA_CORL": _SENT_BY_CLIENT,
    "UV_PROJECT_ENVIRONMENT": _SENT_BY_CLIENT,
    "WANDB_API_KEY": _RESTART,
    "WANDB_BASE_URL": _RESTART,
    "CUDA_VISIBLE_DEVICES": _RESTART,
}
# Specs whose preflight shows what a runner lacks.
_TRIAL_SPECS = {
    "cleanrl": {"script": "ppo", "env_id": "CartPole-v1"},
    "sb3": {"script": "ppo", "env_id": "CartPole-v1"},
}


def examine(home: Home) -> list[Finding]:
    """Run all checks. Starts short probes of other interpreters, and changes nothing."""
    checks = (
        _check_machine(home),
        _check_state(home),
        _check_packages(),
        _check_browser(),
        _check_qt(),
        _check_runners(),
    )
    return [finding for findings in checks for finding in findings]


def _check_machine(home: Home) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Finding("cores", "ok", f"{os.cpu_count()}")
    directory = next(path for path in (home.path, *home.path.parents) if path.exists())
    free = shutil.disk_usage(directory).free >> 20
    if free < _MIN_FREE_MB:
        text = f"{free} MB are free at {directory}, and a launch needs {_MIN_FREE_MB}"
        yield Finding("disk", "refused", text, "palaestra runs gc, or set PALAESTRA_HOME to a larger disk")
    else:
        yield Finding("disk", "ok", f"{free:,} MB free at {directory}")
    if not os.access(directory, os.W_OK):
        remedy = "Set PALAESTRA_HOME to a directory that you can write"
        yield Finding("state", "refused", f"{directory} cannot be written", remedy)
    gpus = detect_gpus()
    shown = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.memory_mb:,} MB)" for gpu in gpus)
    yield Finding("gpu", "ok", shown or "none: runs train on the CPU")
    if gpus and is_installed("torch"):
        interpreter = Interpreter(sys.executable, "this one")
        findings = cuda_findings(interpreter, probe(interpreter, _this_machine(gpus), cuda=True))
        for finding in findings:
            yield replace(finding, check="cuda", level="warning") if finding.level == "refused" else finding
    uv = shutil.which("uv")
    yield Finding("uv", "ok", uv or "not found: needed only to set up checkouts that bring a uv.lock")


def _this_machine(gpus: Sequence[Gpu] = ()) -> Machine:
    indices = tuple(gpu.index for gpu in gpus)
    return Machine(environment=dict(os.environ), free_disk_bytes=1 << 40, gpus=indices)


def _check_state(home: Home) -> Iterator[Finding]:
    yield from _check_registry(home)
    yield from _check_settings(home)
    yield from _check_service(home)
    if home.token.exists() and home.token.stat().st_mode & 0o077:
        yield Finding("token", "refused", f"{home.token} can be read by others", f"chmod 600 {home.token}")


def _check_registry(home: Home) -> Iterator[Finding]:
    if home.registry.exists() and not home.registry.is_file():
        remedy = f"Move it away; the next service rebuilds it from the run directories: mv {home.registry} elsewhere"
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
            yield Finding("registry", "ok", "none yet; the first run creates it")
        else:
            count = connection.execute("SELECT count(*) FROM runs").fetchone()[0]
            connection.close()
            yield Finding("registry", "ok", f"{count:,} run{'' if count == 1 else 's'} in {home.registry}")
    except RegistryCorrupt as error:
        remedy = "Nothing to do: the service rebuilds it from the run directories when it starts"
        yield Finding("registry", "warning", str(error), remedy)
    except PalaestraError as error:
        yield Finding("registry", "refused", str(error))


def _check_settings(home: Home) -> Iterator[Finding]:
    path = home.path / SETTINGS_FILE
    if not path.exists():
        return
    try:
        config = service_config(home, {})
    except PalaestraError as error:
        yield Finding("settings", "refused", f"no service starts with {path}: {error}", "Fix it, or move it away")
        return
    warning = exposure_warning(config.host, config.port)
    if warning:
        yield Finding("network", "warning", warning, f"Remove host from {path}")
    changed = changed_settings_warning(home)
    if changed:
        yield Finding("settings", "warning", changed, _RESTART)
    else:
        yield Finding("settings", "ok", str(path))


def changed_settings_warning(home: Home) -> str:
    """A warning when `service.yaml` was changed after the running service had read it; else empty."""
    path, holder = home.path / SETTINGS_FILE, find_lock_holder(home)
    if not path.exists() or holder is None or holder.since is None or path.stat().st_mtime <= holder.since:
        return ""
    return f"{path} was changed after the service started, which still uses the old settings"


def _check_service(home: Home) -> Iterator[Finding]:
    holder = find_lock_holder(home)
    if holder is None:
        killed = " (the last one was killed)" if home.endpoint.exists() else ""
        yield Finding("service", "ok", f"not running{killed}; starting a run starts it")
        return
    pid = holder.identity.pid
    if not holder.url:
        text = f"process {pid} holds {home.path} without a URL: an orchestrator, or a service that is starting"
        yield Finding("service", "ok", text)
        return
    if pid != os.getpid() and find_service(home) is None:
        yield Finding("service", "warning", f"process {pid} at {holder.url} does not answer", _RESTART)
        return
    yield Finding("service", "ok", f"{holder.url} (process {pid})")
    environment = _read_environment(pid)
    if environment is None or pid == os.getpid():
        return
    for name, remedy in _INHERITED_VARIABLES.items():
        theirs, ours = environment.get(name), os.environ.get(name)
        if theirs != ours and not (theirs and ours and is_secret_name(name)):
            text = f"{name} is {_format_value(name, theirs)} for the service and {_format_value(name, ours)} here"
            yield Finding("environment", "warning", text, remedy)


def _read_environment(pid: int) -> dict[str, str] | None:
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:
        return None
    return dict(word.split("=", 1) for word in words if "=" in word)


def _format_value(name: str, value: str | None) -> str:
    if value is None:
        return "not set"
    return "set" if is_secret_name(name) else repr(value)


def _check_packages() -> Iterator[Finding]:
    if is_installed("torch"):
        yield Finding("dependency:torch", "ok", _version("torch"))
    else:
        yield Finding("dependency:torch", "refused", "is not installed: training will not work", "pip install torch")
    for name, extra in EXTRAS.items():
        missing = missing_modules(name)
        if missing:
            text = f"{', '.join(missing)} not installed; needed for {extra.purpose}"
            yield Finding(f"extra:{name}", "warning", text, install_command(name))
        else:
            versions = ", ".join(f"{module} {_version(module)}" for module in extra.modules)
            yield Finding(f"extra:{name}", "ok", f"{extra.purpose}: {versions}")


def _check_browser() -> Iterator[Finding]:
    try:
        program = find_chromium().path
    except PalaestraError as error:
        yield Finding("chromium", "warning", f"UI sessions will not work: {error}")
        return
    result = _run_check([program, "--version"])
    if result is None or result.returncode:
        text, remedy = f"{program} does not start", f"Run it to see why: {program} --version"
        yield Finding("chromium", "warning", text, remedy)
    else:
        yield Finding("chromium", "ok", f"{result.stdout.strip()} at {program}")


def _check_qt() -> Iterator[Finding]:
    if not is_installed("PySide6"):
        return  # reported with the extra
    result = _run_check([sys.executable, "-c", "import PySide6.QtSvg, PySide6.QtWidgets"])
    if result is None or result.returncode:
        reason = "" if result is None else (result.stderr.strip().splitlines() or [""])[-1]
        yield Finding("qt", "warning", f"PySide6 cannot be loaded: {reason}", QT_LIBRARIES)
    elif any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")):
        yield Finding("qt", "ok", f"PySide6 {_version('PySide6')} can be loaded")
    else:
        yield Finding("qt", "ok", "PySide6 can be loaded; there is no display for the studio here")


def _run_check(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a short program; None if it cannot be started or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _version(module: str) -> str:
    names = _distributions().get(module, ())
    return importlib.metadata.version(names[0]) if names else "installed"


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """The installed distributions by the modules that they hold."""
    return importlib.metadata.packages_distributions()


def _check_runners() -> Iterator[Finding]:
    machine = _this_machine()
    for name, runner in registered_runners().items():
        trial = _TRIAL_SPECS.get(name)
        findings: Sequence[Finding] = ()
        if trial is not None:
            spec = RunSpec.model_validate({"runner": name, "invoked_from": Path.cwd(), **trial})
            findings = runner.preflight(spec, machine)
        elif isinstance(runner, RunnerWithReadiness):
            findings = readiness_of(runner, RunSpec(runner=name), machine).findings
        # A warning only: a machine without a foreign trainer is not broken.
        refusal = next((finding for finding in findings if finding.level == "refused"), None)
        if refusal is None:
            yield Finding(f"runner:{name}", "ok", runner.capabilities.title)
        else:
            yield Finding(f"runner:{name}", "warning", refusal.text, refusal.remedy)
    for name, reason in broken_runners().items():
        yield Finding(f"runner:{name}", "warning", f"cannot be loaded: {reason}", "Fix or uninstall its package")
