"""The Python interpreter and the environment variables of a trainer.

Choosing an interpreter looks at files only. `probe` starts the interpreter once for `probe.py` and caches the answer
for a minute, because a preview, a consent and a launch ask the same within seconds. Nothing is created or installed.

The variables come from a list of names, never from the whole environment of the service: its token, other secrets of
the shell, PYTHONPATH and the like are not passed on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack

from palaestra.config import closest_names
from palaestra.errors import ConfigError
from palaestra.runs.runner import AttemptPaths, Finding, Machine, PolicyRequest
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject, from_json
from palaestra.telemetry.wandb import find_host, has_credentials

PROBE_PROGRAM = Path(__file__).with_name("probe.py")
PROBE_TIMEOUT_S = 60.0
CACHE_S = 60.0

_INHERITED = re.compile(
    r"(?:PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|SHELL|LD_LIBRARY_PATH|SSL_CERT_\w+|\w+_PROXY|XDG_CACHE_HOME|DISPLAY"
    r"|WAYLAND_DISPLAY|(?:OMP|MKL|OPENBLAS|NUMBA|CUDA|NVIDIA|TORCH|HF|WANDB|MUJOCO|MINARI|JAX|XLA)_?\w*)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter and why it was chosen."""

    path: str
    how: str


class ProbeRequest(TypedDict, total=False):
    """What `probe.py` looks for in an interpreter."""

    packages: tuple[str, ...]
    env_id: str | None
    env_kwargs: dict[str, object]
    """Arguments of that environment."""
    register: tuple[str, ...]
    """Modules to import before the environment is created."""
    render: bool
    """Whether to render the environment."""
    cuda: bool
    signature_of: str
    """Address of a class whose parameters are returned."""
    wrappers: tuple[str, ...]
    """Names that `gymnasium.wrappers` may lack."""
    registry: bool
    """Whether to list the registered environments."""
    parameters_of: str
    """Id or address of an environment whose parameters are returned."""


@dataclass(frozen=True)
class ProbedEnvironment:
    """Whether an interpreter can create an environment."""

    made: bool
    signature: JsonObject = field(default_factory=dict)
    """Its identity and spaces; empty if it was not created."""
    reason: str = ""
    """Why it was not created."""
    known: tuple[str, ...] = ()
    """All registered ids, if it was not created."""


@dataclass(frozen=True)
class ProbedParameter:
    """A parameter of a class."""

    default: object
    """None if JSON cannot represent it."""
    required: bool
    kind: str
    """Its annotation as text."""
    opaque: bool = False
    """Whether it has a default that JSON cannot represent."""
    description: str = ""


@dataclass(frozen=True)
class RegisteredEnvironment:
    """An environment in the registry of Gymnasium."""

    env_id: str
    entry_point: str
    max_episode_steps: int | None
    missing: str
    """The module that it needs and that is not installed; empty when nothing is missing."""


