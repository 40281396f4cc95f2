"""Commands: everything the studio can do, by name, with shortcuts; the palette searches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

_WHOLE = 1000.0
"""Score of a text that holds what was typed as a whole; letters that lie apart have less."""


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
            scores = [match_score(text, name) for name in (command.title, f"{command.group} {command.title}")]
            score = max((one for one in scores if one is not None), default=None)
            if score is not None:
                scored.append((-score, order, command))
        return [command for _, _, command in sorted(scored, key=lambda entry: entry[:2])[:limit]]


def match_score(pattern: str, text: str) -> float | None:
    """How well a text matches what was typed; None if it does not.

    Every character of the pattern must occur, in order. Best is a text that begins with the pattern, then one that
    holds it at the start of a word, then anywhere; else consecutive letters and starts of words count more.
    """
    phrase, lowered = " ".join(pattern.lower().split()), text.lower()
    if not phrase:
        return 0.0
    scores = [
        score
        for start, character in enumerate(lowered)
        if character == phrase[0] and (score := _score_from(start, phrase, lowered)) is not None
    ]
    return max(scores) - 0.01 * len(text) if scores else None


def _score_from(start: int, phrase: str, text: str) -> float | None:
    """The score of a match that begins at a place and takes the next occurrence of each character."""
    if text.startswith(phrase, start):
        return _WHOLE * (3 if start == 0 else 2 if _is_word_start(text, start) else 1)
    score, position, run = 0.0, start, 0
    for character in phrase.replace(" ", ""):
        at = text.find(character, position)
        if at < 0:
            return None
        run = run + 1 if at == position and position > start else 0
        score += 1.0 + run + (2.0 if _is_word_start(text, at) else 0.0)
        position = at + 1
    return min(score, _WHOLE)


def _is_word_start(text: str, place: int) -> bool:
    return place == 0 or not text[place - 1].isalnum()
