"""Records which code and which environment an attempt runs with, after it was launched and beside everything else.

One thread at low priority works through the attempts, so that a start never waits for git. An attempt whose record is
missing, because a service was killed, is recorded by the next one; `collected` says when.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import palaestra
from palaestra.files.atomic import read_json, write_json
from palaestra.files.run_directory import Attempt
from palaestra.redaction import Redactor
from palaestra.runs.record import RunChanges
from palaestra.runs.reproducibility.code_record import CodeRecord, code_from_json, collect_code
from palaestra.runs.reproducibility.environment_record import (
    EnvironmentRecord,
    collect_environment,
    environment_from_json,
)
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.wire import JsonObject

_NICENESS = 10
_CLOSE_S = 5.0
_WAIT_S, _POLL_S = 10.0, 0.05
_OWN_CODE = Path(palaestra.__file__).parent
_log = logging.getLogger(__name__)


class SourceRecord(NamedTuple):
    """What ran in an attempt."""

    code: CodeRecord
    environment: EnvironmentRecord

    def columns(self) -> RunChanges:
        """The columns of the run's row."""
        return {"code_version": self.code.version, "environment_digest": self.environment.digest}


class _Request(NamedTuple):
    run_id: str
    attempt: Attempt
    spec: RunSpec
    loop: asyncio.AbstractEventLoop


class SourceRecorder:
    """Records attempts one after the other in a thread of its own."""

    def __init__(self, write: Callable[[str, RunChanges], Coroutine[Any, Any, None]]) -> None:
        """`write` changes columns of the row of a run, in the event loop that asked for the record."""
        self._write = write
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._unfinished: set[str] = set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, run_id: str, attempt: Attempt, spec: RunSpec) -> None:
        """Record an attempt soon, unless it is recorded. Call from the event loop."""
        if (attempt.source / "code.json").exists() or self._closing.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="palaestra-source", daemon=True)
            self._thread.start()
        self._unfinished.add(run_id)
        self._requests.put(_Request(run_id, attempt, spec, asyncio.get_running_loop()))

    async def wait(self, run_id: str) -> None:
        """Wait for the record of a run, for some seconds, so that no file appears while the directory is packed."""
        deadline = time.monotonic() + _WAIT_S
        while run_id in self._unfinished and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """Stop after the current step. What is not recorded is recorded by the next service."""
        self._closing.set()
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        except OSError:
            _log.debug("the priority of the thread cannot be lowered", exc_info=True)
        while not self._closing.is_set():
            request = self._requests.get()
            if request is None or self._closing.is_set():
                return
            try:
                record = record_source(request.attempt, request.spec, self._closing)
                if record is not None:
                    work = self._write(request.run_id, record.columns())
                    asyncio.run_coroutine_threadsafe(work, request.loop)
            except RuntimeError:
                return  # the loop is closed
            except Exception:  # noqa: BLE001 - a record is never worth a run
                _log.warning("%s: its code could not be recorded", request.run_id, exc_info=True)
            finally:
                self._unfinished.discard(request.run_id)


def record_source(attempt: Attempt, spec: RunSpec, closing: threading.Event | None = None) -> SourceRecord | None:
    """Record the code and the environment of an attempt. None if it was interrupted."""
    closing = closing or threading.Event()
    redact = Redactor.from_environment({**os.environ, **spec.environment})
    command = read_json(attempt.command) or {}
    attempt.source.mkdir(exist_ok=True)
    home = attempt.path.parent.parent.parent
    script = find_script(spec, command)
    root = find_code_root(spec) if script is None else script.parent
    code = collect_code(
        root, attempt.source, excluded=home, redact=redact, has_script=script is not None, closing=closing
    )
    gpus = AttemptPlan.read(attempt).gpus
    if attempt.remote.exists():
        environment = EnvironmentRecord(problems=["it runs on another machine"])
    else:
        environment = collect_environment(command, attempt.source, gpus, redact=redact, closing=closing)
    if closing.is_set():
        return None
    write_json(attempt.source / "environment.json", {"schema": 1, **asdict(environment)}, durable=False)
    # The last file: an attempt with it is recorded.
    write_json(attempt.source / "code.json", {"schema": 1, **asdict(code)}, durable=False)
    return SourceRecord(code, environment)


def read_source(attempt: Attempt) -> SourceRecord | None:
    """The record of an attempt; None if there is none."""
    code = read_json(attempt.source / "code.json")
    if code is None:
        return None
    environment = read_json(attempt.source / "environment.json") or {}
    return SourceRecord(code_from_json(code), environment_from_json(environment))


def find_script(spec: RunSpec, command: JsonObject) -> Path | None:
    """The user's script that a command executes; None for a program of ours, a module or a binary."""
    argv = command.get("argv")
    for word in argv[1:] if isinstance(argv, list) else []:
        path = Path(str(command.get("cwd") or spec.invoked_from)) / str(word)
        if path.suffix in (".py", ".sh") and path.is_file():
            path = path.resolve()
            return None if path.is_relative_to(_OWN_CODE) else path
    return None


def find_code_root(spec: RunSpec) -> Path:
    """The directory of the user's code: the checkout, else the directory of the request."""
    checkout = spec.config.get("checkout") or spec.checkout
    if isinstance(checkout, str):
        return (spec.invoked_from / Path(checkout).expanduser()).resolve()
    return spec.invoked_from
