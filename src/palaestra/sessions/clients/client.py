"""HTTP clients of session servers and gateways: `HttpClient`, `SessionClient` and `GatewayClient`.

`HttpClient` retries only where a retry is safe. A request that never reached the server is always retried; one that may
have been received only if it is `repeatable`; one that was answered never, unless a proxy could not reach the session.
The remaining errors are `SessionRefused` for a response of 4xx and `SessionFailed` for everything else.

`SessionClient` implements the `Session` protocol over HTTP and raises the exceptions of the other side. An act is
repeatable, because the session returns the stored result of a repeated step; a reset is not, because the second one
could arrive after the first act.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from palaestra.errors import ConfigError, SessionFailed, SessionRefused
from palaestra.sessions.action import UiAction, Wait, encode
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Step
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec
from palaestra.sessions.wire import SESSION_TOKEN_HEADER, STEP_HEADER, encode_json, parse_error
from palaestra.strict_json import read_json

_log = logging.getLogger(__name__)

T = TypeVar("T")
_JSON = {"Content-Type": "application/json", "Accept": "application/json"}
_PICTURE = {"Content-Type": "application/json", "Accept": "image/png"}
_GATEWAY_ERRORS = (502, 503, 504)

_GATEWAY_GONE = ("unreachable", "peer_unreachable", "peer_lost", "bad_answer")
"""Reasons of failures that end when the gateway, or a load balancer's next one, is back."""

RESTART_S = 30.0
"""Seconds for which clients of a gateway wait while it restarts."""
CLOSE_S = 5.0
"""Seconds for which closing a session waits; after that its lease expires."""
CONNECT_S = 5.0
"""Seconds to connect; shorter than an attempt, because a request that was not sent is safe to retry."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to wait for a response, and how often to retry."""

    attempt_s: float = 20.0
    """Seconds one attempt may take, beyond what the action itself asks to wait."""
    attempts: int = 4
    """Maximum number of attempts; 1 never retries."""
    pause_s: float = 0.1
    """Seconds before the second attempt, shortened at random by up to half; doubled up to five times after that."""
    reconnect_s: float = 0.0
    """Seconds for which a request that cannot be sent is tried again, beyond `attempts`: a gateway may restart."""

    def __post_init__(self) -> None:
        if self.attempt_s <= 0 or self.attempts < 1 or self.pause_s < 0 or self.reconnect_s < 0:
            raise ConfigError("retry", self, "needs attempt_s > 0, attempts >= 1, pause_s and reconnect_s >= 0")

    def pause(self, attempt: int, rng: random.Random) -> float:
        """Seconds between attempt number `attempt`, counted from 0, and the next."""
        return float(self.pause_s * 2 ** min(attempt, 5) * rng.uniform(0.5, 1.0))


@dataclass(frozen=True)
class HttpResponse:
    """A response with a status below 400."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _ConnectionDropped(Exception):
    """The connection broke; whether the request was received is not known."""


async def _raise_dropped(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Keep aiohttp from retrying a GET whose connection broke: in the query-string dialect a GET clicks."""
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _ConnectionDropped(str(error) or type(error).__name__) from None


class HttpClient:
    """A client of one address; close it when done. Many sessions may share its connections."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        retry: RetryPolicy | None = None,
        rng: random.Random | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("url", url, "must begin with http:// or https://")
        self.url = url.rstrip("/")
        self.retry = retry or RetryPolicy()
        self._headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **(headers or {})}
        self._rng = rng or random.Random()
        self._http: aiohttp.ClientSession | None = None

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = False,
        extra_s: float = 0.0,
        params: Mapping[str, str] | None = None,
        reconnect_s: float | None = None,
    ) -> HttpResponse:
        """Send a request and wait for its response; `extra_s` is added to the timeout of each attempt.

        `reconnect_s` replaces that of the retry policy.
        """
        loop = asyncio.get_running_loop()
        reconnect_until = loop.time() + (self.retry.reconnect_s if reconnect_s is None else reconnect_s)
        options = {"data": body, "params": params, "headers": {**self._headers, **(headers or {})}}
        attempt = 0
        while True:
            result, retry = await self._attempt(method, path, self.retry.attempt_s + extra_s, options)
            if isinstance(result, HttpResponse):
                return result
            attempt += 1
            left = attempt < self.retry.attempts or (retry == "always" and loop.time() < reconnect_until)
            if not left or not (retry == "always" or (retry == "maybe" and repeatable)):
                raise result
            await asyncio.sleep(self.retry.pause(attempt - 1, self._rng))

    async def _attempt(
        self, method: str, path: str, seconds: float, options: Mapping[str, Any]
    ) -> tuple[HttpResponse | Exception, str]:
        """The response; or the error and whether to retry: `always`, `maybe` (if repeatable) or `never`."""
        place = f"{method} {self.url}{path}"
        try:
            async with self._session().request(
                method,
                self.url + path,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_S),
                allow_redirects=False,
                **options,
            ) as response:
                result = HttpResponse(response.status, response.headers, await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return SessionFailed("unreachable", f"{place}: no connection ({error})"), "always"
        except TimeoutError:
            return SessionFailed("timeout", f"{place}: no response within {seconds:g} s"), "maybe"
        except (_ConnectionDropped, aiohttp.ClientError) as error:
            return SessionFailed("unreachable", f"{place}: the connection broke ({error})"), "maybe"
        if result.status < 400:
            return result, "never"
        failure = parse_error(result.status, result.body, retry_after=_parse_seconds(result.headers.get("Retry-After")))
        if isinstance(failure, SessionFailed) and failure.reason == "peer_unreachable":
            return failure, "always"
        session_failed = isinstance(failure, SessionFailed) and failure.reason not in ("bad_answer", "peer_lost")
        return failure, "maybe" if result.status in _GATEWAY_ERRORS and not session_failed else "never"

    def _session(self) -> aiohttp.ClientSession:
        # Created on first use, because it belongs to the event loop it is created in.
        if self._http is None or self._http.closed:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0)
            self._http = aiohttp.ClientSession(
                connector=connector,
                middlewares=(_raise_dropped,),
                cookie_jar=aiohttp.DummyCookieJar(),
                max_field_size=16_384,
            )
        return self._http

    async def close(self) -> None:
        """Close the connections. Can be called repeatedly."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()


