"""The commands that reach another machine: `ssh` for a host, a program of ours for the jobs of a Ray cluster.

Every request is a process whose standard input and output are the connection. `ssh` is the system's, so that keys,
agents, jump hosts and known hosts are as the user has them; it never asks anything. What it prints when it fails
becomes one sentence with a remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from palaestra.errors import HostUnreachable
from palaestra.runs.remote import bootstrap
from palaestra.runs.remote.hosts import Host
from palaestra.runs.wire import JsonObject

OPTIONS_VARIABLE = "PALAESTRA_SSH_OPTIONS"
_SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
)
CALL_TIMEOUT_S = 120.0
_UPLOAD_TIMEOUT_S = 3600.0
_NO_FILE = 2
"""Exit code of Python when the program does not exist."""
STREAM_LIMIT = 1 << 26
_MAX_OUTPUT_BYTES = 1 << 20


class Connection(Protocol):
    """How requests reach one machine."""

    async def check(self, request: JsonObject) -> JsonObject:
        """Facts about the machine. `HostUnreachable` without an answer."""

    async def put(self, request: JsonObject, archive: bytes) -> JsonObject:
        """Unpack an archive there."""

    def follow_command(self, code: str) -> list[str]:
        """The local command whose standard input and output are a link with an agent of the unpacked code."""

    def environment(self) -> dict[str, str]:
        """The environment of that command."""

    def explain(self, returncode: int, stderr: str) -> HostUnreachable:
        """Why that command failed."""


class SshConnection:
    """A machine over SSH."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._program = Path(bootstrap.__file__).read_bytes()

    def environment(self) -> dict[str, str]:
        """The environment of ssh; its messages are recognised in English."""
        return {**os.environ, "LC_ALL": "C"}

    async def check(self, request: JsonObject) -> JsonObject:
        """Facts about the machine. `HostUnreachable` without an answer."""
        return await self._call("check", request)

    async def put(self, request: JsonObject, archive: bytes) -> JsonObject:
        """Unpack an archive there."""
        return await self._call("put", request, archive, _UPLOAD_TIMEOUT_S)

    def follow_command(self, code: str) -> list[str]:
        """Start the agent of the unpacked code."""
        return self._command(f"{code}/palaestra/runs/remote/agent.py", "follow")

    def _command(self, *words: str) -> list[str]:
        address, config = self._host.address, self._host.config
        try:
            more = shlex.split(os.environ.get(OPTIONS_VARIABLE, ""))
        except ValueError as error:
            reason = f"{OPTIONS_VARIABLE} cannot be read ({error})"
            raise self._error(reason, "Quote it as for a shell", permanent=True) from None
        options = [*_SSH_OPTIONS, *more, *config.ssh_options]
        options += [] if address.port is None else ["-p", str(address.port)]
        python = [_quote(config.python), "-I", "-S"]
        return ["ssh", *options, "--", address.target, " ".join([*python, *map(_quote, words)])]

    async def _call(
        self, verb: str, request: JsonObject, body: bytes = b"", timeout_s: float = CALL_TIMEOUT_S
    ) -> JsonObject:
        digest = hashlib.sha256(self._program).hexdigest()[:16]
        place = f"{self._host.config.directory}/bootstrap-{digest}.py"
        data = json.dumps(request).encode() + b"\n" + body
        returncode, output, errors = await self._run(self._command(place, verb), data, timeout_s)
        if returncode == _NO_FILE and "can't open file" in errors:
            await self._upload_program(place)
            returncode, output, errors = await self._run(self._command(place, verb), data, timeout_s)
        if returncode != 0:
            raise self.explain(returncode, errors)
        # A login script may print something before the answer.
        answer = _read_answer(output)
        if answer is None:
            raise self._error("its answer cannot be read", "Its login scripts must print nothing", permanent=True)
        return answer

    async def _upload_program(self, place: str) -> None:
        target, temporary = _quote(place), _quote(f"{place}.{os.getpid()}")
        directory = _quote(self._host.config.directory)
        script = f"umask 077; mkdir -p {directory} && cat > {temporary} && mv {temporary} {target}"
        command = [*self._command()[:-1], f"sh -c {shlex.quote(script)}"]
        returncode, _, errors = await self._run(command, self._program, CALL_TIMEOUT_S)
        if returncode != 0:
            raise self.explain(returncode, errors)

    async def _run(self, command: Sequence[str], data: bytes, timeout_s: float) -> tuple[int, bytes, str]:
        try:
            return await run_command(command, data, self.environment(), timeout_s)
        except FileNotFoundError:
            raise self._error("there is no ssh command here", "Install OpenSSH's client", permanent=True) from None
        except TimeoutError:
            raise self._error(f"no answer within {timeout_s:.0f} s") from None

    def explain(self, returncode: int, stderr: str) -> HostUnreachable:
        """What the output of a failed ssh means."""
        lines = [line.strip() for line in stderr.replace("\r", "").splitlines() if line.strip()]
        last = (lines[-1] if lines else f"exit code {returncode}")[:300].rstrip(".")
        if returncode == 255:
            return self._explain_ssh(stderr, last)
        if returncode in (126, 127):
            reason = f"has no usable Python as {self._host.config.python!r} ({last})"
            return self._error(reason, "Name one with --python, or as python of the host's settings", permanent=True)
        if "No space left" in stderr or "Disk quota" in stderr:
            return self._error(f"its disk is full ({last})", "Free space there", permanent=True)
        remedy = f"Try: {self._describe_ssh()} {self._host.config.python} --version"
        return self._error(f"the command there failed with exit code {returncode}: {last}", remedy, permanent=True)

    def _explain_ssh(self, stderr: str, last: str) -> HostUnreachable:
        name, command = self._host.address.target.rpartition("@")[2], self._describe_ssh()
        if self._host.address.port is not None:
            name = f"[{name}]:{self._host.address.port}"
        if "IDENTIFICATION HAS CHANGED" in stderr:
            remedy = f"If its owner confirms the new key: ssh-keygen -R '{name}', then connect once with ssh"
            return self._error("its host key has changed, so it may be another machine", remedy, permanent=True)
        if "Host key verification failed" in stderr or "host key is known" in stderr:
            remedy = f"Connect once with {command} and compare its key"
            return self._error("its host key is not known here", remedy, permanent=True)
        if "Permission denied" in stderr or "Too many authentication" in stderr:
            denied = next((line for line in stderr.splitlines() if "denied" in line or "Too many" in line), last)
            reason = f"refuses the user or the key ({denied.strip()[:200].rstrip('.')})"
            return self._error(reason, f"{command} must work without a password", permanent=True)
        if "Bad configuration option" in stderr or "unknown option" in stderr or "Bad " in last:
            return self._error(
                f"ssh refuses its options ({last})", f"Correct {OPTIONS_VARIABLE} or ssh_options", permanent=True
            )
        return self._error(f"cannot be reached ({last})", f"Try: {command} true")

    def _describe_ssh(self) -> str:
        address = self._host.address
        return f"ssh {address.target}" if address.port is None else f"ssh -p {address.port} {address.target}"

    def _error(self, reason: str, remedy: str = "", *, permanent: bool = False) -> HostUnreachable:
        return HostUnreachable("on", self._host.name, reason, remedy, permanent=permanent)


