"""Commands: everything the studio can do, by name, with shortcuts; the palette searches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One thing that the user can do."""

    name: str
    """Stable id, such as `play.pause`."""
    title: str
    group: str
    perform: Callable[[], None]
    shortcut: str = ""
    """As Qt writes it: `Ctrl+K`."""
    is_enabled: Callable[[], bool] = lambda: True


class Commands:
    """The commands of a window."""

    def __init__(self) -> None:
        self._commands: dict[str, Command] = {}

    def add(self, *commands: Command) -> None:
        """Add commands; two with the same name or shortcut are a mistake of the program."""
        for command in commands:
            used = {other.shortcut for other in self._commands.values()} - {""}
            if command.name in self._commands or command.shortcut in used:
                raise ValueError(f"{command.name} or its shortcut {command.shortcut!r} exists already")
            self._commands[command.name] = command

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())

    def get(self, name: str) -> Command:
        """A command by its name."""
        return self._commands[name]

    def groups(self) -> dict[str, list[Command]]:
        """The commands with a shortcut, by group, for the overlay of shortcuts."""
        groups: dict[str, list[Command]] = {}
        for command in self._commands.values():
            if command.shortcut:
                groups.setdefault(command.group, []).append(command)
        return groups

    def search(self, text: str, limit: int = 12) -> list[Command]:
        """The enabled commands that match, best first: every character of the text occurs in order."""
        scored = []
        for order, command in enumerate(self._commands.values()):
            if not command.is_enabled():
                continue
            score = match_score(text, f"{command.group} {command.title}")
            if score is not None:
                scored.append((-score, order, command))
        return [command for _, _, command in sorted(scored, key=lambda entry: entry[:2])[:limit]]


def match_score(pattern: str, text: str) -> float | None:
    """How well a text matches what was typed; None if it does not. Consecutive letters and word starts count more."""
    wanted = pattern.lower().replace(" ", "")
    if not wanted:
        return 0.0
    lowered, position, score, run = text.lower(), 0, 0.0, 0
    for character in wanted:
        found = lowered.find(character, position)
        if found < 0:
            return None
        run = run + 1 if found == position and position > 0 else 0
        is_start = found == 0 or not lowered[found - 1].isalnum()
        score += 1.0 + run + (2.0 if is_start else 0.0)
        position = found + 1
    return score - 0.01 * len(text)
