"""Runs from Python: start, watch, stop, resume and read them through the run service, which starts by itself.

    service = TrainerService()
    run_id = service.start_run("configs/ppo/cartpole.yaml")
    for line in service.stream_log(run_id):
        ...

Every method is one request, blocks, and may be called from any thread. Streams reconnect where they left off.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import select
import time
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from palaestra.errors import ConfigError, PalaestraError, ServiceUnreachable
from palaestra.files.home import Home
from palaestra.runs.client.connect import RESTART, Endpoint, ensure_service, holder_of
from palaestra.runs.phase import Phase
from palaestra.runs.record import CheckpointRecord, RunEvent, RunRecord
from palaestra.runs.runner import LaunchPreview
from palaestra.runs.series import MetricPoint
from palaestra.runs.spec import RunSpec, find_value_fault, resolve_environment, run_name
from palaestra.runs.wire import error_from_json, from_json
from palaestra.telemetry.event import Record, decode

__all__ = ["TrainerService"]

_log = logging.getLogger(__name__)
_PATIENCE_S = 900.0
"""A stop answers when the run is gone, and a preflight may probe interpreters."""
_SOON_S = 60.0
"""Whatever the service only has to look up."""
_SILENCE_S = 10.0
"""Waiting that is worth a word."""
_QUIET_S = 30.0
"""A stream says something every ten seconds, if only that it is there."""
_TRIES = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class TrainerService:
    """The run service of a state directory, or the one at an address."""

    def __init__(self, home: Home | Path | str | None = None, url: str | None = None, token: str | None = None) -> None:
        if home is None:
            self.home = Home.default()
        else:
            self.home = home if isinstance(home, Home) else Home(Path(home).resolve() / "var" / "training")
        if url is not None:
            _check_url(url)
        self._given = None if url is None else Endpoint(url, token or "")
        self._found: Endpoint | None = None

    def start_run(
        self,
        config: RunSpec | Mapping[str, Any] | str | Path,
        *,
        runner: str = "palaestra",
        consent: bool = False,
        **spec: Any,
    ) -> str:
        """Queue a run and answer its id. `consent` agrees to a command that runs foreign code."""
        wanted = _spec(config, runner, spec)
        if not consent:
            return self.submit(wanted).run_id
        prepared = self.prepare_training(wanted)
        return self.submit(wanted, prepared.digest, prepared.run_id).run_id

    def prepare_training(self, spec: RunSpec) -> LaunchPreview:
        """What a start of this would find and execute. Changes nothing."""
        return from_json(LaunchPreview, self._call("POST", "/preflight", {"spec": _dumped(spec)}))

    def submit(self, spec: RunSpec, consent: str | None = None, run_id: str | None = None) -> RunRecord:
        """Queue a run; `consent` is the digest of the command that was agreed to, `run_id` that of its preview."""
        return from_json(
            RunRecord, self._call("POST", "/runs", {"spec": _dumped(spec), "consent": consent, "run_id": run_id})
        )

    def stop_run(self, run_id: str, *, grace_s: float | None = None) -> RunRecord:
        """End a run. Returns when nothing of it lives."""
        return from_json(RunRecord, self._call("POST", f"/runs/{_word(run_id)}/stop", {"grace_s": grace_s}))

    def resume_run(
        self,
        run_id: str,
        consent: str | None = None,
        *,
        checkpoint: str | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        """Queue a run that has ended again: from its newest undamaged checkpoint or a given one, with changed keys.

        `changes` are values by dotted key, such as {"trainer.total_timesteps": 200_000}.
        """
        body = {"consent": consent, "checkpoint": checkpoint, "changes": _json_changes(changes or {})}
        return from_json(RunRecord, self._call("POST", f"/runs/{_word(run_id)}/resume", body))

    def run(self, run_id: str) -> RunRecord:
        """A run as it is at the moment."""
        return from_json(RunRecord, self._call("GET", f"/runs/{_word(run_id)}"))

    def runs(self, **filters: Any) -> list[RunRecord]:
        """Runs that fit, newest first; the filters are those of `GET /runs`."""
        return [from_json(RunRecord, row) for row in self._call("GET", "/runs", query=filters)]

    def wait(
        self, run_id: str, *, phases: Collection[Phase] | None = None, timeout_s: float | None = None
    ) -> RunRecord:
        """Wait until a run is over, or in one of these phases; `TimeoutError` when that takes too long."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            record = self.run(run_id)
            if record.phase.has_ended or record.phase in (phases or ()):
                return record
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{run_id} is {record.phase} after {timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def stream_log(
        self, run_id: str, *, offset: int = 0, follow: bool = True, attempt: int | None = None
    ) -> Iterator[str]:
        """Lines of a run's output, without their ends; with `follow`, until the run is over."""
        word, more = _word(run_id), {"attempt": attempt}
        if follow:
            for _, _, data in self._stream(f"/runs/{word}/log/stream", {"offset": offset, **more}, ""):
                yield from json.loads(data)["text"].splitlines()
            return
        while True:
            piece = self._call("GET", f"/runs/{word}/log", query={"offset": offset, **more})
            if piece["offset"] <= offset:
                return
            yield from piece["text"].splitlines()
            offset = piece["offset"]

    def stream_events(self, run_id: str, *, after: str = "", follow: bool = True) -> Iterator[Record | RunEvent]:
        """Everything that happened to a run and was measured, in order, each once; with `follow`, until it is over.

        `after` is the id of an event of the HTTP API.
        """
        query = {"after": after, "follow": follow}
        for _, kind, data in self._stream(f"/runs/{_word(run_id)}/events", query, after):
            yield decode(data) if kind == "event" else from_json(RunEvent, json.loads(data))

    def recent_metrics(self, run_id: str, count: int, names: Sequence[str] = ()) -> dict[str, list[MetricPoint]]:
        """The last points of the named metrics; of all, when none is named."""
        query = {"count": count, "name": list(names)}
        return _points(self._call("GET", f"/runs/{_word(run_id)}/metrics/recent", query=query))

    def metrics(
        self, run_id: str, name: str, *, points: int = 2000, first: int | None = None, last: int | None = None
    ) -> list[MetricPoint]:
        """At most so many points of a metric between two steps, extremes among them."""
        query = {"name": [name], "points": points, "first": first, "last": last}
        return _points(self._call("GET", f"/runs/{_word(run_id)}/metrics/series", query=query))[name]

    def export_to_tensorboard(self, run_id: str, into: Path | str | None = None) -> Path:
        """Write event files for TensorBoard; the directory they are in."""
        body = {"into": None if into is None else str(Path(into).resolve())}
        return Path(self._call("POST", f"/runs/{_word(run_id)}/export-tensorboard", body)["directory"])

    def checkpoints(self, **filters: Any) -> list[CheckpointRecord]:
        """Checkpoints that fit, newest first: `run`, `agent`, `env`."""
        return [from_json(CheckpointRecord, row) for row in self._call("GET", "/checkpoints", query=filters)]

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        """Any other route, as docs/http-api.md lists them; errors are raised as they would be here."""
        return self._call(method, path, body, query)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, Any] | None = None
    ) -> Any:
        quick = path == "/drain" or (method == "GET" and path != "/doctor")
        connection, response = self._asked(method, path, body, query or {}, {}, _SOON_S if quick else _PATIENCE_S)
        try:
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServiceUnreachable(f"{method} {path}: half an answer came ({error})") from error
        finally:
            connection.close()
        return answer

    def _asked(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, Any],
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; again when the service we knew is gone and another has come."""
        given = [(k, v) for key, value in query.items() for k, v in _pairs(key, value)]
        target = f"{path}?{urllib.parse.urlencode(given)}" if given else path
        data = None if body is None else json.dumps(body).encode()
        for fresh in (False, True):
            endpoint = self._endpoint(fresh)
            connection = endpoint.connection(timeout_s)
            sent = {"Authorization": f"Bearer {endpoint.token}", "Content-Type": "application/json", **headers}
            try:
                connection.request(method, target, body=data, headers=sent)
            except (ConnectionError, TimeoutError) as error:
                # Nothing was sent, so nothing can happen twice.
                connection.close()
                if fresh or self._given is not None:
                    raise ServiceUnreachable(f"{endpoint.url} does not answer ({error})") from None
                continue
            try:
                self._listen(connection, endpoint, timeout_s)
                response = connection.getresponse()
            except TimeoutError:
                connection.close()
                text = f"{self._who(endpoint)} has not answered {method} {path} for {timeout_s:.0f} s"
                raise ServiceUnreachable(f"{text}. {RESTART}") from None
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if method == "GET" and not fresh and self._given is None:
                    continue
                raise ServiceUnreachable(f"{method} {path}: the service went away ({error})") from error
            if response.status < 400:
                return connection, response
            try:
                if response.status == 401 and self._given is None:
                    raise ServiceUnreachable(f"the run service at {endpoint.url} does not take {self._token_now()}")
                raise _refusal(response, response.read())
            finally:
                connection.close()
        raise AssertionError("unreachable")

    def _listen(self, connection: http.client.HTTPConnection, endpoint: Endpoint, timeout_s: float) -> None:
        """Return when an answer begins, or after a word about how long that takes."""
        if timeout_s <= _SILENCE_S:
            return
        waiting = select.poll()
        waiting.register(connection.sock, select.POLLIN)
        if not waiting.poll(1000 * _SILENCE_S):
            _log.warning("%s has not answered for %.0f s; still waiting", self._who(endpoint), _SILENCE_S)

    def _who(self, endpoint: Endpoint) -> str:
        holder = None if self._given is not None else holder_of(self.home)
        return f"the run service ({endpoint.url if holder is None else f'process {holder.identity.pid}'})"

    def _token_now(self) -> str:
        return f"what {self.home.token} holds: it was changed since the service started. {RESTART}"

    def _endpoint(self, fresh: bool) -> Endpoint:
        if self._given is not None:
            return self._given
        if self._found is None or fresh:
            self._found = ensure_service(self.home)
        return self._found

    def _stream(self, path: str, query: Mapping[str, Any], last_id: str) -> Iterator[tuple[str, str, str]]:
        """Events (id, kind, data) until `end`; goes on with the last id when the connection breaks."""
        broken = 0
        while broken < _TRIES:
            headers = {"Last-Event-ID": last_id} if last_id else {}
            try:
                connection, response = self._asked("GET", path, None, query, headers, _QUIET_S)
            except ServiceUnreachable:
                broken += 1
                if broken == _TRIES:
                    raise
                time.sleep(0.2 * broken)
                continue
            try:
                for place, kind, data in _events(response):
                    broken = 0
                    if kind == "end":
                        return
                    last_id = place or last_id
                    yield place, kind, data
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            broken += 1
            time.sleep(0.05)
        raise ServiceUnreachable(f"GET {path}: the stream broke {_TRIES} times")


def _check_url(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError("url", url, "holds a user or password", "Leave them out, and give the service's token")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("url", url, "is not the address of a service", "Give for example http://127.0.0.1:8710")


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str, str, str]]:
    place, kind, data = "", "", ""
    while line := response.readline():
        text = line.decode("utf-8").rstrip("\n")
        name, _, value = text.partition(": ")
        if not text:
            if data:
                yield place, kind, data
            place, kind, data = "", "", ""
        elif name == "id":
            place = value
        elif name == "event":
            kind = value
        elif name == "data":
            data += value


def _refusal(response: http.client.HTTPResponse, body: bytes) -> PalaestraError:
    try:
        return error_from_json(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return PalaestraError(f"the run service answered {response.status} {response.reason}")


def _spec(config: RunSpec | Mapping[str, Any] | str | Path, runner: str, more: dict[str, Any]) -> RunSpec:
    from palaestra.config import parse_section

    if isinstance(config, RunSpec):
        return config.model_copy(update=more) if more else config
    given: dict[str, Any] = {"runner": runner, **more}
    if isinstance(config, Mapping):
        given["config"] = dict(config)
    else:
        from palaestra.config.file import read_config_file

        given["config"], given["given"] = read_config_file(Path(config)), Path(config).read_text(encoding="utf-8")
        given.setdefault("name", run_name(given["config"].get("name"), Path(config)))
    return parse_section(RunSpec, given, place="spec")


def _dumped(spec: RunSpec) -> dict[str, Any]:
    return resolve_environment(spec, os.environ).model_dump(mode="json")


def _json_changes(changes: Mapping[str, Any]) -> Any:
    """Changed keys as a service takes them; dates become text, as in the configuration of a new run."""
    for key, value in changes.items():
        fault = find_value_fault(value)
        if fault:
            raise ConfigError(key, value, fault)
    return to_jsonable_python(dict(changes))


def _word(run_id: str) -> str:
    return urllib.parse.quote(run_id, safe="")


def _pairs(key: str, value: Any) -> list[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [(key, str(item)) for item in value]
    return [(key, str(value).lower() if isinstance(value, bool) else str(value))]


def _points(data: Mapping[str, Any]) -> dict[str, list[MetricPoint]]:
    return {
        name: [MetricPoint(int(step), float(value), float(at)) for step, value, at in points]
        for name, points in data.items()
    }
