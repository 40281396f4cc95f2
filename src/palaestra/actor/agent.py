"""Agents: an agent starts a dialogue for each episode and replies to one screen after the other.

A `Reply` holds the action, and the tokens, log-probabilities and weight versions it was sampled from. `VlmAgent` uses a
vision-language model; `ScriptedAgent` uses a function and has no tokens.
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

SampleReply: TypeAlias = Callable[[ReplyRequest], Awaitable[SampledReply]]
Script: TypeAlias = Callable[[TaskSpec, Screenshot, int], Awaitable[UiAction | str]]


@dataclass(frozen=True)
class Reply:
    """The agent's reply to a screen, and the action it was read as."""

    action: UiAction | None
    """None if the text is unreadable."""
    unreadable: str = ""
    """Why the text is unreadable."""
    text: str = ""
    pictures: tuple[Screenshot, ...] = ()
    """The pictures in the prompt, oldest first; the last is the screen it replies to."""
    image_sizes: tuple[tuple[int, int], ...] = ()
    """Width and height of each picture in the prompt."""
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    versions: Sequence[int] = ()
    weights: str = ""
    """Fingerprint of the weights that sampled the tokens."""


class Dialogue(Protocol):
    """The agent's state in one episode."""

    async def reply(self, screen: Screenshot) -> Reply:
        """Reply to a screen."""


class Agent(Protocol):
    """Plays any number of episodes concurrently."""

    codec: str
    """Name of its action grammar; empty if it has none."""
    temperature: float

    def begin(self, spec: TaskSpec, *, seed: int) -> Dialogue:
        """Start an episode; its sampling is determined by the seed."""


@dataclass(frozen=True)
class ScriptedAgent:
    """An agent that computes actions with a function: for tests, oracles and baselines."""

    play: Script
    """Called with task, screen and number of previous replies; returns an action, or a text as an unreadable reply."""
    codec: str = ""
    temperature: float = 1.0

    def begin(self, spec: TaskSpec, *, seed: int) -> Dialogue:
        """Start an episode."""
        return _ScriptedDialogue(self.play, spec)


class _ScriptedDialogue:
    def __init__(self, play: Script, spec: TaskSpec) -> None:
        self._play, self._spec, self._count = play, spec, 0

    async def reply(self, screen: Screenshot) -> Reply:
        action = await self._play(self._spec, screen, self._count)
        self._count += 1
        size = (screen.size.width, screen.size.height)
        if isinstance(action, str):
            return Reply(None, "unreadable by script", action, (screen,), (size,))
        return Reply(action, "", action.kind, (screen,), (size,))


class VlmAgent:
    """Sends screens to a model (`sample_reply`) and reads actions from its text."""

    def __init__(self, sample_reply: SampleReply, grammar: ActionGrammar, *, temperature: float) -> None:
        self._sample_reply, self._grammar = sample_reply, grammar
        self.codec, self.temperature = grammar.codec.name, temperature

    def begin(self, spec: TaskSpec, *, seed: int) -> Dialogue:
        """Start an episode."""
        return _VlmDialogue(self._sample_reply, self._grammar, spec, seed)


class _VlmDialogue:
    def __init__(self, sample_reply: SampleReply, grammar: ActionGrammar, spec: TaskSpec, seed: int) -> None:
        self._sample_reply, self._grammar, self._spec, self._seed = sample_reply, grammar, spec, seed
        self._reader = ReplyReader(grammar.codec, grammar.rule)
        self._past: list[PastTurn] = []
        self._screens: dict[str, Screenshot] = {}

    async def reply(self, screen: Screenshot) -> Reply:
        frame = self._reader.frame(screen.size)
        picture = Picture(screen.data, (frame.image.width, frame.image.height))
        self._screens[screen.sha256] = screen
        system = self._grammar.codec.system_prompt(frame) if self._grammar.in_prompt else ""
        conversation = Conversation(system, self._spec.instruction, tuple(self._past), picture)
        seed = _turn_seed(self._seed, len(self._past))
        answer = await self._sample_reply(ReplyRequest(conversation, seed, episode=f"{self._seed:x}"))
        prompt, sampled = answer.prompt, answer.completion
        read = self._reader.read(sampled.text, frame)
        self._past.append(PastTurn(picture, sampled.token_ids, sampled.text))
        action, unreadable = (read.action, "") if isinstance(read, DecodedAction) else (None, read.reason)
        return Reply(
            action=action,
            unreadable=unreadable,
            text=sampled.text,
            pictures=tuple(self._screens[one.sha256] for one in prompt.pictures),
            image_sizes=tuple(one.size for one in prompt.pictures),
            prompt_ids=prompt.ids.tolist(),
            token_ids=sampled.token_ids.tolist(),
            log_probs=sampled.log_probs.tolist(),
            versions=sampled.versions.tolist(),
            weights=sampled.fingerprint,
        )


def _turn_seed(episode: int, turn: int) -> int:
    """A distinct seed for every turn of every episode."""
    return int.from_bytes(hashlib.sha256(f"{episode} {turn}".encode()).digest()[:7], "big")
