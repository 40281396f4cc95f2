"""`TaskRunner`: plays one episode in one new session and returns its trajectory.

If the session fails, the episode is retried in a new session with the same task and seed, a bounded number of times;
the failed attempt is reported and not learned from. An unreadable reply is recorded as a turn; too many in a row end
the episode. Rewards are recorded as the environment returned them.
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
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec

_NO_SESSION = ("no_session", "no_room", "draining")
"""Codes of refusals caused by the session, not by the request."""


class ActorConfig(Section):
    """Settings of an episode."""

    max_steps_per_episode: int = Field(default=50, ge=1)
    """Maximum number of replies per episode. The task may have a lower step limit."""
    task_prompt: str = ""
    """Text before the instruction of the task."""
    session_type: str = "browser"
    """Session type to request from the gateway."""
    codec: str | None = None
    """Action grammar of the model. null: that of its model family."""
    describe_grammar: bool | None = None
    """Describe the action grammar in the prompt. null: yes, except for the built-in models."""
    max_unreadable: int = Field(default=3, ge=1)
    """Number of consecutive unreadable replies that end the episode."""
    retries: int = Field(default=3, ge=0)
    """Number of retries of an episode whose session fails."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature during training. A lower one explores less."""


@dataclass(frozen=True)
class EpisodeRequest:
    """An episode to play."""

    episode_id: str
    task: TaskRequest
    seed: int
    """Seed of the agent's sampling."""
    group: str = ""
    """Requests of one group have the same task and seed."""
    key: str = ""
    """Name of the task in metrics."""


Play: TypeAlias = Callable[[EpisodeRequest], Awaitable[Trajectory]]


@dataclass
class _Recording:
    """The part of an episode recorded so far."""

    turns: list[Turn] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    last_picture: str = ""
    spec: TaskSpec | None = None
    session_id: str = ""
    progress: TaskProgress | None = None

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
    """Plays one episode per call."""

    def __init__(
        self,
        open_session: Callable[[], Awaitable[Session]],
        agent: Agent,
        config: ActorConfig | None = None,
        *,
        on_failed_attempt: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        """`on_failed_attempt` is called with the trajectory of every failed attempt that is retried."""
        self._open, self._agent, self._config = open_session, agent, config or ActorConfig()
        self._on_failed_attempt = on_failed_attempt

    async def run_episode(self, request: EpisodeRequest) -> Trajectory:
        """Play an episode. `SessionRefused` if the task itself is invalid."""
        attempt = 0
        while True:
            started = time.time()
            recording = _Recording()
            try:
                outcome, reason = await self._play(request, recording)
            except SessionFailed as failure:
                outcome, reason = Outcome.ENVIRONMENT_FAILED, str(failure)
            except SessionRefused as refusal:
                if refusal.code not in _NO_SESSION:
                    raise
                outcome, reason = Outcome.ENVIRONMENT_FAILED, str(refusal)
            trajectory = self._build_trajectory(request, recording, outcome, reason, attempt, started)
            if outcome is not Outcome.ENVIRONMENT_FAILED or attempt == self._config.retries:
                return trajectory
            self._on_failed_attempt(trajectory)
            attempt += 1

    async def _play(self, request: EpisodeRequest, recording: _Recording) -> tuple[Outcome, str]:
        session = await self._open()
        recording.session_id = str(getattr(session, "session_id", ""))
        try:
            spec = recording.spec = await session.reset(request.task)
            recording.add_screen(screen := await session.screenshot())
            if self._config.task_prompt:
                spec = replace(spec, instruction=f"{self._config.task_prompt}\n{spec.instruction}")
            dialogue = self._agent.begin(spec, seed=request.seed)
            return await self._take_steps(session, dialogue, screen, recording)
        finally:
            await session.close()

    async def _take_steps(
        self, session: Session, dialogue: Dialogue, screen: Screenshot, recording: _Recording
    ) -> tuple[Outcome, str]:
        actions, unreadable, earned = 0, 0, 0.0
        for _ in range(self._config.max_steps_per_episode):
            reply = await dialogue.reply(screen)
            refusal, step = reply.unreadable, None
            if reply.action is not None:
                try:
                    step = await session.act(reply.action, step=actions + 1)
                except SessionRefused as invalid:
                    if invalid.code != "invalid_action":
                        raise
                    # A mistake of the model, such as a point outside the screen; the session did nothing.
                    refusal = str(invalid)
            if step is None:
                recording.add_turn(reply, refusal)
                unreadable += 1
                if unreadable == self._config.max_unreadable:
                    return Outcome.UNREADABLE, refusal
                continue
            actions, unreadable, screen = actions + 1, 0, step.screenshot
            recording.add_turn(reply, reward=step.progress.reward - earned)
            recording.add_screen(screen)
            recording.progress, earned = step.progress, step.progress.reward
            if step.progress.done:
                return _outcome(step.progress)
        return Outcome.TRUNCATED, f"{self._config.max_steps_per_episode} replies"

    def _build_trajectory(
        self,
        request: EpisodeRequest,
        recording: _Recording,
        outcome: Outcome,
        reason: str,
        attempt: int,
        started: float,
    ) -> Trajectory:
        task = {"task": request.task.task, "seed": request.task.seed, "params": dict(request.task.params)}
        return Trajectory(
            episode_id=request.episode_id,
            task=task if recording.spec is None else recording.spec.facts(),
            turns=tuple(recording.turns),
            outcome=outcome,
            pictures=recording.pictures,
            reason=reason,
            group=request.group,
            attempt=attempt,
            session_id=recording.session_id,
            temperature=self._agent.temperature,
            codec=self._agent.codec,
            last_picture=recording.last_picture,
            started_at=started,
            seconds=time.time() - started,
            detail={} if recording.progress is None else recording.progress.detail,
        )


def _outcome(progress: TaskProgress) -> tuple[Outcome, str]:
    if progress.success:
        return Outcome.SUCCESS, ""
    if progress.truncated:
        return Outcome.TRUNCATED, "the task's step limit"
    return Outcome.FAILURE, ""
