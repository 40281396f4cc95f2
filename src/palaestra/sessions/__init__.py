"""Screens that agents operate: actions, tasks, sessions, and the browsers behind them. Nothing here imports torch."""

from palaestra.sessions.action import UiAction, decode, encode
from palaestra.sessions.conformance import check_session
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Session, Step
from palaestra.sessions.task import Progress, TaskRequest, TaskSpec

__all__ = [
    "Progress",
    "Screenshot",
    "Session",
    "Step",
    "TaskRequest",
    "TaskSpec",
    "UiAction",
    "check_session",
    "decode",
    "encode",
]
