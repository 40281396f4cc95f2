"""Calls of synchronous functions from a notebook, whose own event loop is running.

Sessions and models on screens run event loops of their own, and a thread can run only one. In a notebook, these
functions therefore run in another thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def has_event_loop() -> bool:
    """Whether an event loop runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def call_outside_event_loop(function: Callable[[], _T], *, request_stop: Callable[[], None] | None = None) -> _T:
    """Call a function in this thread, or in another one if an event loop runs in this thread.

    Ctrl-C reaches only the main thread. Then `request_stop` is called, which must make the function return soon;
    without it, `KeyboardInterrupt` is raised and the function goes on in the background.
    """
    if not has_event_loop():
        return function()
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = function()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the caller
            outcome["error"] = error

    thread = threading.Thread(target=run, name="palaestra", daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            if request_stop is None:
                raise
            request_stop()
    if "error" in outcome:
        raise outcome["error"]
    result: _T = outcome["result"]
    return result
