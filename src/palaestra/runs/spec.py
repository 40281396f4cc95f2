"""The request for a run, as the command line, Python and HTTP all make it.

A spec names a runner and holds the runner's own keys, which the runner's preflight checks. It is stored, so it holds no
secrets: they stay in the environment of the service.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, StrictBool, ValidationInfo, field_validator

from palaestra.config import Section
from palaestra.redaction import Redactor, is_secret_name
from palaestra.runs.record import MAX_INTEGER
from palaestra.runs.wire import JsonObject

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_CHARACTERS = {
    "runner": 100,
    "script": 4096,
    "checkout": 4096,
    "env_id": 300,
    "python": 4096,
    "warm_start": 4096,
    "on": 300,
    "tags": 100,
}
_MAX_CONFIG_CHARACTERS = 4 << 20
CHECKOUT_VARIABLES = {"cleanrl": "PALAESTRA_CLEANRL", "corl": "PALAESTRA_CORL"}
"""Environment variables that name the checkout of a runner's scripts."""


class RunSpec(Section):
    """The request for one run."""

    schema_version: Literal[1] = 1
    """Version of this document's schema."""
    runner: str = "palaestra"
    """Name of the runner: `palaestra`, `cleanrl`, `corl`, `sb3`, `spade-bdi`, `script`, `echo`, or that of another
    package."""
    name: str = ""
    """Prefix of the run id; empty uses the environment's name."""
    config: JsonObject = Field(default_factory=dict)
    """The runner's own keys; `palaestra runners --schema NAME` lists them."""
    config_text: str = ""
    """Text of the configuration file, kept as config.yaml."""
    script: str | None = None
    """A script of the runner's checkout (`dqn`), or the algorithm of a library (`ppo`)."""
    checkout: str | None = None
    """Checkout that holds the runner's scripts; null uses the one that the service's environment names."""
    env_id: str | None = None
    """The environment; runners that have it in their configuration read it from there."""
    seed: int | None = Field(default=None, ge=0, le=MAX_INTEGER)
    """Seed of all random numbers; null uses the runner's default."""
    python: str | None = None
    """Interpreter or virtual environment to run in; null lets the runner choose."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables. Secrets are refused, because the spec is stored."""
    shell_variables: dict[str, str | None] = Field(default_factory=dict)
    """Variables of the shell that requested it, for the runner `script`. Null stands for a secret, which is taken from
    the environment of the service."""
    invoked_from: Path = Field(default_factory=Path.cwd)
    """Directory that relative paths of the configuration refer to."""
    on: str | None = None
    """Where it runs: null is the machine of the service; a host or group of the service's settings, `any`, or an
    address such as `user@host` or `ray://host`. `python` is then an interpreter of that machine."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Higher priorities start first; runs of equal priority start in the order of submission."""
    gpus: int = Field(default=0, ge=0, le=64)
    """Number of GPUs reserved for the run. It waits until they are free, and is refused on a machine with fewer."""
    memory_mb: int | None = Field(default=None, ge=64, le=1 << 32)
    """Limit on the trainer's address space in MB; allocations beyond it fail."""
    nice: int = Field(default=0, ge=0, le=19)
    """CPU niceness of the process (0 to 19; higher yields more)."""
    warm_start: str | None = None
    """Checkpoint (id or path) to initialise the weights from, where the runner supports it."""
    track: Literal["off", "offline", "online"] = "off"
    """W&B tracking, where the runner supports it."""
    video: StrictBool = False
    """Record short clips while training, where the runner supports it. Slows training; the report says by how much."""
    stop_grace_s: float | None = Field(default=None, ge=0, le=3600)
    """Seconds between the request to stop and a kill; null uses the runner's default."""
    stall_after_s: float = Field(default=600.0, gt=0)
    """Seconds without events or output before the run is marked stalled."""
    stall_action: Literal["alarm", "stop"] = "alarm"
    """Action on a stall: `alarm` only raises the alarm, `stop` also ends the run as `stalled`."""
    no_episode_steps: int | None = Field(default=None, ge=0, le=MAX_INTEGER)
    """Alarm if no episode finishes within this many steps (0: never, for trainers without episodes); null uses the
    service's setting."""
    thin_every: int = Field(default=1, ge=1, le=MAX_INTEGER)
    """Keep one record per metric in this many steps, for trainers that log every gradient step."""
    tags: tuple[str, ...] = Field(default=(), max_length=100)
    """Labels to filter runs by."""

    @field_validator(
        "seed",
        "priority",
        "gpus",
        "memory_mb",
        "nice",
        "stop_grace_s",
        "stall_after_s",
        "no_episode_steps",
        "thin_every",
        mode="before",
    )
    @classmethod
    def _check_number(cls, value: object) -> object:
        if isinstance(value, bool | str):
            raise ValueError("is not a number")
        return value

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if value and not _NAME.fullmatch(value):
            raise ValueError("may hold letters, digits, dot, dash and underscore only, at most 63, no leading dot")
        return value

    @field_validator(*_MAX_CHARACTERS)
    @classmethod
    def _check_lines(cls, value: str | tuple[str, ...] | None, info: ValidationInfo) -> str | tuple[str, ...] | None:
        for text in (value,) if isinstance(value, str) else value or ():
            _raise_fault(find_text_fault(text, _MAX_CHARACTERS[str(info.field_name)]))
        return value

    @field_validator("config_text")
    @classmethod
    def _check_config_text(cls, value: str) -> str:
        _raise_fault(find_text_fault(value, _MAX_CONFIG_CHARACTERS, one_line=False))
        return value

    @field_validator("config", "environment", "shell_variables", "invoked_from")
    @classmethod
    def _check_storable(cls, value: Any) -> Any:
        _raise_fault(find_value_fault(str(value) if isinstance(value, Path) else value))
        return value

    @field_validator("environment", "shell_variables")
    @classmethod
    def _check_environment(cls, value: dict[str, str | None]) -> dict[str, str | None]:
        for key, optional_text in value.items():
            text = optional_text or ""
            if optional_text is None and key and "=" not in key:
                continue
            if is_secret_name(key) or Redactor()(text) != text:
                problem = "looks like a secret" if is_secret_name(key) else "holds a password or token"
                raise ValueError(
                    f"{key} {problem} and would be stored: export it where the service starts (palaestra serve --stop "
                    "ends the current one), and the trainer inherits it"
                )
            if "\0" in key + text or "=" in key or not key:
                raise ValueError(f"{key!r} is not a name that an environment can hold")
        return value


