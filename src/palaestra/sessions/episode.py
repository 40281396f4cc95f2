"""The bookkeeping of one episode's steps: which act may happen, which is a retry, when it is over. Pure.

Kept apart from screens and servers because it is what makes a retried click harmless, wherever the session runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from palaestra.errors import SessionRefused
from palaestra.sessions.action import Answer, Terminate, UiAction, encode, fits
from palaestra.sessions.task import Progress, TaskSpec

__all__ = ["Episode", "Repeated", "judged"]


@dataclass(frozen=True)
class Repeated:
    """The step was done before, with the same action: here is what came of it."""

    reply: Any


class Episode:
    """The steps of one episode and what was answered to them."""

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        self.steps = 0
        self.over = self.truncated = False
        self._action: dict[str, Any] | None = None
        self._reply: Any = None

    def admit(self, action: UiAction, step: int) -> Repeated | None:
        """None when the act is to be performed now; `Repeated` when it was; `SessionRefused` when it must not be."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise SessionRefused("bad_request", f"step = {step!r}: must be a whole number from 1 on.", status=422)
        if step == self.steps and step > 0:
            if encode(action) == self._action:
                return Repeated(self._reply)
            text = f"step {step} was done with another action ({self._action}). Send the next step, {step + 1}."
            raise SessionRefused("step_conflict", text, status=409)
        if step != self.steps + 1:
            text = f"step {step} does not follow on step {self.steps}. Send step {self.steps + 1}."
            raise SessionRefused("step_out_of_order", text, status=409)
        if self.over:
            raise SessionRefused("episode_over", "the episode is over. Reset for another one.", status=409)
        fits(action, self.spec.screen.width, self.spec.screen.height)
        return None

    def begin(self, action: UiAction) -> None:
        """The act is being performed: from here on it is never performed again, whatever becomes of the reply."""
        self.steps += 1
        self._action, self._reply = encode(action), None

    def answer(self, reply: Any, *, over: bool, truncated: bool = False) -> None:
        """What came of the act that was begun, kept for a retry."""
        self._reply, self.over, self.truncated = reply, over, truncated

    def as_it_stands(self, found: Progress) -> Progress:
        """The verifier's word at any time, with the end that the last act may have brought."""
        if found.done or not self.over:
            return found
        return Progress(found.reward, True, found.success, self.truncated, found.detail)


def judged(progress: Progress, action: UiAction, spec: TaskSpec, steps: int) -> Progress:
    """The verifier's word, with the two ends it does not know of: the agent's own, and the step limit."""
    if progress.done:
        return progress
    if isinstance(action, Terminate | Answer):
        return Progress(progress.reward, True, progress.success, False, progress.detail)
    if steps >= spec.step_limit:
        return Progress(progress.reward, True, progress.success, True, progress.detail)
    return progress
