"""Runs any program: `palaestra runs start -- python train.py --lr 3e-4`.

The program has the working directory, the variables and the interpreter of the shell in which the command was given.
Its metrics are found in what it logs, writes and prints; docs/run-metrics.md has the rules.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.files.checkpoint import digest_file
from palaestra.redaction import redact_command
from palaestra.runs.catalogue import EnvironmentInfo
from palaestra.runs.process.interpreter import choose_python, inherited_variables
from palaestra.runs.process.parameter_schema import object_schema
from palaestra.runs.runner import (
    AttemptPaths,
    Finding,
    LaunchPlan,
    LogFile,
    Machine,
    NewEventFiles,
    ProgramOutput,
    RunnerCapabilities,
)
from palaestra.runs.runners.script.command_line import CommandLine, flatten, is_python, parse_command
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

_ENV_OPTIONS = ("env_id", "env", "env_name", "environment")
_MAX_WORDS = 10_000
_EXAMPLE = "palaestra runs start -- python train.py --lr 3e-4"


class ScriptRunner:
    """Any program."""

    name = "script"
    capabilities = RunnerCapabilities(title="Any program", restarts=True, runs_foreign_code=True)

    def config_schema(self, spec: RunSpec) -> JsonObject:
        """The command, and the options that it has."""
        schema: JsonObject = {
            "command": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "description": "Program and arguments, executed without a shell.",
            }
        }
        try:
            options = _read_command(spec).options
        except ConfigError:
            options = ()
        for option in options:
            schema.setdefault(option.name, {"description": "Replaces the value in the command."})
        return {"type": "object", "properties": schema, "required": ["command"]}

    def environments(self, spec: RunSpec, machine: Machine, *, refresh: bool = False) -> list[EnvironmentInfo]:
        """None: a program has its own."""
        return []

    def environment_parameters(self, env_id: str, spec: RunSpec, machine: Machine) -> JsonObject:
        """None: any name is an environment without parameters."""
        return object_schema({})

    def readiness(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Always ready: it needs no package."""
        return [Finding("program", "ok", "runs any program of this machine")]

    def preflight(self, spec: RunSpec, machine: Machine) -> list[Finding]:
        """Check that the program and the script exist, and that the command holds no secret."""
        if spec.on is not None:
            text = "a program runs on the machine of the service only"
            return [Finding("on", "refused", text, "Leave --on out, or use a runner of docs/runners.md")]
        try:
            command = _read_command(spec)
            program = _find_program(command, spec, machine)
            _check_script(command, spec)
        except ConfigError as error:
            return [Finding("command", "refused", error.reason, error.remedy)]
        if redact_command(command.words) != list(command.words):
            text = "the command holds a password or token and would be stored"
            return [Finding("secret", "refused", text, "Export it where the service starts, and leave it out here")]
        findings = [Finding("program", "ok", program)]
        missing = [name for name, value in spec.shell_variables.items() if value is None]
        missing = [name for name in missing if name not in machine.environment]
        if missing:
            text = f"{', '.join(missing)} of your shell is not passed on: secrets come from the service's environment"
            remedy = "palaestra serve --stop, and start the run again from this shell"
            findings.append(Finding("secret", "warning", text, remedy))
        return findings

    def plan(self, spec: RunSpec, paths: AttemptPaths, machine: Machine) -> LaunchPlan:
        """The command as it was given, with the absolute path of its program."""
        command = _read_command(spec)
        config = command.to_config()
        env_id = spec.env_id or next((config[key] for key in _ENV_OPTIONS if isinstance(config.get(key), str)), "")
        return LaunchPlan(
            argv=(_find_program(command, spec, machine), *command.words[1:]),
            environment=_build_environment(spec, paths, machine),
            cwd=spec.invoked_from,
            paths=paths,
            # In this order: a program that logs or writes event files is not searched for printed numbers.
            sources=(LogFile(), NewEventFiles(str(spec.invoked_from)), ProgramOutput()),
            env_id=str(env_id),
            algorithm=command.name,
            script_sha256=_hash_script(command, spec),
            has_episodes=False,
            resolved=config,
        )


