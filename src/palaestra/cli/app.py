"""The table of commands, and the place where errors become messages and exit codes.

Exit codes: 0 success, 1 failure, 2 invalid input, 130 interrupted. With `--json` exactly one JSON document goes to
stdout; progress and notices go to stderr.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from palaestra import __version__
from palaestra.cli.terminal import sanitize_line
from palaestra.errors import ConfigError, PalaestraError, SessionRefused
from palaestra.extras import find_extra, missing_modules_error

_HELP = """Train reinforcement learning policies and UI agents, and manage their runs.

\b
Train in an environment:            palaestra train cartpole
Train a UI agent on screens:        palaestra train click_target
Supervise runs of your own script:  palaestra runs start -- python train.py
"""


@dataclass(frozen=True)
class Group:
    """A command with subcommands."""

    help: str
    commands: Mapping[str, str]
    """Address `module:function` of each subcommand."""


# Addresses, not functions: importing every command takes longer than running most of them.
COMMANDS: Mapping[str, str | Group] = {
    "train": "palaestra.cli.train:train_command",
    "eval": "palaestra.cli.eval:eval_command",
    "demo": "palaestra.cli.demo:demo",
    "plan": "palaestra.cli.plan:plan_command",
    "runs": Group(
        "Start, watch, stop, resume and compare runs of any trainer.",
        {
            "start": "palaestra.cli.runs.start:start",
            "list": "palaestra.cli.runs.read:list_runs",
            "show": "palaestra.cli.runs.read:show",
            "watch": "palaestra.cli.runs.start:watch",
            "logs": "palaestra.cli.runs.read:logs",
            "stop": "palaestra.cli.runs.manage:stop",
            "resume": "palaestra.cli.runs.start:resume",
            "compare": "palaestra.cli.runs.compare:compare_command",
            "plot": "palaestra.cli.runs.plot:plot_command",
            "diff": "palaestra.cli.runs.diff:diff",
            "open": "palaestra.cli.runs.web:open_command",
            "export-tensorboard": "palaestra.cli.runs.read:export_tensorboard",
            "tensorboard": "palaestra.cli.runs.manage:tensorboard",
            "videos": "palaestra.cli.runs.read:videos",
            "edit": "palaestra.cli.runs.manage:edit",
            "archive": "palaestra.cli.runs.manage:archive",
            "restore": "palaestra.cli.runs.manage:restore",
            "delete": "palaestra.cli.runs.manage:delete",
            "gc": "palaestra.cli.runs.manage:gc",
            "drain": "palaestra.cli.runs.manage:drain",
            "webhooks": "palaestra.cli.runs.web:webhooks_command",
        },
    ),
    "sweeps": Group(
        "List, show, stop and resume sweeps over values and seeds.",
        {
            "list": "palaestra.cli.runs.sweeps:list_command",
            "show": "palaestra.cli.runs.sweeps:show_command",
            "stop": "palaestra.cli.runs.sweeps:stop_command",
            "resume": "palaestra.cli.runs.sweeps:resume_command",
        },
    ),
    "checkpoints": Group(
        "List, verify, import and deploy checkpoints.",
        {
            "list": "palaestra.cli.checkpoints:list_command",
            "verify": "palaestra.cli.checkpoints:verify_command",
            "import": "palaestra.cli.checkpoints:import_command",
            "deploy": "palaestra.cli.checkpoints:deploy_command",
            "deployed": "palaestra.cli.checkpoints:deployed_command",
        },
    ),
    "trajectories": Group(
        "List, view, score and export recorded episodes of UI agents.",
        {
            "list": "palaestra.cli.recordings.trajectories:list_command",
            "view": "palaestra.cli.recordings.trajectories:view_command",
            "report": "palaestra.cli.recordings.trajectories:report_command",
            "export": "palaestra.cli.recordings.trajectories:export_command",
        },
    ),
    "demos": Group(
        "Record, import and list demonstrations to imitate.",
        {
            "record": "palaestra.cli.recordings.demonstrations:record_command",
            "import": "palaestra.cli.recordings.demonstrations:import_command",
            "list": "palaestra.cli.recordings.demonstrations:list_command",
            "show": "palaestra.cli.recordings.demonstrations:show_command",
        },
    ),
    "episodes": Group(
        "List, show, export and delete recorded episodes of plays.",
        {
            "list": "palaestra.cli.recordings.episodes:list_command",
            "show": "palaestra.cli.recordings.episodes:show_command",
            "export": "palaestra.cli.recordings.episodes:export_command",
            "delete": "palaestra.cli.recordings.episodes:delete_command",
        },
    ),
    "datasets": Group(
        "Create, import, verify and remove datasets to learn from.",
        {
            "list": "palaestra.cli.datasets.read:list_command",
            "show": "palaestra.cli.datasets.read:show_command",
            "create": "palaestra.cli.datasets.make:create_command",
            "import": "palaestra.cli.datasets.make:import_command",
            "download": "palaestra.cli.datasets.make:download_command",
            "verify": "palaestra.cli.datasets.read:verify_command",
            "prune": "palaestra.cli.datasets.prune:prune_command",
        },
    ),
    "envs": "palaestra.cli.catalog:envs",
    "tasks": "palaestra.cli.catalog:tasks",
    "runners": "palaestra.cli.catalog:runners",
    "schema": "palaestra.cli.catalog:schema",
    "sessions": Group("Try UI tasks by hand.", {"try": "palaestra.cli.sessions:try_command"}),
    "tiny-vlm": Group(
        "Train and inspect the built-in vision-language models.",
        {
            "make": "palaestra.cli.tiny_vlm:make",
            "join": "palaestra.cli.tiny_vlm:join",
            "info": "palaestra.cli.tiny_vlm:info",
        },
    ),
    "studio": "palaestra.cli.studio:studio",
    "serve": "palaestra.cli.services:serve",
    "gateway": "palaestra.cli.services:gateway",
    "doctor": "palaestra.cli.services:doctor",
}


_OWN_COMMAND = re.compile(rf"(?<![\w./-])palaestra(?= (?:{'|'.join(COMMANDS)})\b)")


def localize_commands(text: str) -> str:
    """A text whose commands `palaestra …` begin as the program was called, so that they can be repeated."""
    program = _program_name()
    return text if program == "palaestra" else _OWN_COMMAND.sub(lambda _: program, text)


def _program_name() -> str:
    """`palaestra` if the shell finds it; else the path as it was typed, or `python -m palaestra`."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "palaestra":
        python = sys.executable
        if shutil.which(Path(python).name) == python:
            python = Path(python).name
        else:
            with suppress(OSError, ValueError):  # the directory was removed, or is another one
                python = str(Path(python).relative_to(Path.cwd()))
        return f"{shlex.quote(python)} -m palaestra"
    if called.name != "palaestra" or called.parent == Path() or shutil.which("palaestra") == str(called):
        return "palaestra"
    return shlex.quote(sys.argv[0])


