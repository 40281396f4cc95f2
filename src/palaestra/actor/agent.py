"""What plays: an agent begins a dialogue for each episode and answers one screen after the other.

A `Reply` carries the action and the proof of it: the exact tokens, their log-probabilities and the versions of the
weights they were drawn from. `VlmAgent` is a vision-language model; `ScriptedAgent` is a function, and has no tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from palaestra.policy.codecs.decoding import DecodedAction
from palaestra.policy.codecs.grammar import ActionGrammar, ReplyReader
from palaestra.policy.vlm.picture import Picture
from palaestra.policy.vlm.prompt import Conversation, PastTurn
from palaestra.policy.vlm.sampler import ReplyRequest, SampledReply
from palaestra.sessions.action import UiAction
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.task import TaskSpec

__all__ = ["Agent", "Dialogue", "Reply", "ScriptedAgent", "VlmAgent"]

Ask: TypeAlias = Callable[[ReplyRequest], Awaitable[SampledReply]]
Script: TypeAlias = Callable[[TaskSpec, Screenshot, int], Awaitable[UiAction | str]]


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

    play: Script
    """Given the task, the screen and how many replies came before; a text stands for something unreadable."""
    codec: str = ""
    temperature: float = 1.0

    def begin(self, spec: TaskSpec, *, seed: int) -> Dialogue:
        """A dialogue that counts its replies."""
        return _ScriptedDialogue(self.play, spec)


class _ScriptedDialogue:
    def __init__(self, play: Script, spec: TaskSpec) -> None:
        self._play, self._spec, self._count = play, spec, 0

    async def reply(self, screen: Screenshot) -> Reply:
        action = await self._play(self._spec, screen, self._count)
        self._count += 1
        size = (screen.size.width, screen.size.height)
        if isinstance(action, str):
            return Reply(None, "the script said so", action, (screen,), (size,))
        return Reply(action, "", action.kind, (screen,), (size,))


class VlmAgent:
    """Plays with whatever answers its questions: screens go in as pictures, actions come out of its text."""

    def __init__(self, ask: Ask, grammar: ActionGrammar, *, temperature: float) -> None:
        self._ask, self._grammar = ask, grammar
        self.codec, self.temperature = grammar.codec.name, temperature

    def begin(self, spec: TaskSpec, *, seed: int) -> Dialogue:
        """A new conversation."""
        return _VlmDialogue(self._ask, self._grammar, spec, seed)


class _VlmDialogue:
    def __init__(self, ask: Ask, grammar: ActionGrammar, spec: TaskSpec, seed: int) -> None:
        self._ask, self._grammar, self._spec, self._seed = ask, grammar, spec, seed
        self._reader = ReplyReader(grammar.codec, grammar.rule)
        self._past: list[PastTurn] = []
        self._shown: dict[str, Screenshot] = {}

    async def reply(self, screen: Screenshot) -> Reply:
        frame = self._reader.frame(screen.size)
        picture = Picture(screen.data, (frame.image.width, frame.image.height))
        self._shown[screen.sha256] = screen
        # A model that was taught the grammar needs no description of it.
        system = self._grammar.codec.system_prompt(frame) if self._grammar.in_prompt else ""
        conversation = Conversation(system, self._spec.instruction, tuple(self._past), picture)
        answer = await self._ask(ReplyRequest(conversation, _turn_seed(self._seed, len(self._past))))
        prompt, sampled = answer.prompt, answer.completion
        read = self._reader.read(sampled.text, frame)
        self._past.append(PastTurn(picture, sampled.token_ids, sampled.text))
        action, unreadable = (read.action, "") if isinstance(read, DecodedAction) else (None, read.reason)
        return Reply(
            action=action,
            unreadable=unreadable,
            text=sampled.text,
            pictures=tuple(self._shown[one.sha256] for one in prompt.pictures),
            image_sizes=tuple(one.size for one in prompt.pictures),
            prompt_ids=prompt.ids.tolist(),
            token_ids=sampled.token_ids.tolist(),
            log_probs=sampled.log_probs.tolist(),
            versions=sampled.versions.tolist(),
            weights=sampled.fingerprint,
        )


def _turn_seed(episode: int, turn: int) -> int:
    """A number of its own for every turn of every episode."""
    return int.from_bytes(hashlib.sha256(f"{episode} {turn}".encode()).digest()[:7], "big")