@dataclass(frozen=True)
class Probe:
    """What an interpreter provides."""

    error: str = ""
    """Why the probe failed; empty if it succeeded."""
    version: tuple[int, ...] = ()
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Versions of the requested packages; None: not installed."""
    cuda: bool = False
    env: ProbedEnvironment | None = None
    """None if the probe was not asked for one."""
    missing_wrappers: tuple[str, ...] = ()
    """Requested names that `gymnasium.wrappers` does not have."""
    arguments: Mapping[str, ProbedParameter] | None = None
    """Parameters of the requested class or environment by name; None without a request, and if it cannot be found."""
    registry: tuple[RegisteredEnvironment, ...] | None = None
    """The registered environments; None without a request, and if Gymnasium is not installed."""
    import_error: str = ""
    """Why the requested class, environment or registry cannot be read."""

    @property
    def env_signature(self) -> JsonObject:
        """Identity and spaces of the environment; empty if it was not created."""
        return {} if self.env is None else self.env.signature

    @property
    def version_text(self) -> str:
        """The version as text: `3.12.1`."""
        return ".".join(str(part) for part in self.version)

    def at_least(self, package: str, *wanted: int) -> bool:
        """Whether a package is installed in this version or a later one."""
        version = self.packages.get(package)
        parts = [int(part) for part in (version or "").split(".")[: len(wanted)] if part.isdecimal()]
        return bool(parts) and tuple(parts) >= wanted


def choose_python(spec: RunSpec, checkout: Path | None = None) -> Interpreter:
    """The interpreter of the spec, else that of the checkout, else our own. `ConfigError` if it does not exist."""
    if spec.python is not None:
        return Interpreter(_find_interpreter(spec.python, spec.invoked_from), "as given")
    if checkout is not None:
        place = os.environ.get("UV_PROJECT_ENVIRONMENT") or ".venv"
        own = checkout / place / "bin" / "python"
        if own.is_file():
            return Interpreter(str(own), f"the checkout's {place}")
    return Interpreter(sys.executable, "the run service's own")


def choose_policy_python(request: PolicyRequest, checkout: Path | None = None) -> Interpreter:
    """The interpreter that trained a checkpoint if it still exists, else that of a new run with the same spec."""
    argv = request.command.get("argv")
    if isinstance(argv, list) and argv and isinstance(argv[0], str) and os.access(argv[0], os.X_OK):
        return Interpreter(argv[0], "the one it was trained with")
    return choose_python(request.spec or RunSpec(), checkout)


def _find_interpreter(python: str, invoked_from: Path) -> str:
    if not python.strip():
        remedy = "Leave it out, or give an interpreter or a virtualenv"
        raise ConfigError("python", python, "names no interpreter", remedy)
    try:
        path = Path(python).expanduser()
    except RuntimeError:
        raise ConfigError("python", python, "there is no such user", "Give the whole path") from None
    if path.parent == Path(".") and not (invoked_from / path).exists():
        program = shutil.which(python)
        if program is None:
            raise ConfigError("python", python, "no such program", "Give the path of an interpreter or a virtualenv")
        return program
    # Not resolved: the location of the link, not its target, identifies a virtual environment.
    path = Path(os.path.normpath(invoked_from / path))
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError("python", python, f"{path} is not a program", "Give an interpreter or a virtualenv directory")
    return str(path)


def probe(
    interpreter: Interpreter,
    machine: Machine,
    *,
    pythonpath: tuple[str, ...] = (),
    max_age_s: float = CACHE_S,
    refresh: bool = False,
    **request: Unpack[ProbeRequest],
) -> Probe:
    """Run the probe in an interpreter. The answer is cached until its packages change, and at most for `max_age_s`.

    `refresh` asks in any case. A probe that failed is repeated after a minute.
    """
    environment = {**inherited_variables(machine), "PYTHONDONTWRITEBYTECODE": "1", "SDL_VIDEODRIVER": "dummy"}
    if pythonpath:
        environment["PYTHONPATH"] = ":".join(pythonpath)
    key = (interpreter.path, _packages_changed(interpreter.path), json.dumps([request, environment], sort_keys=True))
    now = time.monotonic()
    for old in [known for known, (_, expires) in _cache.items() if now > expires]:
        del _cache[old]
    if key not in _cache or refresh:
        answer = _run_probe(interpreter.path, request, environment)
        _cache[key] = (answer, now + (CACHE_S if answer.error else max_age_s))
    return _cache[key][0]


_cache: dict[tuple[str, float, str], tuple[Probe, float]] = {}


def _packages_changed(python: str) -> float:
    """When the packages of an interpreter last changed."""
    directories = Path(python).parent.parent.glob("lib/python3*/site-packages")
    return max((directory.stat().st_mtime for directory in directories), default=0.0)


def _run_probe(python: str, request: ProbeRequest, environment: Mapping[str, str]) -> Probe:
    try:
        done = subprocess.run(
            [python, str(PROBE_PROGRAM), json.dumps(request)],
            env=dict(environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        return Probe(error=f"cannot be started ({error.strerror})")
    except subprocess.TimeoutExpired:
        return Probe(error=f"did not answer within {PROBE_TIMEOUT_S:.0f} s")
    try:
        # Compiled libraries write to stdout directly; the answer is the last line.
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return Probe(error=f"exit code {done.returncode}: {last[:300]}")
    env, parameters, registry = answer.get("env"), answer.get("arguments", {}), answer.get("registry", {})
    takes, rows = parameters.get("takes"), registry.get("environments")
    return Probe(
        version=tuple(int(part) for part in answer["python"].split(".")),
        packages=answer["packages"],
        cuda=answer.get("cuda", False),
        env=None if env is None else from_json(ProbedEnvironment, env),
        missing_wrappers=tuple(answer.get("missing_wrappers", ())),
        arguments=None if takes is None else {n: from_json(ProbedParameter, data) for n, data in takes.items()},
        registry=None if rows is None else tuple(from_json(RegisteredEnvironment, row) for row in rows),
        import_error=parameters.get("reason", "") or registry.get("reason", ""),
    )


def python_findings(
    interpreter: Interpreter, probed: Probe, needed: Mapping[str, str], *, oldest: tuple[int, int], remedy: str = ""
) -> list[Finding]:
    """Check that the interpreter works, is new enough, and has the `needed` packages (name to pip requirement)."""
    if probed.error:
        text = f"{interpreter.path} {probed.error}"
        return [Finding("python", "refused", text, "Name a working interpreter with --python")]
    where = f"{probed.version_text} at {interpreter.path} ({interpreter.how})"
    if probed.version[:2] < oldest:
        wanted = ".".join(str(part) for part in oldest)
        return [Finding("python", "refused", f"{where} is older than {wanted}", f"Use --python with {wanted} or newer")]
    findings = [Finding("python", "ok", where)]
    for package, install in needed.items():
        version = probed.packages.get(package)
        if version is None:
            fix = remedy or f"{interpreter.path} -m pip install '{install}'"
            findings.append(Finding(f"dependency:{package}", "refused", f"is not installed in {interpreter.path}", fix))
        else:
            findings.append(Finding(f"dependency:{package}", "ok", version))
    return findings


def cuda_findings(interpreter: Interpreter, probed: Probe) -> list[Finding]:
    """Check that torch can use a GPU; for runs that request one."""
    if probed.cuda or probed.error:
        return []
    text = f"torch in {interpreter.path} sees no GPU: the run would train on the CPU and hold the GPU"
    install = f"{interpreter.path} -m pip install torch --index-url https://download.pytorch.org/whl/cu128"
    return [Finding("gpu", "refused", text, f"{install}, or leave --gpus out")]


def environment_findings(probed: Probe, env_id: str) -> list[Finding]:
    """Check that the environment can be created."""
    if probed.env is None:
        return []
    if probed.env.made:
        return [Finding("env", "ok", env_id)]
    close = closest_names(env_id, probed.env.known)
    hint = f"Nearest: {', '.join(close)}" if close else "Look at what gymnasium has registered there"
    if env_id in probed.env.known:
        hint = "Install what it names, or choose another environment"
    return [Finding("env", "refused", f"{env_id} cannot be made: {probed.env.reason[:300]}", hint)]


def tracking_findings(spec: RunSpec, machine: Machine) -> list[Finding]:
    """Whether the trainer has W&B credentials, for runs that log online."""
    if spec.track != "online":
        return []
    variables = {**inherited_variables(machine), **spec.environment}
    if has_credentials(variables):
        return [Finding("credentials", "ok", "for W&B")]
    text = f"W&B online needs WANDB_API_KEY in the service's environment, or {find_host(variables)} in ~/.netrc"
    return [Finding("credentials", "refused", text, "Run wandb login, use --track offline, or leave --track out")]


def inherited_variables(machine: Machine) -> dict[str, str]:
    """Variables of the service that a trainer or a probe inherits."""
    return {name: value for name, value in machine.environment.items() if _INHERITED.fullmatch(name)}


def policy_environment(pythonpath: Sequence[str] = ()) -> dict[str, str]:
    """Variables of a policy process in addition to those of the play, whose module path it must not inherit."""
    return {
        "PYTHONPATH": ":".join(pythonpath),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "SDL_VIDEODRIVER": "dummy",
    }


def require_packages(interpreter: Interpreter, probed: Probe, needed: Mapping[str, str]) -> None:
    """Raise `ConfigError` with the command that installs what an interpreter lacks."""
    for finding in python_findings(interpreter, probed, needed, oldest=(3, 8)):
        if finding.level == "refused":
            name = finding.check.partition(":")[2]
            raise ConfigError("python", interpreter.path, f"{name} {finding.text}".strip(), finding.remedy)


def trainer_environment(
    spec: RunSpec, paths: AttemptPaths, machine: Machine, runner_variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """All variables of an attempt. `runner_variables` override those of the spec."""
    own = dict(runner_variables or {})
    if "PYTHONPATH" in own and "PYTHONPATH" in spec.environment:
        own["PYTHONPATH"] += f":{spec.environment['PYTHONPATH']}"
    return {
        # Two runs on two cores are slower with a thread per core each than with one thread each.
        "OMP_NUM_THREADS": "1",
        # GPU indices come from nvidia-smi; by default CUDA numbers the fastest GPU first.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **inherited_variables(machine),
        # Buffered output would be lost in a crash.
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        # After rendering, SDL would handle SIGTERM itself and the trainer could not be stopped.
        "SDL_NO_SIGNAL_HANDLERS": "1",
        "SDL_VIDEODRIVER": "dummy",
        "TMPDIR": str(paths.attempt_dir / "tmp"),
        "PALAESTRA_HOME": str(paths.run_dir.parents[3]),
        "CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[: spec.gpus]),
        **spec.environment,
        **own,
    }