class SessionClient:
    """The session at a URL: `http://server/sessions/NAME`, `http://gateway/proxy/ID`, or a pod that is one session."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        retry: RetryPolicy | None = None,
        rng: random.Random | None = None,
        client: HttpClient | None = None,
        release: Callable[[], Awaitable[object]] | None = None,
        headers: Mapping[str, str] | None = None,
        session_id: str = "",
    ) -> None:
        """`client` is shared with other sessions and not closed here; `release` is awaited when the session is closed.

        `headers` are sent with every request, such as the session token of a gateway. `session_id` is the name of the
        session in trajectories.
        """
        self._client = client or HttpClient(url, token=token, retry=retry, rng=rng)
        self._owns_client = client is None
        self._path = "" if client is None else url.removeprefix(client.url).rstrip("/")
        self._release = release
        self._closed = False
        self.url, self.session_id = url, session_id
        self.headers = dict(headers or {})

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin an episode."""
        try:
            body = encode_json({"task": request.task, "seed": request.seed, "params": dict(request.params)})
        except (TypeError, ValueError) as error:
            raise SessionRefused("bad_params", f"params: cannot be written as JSON ({error}).", status=422) from None
        response = await self._request("POST", "/reset", body, headers=_JSON)
        return _parse(response, lambda: TaskSpec.from_facts(read_json(response.body)))

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform an action once, however often the request is retried."""
        body = encode_json({"step": step, "action": encode(action)})
        extra = action.seconds if isinstance(action, Wait) else 0.0
        response = await self._request("POST", "/act", body, headers=_PICTURE, repeatable=True, extra_s=extra)
        facts = _parse(response, lambda: read_json(response.headers[STEP_HEADER]))
        if _parse(response, lambda: facts["progress"].get("detail_left_out", False)):
            # The detail was too long for a header. The same step again, as JSON, returns the stored result.
            full = await self._request("POST", "/act", body, headers=_JSON, repeatable=True, extra_s=extra)
            facts = _parse(full, lambda: read_json(full.body))
        screenshot = Screenshot.of(response.body)
        if screenshot.sha256 != _parse(response, lambda: facts["screenshot"]["sha256"]):
            raise SessionFailed("bad_answer", f"step {step}: the screenshot does not match its checksum")
        return _parse(
            response, lambda: Step(int(facts["step"]), screenshot, TaskProgress.from_facts(facts["progress"]))
        )

    async def screenshot(self) -> Screenshot:
        """The current screen."""
        response = await self._request("GET", "/screenshot", headers={"Accept": "image/png"}, repeatable=True)
        return Screenshot.of(response.body)

    async def progress(self) -> TaskProgress:
        """The verifier's current judgement."""
        response = await self._request("GET", "/progress", repeatable=True)
        return _parse(response, lambda: TaskProgress.from_facts(read_json(response.body)))

    async def close(self) -> None:
        """Release the session. Can be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._release is not None:
                await self._release()
        except (SessionRefused, SessionFailed) as error:
            # A session that cannot be released is already gone, or its lease will expire.
            if not (isinstance(error, SessionRefused) and error.code == "no_session"):
                _log.warning("%s was not closed: %s", self.url, error)
        finally:
            if self._owns_client:
                await self._client.close()

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> HttpResponse:
        if self._closed:
            raise SessionRefused("no_session", "the session is closed. Open another one.", status=404)
        headers = {**self.headers, **(headers or {})}
        return await self._client.request(method, self._path + path, body, headers=headers, **options)


async def open_session(
    server: str,
    *,
    session_id: str | None = None,
    token: str | None = None,
    retry: RetryPolicy | None = None,
    rng: random.Random | None = None,
) -> SessionClient:
    """Open a session on a session server; closing the client deletes it there."""
    client = HttpClient(server, token=token, retry=retry, rng=rng)
    try:
        body = encode_json({} if session_id is None else {"session_id": session_id})
        response = await client.request("POST", "/sessions", body, headers=_JSON)
        name = _parse(response, lambda: str(read_json(response.body)["session_id"]))
    except BaseException:
        await client.close()
        raise

    async def release() -> None:
        try:
            await client.request("DELETE", f"/sessions/{name}", repeatable=True)
        finally:
            await client.close()

    url = f"{client.url}/sessions/{name}"
    return SessionClient(url, client=client, release=release, session_id=url)


class GatewayClient:
    """A client of a gateway; closing it releases every session that it opened."""

    def __init__(
        self, url: str, *, token: str | None = None, retry: RetryPolicy | None = None, rng: random.Random | None = None
    ) -> None:
        self._client = HttpClient(url, token=token, retry=retry or RetryPolicy(reconnect_s=RESTART_S), rng=rng)
        self._sessions: dict[str, SessionClient] = {}
        self._renewals: dict[str, asyncio.Task[None]] = {}
        self._openings: set[asyncio.Task[SessionClient]] = set()
        self._closings: set[asyncio.Task[None]] = set()

    async def open(
        self, session_type: str = "browser", *, ttl_s: float = 60.0, within_s: float = 300.0
    ) -> SessionClient:
        """Open a session and renew its lease until it is closed.

        Waits at most `within_s` seconds for a free slot or for the successor of a gateway that shuts down, and as long
        as the retry policy says for a gateway that restarts. A session whose opening was not answered is opened again;
        the first one, if there is one, ends with its lease. A session whose caller is cancelled meanwhile is closed.
        """
        body = encode_json({"session_type": session_type, "ttl_s": ttl_s})
        loop = asyncio.get_running_loop()
        end, restart_end = loop.time() + within_s, loop.time() + self._client.retry.reconnect_s
        while True:
            try:
                return await self._open_or_close(body, ttl_s, within_s)
            except SessionRefused as refusal:
                wait = 1.0 if refusal.retry_after is None else refusal.retry_after
                if (refusal.status != 429 and refusal.code != "draining") or loop.time() + wait > end:
                    raise
                await asyncio.sleep(wait)
            except SessionFailed as failure:
                if failure.reason not in _GATEWAY_GONE or loop.time() > restart_end:
                    raise
                await asyncio.sleep(5 * self._client.retry.pause_s)

    async def _open_or_close(self, body: bytes, ttl_s: float, within_s: float) -> SessionClient:
        """Open a session once; if the caller is cancelled meanwhile, the session is closed as soon as it is open."""
        opening = asyncio.create_task(self._open_once(body, ttl_s, within_s))
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_unwanted)
            raise

    def _close_unwanted(self, opening: asyncio.Task[SessionClient]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            closing = asyncio.create_task(opening.result().close())
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)

    async def _open_once(self, body: bytes, ttl_s: float, within_s: float) -> SessionClient:
        response = await self._client.request("POST", "/sessions", body, headers=_JSON, extra_s=within_s)
        document = _parse(response, lambda: read_json(response.body))
        name = _parse(response, lambda: str(document["session_id"]))
        # The gateway's token allows opening sessions; the session's token allows using this one.
        token = document.get("session_token")
        headers = {} if token is None else {SESSION_TOKEN_HEADER: str(token)}

        async def release() -> None:
            await self._stop_renewal(name)
            path, wait_s = f"/sessions/{name}", min(CLOSE_S, self._client.retry.reconnect_s)
            await self._client.request("DELETE", path, headers=headers, repeatable=True, reconnect_s=wait_s)

        url = f"{self._client.url}/proxy/{name}"
        session = SessionClient(url, client=self._client, release=release, headers=headers, session_id=name)
        self._sessions[name] = session
        renewal = self._renew(name, ttl_s, {**_JSON, **headers})
        self._renewals[name] = asyncio.create_task(renewal, name=f"palaestra-lease-{name}")
        return session

    async def close(self) -> None:
        """Release all sessions, also those that are being opened."""
        if self._openings:
            _, waiting = await asyncio.wait(list(self._openings), timeout=CLOSE_S)
            for opening in waiting:
                opening.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*self._closings, return_exceptions=True)
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        await self._client.close()

    async def _renew(self, name: str, ttl_s: float, headers: Mapping[str, str]) -> None:
        """Renew three times per term, so that one renewal may be lost and another late."""
        body = encode_json({"ttl_s": ttl_s})
        while True:
            await asyncio.sleep(ttl_s / 3)
            try:
                await self._client.request("POST", f"/sessions/{name}/renew", body, headers=headers, repeatable=True)
            except SessionRefused as refusal:
                # The lease is gone; the next request to the session fails with the reason.
                _log.warning("the lease of session %s is gone: %s", name, refusal)
                self._renewals.pop(name, None)
                return
            except SessionFailed as failure:
                _log.warning("the lease of session %s was not renewed: %s", name, failure)

    async def _stop_renewal(self, name: str) -> None:
        self._sessions.pop(name, None)
        renewal = self._renewals.pop(name, None)
        if renewal is not None:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)


def _parse(response: HttpResponse, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"status {response.status}, not understood ({error!r}): {response.body[:100]!r}"
        raise SessionFailed("bad_answer", text) from None


def _parse_seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None
