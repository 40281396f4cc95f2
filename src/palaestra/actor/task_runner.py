"""`TaskRunner`: one episode, one fresh session, one trajectory. Every ending has its own name.

A session that breaks is no result: the episode is tried again on a new session with the same task and seed, a bounded
number of times, and what was recorded until then is counted as a failure, never learned from. Text that is no action
is a step like any other: recorded, and too many of them in a row end the episode. Rewards are recorded as the
environment paid them; what an ending is worth to a learner is the learner's business.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pydantic import Field

from palaestra.actor.agent import Agent, Dialogue, Reply
from palaestra.config import Section
from palaestra.errors import SessionFailed, SessionRefused
from palaestra.experience.trajectory import Outcome, Trajectory, Turn
from palaestra.sessions.action import encode
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Session
from palaestra.sessions.task import Progress, TaskRequest, TaskSpec

__all__ = ["ActorConfig", "EpisodeOrder", "Play", "TaskRunner"]

_NO_SESSION = ("no_session", "no_room", "draining")
"""Refusals that are about the session, not about the request: it is gone, there is no room, the gateway stops."""


class ActorConfig(Section):
    """How one episode is played."""

    max_steps_per_episode: int = Field(default=50, ge=1)
    """Replies after which an episode ends, if the task's own step limit does not end it before."""
    task_prompt: str = ""
    """Said to the agent before the task's own instruction."""
    session_type: str = "browser"
    """What to ask the gateway for."""
    codec: str | None = None
    """The grammar the model speaks. null: the one of its family."""
    describe_grammar: bool | None = None
    """Explain the grammar in the prompt. null: yes, except to the built-in tiny model, which knows no other."""
    max_unreadable: int = Field(default=3, ge=1)
    """Unreadable replies in a row that end the episode."""
    retries: int = Field(default=3, ge=0)
    """How many further sessions an episode gets when its session breaks."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature while training. Lower plays safer and learns from less."""


@dataclass(frozen=True)
class EpisodeOrder:
    """An episode to be played."""

    episode_id: str
    task: TaskRequest
    seed: int
    """What the agent's own randomness follows from."""
    group: str = ""
    """Orders of one group are the same task with the same seed."""
    key: str = ""
    """The name under which the task's results are counted."""


Play: TypeAlias = Callable[[EpisodeOrder], Awaitable[Trajectory]]


@dataclass
class _Recording:
    """What has happened so far, whatever happens next."""

    turns: list[Turn] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    last_picture: str = ""
    spec: TaskSpec | None = None
    session_id: str = ""
    progress: Progress | None = None

    def add_screen(self, screen: Screenshot) -> None:
        self.pictures.setdefault(screen.sha256, screen.data)
        self.last_picture = screen.sha256

    def add_turn(self, reply: Reply, refusal: str = "", reward: float = 0.0) -> None:
        for picture in reply.pictures:
            self.pictures.setdefault(picture.sha256, picture.data)
        turn = Turn(
            tuple(picture.sha256 for picture in reply.pictures),
            reply.image_sizes,
            reply.prompt_ids,  # type: ignore[arg-type]
            reply.token_ids,  # type: ignore[arg-type]
            reply.log_probs,  # type: ignore[arg-type]
            reply.versions,  # type: ignore[arg-type]
            reply.text,
            None if refusal or reply.action is None else encode(reply.action),
            refusal,
            reward,
            reply.weights,
        )
        self.turns.append(turn)


class TaskRunner:
    """Plays episodes, one per call; holds nothing between them."""

    def __init__(
        self,
        open_session: Callable[[], Awaitable[Session]],
        agent: Agent,
        config: ActorConfig | None = None,
        *,
        failed: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        """`failed` is given the trajectory of every session that broke and is tried again."""
        self._open, self._agent, self._config = open_session, agent, config or ActorConfig()
        self._failed = failed

    async def run_episode(self, order: EpisodeOrder) -> Trajectory:
        """Play it; the trajectory says how it ended. `SessionRefused` when the task itself makes no sense."""
        attempt = 0
        while True:
            started = time.time()
            recording = _Recording()
            try:
                outcome, reason = await self._play(order, recording)
            except SessionFailed as failure:
                outcome, reason = Outcome.ENVIRONMENT_FAILED, str(failure)
            except SessionRefused as refusal:
                if refusal.code not in _NO_SESSION:
                    raise
                outcome, reason = Outcome.ENVIRONMENT_FAILED, str(refusal)
            trajectory = self._build_trajectory(order, recording, outcome, reason, attempt, started)
            if outcome is not Outcome.ENVIRONMENT_FAILED or attempt == self._config.retries:
                return trajectory
            self._failed(trajectory)
            attempt += 1

    async def _play(self, order: EpisodeOrder, recording: _Recording) -> tuple[Outcome, str]:
        session = await self._open()
        recording.session_id = str(getattr(session, "session_id", ""))
        try:
            spec = recording.spec = await session.reset(order.task)
            recording.add_screen(screen := await session.screenshot())
            if self._config.task_prompt:
                spec = replace(spec, instruction=f"{self._config.task_prompt}\n{spec.instruction}")
            dialogue = self._agent.begin(spec, seed=order.seed)
            return await self._take_steps(session, dialogue, screen, recording)
        finally:
            await session.close()

    async def _take_steps(
        self, session: Session, dialogue: Dialogue, screen: Screenshot, recording: _Recording
    ) -> tuple[Outcome, str]:
        acts, unread, earned = 0, 0, 0.0
        for _ in range(self._config.max_steps_per_episode):
            reply = await dialogue.reply(screen)
            refusal, step = reply.unreadable, None
            if reply.action is not None:
                try:
                    step = await session.act(reply.action, step=acts + 1)
                except SessionRefused as invalid:
                    if invalid.code != "invalid_action":
                        raise
                    # Such as a point outside the screen: the model's mistake, and nothing happened.
                    refusal = str(invalid)
            if step is None:
                recording.add_turn(reply, refusal)
                unread += 1
                if unread == self._config.max_unreadable:
                    return Outcome.UNREADABLE, refusal
                continue
            acts, unread, screen = acts + 1, 0, step.screenshot
            recording.add_turn(reply, reward=step.progress.reward - earned)
            recording.add_screen(screen)
            recording.progress, earned = step.progress, step.progress.reward
            if step.progress.done:
                return _outcome(step.progress)
        return Outcome.TRUNCATED, f"{self._config.max_steps_per_episode} replies"

    def _build_trajectory(
        self, order: EpisodeOrder, recording: _Recording, outcome: Outcome, reason: str, attempt: int, started: float
    ) -> Trajectory:
        request = {"task": order.task.task, "seed": order.task.seed, "params": dict(order.task.params)}
        return Trajectory(
            episode_id=order.episode_id,
            task=request if recording.spec is None else recording.spec.facts(),
            turns=tuple(recording.turns),
            outcome=outcome,
            pictures=recording.pictures,
            reason=reason,
            group=order.group,
            attempt=attempt,
            session_id=recording.session_id,
            temperature=self._agent.temperature,
            codec=self._agent.codec,
            last_picture=recording.last_picture,
            started_at=started,
            seconds=time.time() - started,
            detail={} if recording.progress is None else recording.progress.detail,
        )


def _outcome(progress: Progress) -> tuple[Outcome, str]:
    if progress.success:
        return Outcome.SUCCESS, ""
    if progress.truncated:
        return Outcome.TRUNCATED, "the task's step limit"
    return Outcome.FAILURE, ""
