"""The plays of a run service: worker processes, and the clients that watch and control them.

A client that reads slowly misses pictures and never steps: of the steps that wait for it, only the newest keeps its
picture. A worker ends when its socket is closed, so a play never outlives the service. A play without clients ends
after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import palaestra
from palaestra.errors import ConfigError, LaunchRefused, PalaestraError, UnknownRun
from palaestra.files.home import Home
from palaestra.files.run_directory import new_run_id
from palaestra.redaction import is_secret_name
from palaestra.runs.play.protocol import LOAD, REFUSE, Control, LoadPolicy, Message, MessageBuffer, encode_control, pack
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import (
    ALIVE,
    PlayEnded,
    PlayNotice,
    PlayRecord,
    PlayState,
    PolicyStatus,
    pack_report,
    read_report,
)
from palaestra.runs.state.attempt_files import last_lines
from palaestra.runs.wire import JsonObject, to_json

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0
_SILENT_AFTER_S = 5.0
"""A worker reports every second that it is alive; after this time without a report its environment hangs."""
_CHECK_EVERY_S = 1.0
_MAX_WAITING = 4096
"""Messages that wait for one client; beyond that the oldest are dropped."""
_MAX_PLAYS = 16
_KEPT_ENDED = 32
_READ_BYTES = 1 << 20
_ROOT = str(Path(palaestra.__file__).parents[1])
_WORKER = ("-P", "-m", "palaestra.train.play.worker")

PlanPolicy: TypeAlias = Callable[[LoadPolicy, PlaySpec], Awaitable["PolicyLaunch"]]


@dataclass(frozen=True, kw_only=True)
class PolicyLaunch:
    """A policy that a worker is asked to load: its status, and the command of its process."""

    status: PolicyStatus
    """`loading`; or `failed` or `needs_consent`, and then nothing is started."""
    command: Mapping[str, Any] | None = None
    """`argv`, `environment`, `cwd`; None for random actions."""


class Subscription:
    """The messages that wait for one client."""

    def __init__(self) -> None:
        self._waiting: deque[bytes | tuple[bytes, bytes]] = deque(maxlen=_MAX_WAITING)
        self._has_items = asyncio.Event()
        self._is_closed = False

    def add(self, message: bytes, without_picture: bytes | None) -> None:
        """Add a message; `without_picture` replaces it when a newer picture arrives."""
        if without_picture is None:
            self._waiting.append(message)
        else:
            for index in range(len(self._waiting) - 1, -1, -1):
                item = self._waiting[index]
                if isinstance(item, tuple):
                    self._waiting[index] = item[1]
                    break
            self._waiting.append((message, without_picture))
        self._has_items.set()

    def close(self) -> None:
        """End the stream after the messages that wait."""
        self._is_closed = True
        self._has_items.set()

    async def next(self) -> bytes | None:
        """The next message; None at the end of the play."""
        while not self._waiting:
            if self._is_closed:
                return None
            self._has_items.clear()
            await self._has_items.wait()
        item = self._waiting.popleft()
        return item[0] if isinstance(item, tuple) else item


class Play:
    """One play: its worker process and its clients."""

    def __init__(self, play_id: str, spec: PlaySpec, log: Path, now: float) -> None:
        self.play_id, self.spec, self.created = play_id, spec, now
        self.state: PlayState | None = None
        self.ended: PlayEnded | None = None
        self.idle_since: float | None = time.monotonic()
        self.last_heard = time.monotonic()
        self._log = log
        self._subscriptions: set[Subscription] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._first_report = asyncio.Event()
        self._is_stopping = False
        self._last_step: tuple[bytes, bytes] | None = None
        self._is_silent = False

    async def start(self, home: Home) -> None:
        """Start the worker and wait until the environment is ready. `LaunchRefused` when it cannot be made."""
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if not is_secret_name(name)}
        if self.spec.gateway is not None:
            token = os.environ.get("PALAESTRA_GATEWAY_TOKEN")
            environment |= {"PALAESTRA_GATEWAY_TOKEN": token} if token else {}
        environment |= {"PALAESTRA_HOME": str(home.base), "PYTHONPATH": f"{_ROOT}:{self.spec.invoked_from}"}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(self._log, "wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *_WORKER, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=_READ_BYTES)
        spec = {**self.spec.model_dump(mode="json"), "checkpoint": None}
        self._writer.write(pack({"type": "start", "play_id": self.play_id, "spec": spec}))
        self._reading = asyncio.create_task(self._read(reader))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._first_report.wait()
        except TimeoutError:
            await self.stop("did not start")
            reason = f"was not ready within {_START_TIMEOUT_S:.0f} s"
            raise LaunchRefused("play", self.env_id, reason, f"See {self._log}") from None
        if self.ended is not None and self.ended.failed:
            place = self.ended.place or "play"
            raise LaunchRefused(place, self._value_at(place), self.ended.reason.rstrip("."), self.ended.remedy)

    def _value_at(self, place: str) -> object:
        """The value in the spec that a message of the worker is about."""
        section, _, name = place.partition(".")
        if section != "parameters":
            return self.env_id
        return self.spec.parameters.get(name) if name else self.spec.parameters

    @property
    def env_id(self) -> str:
        """Environment or screen task."""
        return self.spec.env_id or self.spec.task or ""

    @property
    def record(self) -> PlayRecord:
        """The play as the HTTP API shows it."""
        return PlayRecord(
            play_id=self.play_id,
            env_id=self.env_id,
            phase="running" if self.ended is None else "ended",
            reason="" if self.ended is None else self.ended.reason,
            failed=self.ended is not None and self.ended.failed,
            created=self.created,
            clients=len(self._subscriptions),
            pid=0 if self._process is None else self._process.pid,
            spec=self.spec.model_dump(mode="json"),
            state=self.state,
        )

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """The messages of the play from now on, after its state and its newest step."""
        subscription = Subscription()
        if self.state is not None:
            subscription.add(pack_report(self.state), None)
        if self._last_step is not None:
            subscription.add(*self._last_step)
        if self.ended is not None:
            subscription.add(pack_report(self.ended), None)
            subscription.close()
        self._subscriptions.add(subscription)
        self.idle_since = None
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            if not self._subscriptions:
                self.idle_since = time.monotonic()

    def send(self, control: Control) -> None:
        """Send a control to the worker."""
        self._write(encode_control(control))

    def load(self, launch: PolicyLaunch) -> None:
        """Ask the worker to load a policy, or to report why it is not loaded."""
        header: JsonObject = {"type": LOAD if launch.status.state == "loading" else REFUSE}
        command = None if launch.command is None else dict(launch.command)
        self._write(pack(header | {"status": to_json(launch.status), "command": command}))

    def notify(self, notice: PlayNotice) -> None:
        """Send a notice to all clients."""
        self._publish(pack_report(notice))

    def check_alive(self) -> None:
        """Tell the clients once when the environment hangs, and when it goes on."""
        is_silent = self.ended is None and time.monotonic() - self.last_heard > _SILENT_AFTER_S
        if is_silent != self._is_silent:
            self._is_silent = is_silent
            text = f"{self.env_id} has not answered for {_SILENT_AFTER_S:.0f} s." if is_silent else "It answers again."
            remedy = "Wait, or end the play" if is_silent else ""
            self.notify(PlayNotice(level="warning" if is_silent else "info", text=text, remedy=remedy))

    async def stop(self, reason: str) -> None:
        """End the play; returns when no process is left."""
        if self.ended is None and not self._is_stopping:
            self._is_stopping = True
            self._end(PlayEnded(reason=reason))
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                pass
        self._kill_group()
        if self._process is not None:
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    def _kill_group(self) -> None:
        """Kill what is left of the worker's session; policies have sessions of their own and end with their input."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, data: bytes) -> None:
        if self.ended is not None or self._writer is None:
            raise ConfigError("play", self.play_id, "has ended", "Start another one")
        self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        buffer = MessageBuffer()
        try:
            while data := await reader.read(_READ_BYTES):
                self.last_heard = time.monotonic()
                for message in buffer.add(data):
                    self._handle(message)
        except (OSError, ValueError) as error:
            _log.warning("%s: its worker sent something else than messages (%s)", self.play_id, error)
        assert self._process is not None
        if self._writer is not None:
            self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        self._kill_group()
        code = await self._process.wait()
        if self.ended is None:
            self._end(self._describe_exit(code))

    def _handle(self, message: Message) -> None:
        if message.type == ALIVE:
            return
        report = read_report(message)
        if isinstance(report, PlayEnded):
            self._end(report)
            return
        if isinstance(report, PlayState):
            self.state = report
        data = pack(message.header, message.payload)
        if message.type == "step":
            without = pack({**message.header, "width": 0, "height": 0}) if message.payload else None
            if without is not None:
                self._last_step = (data, without)
            self._publish(data, without)
        else:
            self._publish(data)
        self._first_report.set()

    def _publish(self, data: bytes, without_picture: bytes | None = None) -> None:
        for subscription in self._subscriptions:
            subscription.add(data, without_picture)

    def _end(self, ended: PlayEnded) -> None:
        self.ended = ended
        self._publish(pack_report(ended))
        for subscription in self._subscriptions:
            subscription.close()
        self._first_report.set()

    def _describe_exit(self, code: int) -> PlayEnded:
        last = last_lines(self._log, 1).strip()[:300]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        detail = f": {last}" if last and code > 0 else ""
        return PlayEnded(reason=f"its process {how}{detail}", failed=True, remedy="Start it again")


