"""Commands by name and address, each imported when it is asked for: all of them take longer to import than most run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import typer

__all__ = ["Commands", "Group", "fill"]


@dataclass(frozen=True)
class Group:
    """Commands under one word."""

    help: str
    commands: Mapping[str, str]


Commands = Mapping[str, "str | Group"]
"""By name: the address `module:attribute` of a function or of a `typer.Typer`, or a group of them."""


def fill(app: typer.Typer, commands: Commands, words: Sequence[str]) -> None:
    """Add the command that the words begin with; when they begin with none, for help and mistyped ones, all."""
    asked = words[0] if words and words[0] in commands else None
    for name in commands if asked is None else [asked]:
        entry = commands[name]
        if isinstance(entry, Group):
            group = typer.Typer(
                help=entry.help, no_args_is_help=True, rich_markup_mode=None, context_settings=app.info.context_settings
            )
            fill(group, entry.commands, words[1:] if asked else ())
            app.add_typer(group, name=name)
            continue
        module, _, attribute = entry.partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