class _Interrupted(BaseException):
    """A command was interrupted; its cause is the `KeyboardInterrupt`."""


class _OrderedGroup(TyperGroup):
    """Lists commands in the order of the table; typer lists groups last."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            # Typer would turn it into an exit code, without a message and without its notes.
            raise _Interrupted from interrupt

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if name in self.commands]


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"palaestra {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def build_app(words: Sequence[str]) -> typer.Typer:
    """The command-line application with the command that the words start with, or with all commands for help."""
    app = typer.Typer(
        name="palaestra",
        cls=_OrderedGroup,
        help=localize_commands(_HELP),
        no_args_is_help=True,
        rich_markup_mode=None,  # plain help: importing rich would take a third of the response time
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    _add_commands(app, COMMANDS, words)
    return app


def _add_commands(app: typer.Typer, commands: Mapping[str, str | Group], words: Sequence[str]) -> None:
    """Import and add the command that the words start with; if there is none (help, mistyped commands), add all."""
    command = words[0] if words and words[0] in commands else None
    for name in commands if command is None else [command]:
        entry = commands[name]
        if isinstance(entry, Group):
            group = typer.Typer(
                help=entry.help, no_args_is_help=True, rich_markup_mode=None, context_settings=app.info.context_settings
            )
            _add_commands(group, entry.commands, words[1:] if command else ())
            app.add_typer(group, name=name)
        else:
            module, _, function = entry.partition(":")
            command_function = getattr(import_module(module), function)
            app.command(name, cls=getattr(command_function, "command_class", None))(command_function)


def _print_error(problem: str, error: BaseException | None = None) -> None:
    # An exception of an environment may span lines; an error is one line, so that scripts can read it.
    print("error: " + sanitize_line(localize_commands(" ".join(problem.splitlines()))), file=sys.stderr)
    _print_resume_hint(error)


def _print_resume_hint(error: BaseException | None) -> None:
    for note in getattr(error, "__notes__", ()):
        if "Resume with: " in note:
            print(sanitize_line(localize_commands(note)), file=sys.stderr)


def _prepare_output() -> None:
    """Replace closed streams (`palaestra … >&-`), and escape characters that the encoding of a stream lacks."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _removed_working_directory(error: OSError) -> ConfigError | None:
    """An error that names the working directory if it was removed; the system names no file then."""
    if error.filename is not None or not isinstance(error, FileNotFoundError):
        return None
    try:
        os.getcwd()
    except FileNotFoundError:
        directory = os.environ.get("PWD", "")
        remedy = "Change to an existing directory, for example with: cd ~"
        return ConfigError("working directory", directory, "was removed", remedy)
    return None


