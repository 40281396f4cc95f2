"""The jobs of a Ray cluster as a link: the only module of the run service that imports Ray, and a program of its own.

    python -m palaestra.runs.remote.ray_jobs check  http://head:8265    prints facts about the cluster
    python -m palaestra.runs.remote.ray_jobs follow http://head:8265    submits a job, and passes on what it reports

The agent on the node writes its messages as lines into the log of the job. Ray sends a log from its beginning to every
connection, so nothing is lost with one; what is here already is left out by offset. A stop is a second job on the same
node, because Ray's own stop knows no grace period and signals every process at once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from palaestra.errors import HostUnreachable
from palaestra.runs.remote.frames import JOB_VARIABLE, decode_log_line, encode_frame
from palaestra.runs.wire import JsonObject

_EXIT_ERROR = 3
_POLL_S = 0.5
_BEAT_S = 5.0
_CONNECT_TIMEOUT_S = 180.0
_STOP_MARGIN_S = 30
"""How much longer than the grace period Ray waits before it kills a job that is stopped from outside."""
_STOP_JOB_TIMEOUT_S = 60.0
_MAX_VARIABLE = 100_000
"""Longer environment variables are refused by the kernel."""
_AGENT = "package/palaestra/runs/remote/agent.py"
_NODE_RESOURCE = 0.001


class ClusterRefused(HostUnreachable):
    """The cluster does not answer, or refuses us."""


def connect(address: str) -> Any:
    """A client of the job server. `ClusterRefused` if it does not answer, or has another version of Ray."""
    try:
        import ray
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        reason = f"Ray cannot be imported here ({error})"
        raise ClusterRefused("on", address, reason, "pip install 'palaestra[ray]'", permanent=True) from None
    try:
        client = JobSubmissionClient(address)
        # `get_version` is that of the protocol; the document has both.
        version = str(client._do_request("GET", "/api/version").json()["ray_version"])
    except Exception as error:  # noqa: BLE001 - Ray raises what its HTTP library does, and RuntimeError
        raise _explain(address, error) from None
    if version != ray.__version__:
        reason = f"the cluster runs Ray {version}, and {ray.__version__} is installed here"
        raise ClusterRefused("on", address, reason, f"pip install 'ray[default]=={version}'", permanent=True)
    return client


def _explain(address: str, error: Exception) -> ClusterRefused:
    text = " ".join(str(error).split())[:300]
    if any(word in text for word in ("401", "403", "Unauthorized", "Forbidden", "token")):
        remedy = "Set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, where the service starts"
        return ClusterRefused("on", address, f"the cluster refuses the token ({text})", remedy, permanent=True)
    if "404" in text or "JSON" in text:
        reason = f"what answers there is not the job server of Ray ({text})"
        remedy = "Give the address of its dashboard, such as http://head:8265; it needs ray[default]"
        return ClusterRefused("on", address, reason, remedy, permanent=True)
    remedy = "Start the cluster with its dashboard (ray[default]), and check the address"
    return ClusterRefused("on", address, f"cannot be reached ({text})", remedy)


def check(address: str, request: JsonObject) -> JsonObject:
    """Facts about the cluster."""
    connect(address)
    import ray

    return {"ray_version": ray.__version__, "gpus": [], "missing": [], "directory": "", "executable": ""}


class Job:
    """The job of one attempt."""

    def __init__(self, client: Any, address: str, request: JsonObject) -> None:
        self._client, self._address, self._request = client, address, request
        self.job_id = f"palaestra-{request['run_id']}-{request['attempt']}"
        self._offsets: dict[str, int] = dict(request["offsets"])
        self._versions = {name: tuple(version) for name, version in request["versions"].items()}
        self._skipping = ""

    def submit(self) -> str:
        """Submit the job unless it has been; returns why the cluster refuses it, or an empty string."""
        start = dict(self._request["start"])
        job = start.pop("job")
        wanted = {name: self._request[name] for name in ("run_id", "attempt", "directory", "gpus", "grace_s")}
        with tempfile.TemporaryDirectory(prefix="palaestra-job-") as directory:
            _lay_out(Path(directory), job["parts"])
            environment = self._environment({**wanted, "start": start, "home": job["home"]}, Path(directory))
            try:
                self._client.submit_job(
                    entrypoint=f"{_quote(job['python'])} -I -S {_AGENT} job",
                    submission_id=self.job_id,
                    runtime_env={"working_dir": directory, "env_vars": environment},
                    entrypoint_num_cpus=1,
                    entrypoint_num_gpus=job["gpus"] or None,
                    metadata={"palaestra_run": str(self._request["run_id"])},
                )
            except Exception as error:  # noqa: BLE001 - see connect
                text = " ".join(str(error).split())
                if "already exists" in text:
                    return ""  # the connection was lost after the first submission
                if isinstance(error, ConnectionError | TimeoutError | OSError):
                    raise _explain(self._address, error) from None
                return f"the cluster refuses the job ({text[:500]})"
        return ""

    def _environment(self, request: JsonObject, directory: Path) -> dict[str, str]:
        data = zlib.compress(json.dumps(request).encode(), 9)
        text = base64.b64encode(data).decode()
        if len(text) > _MAX_VARIABLE:
            (directory / "request").write_bytes(data)
            text = "@request"
        # Ray kills a job that is stopped from outside after three seconds otherwise.
        wait_s = int(self._request["grace_s"]) + _STOP_MARGIN_S
        return {JOB_VARIABLE: text, "RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}

    async def stop(self, stop: JsonObject) -> None:
        """Stop the attempt by a job on its node; if that does not run, by Ray's own stop."""
        details = await asyncio.to_thread(self._client.get_job_info, self.job_id)
        node = urlsplit(details.driver_agent_http_address or "").hostname
        runtime = dict(details.runtime_env or {})
        if node is None:
            # It waits for resources and has not begun.
            await asyncio.to_thread(self._client.stop_job, self.job_id)
            return
        wanted = {name: self._request[name] for name in ("run_id", "attempt", "directory")}
        request = {**wanted, "stop": stop, "home": self._request["home"]}
        runtime["env_vars"] = {JOB_VARIABLE: base64.b64encode(zlib.compress(json.dumps(request).encode())).decode()}
        stopping = f"{self.job_id}-stop-{int(float(stop['asked']) * 1000)}"
        with contextlib.suppress(RuntimeError):  # it was submitted over an earlier connection
            await asyncio.to_thread(
                lambda: self._client.submit_job(
                    entrypoint=str(details.entrypoint).removesuffix("job") + "stop",
                    submission_id=stopping,
                    runtime_env=runtime,
                    entrypoint_resources={f"node:{node}": _NODE_RESOURCE},
                )
            )
        try:
            async with asyncio.timeout(float(stop["grace_s"]) + _STOP_JOB_TIMEOUT_S):
                while not (await self._status(stopping)).is_terminal():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await asyncio.to_thread(self._client.stop_job, self.job_id)

    async def messages(self) -> AsyncIterator[tuple[JsonObject, bytes]]:
        """What the agent reports that is not here yet, then the end of the attempt."""
        begun = ended = False
        other: list[str] = []
        async for line in _lines(self._client.tail_job_logs(self.job_id)):
            message = decode_log_line(line)
            if message is None:
                other = [*other[-4:], line.strip()]
                continue
            begun = True
            ended = ended or message[0]["kind"] in ("end", "refused")
            for kept in self._leave_out(*message):
                yield kept
        if ended:
            return
        details = await asyncio.to_thread(self._client.get_job_info, self.job_id)
        if not details.status.is_terminal():
            raise ClusterRefused("on", self._address, "the connection to the log of the job ended")
        text = " ".join((details.message or "no message").split())[:500]
        if not begun:
            output = f" Its output: {' | '.join(other)[:500]}" if other else ""
            yield {"kind": "refused", "reason": f"Ray could not start the job ({details.status}: {text}).{output}"}, b""
            return
        reason = f"Ray reports the job as {details.status}, and its agent did not see the end: {text}"
        yield {"kind": "end", "observed": False, "known": True, "reason": reason}, b""

    def _leave_out(self, header: JsonObject, body: bytes) -> Iterator[tuple[JsonObject, bytes]]:
        """A message without what arrived over an earlier connection."""
        name, kind = str(header.get("file", "")), header["kind"]
        if kind == "restart":
            self._offsets[name] = 0
        elif kind == "growth":
            have, offset = self._offsets.get(name, 0), int(header["offset"])
            if offset + len(body) <= have:
                return
            if offset < have:
                header, body = {**header, "offset": have}, body[have - offset :]
            self._offsets[name] = int(header["offset"]) + len(body)
        elif kind == "whole":
            if header["offset"] == 0:
                version = (header["total"], header["mtime_ns"])
                self._skipping = name if self._versions.get(name) == version else ""
                # A file that was replaced is in the log in every version: an older one makes the next one new again.
                self._versions[name] = version
            if self._skipping == name:
                return
        yield header, body

    async def _status(self, job_id: str) -> Any:
        return await asyncio.to_thread(self._client.get_job_status, job_id)


