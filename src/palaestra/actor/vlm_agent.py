"""`VlmAgent`: a vision-language model as an agent: screens go in as pictures, actions come out of its text."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable

from palaestra.actor.agent import Dialogue, Reply
from palaestra.policy.codecs.codec import ActionCodec, Understood
from palaestra.policy.codecs.frame import ImageRule
from palaestra.policy.codecs.reply_reader import ReplyReader
from palaestra.policy.vlm.picture import Picture
from palaestra.policy.vlm.prompt import Conversation, PastTurn
from palaestra.policy.vlm.sampler import Answer, Question
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.task import TaskSpec

__all__ = ["VlmAgent"]


class VlmAgent:
    """Plays with whatever answers its questions."""

    def __init__(
        self, ask: Callable[[Question], Awaitable[Answer]], codec: ActionCodec, rule: ImageRule, *,
        temperature: float, system: bool = True,
    ) -> None:  # fmt: skip
        """`system` False leaves the grammar's description out, for a model that was taught it."""
        self._ask, self._codec, self._rule, self._system = ask, codec, rule, system
        self.codec, self.temperature = codec.name, temperature

    def begin(self, spec: TaskSpec, *, seed: int) -> Dialogue:
        """A new conversation."""
        return _Conversation(self._ask, self._codec, self._rule, spec, seed, told=self._system)


class _Conversation:
    def __init__(
        self, ask: Callable[[Question], Awaitable[Answer]], codec: ActionCodec, rule: ImageRule, spec: TaskSpec,
        seed: int, *, told: bool,
    ) -> None:  # fmt: skip
        self._ask, self._codec, self._reader = ask, codec, ReplyReader(codec, rule)
        self._spec, self._seed, self._told = spec, seed, told
        self._past: list[PastTurn] = []
        self._shown: dict[str, Screenshot] = {}

    async def reply(self, screen: Screenshot) -> Reply:
        """Ask the model, and read what it says."""
        frame = self._reader.frame(screen.size)
        picture = Picture(screen.data, (frame.image.width, frame.image.height))
        self._shown[screen.sha256] = screen
        system = self._codec.system_prompt(frame) if self._told else ""
        asked = Conversation(system, self._spec.instruction, tuple(self._past), picture)
        answer = await self._ask(Question(asked, _seed(self._seed, len(self._past))))
        sampled = answer.sampled
        read = self._reader.read(sampled.text, frame)
        self._past.append(PastTurn(picture, sampled.token_ids, sampled.text))
        action, unreadable = (read.action, "") if isinstance(read, Understood) else (None, read.reason)
        return Reply(
            action=action, unreadable=unreadable, text=sampled.text,
            pictures=tuple(self._shown[one.sha256] for one in answer.prompt.pictures),
            image_sizes=tuple(one.size for one in answer.prompt.pictures), prompt_ids=answer.prompt.ids.tolist(),
            token_ids=sampled.token_ids.tolist(), log_probs=sampled.log_probs.tolist(),
            versions=sampled.versions.tolist(), weights=sampled.fingerprint,
        )  # fmt: skip


def _seed(episode: int, turn: int) -> int:
    """A number of its own for every turn of every episode."""
    return int.from_bytes(hashlib.sha256(f"{episode} {turn}".encode()).digest()[:7], "big")