def _suggest_space(error: OSError) -> str:
    """What to do about a full disk or quota; empty for other errors."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return ". Free space, for example with: palaestra datasets prune, or set PALAESTRA_HOME to another disk."


def _print_foreign_error(error: Exception, words: Sequence[str]) -> int | None:
    """Print a usage error of typer, or a missing module of an extra; returns the exit code, None for other errors."""
    extra = find_extra(error.name or "") if isinstance(error, ModuleNotFoundError) else None
    if extra is not None:
        _print_error(str(missing_modules_error("this command", [str(getattr(error, "name", ""))], [extra])), error)
        return 2
    # The module of typer's errors differs between its versions.
    return _print_usage_error(error, words) if hasattr(error, "format_message") else None


def _print_usage_error(error: Any, words: Sequence[str]) -> int:
    """Print a usage error of typer on one line; returns the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    context = getattr(error, "ctx", None)
    # The parser raises without a context for an option whose value is missing.
    command = context.command_path if context is not None else _command_path(words)
    options = [name for name in getattr(getattr(error, "param", None), "opts", ()) if name.startswith("-")]
    value = _option_value(options, words)
    choice = re.search(r"'(.*)' is not one of (.*?)\.?$", str(getattr(error, "message", "")))
    if choice is not None:
        place = options[-1] if options else error.param.metavar or error.param.name
        _print_error(str(_choice_error(place, choice[1], choice[2])))
    elif value is None:
        problem = error.format_message().rstrip(".")
        _print_error(f"{problem}{'' if problem.endswith('?') else '.'} See: {command} --help")
    else:
        reason = str(error.message).rstrip(".").replace(", unable to parse string as an integer", "")
        _print_error(str(ConfigError(options[-1], value, reason[:1].lower() + reason[1:], f"See: {command} --help")))
    return int(error.exit_code)


def _choice_error(place: str, value: str, choices: str) -> ConfigError:
    """The error about a value that is none of the quoted choices."""
    from palaestra.config import suggest_name

    remedy = suggest_name(value, re.findall(r"'([^']*)'", choices), f"Write {place} as one of them")
    return ConfigError(place, value, f"is not one of {choices}", remedy)


def _command_path(words: Sequence[str]) -> str:
    """The command that the words begin with, such as `palaestra runs list`."""
    names: list[str] = ["palaestra"]
    commands: Mapping[str, str | Group] = COMMANDS
    for word in words:
        if word not in commands:
            break
        names.append(word)
        entry = commands[word]
        if not isinstance(entry, Group):
            break
        commands = entry.commands
    return " ".join(names)


def _option_value(options: Sequence[str], words: Sequence[str]) -> str | None:
    """The value of an option as written, `--name value` or `--name=value`; None if the option was not given."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            return value if equals else next(iter(words[index + 1 :]), None)
    return None


def _words_to_complete() -> list[str]:
    """The words of the command line that a shell asks to complete; it passes them in variables."""
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return line.split()[1:] if "_PALAESTRA_COMPLETE" in os.environ else []


def main() -> None:
    """Run the command, and turn errors into one message and an exit code."""
    _prepare_output()
    words = _words_to_complete() or sys.argv[1:]
    try:
        code = build_app(words)(prog_name="palaestra", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (ConfigError, SessionRefused) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun all processes of a machine refuse the same
            _print_error(str(error), error)
        sys.exit(2)
    except PalaestraError as error:
        if not getattr(error, "known_to_all", False) or os.environ.get("RANK", "0") == "0":
            _print_error(str(error), error)
        sys.exit(1)
    except (KeyboardInterrupt, _Interrupted) as error:
        print("interrupted", file=sys.stderr)
        _print_resume_hint(error.__cause__ if isinstance(error, _Interrupted) else error)
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) closed the pipe; Python would report it again while closing stdout.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # after its subclass BrokenPipeError
        _print_error(f"{_removed_working_directory(error) or error}{_suggest_space(error)}", error)
        sys.exit(1)
    except MemoryError as error:
        _print_error(f"out of memory ({error}). Use fewer environments or shorter rollouts.", error)
        sys.exit(1)
    except Exception as error:
        code = _print_foreign_error(error, words)
        if code is None:
            raise
        sys.exit(code)
