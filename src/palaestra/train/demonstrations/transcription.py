"""Writes the actions of an episode as replies of a model: the prompts and tokens it would have seen and sampled.

The episode runs through the same agent and task runner as when the model plays, so prompts follow the same history
rules, and the action that is performed is the one that the tokens decode to. No token was sampled: versions are
`NOT_SAMPLED`, log-probabilities are 0, and no weights are named.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from palaestra.actor.agent import Dialogue, VlmAgent
from palaestra.actor.task_runner import ActorConfig, EpisodeRequest, TaskRunner
from palaestra.errors import ExperienceError, UnsupportedAction
from palaestra.experience.trajectory import NOT_SAMPLED, Source, Trajectory
from palaestra.policy.codecs.codec import ActionCodec
from palaestra.policy.codecs.coordinates import CoordinateFrame
from palaestra.policy.codecs.decoding import DecodedAction
from palaestra.policy.codecs.grammar import ReplyReader
from palaestra.policy.vlm import VLMPolicy
from palaestra.policy.vlm.generation import Completion
from palaestra.policy.vlm.sampler import ReplyRequest, SampledReply
from palaestra.sessions.action import Drag, Move, UiAction, encode
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Session
from palaestra.sessions.task import TaskSpec

NextAction: TypeAlias = Callable[[Any], Awaitable[UiAction | None]]
"""Called with the session; returns the next action, or None if there is none."""


class NoNextAction(Exception):
    """The oracle has no further action although the episode is not over."""


async def transcribe_episode(
    policy: VLMPolicy,
    request: EpisodeRequest,
    open_session: Callable[[], Awaitable[Session]],
    next_action: NextAction,
    config: ActorConfig,
    *,
    moves_pointer: bool = True,
) -> Trajectory:
    """Play an episode with the actions of `next_action`; returns it as a demonstration for the model.

    `moves_pointer`: before a drag, move the pointer to its start if the codec needs it there; `next_action` is then
    called again.

    `NoNextAction` if there is no next action. `UnsupportedAction` if the codec cannot write an action,
    `ExperienceError` if the model could not have replied so.
    """
    agent = _TranscribingAgent(policy, next_action, moves_pointer)

    async def open_and_keep() -> Session:
        agent.session = await open_session()
        return agent.session

    trajectory = await TaskRunner(open_and_keep, agent, config).run_episode(request)
    return replace(trajectory, source=Source.DEMONSTRATION)


def write_action(codec: ActionCodec, action: UiAction, frame: CoordinateFrame) -> str:
    """The text of an action; `ExperienceError` if it decodes to another one.

    A point may move within the cell of the model's coordinates that contains it: both have the same text.
    """
    text = codec.encode(action, frame)
    read = codec.decode(text, frame)
    if not isinstance(read, DecodedAction):
        raise ExperienceError(f"the text {text!r} of {encode(action)} cannot be decoded: {read.reason}.")
    if _without_points(read.action) != _without_points(action) or codec.encode(read.action, frame) != text:
        raise ExperienceError(f"the text {text!r} of {encode(action)} decodes to {encode(read.action)}.")
    return text


def _without_points(action: UiAction) -> dict[str, Any]:
    return {name: value for name, value in encode(action).items() if name not in ("at", "path")}


def _prepare_drag(codec: ActionCodec, drag: Drag, frame: CoordinateFrame) -> Drag | Move:
    """The drag, or first a move to its start for families whose drags start at the pointer."""
    try:
        codec.encode(drag, frame)
    except UnsupportedAction:
        start, pointer = Move(drag.path[0]), frame.pointer
        if pointer is None or codec.encode(Move(pointer), frame) != codec.encode(start, frame):
            return start
        return replace(drag, path=(pointer, *drag.path[1:]))
    return drag


class _TranscribingAgent:
    """An agent of one episode that writes actions as a model would."""

    temperature = 1.0

    def __init__(self, policy: VLMPolicy, next_action: NextAction, moves_pointer: bool) -> None:
        self._policy, self._next_action, self._moves_pointer = policy, next_action, moves_pointer
        self.codec = policy.grammar.codec.name
        self.session: Session | None = None

    def begin(self, spec: TaskSpec, *, seed: int) -> Dialogue:
        """Start the episode, or another attempt at it."""
        grammar = self._policy.grammar
        reader = ReplyReader(grammar.codec, grammar.rule)

        async def write_reply(request: ReplyRequest) -> SampledReply:
            action = await self._next_action(self.session)
            if action is None:
                raise NoNextAction
            frame = reader.frame(Screenshot.of(request.conversation.now.data).size)
            if self._moves_pointer and isinstance(action, Drag):
                action = _prepare_drag(grammar.codec, action, frame)
            text = write_action(grammar.codec, action, frame)
            reader.read(text, frame)
            token_ids = self._policy.write_reply(text)
            count = len(token_ids)
            completion = Completion(
                token_ids=token_ids,
                log_probs=np.zeros(count, np.float32),
                versions=np.full(count, NOT_SAMPLED, np.int32),
                text=text,
                ended=True,
                fingerprint="",
            )
            return SampledReply(self._policy.prompt(request.conversation), completion)

        return VlmAgent(write_reply, grammar, temperature=self.temperature).begin(spec, seed=seed)