async def _lines(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    rest = ""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _lay_out(directory: Path, parts: JsonObject) -> None:
    for name, part in parts.items():
        for file in part["names"]:
            target = directory / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(part["root"]) / file, target, follow_symlinks=False)


def _quote(path: str) -> str:
    """A path for the shell of the node, which expands a leading `~/`."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


async def _repeat(work: Callable[[], None]) -> None:
    while True:
        work()
        await asyncio.sleep(_BEAT_S)


async def follow(address: str) -> int:
    """Serve one connection."""
    output = os.fdopen(os.dup(1), "wb")

    def send(header: JsonObject, body: bytes = b"") -> None:
        output.write(encode_frame(header, body))
        output.flush()

    requests = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    request = json.loads(await requests.readline())
    waiting = asyncio.ensure_future(_repeat(lambda: send({"kind": "waiting"})))
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        # To import Ray takes seconds, on a busy machine many.
        client = await asyncio.to_thread(connect, address)
    job = Job(client, address, request)
    if request["start"] is not None and (refusal := await asyncio.to_thread(job.submit)):
        send({"kind": "refused", "reason": refusal})
        return 0
    waiting.cancel()
    # The cluster has it; the node may report much later.
    send({"kind": "started"})

    async def report() -> None:
        async for header, body in job.messages():
            send(header, body)

    async def obey() -> None:
        if request["stop"] is not None:
            await job.stop(request["stop"])
        while line := await requests.readline():
            await job.stop(json.loads(line)["stop"])

    async def beat() -> None:
        # The agent is silent while the job waits for resources; the cluster answers.
        while True:
            await asyncio.sleep(_BEAT_S)
            await asyncio.to_thread(client.get_job_status, job.job_id)
            send({"kind": "beat"})

    tasks = [asyncio.ensure_future(work) for work in (report(), obey(), beat())]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return 0


def main(verb: str, address: str) -> int:
    """Run one command; errors are a line of JSON on stderr."""
    try:
        if verb == "check":
            sys.stdout.write(json.dumps(check(address, json.loads(sys.stdin.readline()))) + "\n")
            sys.stdout.flush()
            return 0
        return asyncio.run(follow(address))
    except HostUnreachable as error:
        document = {"reason": error.reason, "remedy": error.remedy, "permanent": error.permanent}
    except Exception as error:  # noqa: BLE001 - whatever Ray's HTTP client raises when the cluster goes away
        document = {"reason": f"{type(error).__name__}: {error}"[:500], "remedy": "", "permanent": False}
    sys.stderr.write(json.dumps(document) + "\n")
    sys.stderr.flush()
    return _EXIT_ERROR


if __name__ == "__main__":
    code = main(*sys.argv[1:3])
    # Threads of Ray and of a blocked request must not keep a link that is over.
    os._exit(code)