class Plays:
    """The plays of one service."""

    def __init__(
        self,
        home: Home,
        plan_policy: PlanPolicy,
        *,
        idle_timeout_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._home, self._plan_policy, self._idle_timeout_s, self._clock = home, plan_policy, idle_timeout_s, clock
        self._plays: dict[str, Play] = {}
        self._checking: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """Number of plays that have not ended."""
        return sum(play.ended is None for play in self._plays.values())

    async def start(self, spec: PlaySpec) -> PlayRecord:
        """Start a play, and load its policy in the background."""
        if self.num_running >= _MAX_PLAYS:
            raise LaunchRefused("play", spec.env_id or spec.task, f"{_MAX_PLAYS} plays are running", "End one of them")
        if self._checking is None:
            self._checking = asyncio.create_task(self._check_periodically())
        play_id = new_run_id(f"play-{(spec.env_id or spec.task or '').rpartition('/')[2]}")
        play = Play(play_id, spec, self._home.service / "plays" / f"{play_id}.log", self._clock())
        self._plays[play_id] = play
        try:
            await play.start(self._home)
            if spec.checkpoint is not None:
                await self.load_policy(play, LoadPolicy(spec.checkpoint, spec.deterministic, spec.consent))
        except BaseException:
            # The client never learns the id of this play, and could not end it.
            await play.stop("it could not be started")
            del self._plays[play_id]
            raise
        self._forget_old()
        return play.record

    def get(self, play_id: str) -> Play:
        """A play by its id. `UnknownRun` if there is none."""
        play = self._plays.get(play_id)
        if play is None:
            raise UnknownRun("play", play_id, "no such play", "GET /play lists them")
        return play

    def list(self) -> list[PlayRecord]:
        """All plays, newest first."""
        return [play.record for play in reversed(self._plays.values())]

    async def handle(self, play: Play, control: Control) -> None:
        """Apply a control of a client. `PalaestraError` when it cannot be applied."""
        if isinstance(control, LoadPolicy):
            await self.load_policy(play, control)
        else:
            play.send(control)

    async def load_policy(self, play: Play, request: LoadPolicy) -> None:
        """Plan a policy and let the worker load it; a refusal is reported by the play."""
        try:
            launch = await self._plan_policy(request, play.spec)
        except PalaestraError as error:
            text = error.reason if isinstance(error, ConfigError) else str(error)
            remedy = error.remedy if isinstance(error, ConfigError) else ""
            status = PolicyStatus(
                state="failed", name=request.checkpoint, checkpoint=request.checkpoint, text=text, remedy=remedy
            )
            launch = PolicyLaunch(status=status)
        play.load(launch)

    async def stop(self, play_id: str) -> PlayRecord:
        """End a play."""
        play = self.get(play_id)
        await play.stop("ended by the user")
        return play.record

    async def close(self) -> None:
        """End all plays."""
        if self._checking is not None:
            self._checking.cancel()
        await asyncio.gather(*(play.stop("the service ended") for play in self._plays.values()))

    async def _check_periodically(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            for play in list(self._plays.values()):
                play.check_alive()
                is_idle = play.idle_since is not None and time.monotonic() - play.idle_since > self._idle_timeout_s
                if play.ended is None and is_idle:
                    await play.stop(f"no client for {self._idle_timeout_s:g} s")

    def _forget_old(self) -> None:
        ended = [play_id for play_id, play in self._plays.items() if play.ended is not None]
        for play_id in ended[: max(0, len(ended) - _KEPT_ENDED)]:
            del self._plays[play_id]
