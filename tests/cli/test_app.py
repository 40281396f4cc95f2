"""A command is imported when it runs, and help knows all commands."""

import subprocess
import sys

import pytest

from palaestra.cli.app import COMMANDS, Group


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
