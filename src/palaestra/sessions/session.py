"""The `Session` protocol: one screen, one episode, one agent.

Whatever is behind it (a browser context on this machine, a pod behind a gateway, the fake), it keeps the same promises,
and `palaestra.sessions.conformance` proves that it does. A session that broke raises `SessionFailed`; a request
that makes no sense raises `SessionRefused` and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from palaestra.sessions.action import UiAction
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.task import Progress, TaskRequest, TaskSpec

__all__ = ["Session", "Step"]


@dataclass(frozen=True)
class Step:
    """What an act leads to."""

    number: int
    """How many acts the episode has seen, this one included; 0 right after the reset."""
    screenshot: Screenshot
    progress: Progress


class Session(Protocol):
    """One screen that can be reset, acted on, looked at and judged."""

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin an episode on a fresh screen: nothing of an earlier one is left (storage, cookies, windows)."""

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform `action` once, as the episode's act number `step`, counted from 1.

        A step that was done already is answered from memory if the action is the same (a retry is harmless), and
        refused with `step_conflict` if it is another; a step that is not the next one is refused with
        `step_out_of_order`; after the end of the episode every further one with `episode_over`.
        """

    async def screenshot(self) -> Screenshot:
        """What is on the screen now."""

    async def progress(self) -> Progress:
        """How far the task has come."""

    async def close(self) -> None:
        """Give the screen up. Harmless when repeated."""
