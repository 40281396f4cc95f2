"""Every `palaestra` command and every YAML block of the README and of docs/ is understood by the program."""

import contextlib
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer.main
import yaml
from tests.docs.blocks import PAGES, ROOT, TUTORIALS, read_blocks

from palaestra.cli.app import build_app
from palaestra.config import parse_section
from palaestra.config.file import apply_overrides
from palaestra.config.packaged import read_config
from palaestra.errors import ConfigError, DatasetError

_SHELLS = ("bash", "console", "sh", "text")
_START = re.compile(r"^(?:\$ )?(?:\.venv/bin/|python -m )?palaestra (?=[a-z])")
"""Options of the root alone, such as --install-completion, take effect while they are parsed, so they are left out."""


def _block_commands(page):
    """The place and the text of each command in the blocks of a page, with continued lines joined."""
    for block in read_blocks(page):
        if block.language in _SHELLS and not block.not_run:
            for line in block.code.replace("\\\n", " ").splitlines():
                if _START.match(line):
                    yield block.name, line


def _other_commands(page):
    """The same for indented code and for commands within a sentence."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    found = [*re.findall(r"^    (palaestra .+)$", text, re.M), *re.findall(r"`(palaestra [a-z][^`]*)`", text)]
    yield from ((str(page.relative_to(ROOT)), command) for command in found if "…" not in command)


def _words(line):
    """The arguments of the first command of a line, without what a shell takes for itself."""
    lexer = shlex.shlex(_START.sub("", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words = []
    for word in lexer:
        if word[0] in "|&;<>":
            break
        words.append(word)
    return words


@cache
def _root():
    return typer.main.get_command(build_app(()))


def _parse(words):
    """Parse a command as the command line does; `ClickException` for what it would refuse."""
    command, context = _root(), None
    rest = list(words)
    while True:
        context = command.make_context(command.name or "palaestra", rest, parent=context)
        if not hasattr(command, "resolve_command"):
            return context
        rest = [*context._protected_args, *context.args]
        _, command, rest = command.resolve_command(context, rest)


def _check_configuration(context):
    """The file of a training exists, and its overrides are keys of the configuration."""
    words = [*filter(None, [context.params.get("config_file")]), *(context.params.get("overrides") or ())]
    name = words[0] if words and "=" not in words[0] else None
    if name is None or (name.endswith(".yaml") and not name.startswith("configs/")):
        return  # a file of the reader
    data = read_config(str(ROOT / name) if name.endswith(".yaml") else name).data
    # A value with commas is a grid.
    data = apply_overrides(data, [re.sub(r"^([\w.]+=[^\[{,]+),.*", r"\1", word) for word in words[1:]])
    _check_any_configuration(data)


def _check_any_configuration(data):
    from palaestra.train import config_from
    from palaestra.train.screen_config import screen_config_from

    with contextlib.suppress(DatasetError):  # a dataset that was not created here
        (screen_config_from if "tasks" in data or "model" in data else config_from)(data)


COMMANDS = [item for page in PAGES for item in _block_commands(page)]
INLINE = [item for page in PAGES for item in _other_commands(page)]


@pytest.mark.parametrize(("place", "line"), COMMANDS, ids=[f"{place} {line[:40]}" for place, line in COMMANDS])
def test_a_command_of_a_page_is_one_that_the_command_line_takes(place, line, monkeypatch):
    monkeypatch.setattr("sys.argv", ["palaestra"])
    context = _parse(_words(line))
    if context.command.name in ("train", "start"):
        _check_configuration(context)


@pytest.mark.parametrize("line", ["palaestra train --colour", "palaestra runs begin", "palaestra eval --episodes many"])
def test_a_command_that_does_not_exist_is_noticed(line):
    with pytest.raises(Exception, match=r"No such|valid integer"):
        _parse(_words(line))


def test_commands_within_sentences_have_names_and_options_that_exist():
    wrong = []
    for place, line in INLINE:
        command, words = _root(), _words(line)
        while words and hasattr(command, "commands"):
            command, name = command.commands.get(words[0]), words.pop(0)
            if command is None:
                wrong.append(f"{place}: {line}: no command {name!r}")
                break
        else:
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            own = words[: words.index("--")] if "--" in words else words
            options = {word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)}
            wrong += [f"{place}: {line}: no option {option}" for option in options - known - {"--help", "-h"}]
    assert wrong == []


def _merge(base, data):
    if not isinstance(base, dict) or not isinstance(data, dict):
        return data
    return {**base, **{key: _merge(base.get(key), value) for key, value in data.items()}}


def _vector(data):
    from palaestra.train import config_from

    config_from(_merge({"env": {"id": "CartPole-v1"}}, data))


def _screens(data):
    from palaestra.train.screen_config import screen_config_from

    screen_config_from(_merge({"model": {"name": "tiny"}, "tasks": [{"task": "click_target/button"}]}, data))


def _plan(data):
    from palaestra.planner.plan import PlanConfig

    parse_section(PlanConfig, data)


def _sweep(data):
    from palaestra.runs.spec import RunSpec
    from palaestra.runs.sweeps.spec import SweepSpec

    parse_section(SweepSpec, {**data, "base": RunSpec(config={})})


def _gateway(data):
    from palaestra.gateway.config import GatewayConfig

    parse_section(GatewayConfig, data)


def _service(data):
    from palaestra.runs.config import ServiceConfig

    parse_section(ServiceConfig, data)


READERS = (_vector, _screens, _plan, _sweep, _gateway, _service)
YAML = [block for page in PAGES if page not in TUTORIALS for block in read_blocks(page) if block.language == "yaml"]


@pytest.mark.parametrize("block", YAML, ids=lambda block: block.name)
def test_a_yaml_block_is_a_configuration_of_something(block):
    if block.not_run:
        pytest.skip(block.not_run)
    data, refusals = yaml.safe_load(block.code), []
    for reader in READERS:
        try:
            return reader(data)
        except ConfigError as error:
            refusals.append(f"{reader.__name__}: {error}")
    pytest.fail("\n".join([block.code, *refusals]))


def test_the_files_that_pages_name_exist():
    missing = []
    for page in PAGES:
        named = re.findall(r"\b((?:configs|examples|benchmarks|src|tests|deploy|docs)/[\w./-]+\.\w+)", page.read_text())
        missing += [f"{page.relative_to(ROOT)}: {name}" for name in named if not (ROOT / Path(name)).exists()]
    assert missing == []