class RayConnection:
    """The jobs of a Ray cluster, through a process of our own, so that the service never imports Ray."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def environment(self) -> dict[str, str]:
        """The environment of the program."""
        return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}

    async def check(self, request: JsonObject) -> JsonObject:
        """The version and state of the cluster."""
        return await self._call("check", request)

    async def put(self, request: JsonObject, archive: bytes) -> JsonObject:
        """Nothing: a job brings its code along."""
        return {"ok": True}

    def follow_command(self, code: str) -> list[str]:
        """Submit the job unless it has been submitted, and follow its log."""
        return self._command("follow")

    def _command(self, verb: str) -> list[str]:
        module = "palaestra.runs.remote.ray_jobs"
        return [sys.executable, "-P", "-m", module, verb, self._host.address.target]

    async def _call(self, verb: str, request: JsonObject) -> JsonObject:
        data = json.dumps(request).encode() + b"\n"
        try:
            returncode, output, errors = await run_command(
                self._command(verb), data, self.environment(), CALL_TIMEOUT_S
            )
        except TimeoutError:
            reason = f"no answer within {CALL_TIMEOUT_S:.0f} s"
            raise HostUnreachable("on", self._host.name, reason) from None
        if returncode != 0:
            raise self.explain(returncode, errors)
        answer = _read_answer(output)
        if answer is None:
            raise HostUnreachable("on", self._host.name, "the answer of the client of Ray cannot be read")
        return answer

    def explain(self, returncode: int, stderr: str) -> HostUnreachable:
        """The error that the program printed as JSON, or its last line."""
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        for line in reversed(lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                error = json.loads(line)
                permanent = bool(error["permanent"])
                return HostUnreachable("on", self._host.name, error["reason"], error["remedy"], permanent=permanent)
        last = lines[-1][:300] if lines else f"exit code {returncode}"
        return HostUnreachable("on", self._host.name, f"the client of Ray failed ({last})")


def connect(host: Host) -> Connection:
    """The connection to a machine; nothing is opened yet."""
    return SshConnection(host) if host.address.kind == "ssh" else RayConnection(host)


async def run_command(
    command: Sequence[str], data: bytes, environment: Mapping[str, str], timeout_s: float
) -> tuple[int, bytes, str]:
    """Run a command with this input; returns exit code, and the end of its output and of its errors.

    It is killed if it takes longer.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(environment), start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(timeout_s):
            _, output, errors = await asyncio.gather(
                _write_input(process, data), read_end(process.stdout), read_end(process.stderr)
            )
            await process.wait()
    finally:
        await end_process(process)
    return process.returncode or 0, output, errors.decode(errors="replace")


async def _write_input(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()
    # A pipe that is not closed yet when the loop ends is a leak.
    with contextlib.suppress(ConnectionError):
        await process.stdin.wait_closed()


async def read_end(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end and keep the last MB: a machine that prints without end must not fill our memory."""
    data = b""
    while block := await stream.read(1 << 16):
        data = (data + block)[-_MAX_OUTPUT_BYTES:]
    return data


def _read_answer(output: bytes) -> JsonObject | None:
    """The JSON document in the last line of an output; None if there is none."""
    try:
        answer = json.loads(output.decode(errors="replace").strip().splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


async def end_process(process: asyncio.subprocess.Process, grace_s: float = 0.0) -> None:
    """Wait until a process has ended, and kill it if it takes longer than this."""
    try:
        if process.returncode is None and grace_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()
        if process.returncode is None:
            # Not `process.kill`: it may reap the process before asyncio does, which then knows nothing of its end.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()
    finally:
        # Pipes that were not read to their end stay open after the process; asyncio closes them by its transport only.
        transport: asyncio.SubprocessTransport = process._transport  # type: ignore[attr-defined]
        transport.close()
    await asyncio.sleep(0)


def _quote(word: str) -> str:
    """A word for the shell there; a leading `~/` is a path from the directory in which its sessions begin."""
    word = word.removeprefix("~/") if word.startswith("~/") else word
    return shlex.quote(word)