def resolve_environment(spec: RunSpec, environment: Mapping[str, str]) -> RunSpec:
    """Fill in the checkout and interpreter that the client's environment variables name, if the spec has none.

    A program of the runner `script` gets the client's variables.

    The service keeps the environment of the shell that started it, which may differ from the client's.
    """
    if spec.runner == "script" and not spec.shell_variables:
        return spec.model_copy(update={"shell_variables": collect_shell_variables(environment)})
    variable = CHECKOUT_VARIABLES.get(spec.runner)
    if variable is None:
        return spec
    directory = spec.config.get("checkout") or spec.checkout or environment.get(variable)
    if not isinstance(directory, str) or not directory:
        return spec
    checkout = (spec.invoked_from / Path(directory).expanduser()).resolve()
    changes = {} if spec.config.get("checkout") or spec.checkout else {"checkout": str(checkout)}
    project_environment = environment.get("UV_PROJECT_ENVIRONMENT")
    # On another machine, the interpreter is one of that machine.
    if spec.python is None and project_environment and spec.on is None:
        # uv resolves a relative path against the project.
        python = checkout / project_environment / "bin" / "python"
        changes |= {"python": str(python)} if python.is_file() else {}
    return spec.model_copy(update=changes) if changes else spec


def collect_shell_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """The variables of a shell that a program may depend on; secrets without their values."""
    redact = Redactor()
    variables: dict[str, str | None] = {}
    for name, value in environment.items():
        if _SHELL_STATE.fullmatch(name) or not name or find_text_fault(value, one_line=False):
            continue
        is_secret = is_secret_name(name) or redact(value) != value
        variables[name] = None if is_secret else value
    return variables


_SHELL_STATE = re.compile(
    r"_|PWD|OLDPWD|SHLVL|COLUMNS|LINES|LS_COLORS|TERM\w*|COLORTERM|PS\d|PROMPT\w*|HIST\w*|LESS\w*|SSH_\w+|TMUX\w*|STY"
    r"|WINDOW\w*|DBUS_\w+|XDG_(?:SESSION|RUNTIME|SEAT|VTNR)\w*|BASH_FUNC_.*|MAIL|TMPDIR|PALAESTRA_\w+|CUDA_VISIBLE_DEVICES"
)
"""Variables of the terminal and the session, which say nothing about a program, and those that every run sets."""


def run_name(name: object, path: Path | None) -> str:
    """Prefix of a run id: the configuration's own name, else the stem of its file; empty without either."""
    stem = name if isinstance(name, str) and name else path.stem if path is not None else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:63]


def find_text_fault(text: str, max_characters: int | None = None, *, one_line: bool = True) -> str:
    """Why a text cannot be stored; empty when it can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    if "\0" in text or (one_line and _CONTROL.search(text)):
        return "holds a control character or a line break"
    if max_characters is not None and len(text) > max_characters:
        return f"is longer than {max_characters:,} characters"
    return ""


def find_value_fault(value: object) -> str:
    """Why nested JSON data cannot be stored, with the place of the fault; empty when it can."""
    for place, leaf in _iterate_leaves(value):
        fault = ""
        if isinstance(leaf, str):
            fault = find_text_fault(leaf, one_line=False)
        elif isinstance(leaf, int) and not -MAX_INTEGER <= leaf <= 2 * MAX_INTEGER + 1:
            fault = "is a number beyond 64 bits"
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            # JSON would turn it into null, which means the default.
            fault = "is not a finite number"
        if fault:
            return f"at {ascii(place)[1:-1]}: {fault}" if place else fault
    return ""


def _iterate_leaves(value: object) -> Iterator[tuple[str, object]]:
    """Keys and leaves of nested data, each with its place; a stack, because the data may be nested deeply."""
    pending = [("", value)]
    while pending:
        place, current = pending.pop()
        if isinstance(current, dict):
            for key, item in current.items():
                key_place = f"{place}.{key}".lstrip(".")
                yield key_place, key
                pending.append((key_place, item))
        elif isinstance(current, list | tuple):
            pending.extend((f"{place}[{index}]", item) for index, item in enumerate(current))
        else:
            yield place, current


def _raise_fault(fault: str) -> None:
    if fault:
        raise ValueError(fault)
