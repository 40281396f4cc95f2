"""The worker process of a play: owns the environment, and connects it with the run service.

`python -m palaestra.train.play.worker FD`, where FD is a connected socket. The first message holds the request; the
worker ends when the socket is closed, so a play never outlives the service that started it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

from palaestra.config import parse_section
from palaestra.errors import ConfigError, PalaestraError
from palaestra.files.home import Home
from palaestra.files.run_directory import new_run_id
from palaestra.runs.play.episode import EpisodeWriter, new_episode_directory
from palaestra.runs.play.protocol import LOAD, REFUSE, Message, MessageBuffer, control_from_header, pack
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import ALIVE, EpisodeRecord, PlayEnded, PlayNotice, PolicyStatus, Report, pack_report
from palaestra.runs.wire import from_json
from palaestra.train.play.environment import open_environment
from palaestra.train.play.loop import PlayLoop
from palaestra.train.play.policies import Policy, PolicyProcess, RandomPolicy, command_from_json

_ALIVE_EVERY_S = 1.0
_READ_BYTES = 1 << 16
_SEND_BUFFER_BYTES = 4 << 20


class Worker:
    """Waits for messages of the service and of policies, and for the next step."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._connection = connection
        self._buffer = MessageBuffer()
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._watched: dict[int, Policy] = {}
        self._next_alive = 0.0
        self._is_open = True

    def run(self) -> int:
        """Play until the connection is closed; returns the exit code."""
        first = self._wait_for_request()
        if first is None:
            return 0
        try:
            spec = parse_section(PlaySpec, first.header["spec"], place="play")
            environment = open_environment(spec)
        except PalaestraError as error:
            self._send(_describe_failure(error, "it"))
            return 1
        home = Home.default()

        def new_recording(record: EpisodeRecord) -> EpisodeWriter:
            episode_id = f"{new_run_id(record.env_id.rpartition('/')[2])}{secrets.token_hex(2)}"
            return EpisodeWriter(new_episode_directory(home, episode_id), replace(record, episode_id=episode_id))

        loop = PlayLoop(
            environment,
            spec,
            str(first.header["play_id"]),
            send=self._send,
            new_recording=new_recording,
            wall_clock=time.time,
        )
        try:
            loop.begin(time.monotonic())
            self._handle_messages(loop, b"")  # those that arrived together with the request
            while self._is_open:
                self._wait(loop)
        except Exception as error:  # noqa: BLE001 - an environment may raise anything; the play then ends with it
            traceback.print_exc()
            self._send(_describe_failure(error, environment.description.env_id))
            return 1
        finally:
            loop.close()
            with contextlib.suppress(Exception):
                environment.close()
        return 0

    def _wait_for_request(self) -> Message | None:
        while data := self._connection.recv(_READ_BYTES):
            for message in self._buffer.add(data):
                return message
        return None

    def _wait(self, loop: PlayLoop) -> None:
        for policy in tuple(loop.policies()):
            if policy.fileno() < 0:
                loop.read_policy(policy)
        self._watch_policies(loop)
        now = time.monotonic()
        deadline = loop.deadline()
        due = self._next_alive if deadline is None else min(deadline, self._next_alive)
        for key, _ in self._selector.select(max(0.0, due - now)):
            if key.fileobj is self._connection:
                self._read_connection(loop)
            else:
                loop.read_policy(self._watched[key.fd])
        now = time.monotonic()
        loop.tick(now)
        if now >= self._next_alive:
            self._next_alive = now + _ALIVE_EVERY_S
            self._write(pack({"type": ALIVE}))

    def _watch_policies(self, loop: PlayLoop) -> None:
        current = {policy.fileno(): policy for policy in loop.policies() if policy.fileno() >= 0}
        for descriptor in self._watched.keys() - current.keys():
            self._selector.unregister(descriptor)
        for descriptor, policy in current.items():
            if descriptor in self._watched and self._watched[descriptor] is not policy:
                self._selector.unregister(descriptor)
            if self._watched.get(descriptor) is not policy:
                self._selector.register(descriptor, selectors.EVENT_READ)
        self._watched = current

    def _read_connection(self, loop: PlayLoop) -> None:
        data = self._connection.recv(_READ_BYTES)
        if not data:
            self._is_open = False
            return
        self._handle_messages(loop, data)

    def _handle_messages(self, loop: PlayLoop, data: bytes) -> None:
        for message in self._buffer.add(data):
            try:
                self._handle(loop, message)
            except ConfigError as error:
                self._send(PlayNotice(level="warning", text=str(error)))

    def _handle(self, loop: PlayLoop, message: Message) -> None:
        if message.type == LOAD:
            status = from_json(PolicyStatus, message.header["status"])
            loop.load(self._start_policy(message.header.get("command"), loop), status)
        elif message.type == REFUSE:
            loop.report_failed_load(from_json(PolicyStatus, message.header["status"]))
        elif message.type == "state":
            loop.report_state()
        else:
            loop.handle(control_from_header(message.header), time.monotonic())

    def _start_policy(self, command: Any, loop: PlayLoop) -> Policy:
        if command is None:
            return RandomPolicy(loop.environment)
        try:
            return PolicyProcess(command_from_json(command))
        except OSError as error:
            raise ConfigError("policy", command["argv"][0], f"cannot be started ({error.strerror})") from None

    def _send(self, report: Report, payload: bytes = b"") -> None:
        self._write(pack_report(report, payload))

    def _write(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError:
            # The service is gone; the play ends without losing what was recorded.
            self._is_open = False


def _describe_failure(error: Exception, env_id: str) -> PlayEnded:
    if isinstance(error, ConfigError):
        return PlayEnded(reason=error.reason, failed=True, remedy=error.remedy, place=error.place)
    text = str(error) if isinstance(error, PalaestraError) else f"{type(error).__name__}: {error}"
    return PlayEnded(reason=f"{env_id} failed: {text[:500]}", failed=True, remedy="The log of the play has the details")


def main(words: list[str]) -> int:
    """Run the worker on the socket whose descriptor is the argument."""
    # Ctrl-C in a terminal reaches the whole process group; the service decides when a play ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SDL would look for a display and install a handler of SIGTERM.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ["SDL_NO_SIGNAL_HANDLERS"] = "1"
    # Libraries print banners; nothing reads standard output.
    sys.stdout = sys.stderr
    with socket.socket(fileno=int(words[0])) as connection:
        return Worker(connection).run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Some simulators hang while exiting.
    os._exit(code)
