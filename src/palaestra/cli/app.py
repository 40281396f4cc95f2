"""The command table, and the one place where errors become messages and exit codes.

0 done, 1 failed while running, 2 refused input, 130 interrupted. With `--json` exactly one JSON document goes to
stdout; progress and notices go to stderr.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from palaestra import __version__
from palaestra.cli.checkpoints import checkpoints_app
from palaestra.cli.demo import demo
from palaestra.cli.doctor import doctor
from palaestra.cli.evaluating import evaluate_command
from palaestra.cli.listing import envs, schema
from palaestra.cli.runners import runners_command
from palaestra.cli.runs import runs_app
from palaestra.cli.service import serve
from palaestra.cli.serving import gateway
from palaestra.cli.sessions import sessions_app, tasks
from palaestra.cli.tiny_vlm import tiny_vlm_app
from palaestra.cli.training import train_command
from palaestra.cli.trajectories import trajectories_app
from palaestra.errors import ConfigError, PalaestraError, SessionRefused

__all__ = ["main"]

app = typer.Typer(
    name="palaestra",
    help="The training hall for agents: train, evaluate and watch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: importing rich would be a third of the time it takes to answer
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"palaestra {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


app.command("train")(train_command)
app.command("eval")(evaluate_command)
app.command("demo")(demo)
app.add_typer(runs_app, name="runs")
app.add_typer(checkpoints_app, name="checkpoints")
app.command("runners")(runners_command)
app.command("doctor")(doctor)
app.command("serve")(serve)
app.command("envs")(envs)
app.command("schema")(schema)
app.command("tasks")(tasks)
app.add_typer(sessions_app, name="sessions")
app.add_typer(trajectories_app, name="trajectories")
app.add_typer(tiny_vlm_app, name="tiny-vlm")
app.command("gateway")(gateway)


def _tell(problem: str) -> None:
    # An environment's own exception may span lines; a refusal is one line, so that scripts can read it.
    print("error: " + " ".join(problem.splitlines()), file=sys.stderr)


def main() -> None:
    """Run the command; every error of ours becomes one message and an exit code."""
    try:
        app()
    except (ConfigError, SessionRefused) as error:
        _tell(f"{error}")
        sys.exit(2)
    except PalaestraError as error:
        _tell(f"{error}")
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; Python would complain again while closing stdout.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # after BrokenPipeError, which is one
        _tell(f"{error}")
        sys.exit(1)
    except MemoryError as error:
        _tell(f"out of memory ({error}). Use fewer environments or shorter rollouts.")
        sys.exit(1)