def _hash_script(command: CommandLine, spec: RunSpec) -> str:
    """The digest of the script; empty for a module or a program without one."""
    path = Path(spec.invoked_from or ".") / command.script
    if not command.script or command.is_module or not path.is_file():
        return ""
    return digest_file(path).sha256


def _read_command(spec: RunSpec) -> CommandLine:
    """The command with the values that the configuration and the seed replace. `ConfigError`."""
    words = spec.config.get("command")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError("command", words, "no program given", f"Write it after two dashes: {_EXAMPLE}")
    if len(words) > _MAX_WORDS or any("\0" in word for word in words) or not words[0].strip():
        raise ConfigError("command", words[0], "is not a command that can be executed", f"For example: {_EXAMPLE}")
    command = parse_command(words)
    changes = dict(flatten({key: value for key, value in spec.config.items() if key != "command"}))
    if spec.seed is not None:
        changes.setdefault("seed", spec.seed)
    return parse_command(command.replace_options(changes)) if changes else command


def _find_program(command: CommandLine, spec: RunSpec, machine: Machine) -> str:
    """The absolute path of the program. `ConfigError` if it cannot be executed."""
    word = command.words[0]
    if spec.python is not None:
        if not is_python(word):
            reason = f"{word} is not a Python interpreter, and --python {spec.python} cannot replace it"
            raise ConfigError("python", spec.python, reason, "Leave --python out")
        try:
            return choose_python(spec).path
        except ConfigError as error:
            raise ConfigError("python", spec.python, f"{spec.python}: {error.reason}", error.remedy) from None
    if "/" not in word:
        search = spec.shell_variables.get("PATH") or machine.environment.get("PATH")
        program = shutil.which(word, path=search)
        if program is not None:
            return os.path.normpath(spec.invoked_from / program)
        here = spec.invoked_from / word
        if here.exists():
            run = f"python {word}" if word.endswith(".py") else f"./{word}"
            raise ConfigError("command", word, f"{word} is not on PATH, but in the working directory", f"Write {run}")
        raise ConfigError("command", word, f"{word}: no such program", "Check its name, or give its path")
    # Not resolved: the location of the link, not its target, identifies a virtual environment.
    path = Path(os.path.normpath(spec.invoked_from / Path(word).expanduser()))
    if path.is_dir():
        raise ConfigError("command", word, f"{path} is a directory, not a program", "Name a program in it")
    if not path.is_file():
        raise ConfigError("command", word, f"{path}: no such program", "Check the path")
    if not os.access(path, os.X_OK):
        run = f"python {word}" if word.endswith(".py") else f"chmod +x {word}"
        raise ConfigError("command", word, f"{path} is not executable", f"Use: {run}")
    return str(path)


def _check_script(command: CommandLine, spec: RunSpec) -> None:
    """Refuse a script that does not exist; a module is found by the interpreter only."""
    if not command.script or command.is_module or command.script in ("-", "-c"):
        return
    path = spec.invoked_from / Path(command.script).expanduser()
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigError("command", command.script, f"{path} is a directory without __main__.py", "Name a script")
    if not path.exists():
        raise ConfigError("command", command.script, f"{path}: no such file", "Check the path of the script")


def _build_environment(spec: RunSpec, paths: AttemptPaths, machine: Machine) -> dict[str, str]:
    """The variables of the shell, and those by which the run is found and reported."""
    shell: dict[str, str] = {}
    for name, value in spec.shell_variables.items():
        known = machine.environment.get(name) if value is None else value
        if known is not None:
            shell[name] = known
    own: Mapping[str, str] = {
        # Buffered output would be lost in a crash.
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(paths.attempt_dir / "tmp"),
        "PALAESTRA_HOME": str(paths.run_dir.parents[3]),
        "PALAESTRA_LOG": str(paths.attempt_dir / "log.jsonl"),
        "PALAESTRA_ATTEMPT": str(paths.attempt),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[: spec.gpus]),
    }
    return {**inherited_variables(machine), **shell, **own, **spec.environment}
