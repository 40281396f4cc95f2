"""Sends requests to the run service, which it finds or starts, and opens its streams."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import select
import socket
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path
from typing import Any, TypeVar

from palaestra.errors import ConfigError, PalaestraError, ServiceUnreachable
from palaestra.files.home import Home
from palaestra.runs.client.connect import RESTART, Endpoint, ensure_service, find_service
from palaestra.runs.client.server_events import ServerEvent, ServerEvents
from palaestra.runs.store.lock import find_lock_holder
from palaestra.runs.wire import error_from_json

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
SLOW_TIMEOUT_S = 900.0
"""For requests that take time: a stop returns when the run has ended, and a preflight may probe interpreters."""
_QUICK_TIMEOUT_S = 60.0
_WARN_AFTER_S = 10.0
"""Time without a response after which a warning is logged."""
_MAX_HEALTH_BYTES = 4096
_STREAM_TIMEOUT_S = 30.0
"""A stream sends at least a comment every ten seconds."""


class ServiceRequests:
    """Requests to the run service of a state directory, or to the one at a URL."""

    def __init__(self, home: Home | Path | str | None = None, url: str | None = None, token: str | None = None) -> None:
        if home is None:
            self.home = Home.default()
        else:
            self.home = home if isinstance(home, Home) else Home(Path(home).resolve() / "var" / "training")
        if url is not None:
            _check_url(url)
        self._configured = None if url is None else Endpoint(url, token or "")
        self._discovered: Endpoint | None = None
        self._connections: weakref.WeakSet[http.client.HTTPConnection] = weakref.WeakSet()
        self._aborted: weakref.WeakSet[http.client.HTTPConnection] = weakref.WeakSet()
        self._connections_lock = threading.Lock()

    def abort(self) -> None:
        """Break all requests that wait for their answers, in any thread; they raise `ServiceUnreachable`."""
        with self._connections_lock:
            connections = list(self._connections)
            self._aborted.update(connections)
        for connection in connections:
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    @property
    def is_remote(self) -> bool:
        """Whether the service was named by its URL, so that it may be on another machine."""
        return self._configured is not None

    @property
    def description(self) -> str:
        """Which service this is: the URL, or the state directory on this machine."""
        return str(self.home.path) if self._configured is None else self._configured.url

    def check_health(self, timeout_s: float = 5.0) -> None:
        """Raise `ServiceUnreachable` if the service does not answer in time. Starts no service."""
        endpoint = self._configured or find_service(self.home, check=False)
        if endpoint is None:
            raise ServiceUnreachable(f"no run service answers for {self.home.path}")
        connection = self._open(endpoint, timeout_s)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            status, body = response.status, response.read(_MAX_HEALTH_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnreachable(f"{endpoint.url} does not answer ({error})") from None
        finally:
            connection.close()
        if status != 200:
            raise ServiceUnreachable(f"{endpoint.url} answers {status}: it is not a run service")
        if not _is_health(body):
            raise ServiceUnreachable(f"{endpoint.url} answers something else: it is not a run service")

    def create_web_link(self, run_id: str | None = None) -> str:
        """An address that opens the web page in one browser, once: the table of runs, or one run."""
        path = self.request("POST", "/web/links", {"run_id": run_id})["path"]
        return f"{self._endpoint(refresh=False).url}{path}"

    def read_bytes(self, path: str, *, timeout_s: float = _QUICK_TIMEOUT_S, **query: Any) -> bytes:
        """The body of a route that returns a file."""
        return self.read_file(path, timeout_s=timeout_s, **query)[0]

    def read_file(self, path: str, *, timeout_s: float = _QUICK_TIMEOUT_S, **query: Any) -> tuple[bytes, Message]:
        """The body and the headers of a route that returns a file."""
        connection, response = self._send("GET", path, None, query, {}, timeout_s)
        try:
            return response.read(), response.headers
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnreachable(f"GET {path}: the response is incomplete ({error})") from error
        finally:
            connection.close()

    def request(self, method: str, path: str, body: Mapping[str, object] | None = None, **query: object) -> Any:
        """Send a request to any route of docs/http-api.md and return its JSON. Error responses are raised."""
        is_quick = path == "/drain" or (method == "GET" and path != "/doctor")
        timeout_s = _QUICK_TIMEOUT_S if is_quick else SLOW_TIMEOUT_S
        connection, response = self._send(method, path, body, query, {}, timeout_s)
        try:
            return json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnreachable(f"{method} {path}: the response is incomplete ({error})") from error
        except (ValueError, RecursionError) as error:
            raise ServiceUnreachable(f"{method} {path}: the response is not JSON ({error})") from error
        finally:
            connection.close()

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
            connection = self._open(endpoint, timeout_s)
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
                can_retry = method == "GET" and not is_retry and self._configured is None
                if can_retry and connection not in self._aborted:
                    continue
                raise ServiceUnreachable(f"{method} {path}: the service closed the connection ({error})") from error
            if response.status < 400:
                return connection, response
            try:
                raise self._read_error(response, endpoint)
            finally:
                connection.close()
        raise AssertionError("unreachable")

    def _open(self, endpoint: Endpoint, timeout_s: float) -> http.client.HTTPConnection:
        """A connection that `abort` breaks."""
        connection = endpoint.connection(timeout_s)
        with self._connections_lock:
            self._connections.add(connection)
        return connection

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
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return PalaestraError(f"the run service answered {response.status} {response.reason}")

    def _endpoint(self, refresh: bool) -> Endpoint:
        if self._configured is not None:
            return self._configured
        known = self._discovered
        # The port may belong to the service of another state directory by now, which must not get the token.
        if known is None or refresh or find_service(self.home, check=False) != known:
            known = self._discovered = ensure_service(self.home)
        return known

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
    remedy = "Give for example http://127.0.0.1:8710"
    try:
        parts = urllib.parse.urlsplit(url)
        has_port = parts.port is None or parts.port > 0
        # As the socket will do it: a label that is empty or too long has no such form.
        host = (parts.hostname or "").encode("idna")
    except ValueError:
        raise ConfigError("url", url, "is not the address of a service", remedy) from None
    if "@" in parts.netloc:
        raise ConfigError("url", url, "holds a user or password", "Leave them out, and give the service's token")
    if parts.scheme not in ("http", "https") or not host or not has_port or any(map(str.isspace, parts.netloc)):
        raise ConfigError("url", url, "is not the address of a service", remedy)
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError("url", url, "has more than a host and a port", remedy)


def _is_health(body: bytes) -> bool:
    """Whether this is what a run service answers when it is asked for its health."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "status" in data


def quote(text: str) -> str:
    """A text as one part of a path."""
    return urllib.parse.quote(text, safe="")


def quote_path(text: str) -> str:
    """A text with slashes as the rest of a path."""
    return urllib.parse.quote(text)


def _query_pairs(key: str, value: object) -> list[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [(key, str(item)) for item in value]
    return [(key, str(value).lower() if isinstance(value, bool) else str(value))]
