"""The words of a command: which program and script it starts, and which options it gives them.

Options are recognised by their form (`--lr 3e-4`, `--lr=3e-4`, `lr=3e-4`, `--flag`), because nothing is known about the
program. They become the configuration of the run, and `KEY=VALUE` replaces the value of one that is in the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from palaestra.config import closest_names
from palaestra.errors import ConfigError
from palaestra.runs.wire import JsonObject

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?")
_ASSIGNMENT = re.compile(r"(?P<name>-{0,2}\+{0,2}[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)
_OPTION = re.compile(r"--?[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_INTEGER = re.compile(r"[-+]?\d{1,18}")
_VALUE_FLAGS = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Flags of the Python interpreter with a value."""


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    name: str
    """As a configuration key: `learning_rate` for `--learning-rate`."""
    word: int
    """Index of its word."""
    value: str | None
    """None for a flag without a value."""
    joined: str | None
    """What precedes the value in the same word, such as `--lr=`; None if the value is a word of its own."""


@dataclass(frozen=True)
class CommandLine:
    """A command, divided into its program, script, options and other words."""

    words: tuple[str, ...]
    script: str
    """The file or module that an interpreter executes; empty for other programs."""
    is_module: bool
    options: tuple[Option, ...]
    arguments: tuple[str, ...]
    """Words that belong to no option."""

    @property
    def name(self) -> str:
        """A short name: `train` for `python train.py`, `pkg.train` for `python -m pkg.train`."""
        if self.is_module:
            return self.script.removesuffix(".__main__")
        path = PurePosixPath(self.script or self.words[0])
        stem = path.stem if path.suffix in (".py", ".sh", ".r", ".R", ".jl", ".js", ".pl", ".rb") else path.name
        return stem if stem not in ("", "-", "-c") else "program"

    def to_config(self) -> JsonObject:
        """The options and other words as configuration values; an option that is repeated has a list."""
        config: JsonObject = {"program": list(self.words[:1]) + ([self.script] if self.script else [])}
        if self.arguments:
            config["arguments"] = list(self.arguments)
        values: dict[str, list[Any]] = {}
        for option in self.options:
            values.setdefault(option.name, []).append(_parse_value(option.value))
        return {**config, **{name: items[0] if len(items) == 1 else items for name, items in values.items()}}

    def replace_options(self, changes: Mapping[str, object]) -> tuple[str, ...]:
        """The words with other values of options. `ConfigError` for a key that the command does not have."""
        words: list[str | None] = list(self.words)
        for key, value in changes.items():
            option = self._get_option(key)
            text = _format_value(value, option)
            if option.value is None:
                if value is False:
                    words[option.word] = None
            elif option.joined is not None:
                words[option.word] = f"{option.joined}{text}"
            else:
                words[option.word + 1] = text
        return tuple(word for word in words if word is not None)

    def _get_option(self, key: str) -> Option:
        name = _normalize(key)
        matches = [option for option in self.options if option.name == name]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ConfigError(
                key, None, f"{key} occurs {len(matches)} times in the command", "Write it into the command"
            )
        known = list(dict.fromkeys(option.name for option in self.options))
        close = closest_names(name, known, count=1)
        remedy = f"Did you mean {close[0]!r}?" if close else f"Write it into the command: --{key} VALUE"
        raise ConfigError(key, None, f"{key} is not an option of the command", remedy)


def parse_command(words: Sequence[str]) -> CommandLine:
    """Divide a command into program, script, options and arguments."""
    start, script, is_module = _find_script(words)
    options: list[Option] = []
    arguments: list[str] = []
    index = start
    while index < len(words):
        word = words[index]
        assignment = _ASSIGNMENT.fullmatch(word)
        if word == "--":
            arguments += words[index + 1 :]
            break
        if assignment is not None:
            name = _normalize(assignment["name"])
            options.append(Option(name, index, assignment["value"], f"{assignment['name']}="))
        elif _OPTION.fullmatch(word):
            following = words[index + 1] if index + 1 < len(words) else None
            has_value = following is not None and not _is_option(following)
            options.append(Option(_normalize(word), index, following if has_value else None, None))
            index += has_value
        else:
            arguments.append(word)
        index += 1
    return CommandLine(tuple(words), script, is_module, tuple(options), tuple(arguments))


def is_python(program: str) -> bool:
    """Whether a program is a Python interpreter, by its name."""
    return _PYTHON.fullmatch(PurePosixPath(program).name) is not None


def flatten(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested values with dotted keys: `model.lr`."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _find_script(words: Sequence[str]) -> tuple[int, str, bool]:
    """Where the program's own words begin, the script that the interpreter runs, and whether it is a module."""
    if not is_python(words[0]):
        return 1, "", False
    index = 1
    while index < len(words):
        word = words[index]
        if word == "-m" and index + 1 < len(words):
            return index + 2, words[index + 1], True
        if word == "-c":
            return min(index + 2, len(words)), "-c", False
        if word == "-" or not word.startswith("-"):
            return index + 1, word, False
        index += 2 if word in _VALUE_FLAGS else 1
    return index, "", False


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def _normalize(name: str) -> str:
    return name.lstrip("-+").replace("-", "_")


def _parse_value(text: str | None) -> Any:
    if text is None:
        return True
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        number = float(text)
        return number if abs(number) < 1e300 else text
    return {"true": True, "false": False}.get(text.lower(), text)


def _format_value(value: object, option: Option) -> str:
    if isinstance(value, bool):
        text = str(value)
        return text.lower() if option.value is not None and option.value.islower() else text
    if isinstance(value, str | int | float):
        if option.value is None:
            reason = "is a flag without a value in the command"
            raise ConfigError(option.name, value, reason, f"Write {option.name}=true or {option.name}=false")
        return str(value)
    raise ConfigError(option.name, value, "is not one value", "Give one number or text")
