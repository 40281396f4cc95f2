"""The Python client of the run service, which it starts automatically.

    service = TrainerService()
    run_id = service.start_run("configs/ppo/cartpole.yaml")
    for line in service.stream_log(run_id):
        ...

Every method sends one request, blocks, and may be called from any thread. Streams reconnect and continue.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import select
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_core import to_jsonable_python

from palaestra.errors import ConfigError, PalaestraError, ServiceUnreachable
from palaestra.files.home import Home
from palaestra.runs.client.connect import RESTART, Endpoint, ensure_service, find_service
from palaestra.runs.client.server_events import ServerEvent, ServerEvents
from palaestra.runs.phase import Phase
from palaestra.runs.play.state import EpisodeRecord, EpisodeStep, PlayRecord
from palaestra.runs.record import CheckpointRecord, RunEvent, RunRecord
from palaestra.runs.runner import LaunchPreview
from palaestra.runs.series import MetricPoint
from palaestra.runs.spec import RunSpec, find_value_fault, resolve_environment, run_name
from palaestra.runs.store.lock import find_lock_holder
from palaestra.runs.wire import JsonObject, error_from_json, from_json, upgrade_names
from palaestra.telemetry.event import Record, decode

if TYPE_CHECKING:
    from palaestra.runs.client.play import PlayConnection
    from palaestra.runs.play.spec import PlaySpec

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_SLOW_TIMEOUT_S = 900.0
"""For requests that take time: a stop returns when the run has ended, and a preflight may probe interpreters."""
_QUICK_TIMEOUT_S = 60.0
_WARN_AFTER_S = 10.0
"""Time without a response after which a warning is logged."""
_STREAM_TIMEOUT_S = 30.0
"""A stream sends at least a comment every ten seconds."""
_FIRST_POLL_S, _MAX_POLL_S = 0.02, 0.5


class TrainerService:
    """The run service of a state directory, or the one at a URL."""

    def __init__(self, home: Home | Path | str | None = None, url: str | None = None, token: str | None = None) -> None:
        if home is None:
            self.home = Home.default()
        else:
            self.home = home if isinstance(home, Home) else Home(Path(home).resolve() / "var" / "training")
        if url is not None:
            _check_url(url)
        self._configured = None if url is None else Endpoint(url, token or "")
        self._discovered: Endpoint | None = None

    @property
    def description(self) -> str:
        """Which service this is: the URL, or the state directory on this machine."""
        return str(self.home.path) if self._configured is None else self._configured.url

    def start_run(
        self,
        config: RunSpec | Mapping[str, object] | str | Path,
        *,
        runner: str = "palaestra",
        consent: bool = False,
        **spec: object,
    ) -> str:
        """Queue a run and return its id. `consent` agrees to a command that executes foreign code."""
        run_spec = _build_spec(config, runner, spec)
        if not consent:
            return self.submit(run_spec).run_id
        preview = self.prepare_training(run_spec)
        return self.submit(run_spec, preview.digest, preview.run_id).run_id

    def prepare_training(self, spec: RunSpec) -> LaunchPreview:
        """The findings of a preflight and the command that a start would execute. Changes nothing."""
        return from_json(LaunchPreview, self.request("POST", "/preflight", {"spec": _spec_to_json(spec)}))

    def submit(self, spec: RunSpec, consent: str | None = None, run_id: str | None = None) -> RunRecord:
        """Queue a run. `consent` and `run_id` are the digest and the run id of its preview."""
        return self._run_request("/runs", {"spec": _spec_to_json(spec), "consent": consent, "run_id": run_id})

    def stop_run(self, run_id: str, *, grace_s: float | None = None) -> RunRecord:
        """Stop a run. Returns when all its processes have ended."""
        return self._run_request(f"/runs/{_quote(run_id)}/stop", {"grace_s": grace_s})

    def resume_run(
        self,
        run_id: str,
        consent: str | None = None,
        *,
        checkpoint: str | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> RunRecord:
        """Queue a run that has ended again, from its newest undamaged checkpoint or from `checkpoint`.

        `changes` are values by dotted key, such as {"trainer.total_timesteps": 200_000}.
        """
        body = {"consent": consent, "checkpoint": checkpoint, "changes": _changes_to_json(changes or {})}
        return self._run_request(f"/runs/{_quote(run_id)}/resume", body)

    def run(self, run_id: str) -> RunRecord:
        """A run in its current state."""
        return from_json(RunRecord, self.request("GET", f"/runs/{_quote(run_id)}"))

    def runs(self, **filters: object) -> list[RunRecord]:
        """Runs that match the filters of `GET /runs`, newest first."""
        return [from_json(RunRecord, row) for row in self.request("GET", "/runs", None, **filters)]

    def wait(
        self, run_id: str, *, phases: Collection[Phase] | None = None, timeout_s: float | None = None
    ) -> RunRecord:
        """Wait until a run has ended or is in one of the phases; `TimeoutError` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll_s = _FIRST_POLL_S
        while True:
            record = self.run(run_id)
            if record.phase.has_ended or record.phase in (phases or ()):
                return record
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{run_id} is {record.phase} after {timeout_s} s")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)

    def stream_log(
        self, run_id: str, *, offset: int = 0, follow: bool = True, attempt: int | None = None
    ) -> Iterator[str]:
        """Lines of a run's output, without line ends; with `follow`, until the run has ended."""
        path = f"/runs/{_quote(run_id)}/log"
        if follow:
            for text in self.watch_log(run_id, offset=offset, attempt=attempt):
                yield from text.splitlines()
            return
        while True:
            chunk = self.request("GET", path, offset=offset, attempt=attempt)
            if chunk["offset"] <= offset:
                return
            yield from chunk["text"].splitlines()
            offset = chunk["offset"]

    def stream_events(self, run_id: str, *, after: str = "", follow: bool = True) -> Iterator[Record | RunEvent]:
        """All events and journal records of a run, in order and each once; with `follow`, until the run has ended.

        `after` is the id of an event of the HTTP API.
        """
        query = {"after": after, "follow": follow}

        def convert(event: ServerEvent) -> Record | RunEvent:
            return decode(event.data) if event.kind == "event" else _read_run_event(json.loads(event.data))

        yield from self._stream(f"/runs/{_quote(run_id)}/events", query, convert, after)

    def watch_log(self, run_id: str, *, offset: int = 0, attempt: int | None = None) -> ServerEvents[str]:
        """Parts of a run's output as they are written, until the run has ended; can be closed from any thread."""
        path = f"/runs/{_quote(run_id)}/log/stream"
        return self._stream(path, {"offset": offset, "attempt": attempt}, lambda event: json.loads(event.data)["text"])

    def watch_runs(self) -> ServerEvents[tuple[str, RunEvent]]:
        """Run id and event of all runs from now on; ends with the connection. List the runs after it has begun."""

        def convert(event: ServerEvent) -> tuple[str, RunEvent]:
            data = json.loads(event.data)
            return str(data.pop("run_id")), _read_run_event(data)

        return self._stream("/stream", {}, convert, resumes=False)

    def recent_metrics(self, run_id: str, count: int, names: Sequence[str] = ()) -> dict[str, list[MetricPoint]]:
        """The last points of the named metrics (default: of all metrics)."""
        path = f"/runs/{_quote(run_id)}/metrics/recent"
        return _read_points(self.request("GET", path, count=count, name=list(names)))

    def metrics(
        self, run_id: str, name: str, *, points: int = 2000, first: int | None = None, last: int | None = None
    ) -> list[MetricPoint]:
        """At most `points` points of a metric between two steps, including the extremes."""
        path = f"/runs/{_quote(run_id)}/metrics/series"
        return _read_points(self.request("GET", path, name=[name], points=points, first=first, last=last))[name]

    def export_to_tensorboard(self, run_id: str, into: Path | str | None = None) -> Path:
        """Write event files for TensorBoard and return their directory."""
        body = {"into": None if into is None else str(Path(into).resolve())}
        return Path(self.request("POST", f"/runs/{_quote(run_id)}/export-tensorboard", body)["directory"])

    def checkpoints(self, **filters: object) -> list[CheckpointRecord]:
        """Checkpoints that match the filters `run`, `agent` and `env`, newest first."""
        return [from_json(CheckpointRecord, row) for row in self.request("GET", "/checkpoints", None, **filters)]

    def start_play(self, spec: PlaySpec) -> PlayRecord:
        """Start a play; returns when its environment is ready."""
        return from_json(PlayRecord, self.request("POST", "/play", {"spec": spec.model_dump(mode="json")}))

    def plays(self) -> list[PlayRecord]:
        """The plays of the service, newest first."""
        return [from_json(PlayRecord, row) for row in self.request("GET", "/play")]

    def stop_play(self, play_id: str) -> PlayRecord:
        """End a play."""
        return from_json(PlayRecord, self.request("DELETE", f"/play/{_quote(play_id)}"))

    def open_play(self, play_id: str) -> PlayConnection:
        """Watch and control a play."""
        from palaestra.runs.client.play import PlayConnection  # needs the package websockets

        return PlayConnection(self._endpoint(False), play_id)

    def activate_checkpoint(
        self, play_id: str, checkpoint: str, *, deterministic: bool = True, consent: str = ""
    ) -> PlayRecord:
        """Load a policy into a play, in the background; the state of the play reports the result."""
        body = {"checkpoint": checkpoint, "deterministic": deterministic, "consent": consent}
        return from_json(PlayRecord, self.request("POST", f"/play/{_quote(play_id)}/policy", body))

    def episodes(self, *, env: str | None = None, play: str | None = None) -> list[EpisodeRecord]:
        """Recorded episodes, newest first."""
        return [from_json(EpisodeRecord, row) for row in self.request("GET", "/episodes", env=env, play=play)]

    def episode_steps(self, episode_id: str, first: int = 0, count: int | None = None) -> list[EpisodeStep]:
        """The steps of an episode; step 0 is its beginning."""
        rows = self.request("GET", f"/episodes/{_quote(episode_id)}/steps", first=first, count=count)
        return [from_json(EpisodeStep, row) for row in rows]

    def episode_picture(self, episode_id: str, step: int) -> bytes:
        """The picture of a step, or the last one before it."""
        return self.read_bytes(f"/episodes/{_quote(episode_id)}/pictures/{step}")

    def export_episode(self, episode_id: str) -> bytes:
        """An episode as a video in WebM format."""
        return self.read_bytes(f"/episodes/{_quote(episode_id)}/video", timeout_s=_SLOW_TIMEOUT_S)

    def delete_episode(self, episode_id: str) -> EpisodeRecord:
        """Delete a recorded episode."""
        return from_json(EpisodeRecord, self.request("DELETE", f"/episodes/{_quote(episode_id)}"))

    def check_health(self, timeout_s: float = 5.0) -> None:
        """Raise `ServiceUnreachable` if the service does not answer in time. Starts no service."""
        endpoint = self._configured or find_service(self.home, check=False)
        if endpoint is None:
            raise ServiceUnreachable(f"no run service answers for {self.home.path}")
        connection = endpoint.connection(timeout_s)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnreachable(f"{endpoint.url} does not answer ({error})") from None
        finally:
            connection.close()
        if status != 200:
            raise ServiceUnreachable(f"{endpoint.url} answers {status}: it is not a run service")

    def read_bytes(self, path: str, *, timeout_s: float = _QUICK_TIMEOUT_S, **query: Any) -> bytes:
        """The body of a route that returns a file."""
        connection, response = self._send("GET", path, None, query, {}, timeout_s)
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnreachable(f"GET {path}: the response is incomplete ({error})") from error
        finally:
            connection.close()

    def request(self, method: str, path: str, body: Mapping[str, object] | None = None, **query: object) -> Any:
        """Send a request to any route of docs/http-api.md and return its JSON. Error responses are raised."""
        is_quick = path == "/drain" or (method == "GET" and path != "/doctor")
        timeout_s = _QUICK_TIMEOUT_S if is_quick else _SLOW_TIMEOUT_S
        connection, response = self._send(method, path, body, query, {}, timeout_s)
        try:
            return json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServiceUnreachable(f"{method} {path}: the response is incomplete ({error})") from error
        finally:
            connection.close()

    def _run_request(self, path: str, body: Mapping[str, object]) -> RunRecord:
        return from_json(RunRecord, self.request("POST", path, body))

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        query: Mapping[str, object],
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; retry once when the service was replaced by another."""
        pairs = [pair for key, value in query.items() for pair in _query_pairs(key, value)]
        target = f"{path}?{urllib.parse.urlencode(pairs)}" if pairs else path
        data = None if body is None else json.dumps(body).encode()
        for is_retry in (False, True):
            endpoint = self._endpoint(is_retry)
            connection = endpoint.connection(timeout_s)
            all_headers = {"Authorization": f"Bearer {endpoint.token}", "Content-Type": "application/json", **headers}
            try:
                connection.request(method, target, body=data, headers=all_headers)
            except (ConnectionError, TimeoutError) as error:
                # The service did not receive the request, so a retry cannot execute it twice.
                connection.close()
                if is_retry or self._configured is not None:
                    raise ServiceUnreachable(f"{endpoint.url} does not answer ({error})") from None
                continue
            try:
                self._wait_for_response(connection, endpoint, timeout_s)
                response = connection.getresponse()
            except TimeoutError:
                connection.close()
                text = f"{self._describe(endpoint)} has not answered {method} {path} for {timeout_s:.0f} s"
                raise ServiceUnreachable(f"{text}. {RESTART}") from None
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if method == "GET" and not is_retry and self._configured is None:
                    continue
                raise ServiceUnreachable(f"{method} {path}: the service closed the connection ({error})") from error
            if response.status < 400:
                return connection, response
            try:
                raise self._read_error(response, endpoint)
            finally:
                connection.close()
        raise AssertionError("unreachable")

    def _wait_for_response(self, connection: http.client.HTTPConnection, endpoint: Endpoint, timeout_s: float) -> None:
        """Wait for the response to begin; after `_WARN_AFTER_S`, log a warning and return."""
        if timeout_s <= _WARN_AFTER_S:
            return
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        if not poll.poll(1000 * _WARN_AFTER_S):
            _log.warning("%s has not answered for %.0f s; still waiting", self._describe(endpoint), _WARN_AFTER_S)

    def _describe(self, endpoint: Endpoint) -> str:
        holder = None if self._configured is not None else find_lock_holder(self.home)
        return f"the run service ({endpoint.url if holder is None else f'process {holder.identity.pid}'})"

    def _read_error(self, response: http.client.HTTPResponse, endpoint: Endpoint) -> PalaestraError:
        if response.status == 401 and self._configured is None:
            text = f"the run service at {endpoint.url} does not accept the token in {self.home.token}"
            return ServiceUnreachable(f"{text}: the file was changed since the service started. {RESTART}")
        try:
            return error_from_json(json.loads(response.read())["error"])
        except (ValueError, KeyError, TypeError):
            return PalaestraError(f"the run service answered {response.status} {response.reason}")

    def _endpoint(self, refresh: bool) -> Endpoint:
        if self._configured is not None:
            return self._configured
        if self._discovered is None or refresh:
            self._discovered = ensure_service(self.home)
        return self._discovered

    def _stream(
        self,
        path: str,
        query: Mapping[str, Any],
        convert: Callable[[ServerEvent], _T],
        last_id: str = "",
        *,
        resumes: bool = True,
    ) -> ServerEvents[_T]:
        """A stream that reconnects with the last id when the connection breaks."""

        def open_stream(after: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
            headers = {"Last-Event-ID": after} if after else {}
            return self._send("GET", path, None, query, headers, _STREAM_TIMEOUT_S)

        return ServerEvents(open_stream, convert, last_id, resumes=resumes)


def _check_url(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError("url", url, "holds a user or password", "Leave them out, and give the service's token")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("url", url, "is not the address of a service", "Give for example http://127.0.0.1:8710")


def _build_spec(config: RunSpec | Mapping[str, object] | str | Path, runner: str, fields: JsonObject) -> RunSpec:
    from palaestra.config import parse_section

    if isinstance(config, RunSpec):
        return config.model_copy(update=fields) if fields else config
    data: JsonObject = {"runner": runner, **fields}
    if isinstance(config, Mapping):
        data["config"] = dict(config)
    else:
        from palaestra.config.file import read_config_file

        path = Path(config)
        data["config"], data["config_text"] = read_config_file(path), path.read_text(encoding="utf-8")
        data.setdefault("name", run_name(data["config"].get("name"), path))
    return parse_section(RunSpec, data, place="spec")


def _spec_to_json(spec: RunSpec) -> JsonObject:
    return resolve_environment(spec, os.environ).model_dump(mode="json")


def _changes_to_json(changes: Mapping[str, object]) -> Any:
    """Changed keys as JSON; dates become text, as in the configuration of a new run."""
    for key, value in changes.items():
        fault = find_value_fault(value)
        if fault:
            raise ConfigError(key, value, fault)
    return to_jsonable_python(dict(changes))


def _read_run_event(data: JsonObject) -> RunEvent:
    return from_json(RunEvent, upgrade_names(data))


def _quote(run_id: str) -> str:
    return urllib.parse.quote(run_id, safe="")


def _query_pairs(key: str, value: object) -> list[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [(key, str(item)) for item in value]
    return [(key, str(value).lower() if isinstance(value, bool) else str(value))]


def _read_points(data: JsonObject) -> dict[str, list[MetricPoint]]:
    return {
        name: [MetricPoint(int(step), float(value), float(at)) for step, value, at in points]
        for name, points in data.items()
    }
