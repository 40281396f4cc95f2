"""The request of `runs start`: a configuration, any program, or an earlier run with changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from palaestra.cli.runs.read import query
from palaestra.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.runs.spec import RunSpec

# Options of `start` whose names differ from the fields of a RunSpec.
_OPTION_OF_FIELD = {
    "env_id": "env",
    "stall_after_s": "stall-after",
    "tags": "tag",
    "stop_grace_s": "grace",
    "environment": "set",
}
_FIELD_OF_PARAMETER = {
    "env": "env_id",
    "stall_after": "stall_after_s",
    "grace": "stop_grace_s",
    "tag": "tags",
    "variables": "environment",
    "stall_stop": "stall_action",
}
"""Fields of a RunSpec by the parameter of `start`, where the names differ."""
_PARAMETERS = frozenset(
    "runner script env seed python name on priority gpus memory_mb nice grace thin_every no_episode_steps variables "
    "warm_start track video tag stall_after stall_stop".split()
)
"""Parameters of `start` that are fields of a RunSpec."""
_WORDS = "palaestra.words"


class ProgramCommand(TyperCommand):
    """A command whose words after `--` are another program's, options included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words after `--` apart."""
        if "--" in args:
            place = args.index("--")
            ctx.meta[_WORDS] = args[place + 1 :]
            args = args[:place]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


def get_program(context: Any) -> list[str] | None:
    """The words after `--`; None without any dashes."""
    words: list[str] | None = context.meta.get(_WORDS)
    return words


def build_spec(context: Any, words: list[str]) -> RunSpec:
    """The request of `runs start`; `words` are its file and assignments. `ConfigError` names the option."""
    parameters, program = context.params, get_program(context)
    given = {name for name in _PARAMETERS if context.get_parameter_source(name).name == "COMMANDLINE"}
    fields = {_FIELD_OF_PARAMETER.get(name, name): _read_parameter(name, parameters[name]) for name in _PARAMETERS}
    if parameters["like"] is not None:
        explicit = {_FIELD_OF_PARAMETER.get(name, name) for name in given}
        return _build_like(parameters["like"], words, program, {name: fields[name] for name in explicit})
    if program is not None:
        runner = fields["runner"] if "runner" in given else "script"
        fields |= _read_program(program, words, runner, fields["name"], fields["seed"])
    else:
        config, text, name = _read_config(words, fields["runner"])
        fields |= {"config": config, "config_text": text, "name": fields["name"] or name}
    return _parse_spec(**fields, invoked_from=Path.cwd())


def resolve_checkpoint(checkpoint: str | None) -> str | None:
    """An absolute path for a path, because the service has another working directory; an id stays an id."""
    if checkpoint == "":  # as a path, this would be the working directory
        raise ConfigError("checkpoint", "", "is empty", "List checkpoints with: palaestra checkpoints list")
    if checkpoint is not None and Path(checkpoint).exists():
        return str(Path(checkpoint).resolve())
    return checkpoint


def _read_parameter(name: str, value: Any) -> Any:
    match name:
        case "variables":
            return _parse_variables(value or [])
        case "warm_start":
            return resolve_checkpoint(value)
        case "tag":
            return tuple(value or ())
        case "stall_stop":
            return "stop" if value else "alarm"
        case _:
            return value


def _build_like(run: str, words: list[str], program: list[str] | None, fields: dict[str, Any]) -> RunSpec:
    """The request of an earlier run, with other values of the configuration and of the options that are given."""
    from palaestra.config.file import parse_override
    from palaestra.runs.supervisor.resume import change_spec, read_current_spec

    if "runner" in fields:
        raise ConfigError("--runner", fields["runner"], "cannot be changed with --like", "Leave one of them out")
    if any("=" not in word for word in words):
        word = next(word for word in words if "=" not in word)
        raise ConfigError("CONFIG", word, "cannot be combined with --like", "Write changes as KEY=VALUE")
    paths, events = query(lambda reader: (reader.paths(run), reader.events(run)))
    if not paths.is_supervised:
        remedy = f"palaestra runs start {paths.config} KEY=VALUE"
        raise ConfigError("--like", paths.run_id, "was not started by the run service", remedy)
    spec = read_current_spec(paths, events)
    if program is not None:
        if spec.runner != "script":
            raise ConfigError("--like", paths.run_id, f"is a run of {spec.runner}, not of a program", "Leave -- out")
        spec = spec.model_copy(update={"config": {"command": program}})
    changes = dict(map(parse_override, words))
    if spec.runner == "script" and "seed" in changes:
        fields.setdefault("seed", changes.pop("seed"))
    spec = change_spec(spec, changes)
    if not fields:
        return spec
    if "environment" in fields:
        fields["environment"] = {**spec.environment, **fields["environment"]}
    return _parse_spec(**{**spec.model_dump(), **fields})


def _read_program(program: Sequence[str], words: list[str], runner: str, name: str, seed: int | None) -> dict[str, Any]:
    """The fields of a request for any program; words before the dashes change its options."""
    from palaestra.config.file import apply_overrides
    from palaestra.runs.runners.script.command_line import parse_command
    from palaestra.runs.spec import run_name

    if runner != "script":
        remedy = "Leave --runner out, or the words after the dashes"
        raise ConfigError("--runner", runner, "does not run programs given after two dashes", remedy)
    if not program:
        remedy = "Write for example: palaestra runs start -- python train.py --lr 3e-4"
        raise ConfigError("--", None, "no program given", remedy)
    if any("=" not in word for word in words):
        word = next(word for word in words if "=" not in word)
        raise ConfigError("CONFIG", word, "is no part of the program", "Write the program after the two dashes")
    config = {**apply_overrides({}, words), "command": list(program)}
    command = parse_command(program)
    if seed is None:
        # The seed of the command is that of the run, so that runs of several seeds form a group.
        value = config.pop("seed", command.to_config().get("seed"))
        seed = value if type(value) is int and value >= 0 else None
    return {"runner": runner, "config": config, "name": name or run_name(command.name, None), "seed": seed}


def _read_config(words: list[str], runner: str) -> tuple[dict[str, Any], str, str]:
    """The configuration from a file and overrides, the text of the file, and a name for the run."""
    from palaestra.config.packaged import NamedConfig, read_runner_config
    from palaestra.runs.spec import run_name

    name = words.pop(0) if words and "=" not in words[0] else None
    if name is None and not words and runner == "palaestra":
        raise ConfigError("CONFIG", None, "no configuration given", "Try: palaestra runs start cartpole")
    source = NamedConfig({}) if name is None else read_runner_config(name, runner)
    config = source.apply_overrides(words)
    return config, source.text, run_name(config.get("name"), source.path)


def _parse_variables(words: list[str]) -> dict[str, str]:
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError("--set", word, "is not NAME=VALUE", "Write for example --set OMP_NUM_THREADS=2")
        variables[name] = value
    return variables


def _parse_spec(**fields: Any) -> RunSpec:
    """A validated RunSpec; errors name the option, not the field."""
    from palaestra.config import parse_section
    from palaestra.runs.spec import RunSpec

    try:
        return parse_section(RunSpec, fields)
    except ConfigError as error:
        field = error.place.partition(".")[0]
        option = _OPTION_OF_FIELD.get(field, error.place).replace("_", "-")
        raise ConfigError(f"--{option}", error.value, error.reason, error.remedy) from None
