"""The command table, and the one place where errors become messages and exit codes.

0 done, 1 failed while running, 2 refused input, 130 interrupted. With `--json` exactly one JSON document goes to
stdout; progress and notices go to stderr.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from palaestra import __version__
from palaestra.cli.command_table import Commands, fill
from palaestra.cli.runs import RUNS
from palaestra.cli.terminal import printable
from palaestra.errors import ConfigError, PalaestraError, SessionRefused

__all__ = ["main"]

_COMMANDS: Commands = {
    "train": "palaestra.cli.training:train_command",
    "eval": "palaestra.cli.evaluating:evaluate_command",
    "demo": "palaestra.cli.demo:demo",
    "runs": RUNS,
    "checkpoints": "palaestra.cli.checkpoints:checkpoints_app",
    "runners": "palaestra.cli.runners:runners_command",
    "doctor": "palaestra.cli.doctor:doctor",
    "serve": "palaestra.cli.service:serve",
    "envs": "palaestra.cli.listing:envs",
    "schema": "palaestra.cli.listing:schema",
    "tasks": "palaestra.cli.sessions:tasks",
    "sessions": "palaestra.cli.sessions:sessions_app",
    "trajectories": "palaestra.cli.trajectories:trajectories_app",
    "tiny-vlm": "palaestra.cli.tiny_vlm:tiny_vlm_app",
    "gateway": "palaestra.cli.gateway:gateway",
}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"palaestra {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _app(words: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        name="palaestra",
        help="The training hall for agents: train, evaluate and watch.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # plain help: importing rich would be a third of the time it takes to answer
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    fill(app, _COMMANDS, words)
    return app


def _tell(problem: str, error: BaseException | None = None) -> None:
    # An environment's own exception may span lines; a refusal is one line, so that scripts can read it.
    print("error: " + printable(" ".join(problem.splitlines())), file=sys.stderr)
    _print_resume_hint(error)


def _print_resume_hint(error: BaseException | None) -> None:
    for note in getattr(error, "__notes__", ()):
        if "Resume with: " in note:
            print(printable(note), file=sys.stderr)


def _speak() -> None:
    """Have somewhere to print to, and no letter that cannot be printed there."""
    if sys.stdout is None:  # somebody closed it: `palaestra … >&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:  # nor may what belongs there go to the other
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _of_a_place_that_is_gone(error: OSError) -> ConfigError | None:
    """What ails whoever is in a directory that somebody removed: the system names no file then."""
    if error.filename is not None or not isinstance(error, FileNotFoundError):
        return None
    try:
        os.getcwd()
    except FileNotFoundError:
        here = os.environ.get("PWD", "")
        return ConfigError("working directory", here, "was removed", "Go to one that is there, for example with: cd ~")
    return None


def _refuse_words(error: Any, words: Sequence[str]) -> int:
    """Print a usage error on one line; returns the exit code."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    command = context.command_path if context is not None else "palaestra"
    names = [name for name in getattr(getattr(error, "param", None), "opts", ()) if name.startswith("-")]
    value = _value_of(names, words)
    if value is None:
        problem = error.format_message().rstrip(".")
        _tell(f"{problem}{'' if problem.endswith('?') else '.'} See: {command} --help")
    else:
        reason = str(error.message).rstrip(".").replace(", unable to parse string as an integer", "")
        _tell(str(ConfigError(names[-1], value, reason[:1].lower() + reason[1:], f"See: {command} --help")))
    return int(error.exit_code)


def _value_of(names: Sequence[str], words: Sequence[str]) -> str | None:
    """The value of an option as it was written, `--name value` or `--name=value`; None if the option was not given."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(words[number + 1 :]), None)
    return None


def main() -> None:
    """Run the command; every error of ours becomes one message and an exit code."""
    _speak()
    words = sys.argv[1:]
    try:
        code = _app(words)(prog_name="palaestra", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (ConfigError, SessionRefused) as error:
        _tell(f"{error}", error)
        sys.exit(2)
    except PalaestraError as error:
        _tell(f"{error}", error)
        sys.exit(1)
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        _print_resume_hint(error)
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; Python would complain again while closing stdout.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # after BrokenPipeError, which is one
        _tell(str(_of_a_place_that_is_gone(error) or error), error)
        sys.exit(1)
    except MemoryError as error:
        _tell(f"out of memory ({error}). Use fewer environments or shorter rollouts.", error)
        sys.exit(1)
    except Exception as error:
        # typer's own; where it keeps them differs from version to version.
        if not hasattr(error, "format_message"):
            raise
        sys.exit(_refuse_words(error, words))
