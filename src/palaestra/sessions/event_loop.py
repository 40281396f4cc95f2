"""Which event loop a server of ours runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module

__all__ = ["loop_factory"]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop of uvloop where it is installed: the same, and faster. None stands for asyncio's own."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return factory
