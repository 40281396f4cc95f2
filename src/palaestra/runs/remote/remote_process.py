"""An attempt on another machine, with the interface of `AttemptProcess`: wait, stop, adopt, and a link that reconnects.

The link is a process (`connection`) with an agent at its other end. What the agent sends is written into the directory
of the attempt, so that everything that reads a local attempt reads this one. A lost link says nothing about the run: it
is shown as unreachable, and the link is tried again until the other side reports the end. `remote.json` holds what the
next service needs to do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

from palaestra.errors import HostUnreachable, LaunchRefused, PalaestraError
from palaestra.files.atomic import write_json
from palaestra.files.run_directory import Attempt
from palaestra.runs.process.attempt_process import write_stop_request
from palaestra.runs.remote.connection import STREAM_LIMIT, Connection, end_process, read_end
from palaestra.runs.remote.frames import LinkBroken, read_frame
from palaestra.runs.remote.hosts import Host
from palaestra.runs.remote.mirror import Mirror
from palaestra.runs.state.attempt_files import read_versioned_json
from palaestra.runs.wire import JsonObject

SILENCE_S = 30.0
"""An agent reports at least every two seconds; after this long without a word the link is dead."""
UNREACHABLE_AFTER_S = 2.0
"""A link that is back sooner was not lost."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 20.0
_FULL_DISK_PAUSE_S = 1.0
_GOODBYE_S = 2.0
"""Time for a link to end by itself after its attempt has."""
_log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(frozen=True)
class RemotePlace:
    """Where an attempt is: the stored content of remote.json."""

    host: str
    directory: str
    code: str
    """The unpacked package there, whose agent is used."""
    gpus: tuple[str, ...] = ()
    grace_s: float = 10.0
    started: bool = False
    """Whether the other machine has confirmed the start."""
    python: str = "python3"
    """The interpreter of the agent there."""

    @classmethod
    def read(cls, attempt: Attempt) -> RemotePlace | None:
        """The place of an attempt on another machine; None for one of this machine."""
        data = read_versioned_json(attempt.remote)
        if data is None:
            return None
        try:
            return cls(
                host=str(data["host"]),
                directory=str(data["directory"]),
                code=str(data["code"]),
                gpus=tuple(data.get("gpus", ())),
                grace_s=float(data.get("grace_s", cls.grace_s)),
                started=bool(data.get("started", True)),
                python=str(data.get("python", cls.python)),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def write(self, attempt: Attempt, **facts: object) -> None:
        """Store it; `facts` say how the attempt ended, if that is known from the link alone."""
        write_json(attempt.remote, {"schema": 1, **asdict(self), **facts})


class RemoteProcess:
    """The processes of an attempt on another machine. Use from one event loop."""

    watchdog = trainer = None
    watchdog_alive = False

    def __init__(
        self,
        attempt: Attempt,
        host: Host,
        connection: Connection,
        place: RemotePlace,
        start: JsonObject | None = None,
    ) -> None:
        self.attempt = attempt
        self.watchdog_gone = False
        self._host, self._connection, self._place = host, connection, place
        self._start = start
        self._mirror = Mirror(attempt.path)
        self._stop: JsonObject | None = None
        self._input: asyncio.StreamWriter | None = None
        self._ended, self._confirmed = asyncio.Event(), asyncio.Event()
        self._hurry = asyncio.Event()
        self._refusal: PalaestraError | None = None
        self._is_launching = False
        self._problem, self._down_since = "", time.monotonic()

    @property
    def is_visible(self) -> bool:
        """Whether the link works, so that silence means that nothing happens there."""
        return not self._problem

    @property
    def unreachable(self) -> str:
        """Why the machine cannot be asked about the run; empty while the link works."""
        if not self._problem or time.monotonic() - self._down_since < UNREACHABLE_AFTER_S:
            return ""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - self._down_since)))
        return f"{self._host.describe()} is unreachable since {since}: {self._problem}; the run may continue there"

    async def launch(self, spawn: Spawn) -> None:
        """Start the attempt there. `LaunchRefused` if the other machine refuses it.

        Returns also when the link is lost after the request was sent: then it is repeated until there is an answer.
        """
        self._place.write(self.attempt)
        self._is_launching = True
        self.connect(spawn)
        while not self._confirmed.is_set() and not self.unreachable:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._confirmed.wait()
        self._is_launching = False
        if self._refusal is not None:
            raise self._refusal

    def connect(self, spawn: Spawn) -> None:
        """Keep a link to the attempt until it has ended."""
        spawn(self._keep_link())

    async def wait(self) -> None:
        """Wait until no process of the attempt is left there."""
        await self._ended.wait()

    async def stop(self, reason: str, grace_s: float) -> None:
        """Request a stop. Returns when no process is left, or when the machine is unreachable: then it is pending."""
        request: JsonObject = {"schema": 1, "reason": reason, "by": "service", "grace_s": grace_s, "asked": time.time()}
        write_stop_request(self.attempt, request)
        self._stop = request
        self._hurry.set()
        if self._input is not None:
            with contextlib.suppress(OSError):
                self._input.write(json.dumps({"stop": request}).encode() + b"\n")
        while not self._ended.is_set() and not self.unreachable:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._ended.wait()

    def close(self) -> None:
        """Nothing to release: the task of the link ends its process."""

    # The link

    async def _keep_link(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._ended.is_set():
            connected = time.monotonic()
            try:
                await self._follow()
                problem = "the connection ended"
            except HostUnreachable as error:
                problem = f"{error.reason}. {error.remedy}".removesuffix(". ")
            except (PalaestraError, OSError) as error:
                problem = str(error)
            if self._ended.is_set():
                return
            if not self._problem:
                self._down_since = time.monotonic()
                _log.warning("%s: lost the link to %s: %s", self.attempt.path, self._host.name, problem)
            self._problem = problem
            if self._give_up_if_lost():
                return
            pause = _FIRST_PAUSE_S if time.monotonic() - connected > _LONGEST_PAUSE_S else pause
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._hurry.wait()
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _give_up_if_lost(self) -> bool:
        limit, silent_s = self._host.config.lost_after_s, time.monotonic() - self._down_since
        if limit is None or silent_s < limit:
            return False
        reason = f"{self._host.describe()} has not answered for {silent_s:.0f} s: {self._problem}"
        self._finish(lost=reason)
        return True

    async def _follow(self) -> None:
        """One connection, from its beginning to its end."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._connection.follow_command(self._place.code),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=self._connection.environment(),
            limit=STREAM_LIMIT,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.ensure_future(read_end(process.stderr))
        try:
            request = await asyncio.to_thread(self._request)
            process.stdin.write(json.dumps(request).encode() + b"\n")
            self._input = process.stdin
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
            if await self._read_frames(process.stdout):
                return
            returncode = await process.wait()
            raise self._connection.explain(returncode, (await errors).decode(errors="replace"))
        finally:
            self._input = None
            process.stdin.close()
            await end_process(process, _GOODBYE_S if self._ended.is_set() else 0.0)
            errors.cancel()

    def _request(self) -> JsonObject:
        attempt, place = self.attempt, self._place
        return {
            "run_id": attempt.path.parent.name,
            "attempt": attempt.number,
            "directory": place.directory,
            "home": self._host.config.directory,
            "gpus": list(place.gpus),
            "grace_s": place.grace_s,
            "start": self._start,
            "stop": self._stop,
            **self._mirror.state(),
        }

    async def _read_frames(self, stream: asyncio.StreamReader) -> bool:
        """Process messages until the connection ends; whether the attempt has ended."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    frame = await read_frame(stream)
            except TimeoutError:
                raise LinkBroken(f"no word from {self._host.name} for {SILENCE_S:.0f} s") from None
            if frame is None:
                return False
            header, body = frame
            try:
                if self._problem and header["kind"] != "waiting":
                    _log.info("%s: %s answers again", self.attempt.path, self._host.name)
                    self._problem = ""
                if await self._process(header, body):
                    return True
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                # A fault there must not end the task that links again.
                text = f"{self._host.name} sent a message that cannot be read ({type(error).__name__}: {error})"
                raise LinkBroken(text) from None

    async def _process(self, header: JsonObject, body: bytes) -> bool:
        kind = header["kind"]
        if kind == "refused":
            self._refuse(str(header["reason"]))
            return True
        if kind == "end":
            lost = str(header.get("reason") or "")
            self._finish(
                rebooted=bool(header.get("rebooted")),
                lost=lost if header.get("known", True) else self._explain_unknown(),
            )
            return True
        if kind in ("started", "status"):
            self._confirm()
            self.watchdog_gone = bool(header.get("watchdog_gone"))
        elif kind == "left_out":
            _log.warning("%s: %s (%s bytes) is not copied", self.attempt.path, header["file"], header["size"])
        elif kind in ("growth", "whole", "restart"):
            await self._store(header, body)
        return False

    async def _store(self, header: JsonObject, body: bytes) -> None:
        while True:
            try:
                return await asyncio.to_thread(self._mirror.write, header, body)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # The other machine keeps the files; a part that fitted is where the next connection continues.
                self._problem = f"the disk here is full ({error.strerror})"
                await asyncio.sleep(_FULL_DISK_PAUSE_S)
                raise LinkBroken(self._problem) from None

    def _confirm(self) -> None:
        if self._start is not None or not self._place.started:
            self._start = None
            self._place = RemotePlace(**{**vars(self._place), "started": True})
            self._place.write(self.attempt)
        self._confirmed.set()

    def _refuse(self, reason: str) -> None:
        if self._is_launching and not self._confirmed.is_set():
            self._refusal = LaunchRefused("command", self._host.name, reason)
        elif self._stop is None:
            # The answer came late, as from a cluster that had no room: the attempt ends as if its program were missing.
            write_json(self.attempt.exit, {"schema": 1, "returncode": None, "launch_error": reason})
        self._finish()

    def _explain_unknown(self) -> str:
        """Why the other machine does not know the attempt; empty if it was stopped before it began."""
        machine = self._host.describe()
        if self._place.started:
            return f"its directory on {machine} is gone"
        return f"it was not started on {machine}" if self._stop is None else ""

    def _finish(self, *, rebooted: bool = False, lost: str = "") -> None:
        if rebooted or lost:
            with contextlib.suppress(OSError):
                self._place.write(self.attempt, rebooted=rebooted, lost=lost)
        self._problem = ""
        self._confirmed.set()
        self._ended.set()
