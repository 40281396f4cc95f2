"""The `Session` protocol (one screen, one episode, one agent), and the step rules that every session keeps.

All implementations (a browser on this machine, a pod behind a gateway, the fake) keep the same rules, and
`palaestra.sessions.conformance` tests them. A session that broke raises `SessionFailed`; an invalid request raises
`SessionRefused` and changes nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.action import Answer, Terminate, UiAction, encode, fits
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec


@dataclass(frozen=True)
class Step:
    """The result of an act."""

    number: int
    """Number of the act in its episode, from 1."""
    screenshot: Screenshot
    progress: TaskProgress


class Session(Protocol):
    """One screen that can be reset, acted on, observed and judged."""

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin an episode on a new screen, without storage, cookies or windows of an earlier one."""

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform `action` once, as the episode's act number `step`, counted from 1.

        A step that was already performed returns the stored result if the action is the same, so that retries are
        safe, and is refused with `step_conflict` otherwise. A step that is not the next one is refused with
        `step_out_of_order`, and every step after the end of the episode with `episode_over`.
        """

    async def screenshot(self) -> Screenshot:
        """The current screen."""

    async def progress(self) -> TaskProgress:
        """The verifier's current judgement."""

    async def close(self) -> None:
        """Release the screen. Can be called repeatedly."""


class EpisodeTracker:
    """The steps of one episode: which act is next, which is a retry, and when the episode is over."""

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        self.num_steps = 0
        self.is_over = self.is_truncated = False
        self._action: UiAction | None = None
        self._result: Step | None = None

    def find_repeated(self, action: UiAction, step: int) -> Step | None:
        """The stored result of a retry; None when the act is to be performed now; `SessionRefused` when it must not."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise SessionRefused("bad_request", f"step = {step!r}: must be a whole number of at least 1.", status=422)
        if step == self.num_steps:
            assert self._action is not None
            if encode(action) == encode(self._action):
                if self._result is None:
                    raise SessionFailed("interrupted", f"step {step} was not completed")
                return self._result
            text = f"step {step} was another action ({encode(self._action)}). Send the next step, {step + 1}."
            raise SessionRefused("step_conflict", text, status=409)
        if step != self.num_steps + 1:
            text = f"step {step} does not follow step {self.num_steps}. Send step {self.num_steps + 1}."
            raise SessionRefused("step_out_of_order", text, status=409)
        if self.is_over:
            raise SessionRefused("episode_over", "the episode is over. Reset for another one.", status=409)
        fits(action, self.spec.screen.width, self.spec.screen.height)
        return None

    def begin(self, action: UiAction) -> None:
        """Count an act that is about to be performed; from here on it is never performed again."""
        self.num_steps += 1
        self._action, self._result = action, None

    def finish(self, screenshot: Screenshot, progress: TaskProgress) -> Step:
        """The result of the act, stored for a retry. Adds the ends that verifiers do not know: the agent's and the
        step limit.
        """
        if not progress.done and isinstance(self._action, Terminate | Answer):
            progress = dataclasses.replace(progress, done=True, truncated=False)
        elif not progress.done and self.num_steps >= self.spec.step_limit:
            progress = dataclasses.replace(progress, done=True, truncated=True)
        self.is_over, self.is_truncated = progress.done, progress.truncated
        self._result = Step(self.num_steps, screenshot, progress)
        return self._result

    def with_end(self, progress: TaskProgress) -> TaskProgress:
        """The verifier's current judgement, with the end that the last act may have brought."""
        if progress.done or not self.is_over:
            return progress
        return dataclasses.replace(progress, done=True, truncated=self.is_truncated)


class SessionState:
    """Whether a session is closed, failed, or in an episode; base class of the sessions in this package."""

    def __init__(self) -> None:
        self._episode: EpisodeTracker | None = None
        self._failure: SessionFailed | None = None
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise SessionRefused("no_session", "the session is closed. Open another one.", status=404)

    def _require_episode(self) -> EpisodeTracker:
        self._check_open()
        if self._failure is not None:
            raise self._failure
        if self._episode is None:
            raise SessionRefused("not_reset", "the session has no task. Reset it first.", status=409)
        return self._episode
