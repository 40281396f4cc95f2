"""Screens that agents operate: actions, tasks, sessions, and the browsers behind them. Nothing here imports torch."""

from palaestra.sessions.action import UiAction, decode, encode
from palaestra.sessions.conformance import check_session
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Session, Step
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec

__all__ = [
    "Screenshot",
    "Session",
    "Step",
    "TaskProgress",
    "TaskRequest",
    "TaskSpec",
    "UiAction",
    "check_session",
    "decode",
    "encode",
]
