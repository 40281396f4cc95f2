"""A command is imported when it runs, and help knows all commands."""

import subprocess
import sys

import pytest
from typer.main import get_command

from palaestra.cli.app import COMMANDS, Group, build_app, localize_commands


def _names(entry=None):
    for name, one in (COMMANDS if entry is None else entry.commands).items():
        yield [name]
        if isinstance(one, Group):
            yield from ([name, *rest] for rest in _names(one))


@pytest.mark.parametrize("words", list(_names()), ids=" ".join)
def test_every_command_explains_itself(palaestra, words):
    result = palaestra(*words, "--help")
    assert result.code == 0, result
    assert result.out.startswith(f"Usage: palaestra {' '.join(words)} ")


def test_help_and_mistyped_words_know_all_commands(palaestra):
    result = palaestra("--help")
    for name in COMMANDS:
        assert f"\n  {name} " in result.out
    result = palaestra("runs", "lst")
    assert (result.code, "Did you mean 'list'?" in result.err) == (2, True), result


def test_only_the_command_that_is_asked_for_is_imported():
    code = (
        "import sys\nfrom palaestra.cli.app import build_app\nbuild_app(['runs', 'list'])\n"
        "print(sorted(name for name in sys.modules if name.startswith('palaestra.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wanted = [f"palaestra.cli.{name}" for name in ("app", "runs", "runs.read", "terminal")]
    assert done.stdout == f"{wanted}\n"


def test_ctrl_c_during_the_imports_of_a_command_exits_with_130_and_prints_nothing():
    code = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from palaestra.cli import main

main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_command_alone_shows_how_to_start(palaestra):
    result = palaestra()
    assert (result.code, result.out) == (2, "")
    for command in ("train cartpole", "train click_target", "runs start -- python train.py"):
        assert f"palaestra {command}" in result.err


@pytest.mark.parametrize(("program", "expected"), [
    ("palaestra", "palaestra"),
    (".venv/bin/palaestra", ".venv/bin/palaestra"),
    ("{found}/palaestra", "palaestra"),
    ("/x/site-packages/palaestra/__main__.py", "{python} -m palaestra"),
    ("/x/site-packages/pytest/__main__.py", "palaestra"),
])  # fmt: skip
def test_hints_can_be_repeated_as_the_command_was_called(tmp_path, monkeypatch, program, expected):
    (tmp_path / "palaestra").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [program.format(found=tmp_path)])
    monkeypatch.setattr(sys, "executable", "/x/bin/python")
    expected = expected.format(python=sys.executable)
    assert localize_commands("Try: palaestra train x, palaestra is") == f"Try: {expected} train x, palaestra is"


@pytest.mark.parametrize(("line", "expected"), [
    ("palaestra tr", ["train", "trajectories"]),
    ("palaestra runs st", ["start", "stop"]),
    ("palaestra train cart", ["cartpole"]),
    ("palaestra runs start dqn_c", ["dqn_cartpole"]),
])  # fmt: skip
def test_a_shell_completes_commands_and_packaged_configurations(palaestra, monkeypatch, line, expected):
    monkeypatch.setenv("_PALAESTRA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    assert palaestra().out.split() == expected


def _commands(group=None, path=()):
    group = get_command(build_app([])) if group is None else group
    for name, command in group.commands.items():
        yield from _commands(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]


def test_every_option_has_a_help_text_and_common_ones_have_the_same():
    for path, command in _commands():
        assert command.help, path
        for parameter in command.params:
            assert parameter.help, (path, parameter.name)
            assert parameter.help.endswith("."), (path, parameter.name)
            if parameter.name == "as_json":
                assert parameter.help == "Print one JSON document."
            if parameter.metavar == "RUN" and parameter.param_type_name == "argument":
                assert parameter.help == "Run id or a unique prefix of it."


@pytest.mark.parametrize("words", [[], *([name] for name, entry in COMMANDS.items() if isinstance(entry, Group))])
def test_no_summary_of_a_command_is_cut_off(palaestra, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    summaries = palaestra(*words, "--help").out.partition("Commands:")[2]
    assert summaries
    assert "..." not in summaries


def test_an_interrupted_command_says_so_and_how_to_resume(palaestra, monkeypatch):
    def interrupt(*_, **__):
        interruption = KeyboardInterrupt()
        interruption.add_note("Resume with: palaestra train --resume one")
        raise interruption

    monkeypatch.setattr("palaestra.experience.demonstrations.Demonstrations", interrupt)
    stopped = palaestra("demos", "list", "d")
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err.splitlines() == ["interrupted", "Resume with: palaestra train --resume one"]
