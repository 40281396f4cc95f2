"""What plays: an agent begins a dialogue for each episode and answers one screen after the other.

A `Reply` carries the action and the proof of it: the exact tokens, their log-probabilities and the versions of the
weights they were drawn from. Scripts and people can be agents, too; they have no tokens to show.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from palaestra.sessions.action import UiAction
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.task import TaskSpec

__all__ = ["Agent", "Dialogue", "Reply", "ScriptedAgent"]


@dataclass(frozen=True)
class Reply:
    """What the agent said to a screen, and what it was understood as."""

    action: UiAction | None
    """None when the text could not be read as one."""
    unreadable: str = ""
    """Why not."""
    text: str = ""
    pictures: tuple[Screenshot, ...] = ()
    """What the agent looked at, oldest first; the last one is the screen it answers."""
    image_sizes: tuple[tuple[int, int], ...] = ()
    """Width and height at which it saw each of them."""
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    versions: Sequence[int] = ()
    weights: str = ""
    """Fingerprint of the weights that the tokens were drawn from."""


class Dialogue(Protocol):
    """One episode from the agent's side; remembers what it needs of the past."""

    async def reply(self, screen: Screenshot) -> Reply:
        """Answer the screen."""


class Agent(Protocol):
    """Plays any number of episodes at once."""

    codec: str
    """The grammar it speaks; empty when it speaks none."""
    temperature: float

    def begin(self, spec: TaskSpec, *, seed: int) -> Dialogue:
        """A new episode; everything random in it follows from the seed."""


@dataclass(frozen=True)
class ScriptedAgent:
    """An agent that follows a function from task and screen to action: for tests, oracles and baselines."""

    play: Callable[[TaskSpec, Screenshot, int], Awaitable[UiAction | str]]
    """Given the task, the screen and how many replies came before; a text stands for something unreadable."""
    codec: str = ""
    temperature: float = 1.0

    def begin(self, spec: TaskSpec, *, seed: int) -> Dialogue:
        """A dialogue that counts its replies."""
        return _Script(self.play, spec)


class _Script:
    def __init__(self, play: Callable[[TaskSpec, Screenshot, int], Awaitable[UiAction | str]], spec: TaskSpec) -> None:
        self._play, self._spec, self._count = play, spec, 0

    async def reply(self, screen: Screenshot) -> Reply:
        """What the function says."""
        said = await self._play(self._spec, screen, self._count)
        self._count += 1
        size = (screen.size.width, screen.size.height)
        if isinstance(said, str):
            return Reply(None, "the script said so", said, (screen,), (size,))
        return Reply(said, "", said.kind, (screen,), (size,))
