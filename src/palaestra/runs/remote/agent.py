"""The program that starts an attempt on another machine and reports its files until it has ended.

    python -I -S agent.py follow      over a pipe such as that of SSH: frames on stdout, requests on stdin
    python -I -S agent.py job         as the entry point of a Ray job: the same frames as lines of its log
    python -I -S agent.py stop        as the entry point of another job on the same node: stops the attempt

It uses the same watchdog, stop and process files as the run service does at home. The attempt does not depend on it: if
it ends, for example with its connection, the trainer and its watchdog continue, and the next agent reports the rest.
It imports only the standard library and parts of Palaestra that do the same.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

if not __package__:
    # Started by path without site-packages: make our own package importable.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from palaestra.errors import LaunchRefused
from palaestra.files.atomic import write_text
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.processes.procfs import boot_id
from palaestra.runs.process.attempt_process import AttemptProcess, find_survivors, has_run
from palaestra.runs.process.resource_usage import ResourceSampler
from palaestra.runs.remote.attempt_tree import AttemptTree, Send
from palaestra.runs.remote.frames import CODE, JOB_VARIABLE, LOG_PREFIX, NODE_HOME, encode_frame
from palaestra.runs.runner import AttemptPaths, LaunchPlan
from palaestra.runs.state.attempt_files import read_status
from palaestra.runs.wire import JsonObject

MAX_LOG_FILE_BYTES = 64 << 20
"""Larger files do not travel through the log of a job."""
_POLL_S = 0.1
_BEAT_S = 2.0
_LOG_BEAT_S = 30.0
"""A beat in the log of a job stays there."""
_SAMPLE_S = 5.0


def locate_attempt(request: JsonObject) -> Attempt:
    """The directory of the attempt on this machine."""
    runs = Path(request["directory"]).expanduser() / "var" / "training" / "runs"
    return RunDirectory(runs / request["run_id"]).attempt(int(request["attempt"]))


async def start(request: JsonObject) -> str:
    """Start the attempt unless it has been started before; returns why it cannot be started, or an empty string."""
    attempt, launch = locate_attempt(request), request["start"]
    run = RunDirectory(attempt.path.parent)
    try:
        run.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Two agents may start the same attempt: the one whose connection was lost may still be at it.
        with open(run.path / ".start.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if has_run(attempt) or find_survivors(attempt).alive:
                return ""
            for other in run.attempts():
                status = read_status(other)
                if status.alive and status.trainer is not None:
                    return f"attempt {other.number} of the run is alive there as process {status.trainer.pid}"
            attempt.work.mkdir(parents=True, exist_ok=True)
            for name, text in launch["files"].items():
                (attempt.path / name).parent.mkdir(parents=True, exist_ok=True)
                write_text(attempt.path / name, text)
            for name, text in launch["run_files"].items():
                write_text(run.path / name, text)
            for path in launch["code"]:
                os.utime(Path(path).expanduser())
            await _launch(attempt, launch)
    except LaunchRefused as error:
        return error.reason
    except OSError as error:
        return f"{error.filename or attempt.path}: {error.strerror or error}"
    return ""


async def _launch(attempt: Attempt, launch: JsonObject) -> None:
    paths = AttemptPaths(attempt.path.parent.name, attempt.number, attempt.path.parent, attempt.path, attempt.work)
    plan = LaunchPlan(
        argv=tuple(launch["argv"]),
        environment={**os.environ, **launch["environment"]},
        cwd=Path(launch["cwd"]),
        paths=paths,
        sources=(),
    )
    process = await AttemptProcess.launch(plan, attempt, memory_mb=launch["memory_mb"], nice=launch["nice"])
    process.close()


class Reporter:
    """Reports one attempt: its files, whether it is watched, and how it ended."""

    def __init__(self, attempt: Attempt, tree: AttemptTree, send: Send, gpus: tuple[str, ...], beat_s: float) -> None:
        self._attempt, self._tree, self._send, self._gpus, self._beat_s = attempt, tree, send, gpus, beat_s
        self._wake = asyncio.Event()
        self._stops: set[asyncio.Task[None]] = set()
        self._process = AttemptProcess.adopt(attempt)
        self._status: JsonObject = {}
        self._beat = self._sampled = 0.0

    def stop(self, request: JsonObject) -> None:
        """Stop the attempt: TERM, the grace period, KILL."""
        if self._process is not None:
            work = self._process.stop(str(request["reason"]), float(request["grace_s"]))
            task = asyncio.ensure_future(work)
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)

    async def run(self) -> None:
        """Report until the attempt has ended and everything has been sent."""
        if self._process is not None:
            await self._report_live(self._process)
            self._process.close()
        await asyncio.to_thread(self._tree.send_changes, self._send, final=True)
        status = read_status(self._attempt)
        process = status.watchdog or status.trainer
        rebooted = process is not None and process.boot_id != boot_id()
        known = status.exit is not None or process is not None
        self._send({"kind": "end", "observed": status.exit is not None, "rebooted": rebooted, "known": known}, b"")

    async def _report_live(self, process: AttemptProcess) -> None:
        ended = asyncio.ensure_future(process.wait())
        ended.add_done_callback(lambda _: self._wake.set())
        root = process.watchdog if process.watchdog_alive else process.trainer
        sampler = None if root is None else ResourceSampler(self._attempt, root, self._gpus)
        while not ended.done():
            self._report_status(process)
            now = time.monotonic()
            if sampler is not None and now - self._sampled >= _SAMPLE_S:
                self._sampled = now
                await asyncio.to_thread(sampler.sample)
            await asyncio.to_thread(self._tree.send_changes, self._send)
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
        ended.result()

    def _report_status(self, process: AttemptProcess) -> None:
        pid = None if process.trainer is None else process.trainer.pid
        status = {"kind": "status", "watchdog_gone": process.watchdog_gone, "pid": pid}
        now = time.monotonic()
        if status != self._status or now - self._beat >= self._beat_s:
            self._status, self._beat = status, now
            self._send(status, b"")


def _reporter(
    request: JsonObject, send: Send, *, max_whole_bytes: int | None = None, beat_s: float = _BEAT_S
) -> Reporter:
    attempt = locate_attempt(request)
    tree = AttemptTree(attempt.path, request["offsets"], request["versions"], max_whole_bytes=max_whole_bytes)
    return Reporter(attempt, tree, send, tuple(request["gpus"]), beat_s)


async def follow() -> int:
    """Serve one connection."""
    output = os.fdopen(os.dup(1), "wb")

    def send(header: JsonObject, body: bytes) -> None:
        output.write(encode_frame(header, body))
        output.flush()

    loop = asyncio.get_running_loop()
    requests = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    request = json.loads(await requests.readline())
    if request.get("start") is not None:
        refusal = await start(request)
        send({"kind": "refused", "reason": refusal} if refusal else {"kind": "started"}, b"")
        if refusal:
            return 0
    reporter = _reporter(request, send)
    if request.get("stop") is not None:
        reporter.stop(request["stop"])
    await _first(reporter.run(), _read_requests(requests, reporter))
    return 0


async def _read_requests(requests: asyncio.StreamReader, reporter: Reporter) -> None:
    """Obey requests until the other side closes the connection."""
    while line := await requests.readline():
        reporter.stop(json.loads(line)["stop"])


async def job() -> int:
    """The entry point of a Ray job: start the attempt, report it in the log, and exit as the trainer did."""
    # Ray signals every process of a job that is stopped from outside: the watchdog ends the trainer, and we report it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    request = _read_job_request()

    def send(header: JsonObject, body: bytes) -> None:
        text = base64.b64encode(body).decode()
        sys.stdout.write(f"{LOG_PREFIX}{json.dumps({**header, 'data': text})}\n")
        sys.stdout.flush()

    refusal = await start(request)
    send({"kind": "refused", "reason": refusal} if refusal else {"kind": "started"}, b"")
    if refusal:
        return 1
    everything = {**request, "offsets": {}, "versions": {}}
    await _reporter(everything, send, max_whole_bytes=MAX_LOG_FILE_BYTES, beat_s=_LOG_BEAT_S).run()
    exit_ = read_status(locate_attempt(request)).exit
    return 0 if exit_ is not None and exit_.returncode == 0 else 1


async def stop() -> int:
    """The entry point of a second Ray job on the same node: stop the attempt as at home."""
    request = _read_job_request()
    process = AttemptProcess.adopt(locate_attempt(request))
    if process is not None:
        await process.stop(str(request["stop"]["reason"]), float(request["stop"]["grace_s"]))
    return 0


def _read_job_request() -> JsonObject:
    data = os.environ.pop(JOB_VARIABLE)
    text = zlib.decompress(Path(data[1:]).read_bytes() if data.startswith("@") else base64.b64decode(data)).decode()
    # Ray unpacks the code under a name of its own, and the job may be on any node.
    home = os.path.expanduser(json.loads(text)["home"])
    for name, place in ((CODE, os.getcwd()), (NODE_HOME, home)):
        text = text.replace(name, json.dumps(place)[1:-1])
    request: JsonObject = json.loads(text)
    return request


async def _first(*work: Awaitable[None]) -> None:
    """Wait for the first of several to end, and cancel the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


_VERBS: dict[str, Callable[[], Coroutine[Any, Any, int]]] = {"follow": follow, "job": job, "stop": stop}

if __name__ == "__main__":
    try:
        code = asyncio.run(_VERBS[sys.argv[1]]())
    except (BrokenPipeError, ConnectionError):
        code = 0  # the other side is gone; the attempt continues
    # Threads may still be writing to a connection that is gone.
    os._exit(code)
